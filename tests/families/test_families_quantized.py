"""Which schemes of 8 bits a config.json may name, and what lies beside their weights."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_families_translate import read_or_refused

from llmcli.checkpoints import TensorInfo
from llmcli.errors import UnsupportedModel
from llmcli.families.quantized import scheme, with_scales
from llmcli.families.rules import Drop, Rename, Transpose, plan
from llmcli.families.scales import Grid, Scale, scale_problem

LAYERS = type("Model", (), {"layers": (None,) * 3})
RULES = (
    Rename("h.{layer}.q.weight", "blocks.{layer}.attn.W_q"),
    Rename("h.{layer}.q.bias", "blocks.{layer}.attn.b_q"), Drop("lm_head.weight", "tied"),
)  # fmt: skip
GROUP = {"weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}}


def compressed(group=GROUP, **more):
    section = {"quant_method": "compressed-tensors", "format": "int-quantized"}
    return {"quantization_config": section | {"config_groups": {"group_0": group}} | more}


def of(method, **more):
    return {"quantization_config": {"quant_method": method} | more}


def weights(**more):
    return {"weights": GROUP["weights"] | more}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
    | st.sampled_from(["fp8", "compressed-tensors", "bitsandbytes", "block", "int-quantized"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from([
            "quant_method", "weight_block_size", "config_groups", "weights", "format", "strategy",
            "group_size", "block_structure", "num_bits", "type", "load_in_8bit", "sparsity_config",
        ]) | st.text(max_size=4), inner, max_size=5),
    max_leaves=12,
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(JSON)
def test_whatever_a_file_says_is_a_scheme_or_one_clear_error(section):
    found = read_or_refused(lambda: scheme({"quantization_config": section}))
    assert found is None or found.grids


def test_no_scheme_changes_no_rule():
    for config in ({}, {"quantization_config": None}, {"quantization_config": {}}):
        assert scheme(config) is None
    assert with_scales(RULES, None) == RULES
    assert plan(["h.0.q.weight"], RULES, LAYERS).scales is None


def test_scales_belong_to_the_weight_beside_them():
    rules = with_scales(RULES, scheme(of("bitsandbytes", load_in_8bit=True)))
    names = ["h.1.q.SCB", "h.1.q.weight", "h.0.q.weight", "h.1.q.weight_format", "h.1.q.bias"]
    planned = plan(names, rules, LAYERS)
    assert planned.unexpected == ()
    first, second, bias = planned.loads
    assert (first.source, second.scale, bias.scale) == ("h.1.q.weight", None, None)
    assert first.scale.tensors == ("h.1.q.SCB", "h.1.q.weight_format")
    assert first.words == ("× SCB / 127, one per row",)
    assert planned.scales == "SCB"


def test_what_has_no_use_is_dropped_with_a_reason_or_unexpected():
    rules = with_scales(RULES, scheme(of("fp8")))
    names = [
        "h.0.q.weight", "h.0.q.weight_scale_inv", "h.0.q.weight_scale", "h.2.q.weight_scale_inv",
        "h.0.q.input_scale", "h.0.k_scale", "lm_head.weight", "lm_head.weight_scale_inv",
        "h.3.q.weight_scale_inv", "h.0.q.bias_scale",
    ]  # fmt: skip
    planned = plan(names, rules, LAYERS)
    assert planned.loads[0].scale.source == "h.0.q.weight_scale_inv"
    dropped = dict(planned.dropped)
    assert "activations" in dropped.pop("h.0.q.input_scale")
    assert "keys and values" in dropped.pop("h.0.k_scale")
    assert dropped == {"lm_head.weight": "tied", "lm_head.weight_scale_inv": "tied"}
    # a second scale of one weight, one without a weight, one beyond the layers, one of a bias
    assert set(planned.unexpected) == {
        "h.0.q.weight_scale", "h.2.q.weight_scale_inv", "h.3.q.weight_scale_inv", "h.0.q.bias_scale"
    }  # fmt: skip


def test_conv1d_matrices_of_bitsandbytes_lie_otherwise():
    rules = (Rename("h.{layer}.c.weight", "blocks.{layer}.mlp.W_up", Transpose()),)
    with pytest.raises(UnsupportedModel, match="Conv1D"):
        with_scales(rules, scheme(of("bitsandbytes", load_in_8bit=True)))
    assert len(with_scales(rules, scheme(of("fp8")))) > 1


def info(name, shape, format="F32", nbytes=0):
    return TensorInfo(name=name, shape=shape, format=format, file=None, offset=0, nbytes=nbytes)


FP8 = ("F8_E4M3",)


@pytest.mark.parametrize(("grid", "shapes", "wrong"), [
    (Grid(formats=FP8), [(), (1,), (1, 1)], [(2,), (5, 1), (0,), (1, 1, 1)]),
    (Grid(formats=FP8, rows=1), [(5,), (5, 1)], [(), (7,), (1, 5), (5, 7), (4,), (5, 0)]),
    (Grid(formats=FP8, rows=2, columns=3), [(3, 3)], [(2, 2), (3,), (9,), (3, 4), ()]),
    (Grid(formats=FP8, rows=128, columns=128), [(1, 1)], [(1,), ()]),
    (Grid(formats=FP8, rows=1, columns=4), [(5, 2)], [(2, 5), (5,), (5, 1)]),
])  # fmt: skip
def test_shapes_of_scales(grid, shapes, wrong):
    """Of a matrix [5, 7]."""
    scale = Scale(source="s", grid=grid)
    weight = info("w", (5, 7), "F8_E4M3")
    for shape in shapes:
        assert scale.problem(weight, {"s": info("s", shape)}) is None, shape
    for shape in wrong:
        assert "should be" in scale.problem(weight, {"s": info("s", shape)}), shape


def test_formats_of_scales_and_of_what_they_scale():
    scale = Scale(source="s", grid=Grid(formats=FP8), layout="l")
    good = {"w": info("w", (5, 7), "F8_E4M3"), "s": info("s", ()), "l": info("l", (), "U8", 1)}
    assert scale_problem("w", scale, good, "x") is None
    for name, other, says in (
        ("w", info("w", (5, 7), "BF16"), "stored as BF16, not as F8_E4M3"),
        ("w", info("w", (5, 7), "I8"), "stored as I8, not as F8_E4M3"),
        ("w", info("w", (35,), "F8_E4M3"), "no matrix"),
        ("s", info("s", (), "I8"), "scale that is stored as I8"),
        ("s", info("s", (), "F8_E8M0"), "scale that is stored as F8_E8M0"),
        ("l", info("l", (2,), "U8", 2), "not one byte"),
        ("l", info("l", (), "I8", 1), "not one byte"),
    ):
        assert says in scale_problem("w", scale, good | {name: other}, "x")
    alone = {"w.weight": good["w"]}
    assert "no `w.weight_scale`" in scale_problem("w.weight", None, alone, "weight_scale")
    whole = {"w": info("w", (5, 7), "I8")}
    assert "whole numbers" in scale_problem("w", None, whole, None)
    assert scale_problem("w", None, {"w": good["w"]}, None) is None  # plain numbers of 8 bits

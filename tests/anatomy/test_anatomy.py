"""The specs themselves: names, axes and their letters, formulas, bytes, and visible pairs."""

from dataclasses import replace

import pytest
from anatomy_configs import GPT, QWEN, models
from hypothesis import given, settings
from hypothesis import strategies as st

from llmcli.anatomy import parameters, plan, states
from llmcli.anatomy.letters import Letters
from llmcli.graph.ops import visible_pairs
from llmcli.graph.spec import Call
from llmcli.observe.rules import rules


def axes_and_shapes(specs):
    return {spec.name: (" ".join(spec.axes), spec.shape) for spec in specs}


def call(config, **given):
    given = {"batch": 2, "tokens": 5, "past": 0, "phase": "prefill"} | given
    logits = given.pop("logits", "all")
    return {spec.name: spec for spec in plan(config, Call(**given), logits=logits).written}


def test_parameters_with_biases_norms_and_their_own_head():
    assert axes_and_shapes(parameters(QWEN)) == {
        "embed.W": ("V D", (50, 12)),
        "blocks.0.ln1.w": ("D", (12,)),
        "blocks.0.attn.W_q": ("D H·dh", (12, 24)),
        "blocks.0.attn.b_q": ("H·dh", (24,)),
        "blocks.0.attn.W_k": ("D Hk·dh", (12, 8)),
        "blocks.0.attn.b_k": ("Hk·dh", (8,)),
        "blocks.0.attn.W_v": ("D Hk·dv", (12, 6)),
        "blocks.0.attn.b_v": ("Hk·dv", (6,)),
        "blocks.0.attn.q_norm.w": ("dh", (4,)),
        "blocks.0.attn.k_norm.w": ("dh", (4,)),
        "blocks.0.attn.W_o": ("H·dv D", (18, 12)),
        "blocks.0.ln2.w": ("D", (12,)),
        "blocks.0.mlp.W_gate": ("D F", (12, 20)),
        "blocks.0.mlp.W_up": ("D F", (12, 20)),
        "blocks.0.mlp.W_down": ("F D", (20, 12)),
        "ln_final.w": ("D", (12,)),
        "head.W": ("D V", (12, 50)),
    }


def test_formulas_follow_one_another():
    """Every letter on a right side is a parameter or was on a left side before.

    Those of a model with LayerNorm, learned positions and a tied head: transcripts/shapes-names.txt
    """
    formulas = {name: spec.formula for name, spec in call(QWEN).items()}
    assert formulas["embed"] == "E = W_E[id]"
    assert formulas["blocks.0.resid_pre"] == "X = E"
    assert formulas["blocks.0.ln1.scale"] == "s = √(mean(X²) + ε)"
    assert formulas["blocks.0.ln1.out"] == "T¹ = RMSNorm(X) = X / s · w"
    assert formulas["blocks.0.attn.q"] == "Q = T¹ W_q + b_q"
    assert formulas["blocks.0.attn.q_norm"] == "Q_norm = RMSNorm(Q) = Q / s · w"
    assert formulas["blocks.0.attn.q_rot"] == "Q_rot = R(position) Q_norm"
    assert formulas["blocks.0.attn.z"] == "C = A V"
    assert formulas["blocks.0.attn_out"] == "T² = C W_o"
    assert formulas["blocks.0.resid_mid"] == "T³ = T² + X"
    assert formulas["blocks.0.ln2.scale"] == "s = √(mean((T³)²) + ε)"
    assert formulas["blocks.0.ln2.out"] == "T⁴ = RMSNorm(T³) = T³ / s · w"
    assert formulas["blocks.0.mlp.act"] == "Activation(G) = SiLU(G)"
    assert formulas["blocks.0.mlp.post"] == "L = Activation(G) ∘ U"
    assert formulas["blocks.0.mlp_out"] == "T⁵ = L W_down"
    assert formulas["blocks.0.resid_post"] == "H = T⁵ + T³"
    assert formulas["logits_raw"] == "logits = H′ W_head"
    weights = {spec.name: spec.formula for spec in parameters(QWEN)}
    assert weights["blocks.0.ln2.w"] == formulas["blocks.0.ln2.out"]
    assert weights["blocks.0.attn.b_k"] == formulas["blocks.0.attn.k"]
    assert weights["blocks.0.mlp.W_down"] == formulas["blocks.0.mlp_out"]


@pytest.mark.parametrize(
    ("change", "formula"),
    [
        ({"rope": None}, "Q_norm K_normᵀ · 0.3 + M"),
        ({"rope": None, "qk_norm": None, "scale": 0.5}, "Q Kᵀ / √d_k + M"),
        ({"heads": 3, "kv_heads": 3, "scale": 0.5}, "Q_rot K_rotᵀ / √(d/h) + M"),
    ],
)
def test_the_formula_of_the_scores_says_what_enters_them(change, formula):
    mixer = replace(QWEN.layers[0].attention, **{"scale": 0.3} | change)
    config = replace(QWEN, layers=(QWEN.layers[0].with_attention(mixer),))
    given = {"batch": 1, "tokens": 3, "past": 0, "phase": "prefill"}
    derived = {spec.name: spec.formula for spec in plan(config, Call(**given)).derived}
    assert derived["blocks.0.attn.scores"] == f"S = {formula}"
    assert derived["blocks.0.attn.pattern"] == "A = softmax(S)"


@settings(max_examples=40, deadline=None)
@given(models())
def test_formulas_are_those_that_explain_derives_with(config):
    """Two views never write one tensor in two ways."""
    specs = plan(config, Call(batch=1, tokens=3, past=0, phase="prefill", dtype="float32")).tensors
    derived = {name: rule.formula for name, rule in rules(config).items()}
    assert [spec.name for spec in specs] == list(derived)
    for spec in specs:
        said = derived[spec.name].removesuffix(", H of the last block")
        if spec.name.endswith(".pattern"):  # explain goes on to say what S is
            said = said.partition(" = softmax(Q")[0]
        if spec.name != "logits":  # which explain derives in one with `logits_raw`
            assert spec.formula == said


@pytest.mark.parametrize("window", [None, 1, 3, 7, 50])
def test_visible_pairs_against_the_mask_itself(window):
    for past in (0, 1, 2, 5, 8):
        for tokens in (1, 2, 5, 9):
            cells = sum(
                key <= query and (window is None or key > query - window)
                for query in range(past, past + tokens)
                for key in range(past + tokens)
            )
            assert visible_pairs(tokens, past, window) == cells


def test_scores_count_as_a_rectangle_and_say_what_the_mask_hides():
    z = call(QWEN, batch=1, tokens=4, past=3)["blocks.0.attn.z"]
    per_pair = 2 * 6 * (4 + 3)  # heads, then q·k and pattern·v
    assert z.flops == per_pair * 4 * 7
    assert z.flops - z.masked_flops == per_pair * (4 + 5 + 6 + 7)
    one = call(QWEN, batch=1, tokens=1, past=3, phase="decode")["blocks.0.attn.z"]
    assert one.masked_flops == 0


def test_bytes_follow_the_dtype_and_are_unknown_without_one():
    specs = call(QWEN, dtype="bfloat16")
    assert specs["blocks.0.attn.q_rot"].bytes == 2 * 6 * 5 * 4 * 2
    assert specs["blocks.0.ln1.scale"].bytes == 2 * 5 * 4  # at least float32
    assert {name for name, spec in specs.items() if spec.dtype == "float32"} == {
        "embed", "ln_final.scale", "logits_raw", "logits",
        *(f"blocks.0.{name}" for name in (
            "resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post",  # the stream
            "ln1.scale", "ln2.scale", "attn.q", "attn.k",  # the last two are normalized
        )),
    }  # fmt: skip
    assert call(QWEN, dtype="float64")["blocks.0.ln1.scale"].dtype == "float64"
    assert call(QWEN)["logits"].bytes is None
    keys, values = states(QWEN, batch=2, capacity=10, dtype="float16")
    assert (keys.axes, keys.shape, keys.bytes) == (("B", "Hk", "S", "dh"), (2, 2, 10, 4), 320)
    assert (values.axes, values.shape, values.bytes) == (("B", "Hk", "S", "dv"), (2, 2, 10, 3), 240)
    assert "rotated" in keys.formula
    assert "rotated" not in states(GPT, batch=1, capacity=1)[0].formula


def test_last_logits_narrow_only_the_end():
    everything, last = call(QWEN), call(QWEN, logits="last")
    assert last["ln_final.out"].shape == (2, 1, 12)
    assert last["logits"].shape == (2, 1, 50)
    assert last["logits_raw"].flops * 5 == everything["logits_raw"].flops
    assert last["blocks.0.resid_post"] == everything["blocks.0.resid_post"]


def letters(config, batch=2, tokens=5, past=0):
    return Letters(config=config, batch=batch, tokens=tokens, past=past)


@settings(max_examples=60, deadline=None)
@given(models(), st.integers(1, 9), st.integers(1, 9), st.integers(0, 9))
def test_every_shape_is_what_its_letters_say(config, batch, tokens, past):
    """Small sizes: T = D, H = Hk, dh = dv and other collisions are all among the examples."""
    call = letters(config, batch, tokens, past)
    given = {"batch": batch, "tokens": tokens, "past": past, "phase": "prefill"}
    specs = (
        *parameters(config),
        *plan(config, Call(**given)).tensors,
        *states(config, batch=batch, capacity=past + tokens),
    )
    for spec in specs:
        assert tuple(call.size(axis, spec.layer) for axis in spec.axes) == spec.shape, spec.name
        assert len(call.documented(spec.axes, spec.layer)) == len(spec.axes)


def test_a_letter_does_not_follow_a_size_that_happens_to_be_equal():
    """With T = D and H = Hk the letters are those of a call where nothing is equal."""
    mixer = replace(QWEN.layers[0].attention, heads=4, kv_heads=4, head_dim=3, value_dim=3)
    square = replace(QWEN, width=12, layers=(QWEN.layers[0].with_attention(mixer),))

    def axes(config, tokens):
        given = {"batch": tokens, "tokens": tokens, "past": 0, "phase": "prefill"}
        return {spec.name: spec.axes for spec in plan(config, Call(**given)).tensors}

    assert axes(square, 12) == axes(QWEN, 5)


def test_unknown_letters_are_errors():
    with pytest.raises(KeyError):
        letters(QWEN).size("Z", 0)
    with pytest.raises(KeyError):
        letters(QWEN).size("H", None)
    with pytest.raises(KeyError):
        letters(QWEN).size("P", None)
    assert letters(GPT).size("P", None) == 64


@pytest.mark.parametrize(
    ("config", "axes", "documents"),
    [
        (GPT, ("B", "T", "D"), ("b", "n", "d")),
        (GPT, ("B", "H", "T", "dh"), ("b", "h", "n", "d/h")),
        (GPT, ("B", "H", "T", "S"), ("b", "h", "n", "n")),
        (GPT, ("D", "H·dh"), ("d", "d")),
        (GPT, ("B", "T", "F"), ("b", "n", "4d")),
        (GPT, ("V", "D"), ("v", "d")),
        (QWEN, ("B", "Hk", "S", "dv"), ("b", "h_kv", "n", "d_v")),
        (QWEN, ("D", "H·dh"), ("d", "h·d_k")),
        (QWEN, ("Hk·dh",), ("h_kv·d_k",)),
        (QWEN, ("B", "T", "1"), ("b", "n", "1")),
        (QWEN, ("F", "D"), ("F", "d")),
    ],
)
def test_the_documents_letters(config, axes, documents):
    assert letters(config).documented(axes, 0) == documents


def test_a_step_computes_the_last_row_only():
    step = letters(GPT, tokens=1, past=7)
    assert step.documented(("B", "H", "T", "S"), 0) == ("b", "h", "1", "n")
    assert step.size("S", None) == 8

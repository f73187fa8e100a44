"""Rules as data: how a plan is made of names, and which names a family's rules take."""

import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_checkpoints import GPT2, LLAMA

from llmcli.families import find
from llmcli.families.quantized import Scheme, with_scales
from llmcli.families.rules import Drop, PerExpert, Rename, Rows, Transpose, UnpairRows, plan
from llmcli.families.scales import Grid
from llmcli.families.sources import sources, sources_of

MODEL = SimpleNamespace(layers=(None,) * 12)


W = Rename("h.{layer}.w", "blocks.{layer}.w")
MANY_NINES = f"h.{'9' * 5000}.w"
BEYOND = Drop("h.{layer}.*", "beyond", {"layer": range(12, 14)})


@pytest.mark.parametrize(("rules", "loads", "dropped", "unexpected"), [
    # a layer's number is carried over
    ([Rename("model.layers.{layer}.up", "blocks.{layer}.mlp.W_up", Transpose())],
     [("model.layers.11.up", "blocks.11.mlp.W_up", Transpose())], {}, []),
    # a whole name wins over a pattern
    ([W, Rename("h.3.w", "blocks.3.w", Rows(0, 2))],
     [("h.3.w", "blocks.3.w", Rows(0, 2)), ("h.4.w", "blocks.4.w")], {}, []),
    # one source may fill several parameters
    ([Rename("qkv", "q", Rows(0, 2)), Rename("qkv", "k", Rows(2, 4))],
     [("qkv", "q", Rows(0, 2)), ("qkv", "k", Rows(2, 4))], {}, []),
    ([Drop("h.{layer}.mask", "computed")], [], {"h.0.mask": "computed"}, []),
    # numbers that are no layers, and placeholders already
    ([W, Drop("v.*", "vision")], [], {"v.": "vision"}, [
        "h.12.w", "h.00.w", "h.-1.w", "h.1e1.w", "h.x.w", "h..w", "h.٣.w", "h.0.w.w", "h.0.w\n",
        MANY_NINES, "h.{}.w", "h.{layer}.w", "v", "va.x", "x.v.y",
    ]),
    # a rule of its own wins over all that begins so
    ([BEYOND, Drop("h.3.*", "third"), W, Rename("h.13.w", "last.w")],
     [("h.3.w", "blocks.3.w"), ("h.13.w", "last.w")],
     {"h.3.x": "third", "h.12.w": "beyond", "h.13.a.b.7": "beyond"}, ["h.14.w", "h.11.x"]),
])  # fmt: skip
def test_a_name_is_loaded_dropped_or_unexpected(rules, loads, dropped, unexpected):
    names = dict.fromkeys([*(source for source, *_ in loads), *dropped, *unexpected])
    planned = plan(names, rules, MODEL)
    found = [(load.source, load.target, *load.ops) for load in planned.loads]
    assert found == loads
    assert planned.dropped == tuple(dropped.items())
    assert planned.unexpected == tuple(unexpected)


def test_a_scale_of_every_expert_belongs_to_its_weight():
    grid = Grid(formats=("F8_E4M3",), rows=1)
    experts = {"expert": range(4)}
    weight = Rename("h.{layer}.e.{expert}.weight", "b.{layer}.W[{expert}]", within=experts)
    rules = with_scales([weight], Scheme(grids={"weight_scale": grid}))
    leaves = ("3.weight", "3.weight_scale", "4.weight_scale", "3.input_scale")
    names = [f"h.0.e.{leaf}" for leaf in leaves]
    planned = plan(names, rules, MODEL)
    assert [load.scale.source for load in planned.loads] == ["h.0.e.3.weight_scale"]
    assert planned.unexpected == ("h.0.e.4.weight_scale",)
    assert [name for name, _ in planned.dropped] == ["h.0.e.3.input_scale"]


def test_time_is_linear_in_the_names():
    rules = [Rename(f"h.{{layer}}.{i}x", f"blocks.{{layer}}.{i}x") for i in range(40)]
    names = [f"h.{i % 12}.{i % 40}x" for i in range(20_000)]
    rules += [Drop(f"v{i}.a.*", "vision") for i in range(40)]
    names += ["v1.a." + "." * 100_000, "." * 1_000_000]
    took = []
    for _ in range(3):  # the best of them: a busy machine takes five times as long
        start = time.process_time()
        assert len(plan(names, rules, MODEL).loads) == 20_000
        took.append(time.process_time() - start)
        if took[-1] < 2.0:
            break
    assert min(took) < 2.0


@settings(max_examples=50)
@given(st.lists(st.text("hwx.01{}é", max_size=8) | st.integers(0, 99).map("h.{}.w".format)))
def test_any_name_is_loaded_dropped_or_unexpected(names):
    rules = [Rename("h.{layer}.w", "blocks.{layer}.w"), Drop("x", "known")]
    planned = plan(names, rules, MODEL)
    seen = [load.source for load in planned.loads]
    seen += [name for name, _ in planned.dropped]
    seen += planned.unexpected
    assert sorted(seen) == sorted(names)


def test_operations_are_named_for_the_ledger():
    each = PerExpert(Rows(0, 1, groups=8))
    assert [str(op) for op in (Rows(0, 8), UnpairRows(9, 64), PerExpert(Transpose()), each)] == [
        "rows 0:8", "unpaired rows of 9 heads", "each expert: transposed",
        "each expert: rows 0:1 of each of 8 groups",
    ]  # fmt: skip


SETTINGS = {
    "gpt2": GPT2 | {"n_layer": 2}, "llama": LLAMA, "mistral": LLAMA | {"model_type": "mistral"},
    "qwen2": LLAMA | {"model_type": "qwen2"},
    "qwen3": LLAMA | {"model_type": "qwen3", "tie_word_embeddings": True},
}  # fmt: skip


@pytest.mark.parametrize("kind", SETTINGS)
def test_the_names_that_rules_take_are_what_loading_would_take(kind):
    family = find(kind, "safetensors")
    config = family.from_hf(SETTINGS[kind])
    for rules in (family.rules_hf(config), family.rules_gguf(config)):
        found = sources_of(rules, config)
        planned = plan(found, rules, config)
        assert (planned.unexpected, planned.dropped) == ((), ())
        filled = {}
        for load in planned.loads:
            filled[load.source] = (*filled.get(load.source, ()), load.target)
        assert filled == found
        assert len(found) >= len({rule.source for rule in rules if isinstance(rule, Rename)})


def test_both_kinds_of_files_are_named_whichever_the_model_came_from():
    named = sources(find("gpt2", "safetensors").from_hf(SETTINGS["gpt2"]))
    assert named["blk.1.ffn_up.weight"] == named["h.1.mlp.c_fc.weight"] == ("blocks.1.mlp.W_up",)
    assert named["transformer.h.1.attn.c_attn.bias"] == tuple(
        f"blocks.1.attn.b_{part}" for part in "qkv"
    )
    assert "lm_head.weight" not in named
    assert "blk.2.ffn_up.weight" not in named


def test_a_model_of_no_family_has_none():
    config = find("llama", "safetensors").from_hf(LLAMA)
    assert sources(replace(config, family="other")) == {}


def test_every_expert_has_a_name():
    config = find("llama", "safetensors").from_hf(LLAMA)
    rule = Rename("h.{layer}.e.{expert}", "b.{layer}.W[{expert}]", within={"expert": range(3)})
    found = sources_of([rule], config)
    assert found == {f"h.{i}.e.{e}": (f"b.{i}.W",) for i in range(2) for e in range(3)}

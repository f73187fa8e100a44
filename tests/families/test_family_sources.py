"""The checkpoint names that a family's rules take, against the plan that loading makes of them."""

import pytest
from tiny_checkpoints import GPT2, LLAMA

from llmcli.families import Rename, find, plan
from llmcli.families.sources import sources, sources_of

SETTINGS = {
    "gpt2": GPT2 | {"n_layer": 2}, "llama": LLAMA, "mistral": LLAMA | {"model_type": "mistral"},
    "qwen2": LLAMA | {"model_type": "qwen2"},
    "qwen3": LLAMA | {"model_type": "qwen3", "tie_word_embeddings": True},
}  # fmt: skip


@pytest.mark.parametrize("kind", list(SETTINGS))
def test_they_are_what_loading_would_take(kind):
    family = find(kind, "safetensors")
    config = family.from_hf(SETTINGS[kind])
    for rules in (family.rules_hf(config), family.rules_gguf(config)):
        found = sources_of(rules, config)
        planned = plan(found, rules, config)
        assert (planned.unexpected, planned.dropped) == ((), ())
        filled: dict[str, tuple[str, ...]] = {}
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
    from dataclasses import replace

    config = find("llama", "safetensors").from_hf(LLAMA)
    assert sources(replace(config, family="other")) == {}


def test_every_expert_has_a_name():
    config = find("llama", "safetensors").from_hf(LLAMA)
    rule = Rename("h.{layer}.e.{expert}", "b.{layer}.W[{expert}]", within={"expert": range(3)})
    found = sources_of([rule], config)
    assert found == {f"h.{i}.e.{e}": (f"b.{i}.W",) for i in range(2) for e in range(3)}

"""The names of a model, what others call them, and why one is not there."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest
from anatomy_configs import models
from hypothesis import given, settings
from zoo import ZOO, attending, three_layers, variant

from llmcli.errors import UsageError
from llmcli.families.sources import sources
from llmcli.graph.aliases import listed, modules
from llmcli.graph.names import Names, known
from llmcli.graph.plan import parameters, plan, states
from llmcli.graph.spec import Call

ALL = [one.name for one in ZOO]
model = three_layers


@settings(max_examples=60, deadline=None)
@given(models())
def test_the_names_are_those_of_the_specs_each_once(config):
    run = plan(config, Call(batch=2, tokens=3, past=1, phase="prefill")).tensors
    kept = states(config, batch=2, capacity=4)
    every = [*parameters(config), *run, *kept]
    named = known(config)
    assert sorted(named) == sorted(spec.name for spec in every)
    for spec in every:
        one = named[spec.name]
        assert (one.kind, one.layer, one.axes, one.formula) == (
            spec.kind, spec.layer, spec.axes, spec.formula,
        )  # fmt: skip
    order = [name for name, one in named.items() if one.kind == "activation"]
    assert order == [spec.name for spec in run]


def test_a_cache_stands_where_it_is_written():
    order = list(known(model("llama")))
    at = order.index("cache.1.k")
    assert order[at - 1 : at + 4] == [
        "blocks.1.attn.k_rot", "cache.1.k", "cache.1.v", "blocks.1.attn.scores",
        "blocks.1.attn.pattern",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ALL)
def test_every_alias_means_exactly_one_name(name):
    config = variant(name).config()
    names = Names(config, sources(config))
    claimed: dict[str, str] = {}
    for ours in names.known:
        for theirs in names.aliases(ours):
            assert claimed.setdefault(theirs, ours) == ours
            assert names.canonical(theirs) == ours
            assert theirs not in names.known
    if not attending(config):
        assert {"out_proj", "mixer", "hook_attn_out"} <= {one.rpartition(".")[2] for one in claimed}
        return
    leaves = {theirs.rpartition(".")[2] for theirs in claimed}
    assert {"hook_pattern", f"pattern{attending(config)[0]}"} <= leaves
    # of queries, or where these are in a tensor with others, of the output
    assert leaves & {"q_proj", "o_proj", "c_proj", "dense"}


@pytest.mark.parametrize("name", ALL)
def test_no_name_of_others_is_listed_with_two_meanings(name):
    config = variant(name).config()
    filled = sources(config)
    meanings: dict[str, set] = {}
    for theirs, ours in listed(config):
        meanings.setdefault(theirs, set()).add((ours,))
    for table in (filled.items(), modules(config, filled)):
        for theirs, ours in table:
            meanings.setdefault(theirs, set()).add(ours)
    assert {theirs: ours for theirs, ours in meanings.items() if len(ours) > 1} == {}


# ours, and what others call it: in every family, then in one
MEANT = """
gpt2 llama qwen3
blocks.2.resid_pre: blocks.2.hook_resid_pre blocks.2.hook_in resid_pre2
blocks.2.resid_mid: blocks.2.hook_resid_mid
blocks.2.resid_post: blocks.2.hook_resid_post blocks.2.hook_out ln_final.hook_in
blocks.1.resid_pre: blocks.1.ln1.hook_in
blocks.1.ln1.out: blocks.1.ln1.hook_out
blocks.1.resid_mid: blocks.1.ln2.hook_in
blocks.1.ln2.scale: scale1ln2
blocks.2.attn.pattern: blocks.2.attn.hook_pattern pattern2 attn2
blocks.2.attn.k: k2
blocks.0.attn.q: query0
blocks.0.attn.scores: blocks.0.attn.hook_attn_scores attn_scores0
blocks.0.attn.z: blocks.0.attn.hook_z blocks.0.attn.o.hook_in
blocks.0.attn.result: blocks.0.attn.hook_result
blocks.0.attn_out: blocks.0.hook_attn_out
blocks.2.mlp_out: mlp_out2
blocks.1.mlp.post: post1
embed: hook_embed embed.hook_out
logits_raw: unembed.hook_out lm_head
ln_final.scale: ln_final.hook_scale
blocks.1.attn.W_q: blocks.1.attn.W_Q
blocks.1.mlp.W_up: blocks.1.mlp.W_in blk.1.ffn_up
embed.W: embed.W_E token_embd.weight
blocks.1.attn.W_o: blk.1.attn_output.weight
gpt2
pos_embed: hook_pos_embed
blocks.1.mlp.pre: blocks.1.mlp.hook_pre blocks.1.mlp.in.hook_out
blocks.1.resid_post: transformer.h.1
blocks.1.attn_out: transformer.h.1.attn
blocks.1.mlp.post: transformer.h.1.mlp.act
blocks.1.mlp.b_up: h.1.mlp.c_fc.bias
ln_final.out: transformer.ln_f
llama
blocks.1.mlp.gate: blocks.1.mlp.hook_pre
blocks.1.mlp.up: pre_linear1
blocks.1.attn.q_rot: rot_q1
blocks.1.attn.q: model.layers.1.self_attn.q_proj
blocks.1.attn.W_q: model.layers.1.self_attn.q_proj.weight
blocks.1.mlp_out: layers.1.mlp
blocks.1.mlp.act: model.layers.1.mlp.act_fn
blocks.1.ln2.out: model.layers.1.post_attention_layernorm
ln_final.out: model.norm
head.W: unembed.W_U
qwen2
blocks.1.attn.b_q: model.layers.1.self_attn.q_proj.bias
qwen3
blocks.1.attn.q_norm: model.layers.1.self_attn.q_norm
blocks.1.attn.k_norm: blocks.1.attn.k_norm.hook_out
blocks.1.attn.q_norm.w: blk.1.attn_q_norm.weight
"""


def meant():
    """(family, their name, ours) of every name in that table."""
    for line in MEANT.strip().split("\n"):
        ours, colon, theirs = line.partition(": ")
        if not colon:
            families = line.split()
            continue
        yield from ((family, name, ours) for family in families for name in theirs.split())
@pytest.mark.parametrize(("family", "theirs", "ours"), list(meant()))
def test_names_of_others(family, theirs, ours):
    config = model(family)
    assert Names(config, sources(config)).canonical(theirs) == ours


def test_without_the_familys_names_the_others_are_known():
    names = Names(model("llama"))
    assert names.canonical("pattern1") == "blocks.1.attn.pattern"
    assert names.canonical("model.norm") is None
    assert names.aliases("blocks.1.attn.q_rot") == ("blocks.1.attn.hook_rot_q", "rot_q1")
    assert names.aliases("blocks.1.ln1.w") == ()


NONE = (
    *("", ".", "blocks", "blocks.0", "blocks.9.attn.q", "q_rot", "k"),
    "model.layers.0.self_attn.q_norm",  # in the family's rules, not in this model
)


@pytest.mark.parametrize("typed", NONE)
def test_what_is_no_name_is_none(typed):
    config = model("llama")
    assert Names(config, sources(config)).canonical(typed) is None


# what is wrong with other names is in transcripts/dump-names.txt
@pytest.mark.parametrize("typed", ["blocks.1.attn.W_q", "blocks.*.attn.W_q", "W_q"])
def test_a_parameter_is_said_to_be_one_where_none_is_asked_for(typed):
    with pytest.raises(UsageError, match="is a parameter, not an activation or a state") as caught:
        Names(model("llama")).select(typed)
    assert f"`{typed}`" in caught.value.message
    assert "for example" in caught.value.hint


def test_no_number_of_a_block_is_too_long():
    typed = "blocks." + "9" * 5000 + ".attn.q"
    with pytest.raises(UsageError, match=f"there is no activation or state `{typed}`") as caught:
        Names(model("llama")).select(typed)
    assert "`" in caught.value.hint


def test_names_of_twice_as_many_layers_take_twice_as_many_calls():
    def calls(layers):
        config = variant("llama-gqa3").config(num_hidden_layers=layers)
        count = 0

        def called(frame, event, arg):
            nonlocal count
            count += event == "call"

        sys.setprofile(called)
        try:
            names = Names(config, sources(config))
            assert len(names.select("model.layers.*.self_attn.q_proj")) == layers
            assert names.aliases(f"blocks.{layers - 1}.attn.q")
        finally:
            sys.setprofile(None)
        return count

    assert calls(80) < 2.2 * calls(40)


def test_three_kinds_are_listed_as_people_list_them():
    with pytest.raises(UsageError, match="there is no parameter, activation or state `nope`"):
        Names(model("llama")).select("nope", ("parameter", "activation", "state"))


HOOKS = json.loads(
    Path(__file__).parents[1].joinpath("data/transformerlens_names.json").read_text()
)["hooks"]
# what holds something of ours and is not accepted: it is there in some models of the kind only
LEFT_OUT = ("attn.hook_hidden_states", "attn.q_norm.hook_in", "attn.k_norm.hook_in", "emb.hook_in")


@pytest.mark.parametrize("case", list(HOOKS))
def test_a_hooks_name_means_what_the_hook_holds(case):
    config = model(case.partition("-")[0])
    names = Names(dataclasses.replace(config, layers=config.layers[:2]))
    meant = 0
    for hook, held in HOOKS[case].items():
        if hook.endswith("hook_normalized") and "_norm.hook" not in hook:
            with pytest.raises(UsageError, match="in one version"):
                names.canonical(hook)
            assert held == ""
            continue
        ours = names.canonical(hook)
        if ours is None:
            assert held == "" or hook.endswith(LEFT_OUT), hook
        else:
            assert ours in held.split(), hook
            meant += 1
    assert meant > 45


@pytest.mark.parametrize("case", list(HOOKS))
def test_a_name_that_is_listed_for_a_hook_is_one_that_there_is(case):
    config = model(case.partition("-")[0])
    names = Names(dataclasses.replace(config, layers=config.layers[:2]))
    listed = {alias for ours in names.known for alias in names.aliases(ours) if "hook_" in alias}
    here = {alias for alias in listed if not alias.startswith("blocks.0.")}
    assert here - set(HOOKS[case]) == set()

"""The names of a model, what others call them, and why one is not there."""

import dataclasses
import json
import re
import sys
from pathlib import Path

import pytest
from anatomy_configs import models
from hypothesis import given, settings
from hypothesis import strategies as st
from zoo import ZOO, attending, variant
from zoo import three_layers as model

from llmcli.cli.vocabulary import vocabulary
from llmcli.errors import UsageError
from llmcli.families.sources import sources
from llmcli.graph.aliases import listed, modules
from llmcli.graph.names import Names, known
from llmcli.graph.plan import parameters, plan, states
from llmcli.graph.spec import Call


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


@pytest.mark.parametrize("name", [one.name for one in ZOO])
def test_every_alias_means_exactly_one_name(name):
    config = variant(name).config()
    filled = sources(config)
    names = Names(config, filled)
    assert {re.sub(r"\.\d+", ".*", one) for one in names.known} <= {*sum(vocabulary().values(), ())}
    claimed: dict[str, str] = {}
    for ours in names.known:
        for theirs in names.aliases(ours):
            assert claimed.setdefault(theirs, ours) == ours
            assert names.canonical(theirs) == ours
            assert theirs not in names.known
    meanings: dict[str, set] = {}  # nor is one listed with two
    alone = ((theirs, (ours,)) for theirs, ours in listed(config))
    for theirs, ours in (*alone, *filled.items(), *modules(config, filled)):
        meanings.setdefault(theirs, set()).add(ours)
    assert {theirs: ours for theirs, ours in meanings.items() if len(ours) > 1} == {}
    if not attending(config):
        assert {"out_proj", "mixer", "hook_attn_out"} <= {one.rpartition(".")[2] for one in claimed}
        return
    leaves = {theirs.rpartition(".")[2] for theirs in claimed}
    assert {"hook_pattern", f"pattern{attending(config)[0]}"} <= leaves
    # of queries, or where these are in a tensor with others, of the output
    assert leaves & {"q_proj", "o_proj", "c_proj", "dense"}


# ours, and what others call it, in every family, then in one; of hooks more is in `HOOKS`
MEANT = """
gpt2 llama qwen3
blocks.2.resid_pre: blocks.2.hook_resid_pre blocks.2.hook_in resid_pre2
blocks.2.resid_post: blocks.2.hook_resid_post blocks.2.hook_out ln_final.hook_in
blocks.1.ln2.scale: scale1ln2
blocks.2.attn.pattern: blocks.2.attn.hook_pattern pattern2 attn2
blocks.2.attn.k: k2
blocks.0.attn.q: query0
blocks.0.attn.scores: blocks.0.attn.hook_attn_scores attn_scores0
blocks.0.attn.z: blocks.0.attn.hook_z blocks.0.attn.o.hook_in
blocks.0.attn_out: blocks.0.hook_attn_out
blocks.2.mlp_out: mlp_out2
blocks.1.mlp.post: post1
logits_raw: unembed.hook_out lm_head
blocks.1.attn.W_q: blocks.1.attn.W_Q
blocks.1.mlp.W_up: blocks.1.mlp.W_in blk.1.ffn_up
embed.W: embed.W_E token_embd.weight
blocks.1.attn.W_o: blk.1.attn_output.weight
gpt2
blocks.1.resid_post: transformer.h.1
blocks.1.attn_out: transformer.h.1.attn
blocks.1.mlp.post: transformer.h.1.mlp.act
blocks.1.mlp.b_up: h.1.mlp.c_fc.bias
ln_final.out: transformer.ln_f
llama
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


NONE = (
    *("", ".", "blocks", "blocks.0", "blocks.9.attn.q", "q_rot", "k"),
    "model.layers.0.self_attn.q_norm",  # in the family's rules, not in this model
)


@pytest.mark.parametrize(
    ("family", "theirs", "ours"), [*meant(), *(("llama", typed, None) for typed in NONE)]
)
def test_names_of_others(family, theirs, ours):
    config = model(family)
    assert Names(config, sources(config)).canonical(theirs) == ours


def test_without_the_familys_names_the_others_are_known():
    names = Names(model("llama"))
    assert names.canonical("pattern1") == "blocks.1.attn.pattern"
    assert names.canonical("model.norm") is None
    assert names.aliases("blocks.1.attn.q_rot") == ("blocks.1.attn.hook_rot_q", "rot_q1")
    assert names.aliases("blocks.1.ln1.w") == ()


def test_norms_and_the_stream_of_post_norm_blocks_have_no_names_in_transformerlens():
    names = Names(variant("opt-350m").config())
    assert names.canonical("blocks.1.hook_attn_out") == "blocks.1.attn_out"
    assert names.canonical("unembed.hook_in") == "head_proj"
    for typed in (
        *("blocks.1.ln1.hook_out", "blocks.1.ln2.hook_in", "scale1ln2"),
        *("resid_post1", "ln_final.hook_in"),
    ):
        assert names.canonical(typed) is None
    for typed in ("blocks.1.hook_resid_pre", "1.hook_out", "hook_resid_mid"):
        with pytest.raises(UsageError, match="and this model is post-norm"):
            names.select(typed)


# what is wrong with other names is in transcripts/dump-names.txt
PARAMETER = "is a parameter, not an activation or a state"


@pytest.mark.parametrize(("typed", "kinds", "message", "hint"), [
    *((typed, (), PARAMETER, "for example")
      for typed in ("blocks.1.attn.W_q", "blocks.*.attn.W_q", "W_q")),
    pytest.param(
        f"blocks.{'9' * 5000}.attn.q", (), "there is no activation or state `", "`", id="digits"
    ),
    ("nope", (("parameter", "activation", "state"),),
     "there is no parameter, activation or state `nope`", "`"),
])  # fmt: skip
def test_what_cannot_be_selected_says_why(typed, kinds, message, hint):
    with pytest.raises(UsageError, match=message) as caught:
        Names(model("llama")).select(typed, *kinds)
    assert f"`{typed}`" in caught.value.message
    assert hint in caught.value.hint


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
    shown = {alias for ours in names.known for alias in names.aliases(ours) if "hook_" in alias}
    here = {alias for alias in shown if not alias.startswith("blocks.0.")}
    assert here - set(HOOKS[case]) == set()


# patterns against a slow and obvious reading of what they mean

KINDS = st.sampled_from(
    [("activation", "state"), ("activation",), ("parameter",), ("parameter", "activation", "state")]
)


def matches(glob, text):
    """`*` is any characters, `?` is one: letter by letter."""
    if not glob:
        return not text
    if glob[0] == "*":
        return any(matches(glob[1:], text[i:]) for i in range(len(text) + 1))
    return bool(text) and glob[0] in ("?", text[0]) and matches(glob[1:], text[1:])


def means(item, name, layers):
    """Whether `name` is one of what `item` means; None where the item itself is wrong."""
    found = re.match(r"(blocks|cache)\.(-?\d+)(-(-?\d+))?(?=\.|$)", item)
    if found is None:
        return matches(item, name)
    ends = [int(found[2]), int(found[4] if found[3] else found[2])]
    counted = [end + layers if end < 0 else end for end in ends]
    if not all(0 <= end < layers for end in counted) or counted[0] > counted[1]:
        return None
    return any(
        matches(f"{found[1]}.{i}{item[found.end() :]}", name)
        for i in range(layers)
        if counted[0] <= i <= counted[1]
    )


@st.composite
def items(draw, names, layers):
    """A name with letters taken for `?` or `*`, and in place of its number another or a range."""
    name = draw(st.sampled_from(names))
    part, _, rest = name.partition(".")
    number, _, tail = rest.partition(".")
    if part in ("blocks", "cache"):
        numbers = st.integers(-layers - 1, layers)
        number = draw(
            st.one_of(
                st.just(number), st.just("*"), numbers.map(str),
                st.tuples(numbers, numbers).map(lambda two: f"{two[0]}-{two[1]}"),
            )
        )  # fmt: skip
        head = f"{part}.{number}."
    else:
        head, tail = "", name
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(tail)))
        end = draw(st.integers(at, len(tail)))
        tail = tail[:at] + draw(st.sampled_from(["*", "?"])) + tail[end:]
    return head + tail


@settings(max_examples=250, deadline=None)
@given(st.data(), models(), KINDS)
def test_a_pattern_means_what_it_says(data, config, kinds):
    names = Names(config)
    layers = len(config.layers)
    chosen = data.draw(st.lists(items(list(names.known), layers), min_size=1, max_size=3))
    of_kind = [name for name, named in names.known.items() if named.kind in kinds]
    wanted, refused = set(), False
    for item in chosen:
        meant = {name: means(item, name, layers) for name in of_kind}
        refused |= not any(meant.values())
        wanted |= {name for name, is_meant in meant.items() if is_meant}
    if not refused:
        assert names.select(",".join(chosen), kinds) == tuple(n for n in of_kind if n in wanted)
        return
    try:
        found = names.select(" , ".join(chosen), kinds)
    except UsageError:
        return
    # an item that means nothing of ours is the end of names, or a glob of others' names
    for name in set(found) - wanted:
        theirs = names.aliases(name)
        assert any(
            means(item, other, layers) or matches(f"*.{item.rpartition('.')[2]}", other)
            for item in chosen
            for other in (name, *theirs)
        )


@pytest.mark.parametrize(
    ("pattern", "count", "first", "last"),
    [
        ("*", 77, "embed", "logits"),
        # a whole name is never the end of others, though some end so
        ("blocks.1.hook_in", 1, "blocks.1.resid_pre", "blocks.1.resid_pre"),
        ("blocks.0-1.*", 44, "blocks.0.resid_pre", "blocks.1.resid_post"),
        ("logits,embed,logits,hook_embed", 2, "embed", "logits"),
        ("cache.-1.*", 2, "cache.2.k", "cache.2.v"),
        ("blocks.[02].attn.[qk]", 4, "blocks.0.attn.q", "blocks.2.attn.k"),
        ("blocks.*.attn.hook_pattern", 3, "blocks.0.attn.pattern", "blocks.2.attn.pattern"),
        ("blocks.-1.attn.hook_z", 1, "blocks.2.attn.z", "blocks.2.attn.z"),
        ("model.layers.1--1.mlp", 2, "blocks.1.mlp_out", "blocks.2.mlp_out"),
        ("model.layers.*.self_attn.[kv]_proj", 6, "blocks.0.attn.k", "blocks.2.attn.v"),
        ("pattern2, k0", 2, "blocks.0.attn.k", "blocks.2.attn.pattern"),
        ("resid_post", 3, "blocks.0.resid_post", "blocks.2.resid_post"),
        ("pattern", 3, "blocks.0.attn.pattern", "blocks.2.attn.pattern"),
        ("attn.pattern", 3, "blocks.0.attn.pattern", "blocks.2.attn.pattern"),
        ("attn.hook_pattern", 3, "blocks.0.attn.pattern", "blocks.2.attn.pattern"),
        ("hook_resid_pre", 3, "blocks.0.resid_pre", "blocks.2.resid_pre"),
        ("1.attn.z", 1, "blocks.1.attn.z", "blocks.1.attn.z"),
        ("0-1.pattern", 2, "blocks.0.attn.pattern", "blocks.1.attn.pattern"),
        ("-1.resid_post", 1, "blocks.2.resid_post", "blocks.2.resid_post"),
        ("v", 6, "blocks.0.attn.v", "cache.2.v"),
        ("0.attn.[qk]", 2, "blocks.0.attn.q", "blocks.0.attn.k"),
        ("layers.1.self_attn", 1, "blocks.1.attn_out", "blocks.1.attn_out"),
    ],
)
def test_examples(pattern, count, first, last):
    config = model("llama")
    found = Names(config, sources(config)).select(pattern)
    assert (len(found), found[0], found[-1]) == (count, first, last)
    assert len(set(found)) == count


def test_a_fused_tensor_in_a_glob_is_all_that_it_holds():
    config = model("gpt2")
    found = Names(config, sources(config)).select("transformer.h.*.attn.c_attn")
    assert found == tuple(f"blocks.{i}.attn.{part}" for i in range(3) for part in "qkv")


def test_parameters_are_chosen_where_they_are_asked_for():
    config = model("llama")
    found = Names(config, sources(config)).select("blk.0-1.attn_q.weight", ("parameter",))
    assert found == ("blocks.0.attn.W_q", "blocks.1.attn.W_q")

"""Patterns against a slow and obvious reading of what they mean."""

import re

import pytest
from anatomy_configs import models
from hypothesis import given, settings
from hypothesis import strategies as st
from zoo import three_layers as model

from llmcli.errors import UsageError
from llmcli.families.sources import sources
from llmcli.graph.names import Names

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
        ("blocks.*.attn.pattern", 3, "blocks.0.attn.pattern", "blocks.2.attn.pattern"),
        ("blocks.0-1.*", 44, "blocks.0.resid_pre", "blocks.1.resid_post"),
        ("blocks.-1.attn.q", 1, "blocks.2.attn.q", "blocks.2.attn.q"),
        ("blocks.-2--1.attn.q", 2, "blocks.1.attn.q", "blocks.2.attn.q"),
        ("blocks.0--1.attn.q", 3, "blocks.0.attn.q", "blocks.2.attn.q"),
        ("cache.-1.*", 2, "cache.2.k", "cache.2.v"),
        ("logits,embed,logits,hook_embed", 2, "embed", "logits"),
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


def test_a_whole_name_is_never_the_end_of_others():
    names = Names(model("llama"))
    assert names.select("embed") == ("embed",)
    assert "blocks.0.mlp.post" not in names.select("resid_post")


def test_a_fused_tensor_in_a_glob_is_all_that_it_holds():
    config = model("gpt2")
    found = Names(config, sources(config)).select("transformer.h.*.attn.c_attn")
    assert found == tuple(f"blocks.{i}.attn.{part}" for i in range(3) for part in "qkv")


def test_parameters_are_chosen_where_they_are_asked_for():
    config = model("llama")
    found = Names(config, sources(config)).select("blk.0-1.attn_q.weight", ("parameter",))
    assert found == ("blocks.0.attn.W_q", "blocks.1.attn.W_q")

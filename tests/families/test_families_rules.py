"""Rules as data: how a plan is made of names."""

import time
from types import SimpleNamespace

from hypothesis import given, settings
from hypothesis import strategies as st

from llmcli.families import Drop, Load, Rename, Rows, Transpose, UnpairRows, plan

MODEL = SimpleNamespace(layers=(None,) * 12)


def test_a_layers_number_is_carried_over():
    rules = [Rename("model.layers.{layer}.up", "blocks.{layer}.mlp.W_up", Transpose())]
    planned = plan(["model.layers.11.up"], rules, MODEL)
    assert planned.loads == (Load("model.layers.11.up", "blocks.11.mlp.W_up", (Transpose(),)),)
    assert (planned.dropped, planned.unexpected) == ((), ())


def test_a_whole_name_wins_over_a_pattern():
    rules = [Rename("h.{layer}.q", "blocks.{layer}.q"), Rename("h.3.q", "blocks.3.q", Rows(0, 2))]
    planned = plan(["h.3.q", "h.4.q"], rules, MODEL)
    assert [load.ops for load in planned.loads] == [(Rows(0, 2),), ()]


def test_one_source_may_fill_several_parameters():
    rules = [Rename("qkv", "q", Rows(0, 2)), Rename("qkv", "k", Rows(2, 4))]
    assert [load.target for load in plan(["qkv"], rules, MODEL).loads] == ["q", "k"]


def test_drops_carry_their_reason():
    assert plan(["h.0.mask"], [Drop("h.{layer}.mask", "computed")], MODEL).dropped == (
        ("h.0.mask", "computed"),
    )


def test_numbers_that_are_no_layers_are_unexpected():
    rules = [Rename("h.{layer}.w", "blocks.{layer}.w")]
    names = [
        "h.12.w",
        "h.00.w",
        "h.-1.w",
        "h.1e1.w",
        "h.x.w",
        "h..w",
        "h.٣.w",
        "h.0.w.w",
        "h.0.w\n",
    ]
    names.append(f"h.{'9' * 5000}.w")
    planned = plan(names, rules, MODEL)
    assert planned.unexpected == tuple(names)
    assert not planned.loads


def test_time_is_linear_in_the_names():
    rules = [Rename(f"h.{{layer}}.{i}x", f"blocks.{{layer}}.{i}x") for i in range(40)]
    names = [f"h.{i % 12}.{i % 40}x" for i in range(20_000)]
    start = time.process_time()
    assert len(plan(names, rules, MODEL).loads) == 20_000
    assert time.process_time() - start < 2.0


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
    assert [str(op) for op in (Rows(0, 8), UnpairRows(9, 64), Transpose())] == [
        "rows 0:8",
        "unpaired rows of 9 heads",
        "transposed",
    ]

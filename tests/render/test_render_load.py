"""`llmcli load` on the screen: tables that fit, marks that say what is wrong."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from drawn import changes, lines_of, printed, shown

from llmcli.commands.load.report import (
    LedgerLine,
    LoadBytes,
    LoadMemory,
    LoadReport,
    MetadataCheck,
    Numbers,
    Shared,
    Stage,
)
from llmcli.commands.load.view import render_load
from llmcli.records.checks import ViewCheck

NUMBERS = Numbers(
    count=2000, mean=0.25, std=1.0, min=-2.0, max=3.0, zeros=1, nan=0, inf=0, negative_inf=0,
    first_bad=None,
)  # fmt: skip
LINES = (
    LedgerLine(
        parameter="blocks.{0-29}.attn.W_q", source="blk.{0-29}.attn_q.weight", stored="Q4_1",
        shape=(576, 576), bytes=6 << 20, operations=("unpaired rows of 9 heads",),
        dequantized=True, numbers=NUMBERS, tensors=30,
    ),
    LedgerLine(
        parameter="ln_final.w", source="output_norm.weight", stored="F32", shape=(576,),
        bytes=2304, numbers=replace(NUMBERS, zeros=0),
    ),
    LedgerLine(
        source="rope.inv_freq", stored="F32", shape=(32,), bytes=128,
        reason="frequencies, which are computed",
    ),
)  # fmt: skip
CLAIM = MetadataCheck(
    name="total_size", what="`total_size`", says="1,000", holds="1,000", ok=True
)
CHECK = ViewCheck(name="ledger", words="nothing is left over", value=0.0, tolerance=0.0)
REPORT = LoadReport(
    dtype="bfloat16", files=2, bytes=LoadBytes(files=5 << 20, tensors=4 << 20, weights=8 << 20),
    memory=LoadMemory(before=100 << 20, peak=300 << 20, device=None), ledger=LINES, rows=LINES,
    stages=(
        Stage(name="find", seconds=0.25), Stage(name="read", seconds=0.5, bytes=1_000_000_000),
        Stage(name="convert", seconds=0.25, bytes=10**9),
    ),
    shared=(Shared(kind="tied", names=("head.W", "embed.W"), bytes=1 << 20),),
    claims=(CLAIM,), checks=(CHECK,), notes=(), numbers=4000, fault=None, not_finite=None,
)  # fmt: skip


def ledger(report=REPORT, lines=LINES, **more):
    return render_load(report, "m (Q4_1 → bfloat16 on cpu)", lines, **more)


def loaded(report=REPORT, width=200, lines=LINES, **more):
    return shown(ledger(report, lines, **more), width=width)


def test_screens(golden):
    """The verdict is first, and each of them last."""
    bad = replace(NUMBERS, nan=3, inf=2, negative_inf=1, first_bad=(1, 2))
    bad = {"lines": (replace(LINES[0], numbers=bad), *LINES[1:])}
    none = replace(
        NUMBERS, mean=math.nan, std=math.nan, min=math.nan, max=math.nan, nan=2000, zeros=0
    )
    wrong = replace(CLAIM, ok=False, holds="999")
    fails = replace(CHECK, value=1.0, words="all is there")
    not_finite = replace(REPORT, not_finite="`blocks.0.attn.W_q[1,2]` is nan")
    stranger = replace(REPORT, claims=(replace(CLAIM, says="\x1b[2J", ok=False),), fault="\x1b[1m")
    line = (replace(LINES[1], source="a\x1b]0;x\x07", parameter=None),)
    all_wrong = replace(
        REPORT, claims=(CLAIM, wrong), checks=(CHECK, fails), fault="no tensor for `x`",
        not_finite="`y[0]` is infinite",
    )  # fmt: skip
    large = replace(REPORT, bytes=replace(REPORT.bytes, tensors=10**9))
    equal = Shared(kind="equal", names=tuple("abcde"), bytes=2 << 20)

    def verdict(**changed):
        report = replace(REPORT, **changed)
        return changes(*(shown(render_load(one, "m", None), width=120) for one in (REPORT, report)))

    golden("load", {
        "the whole, of which some were read twice": loaded(full=True),
        "on few lines": loaded(),
        "with each check": changes(loaded(), loaded(checks=True)),
        "read once": changes(loaded(full=True), loaded(large, full=True)),
        "of some lines no more than they and the last verdict": loaded(lines=LINES[:1], brief=True),
        "and what is wrong": changes(
            loaded(lines=LINES[:1], brief=True), loaded(all_wrong, lines=LINES[:1], brief=True)
        ),
        "what is not finite has a column": loaded(not_finite, **bad),
        "which stays where it is narrow": loaded(not_finite, 60, **bad),
        "a tensor of nothing but NaN has no mean": changes(
            loaded(lines=LINES[1:2]), loaded(lines=(replace(LINES[1], numbers=none),))
        )[-1:],
        "what a stranger wrote is spelled out": loaded(stranger, lines=line, checks=True),
        "the verdicts alone, with the name and the sizes":
            shown(render_load(
                replace(REPORT, memory=replace(REPORT.memory, before=None)), "m", None
            ), width=120),
        "a fault": verdict(fault="no tensor for `x`"),
        "a claim that does not hold": verdict(claims=(wrong,)),
        "one that need not": verdict(claims=(replace(wrong, must=False),)),
        "one that nearly does": verdict(claims=(replace(CLAIM, holds="about 1 k"),)),
        "a check that fails":
            verdict(checks=(replace(CHECK, value=7.0, where="the end of x"),)),
        "a note": verdict(notes=("F4 was not looked at",)),
        "tensors of no known model": verdict(ledger=LINES[2:]),
        "of matrices that are equal some are named": verdict(shared=(equal,)),
    })  # fmt: skip
    assert "\x1b" not in printed(ledger(stranger, line), width=200)


@pytest.mark.parametrize("width", [60, 80, 140])
def test_columns_without_room_are_left_out_of_the_brief_one(width):
    whole, few = (lines_of(ledger(full=full), width=width) for full in (True, False))
    assert max(map(len, few)) <= width
    assert len(few) < len(whole) - 5

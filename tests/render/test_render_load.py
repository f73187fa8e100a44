"""`llmcli load` on the screen: tables that fit, marks that say what is wrong."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from rich.console import Console

from llmcli.commands.load.report import Claim, LedgerLine, LoadReport, Numbers, Shared, Stage
from llmcli.commands.load.view import render_check, render_load
from llmcli.reports.checks import ViewCheck

NUMBERS = Numbers(
    count=2000, mean=0.25, std=1.0, low=-2.0, high=3.0, zeros=1, nan=0, infinite=0, negative=0,
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
        parameter="", source="rope.inv_freq", stored="F32", shape=(32,), bytes=128,
        reason="frequencies, which are computed",
    ),
)  # fmt: skip
CLAIM = Claim(
    name="total_size", what="`total_size`", says="1,000", holds="1,000", ok=True, must=True
)
CHECK = ViewCheck(name="ledger", words="nothing is left over", value=0.0, tolerance=0.0)
REPORT = LoadReport(
    dtype="bfloat16", device="cpu", files=2, file_bytes=5 << 20, tensor_bytes=4 << 20,
    weight_bytes=8 << 20, lines=LINES, rows=LINES,
    stages=(
        Stage(name="find", seconds=0.25), Stage(name="read", seconds=0.5, bytes=1_000_000_000),
        Stage(name="convert", seconds=0.25, bytes=10**9),
    ),
    base_bytes=100 << 20, peak_bytes=300 << 20, device_bytes=None,
    shared=(Shared(kind="tied", names=("head.W", "embed.W"), bytes=1 << 20),),
    claims=(CLAIM,), checks=(CHECK,), notes=(), looked_at=4000, fault="", not_finite="",
)  # fmt: skip


def printed(view, width):
    console = Console(width=width, color_system=None, highlight=False, markup=False)
    with console.capture() as capture:
        console.print(view)
    return capture.get()


def loaded(report=REPORT, width=200, lines=LINES, **more):
    return printed(render_load(report, "m (Q4_1 → bfloat16 on cpu)", lines, **more), width)


def test_every_part_of_the_report_is_there():
    lines = loaded().splitlines()
    assert lines[0] == "m (Q4_1 → bfloat16 on cpu)"
    assert lines[3] == (
        "3 tensors in 2 files, 5 MiB · 4,000 parameters, 8 MiB of memory · "
        "peak memory 300 MiB, of it 100 MiB Python and PyTorch before"
    )
    cells = [cell.strip() for cell in lines[7].split("   ") if cell.strip()]
    assert cells == [
        "blocks.{0-29}.attn.W_q", "blk.{0-29}.attn_q.weight", "Q4_1 [576 576] × 30", "6 MiB",
        "dequantized, unpaired rows of 9 heads", "0.25", "1", "-2", "3", "0.05 %",
    ]  # fmt: skip
    assert "to bfloat16" in lines[8]
    assert lines[9].split() == [
        "–", "rope.inv_freq", "F32", "[32]", "128", "B", "frequencies,", "which", "are", "computed",
    ]  # fmt: skip


def test_time_has_its_share_and_bytes_their_speed():
    lines = [" ".join(line.split()) for line in loaded(full=True).splitlines()]
    assert "find or fetch 250 ms 25 %" in lines
    assert "read, some twice 500 ms 50 % 954 MiB 2 GB/s" in lines, "of 4 MiB of tensors"
    once = loaded(replace(REPORT, tensor_bytes=10**9), full=True).splitlines()
    assert "read 500 ms 50 % 954 MiB 2 GB/s" in [" ".join(line.split()) for line in once]
    assert "together 1.00 s" in lines
    assert (
        "1.00 s in all · read 500 ms at 2 GB/s · find or fetch 250 ms · convert 250 ms at 4 GB/s"
        in loaded().splitlines()
    )


def test_the_verdict_is_first_and_each_of_them_last():
    assert loaded().splitlines()[1:3] == [
        "✓ readable: 3 tensors, all numbers finite, 4 checks · --checks · --all",
        "head.W is embed.W: one matrix of 1 MiB",
    ]
    assert loaded(checks=True).splitlines()[-6:] == [
        "head.W is embed.W: one matrix of 1 MiB",
        "✓ every parameter has its tensor, and every tensor its place",
        "✓ `total_size`: 1,000",
        "✓ nothing is left over · exactly",
        "✓ no NaN and no infinity in 4,000 numbers",
        "✓ readable: 3 tensors, all numbers finite, 4 checks",
    ]


def test_of_some_lines_there_is_no_more_than_what_is_wrong_and_the_last_verdict():
    def brief(**changes):
        report = replace(REPORT, **changes)
        return printed(render_load(report, "m", LINES[:1], brief=True), 200).splitlines()

    good = brief()
    assert len(good) == 5
    assert good[-1] == "✓ readable: 3 tensors, all numbers finite, 4 checks"
    wrong = brief(
        claims=(CLAIM, replace(CLAIM, ok=False, holds="999")),
        checks=(CHECK, replace(CHECK, value=1.0, words="all is there")), fault="no tensor for `x`",
        not_finite="`y[0]` is infinite",
    )  # fmt: skip
    assert [line[:20] for line in wrong[4:]] == [
        "✗ no tensor for `x`", "✗ `total_size`: 1,00", "✗ check failed: all ",
        "✗ `y[0]` is infinite",
    ]  # fmt: skip


@pytest.mark.parametrize("width", [60, 80, 140])
def test_nothing_is_lost_where_it_is_narrow(width):
    text = loaded(width=width, full=True)
    assert max(map(len, text.splitlines())) <= width
    few = loaded(width=width).splitlines()
    assert max(map(len, few)) <= width
    assert len(few) < len(text.splitlines()) - 5, "columns without room are left out"
    flat = " ".join(text.split())
    for part in ("blk.{0-29}.attn_q.weight", "Q4_1 [576 576] × 30", "6 MiB", "-2", "0.05 %"):
        assert part in flat


@pytest.mark.parametrize("width", [60, 200])
def test_what_is_not_finite_has_a_column_that_stays(width):
    bad = replace(NUMBERS, nan=3, infinite=2, negative=1, first_bad=(1, 2))
    lines = (replace(LINES[0], numbers=bad), *LINES[1:])
    text = loaded(replace(REPORT, not_finite="`blocks.0.attn.W_q[1,2]` is nan"), width, lines)
    assert "3 NaN, 1 +∞, 1 −∞, first at [1,2]" in text
    assert text.splitlines()[1] == "✗ `blocks.0.attn.W_q[1,2]` is nan"
    assert "no infinity" not in text
    assert "NaN" not in loaded().split("stage")[0]


def test_a_tensor_of_nothing_but_nan_has_no_mean():
    none = replace(
        NUMBERS, mean=math.nan, std=math.nan, low=math.nan, high=math.nan, nan=2000, zeros=0
    )
    row = loaded(lines=(replace(LINES[1], numbers=none),)).splitlines()[7]
    assert row.split()[-5:] == ["–", "–", "–", "–", "0"]


def verdicts(**changes):
    return printed(render_check(replace(REPORT, **changes), "m"), 120).splitlines()


def test_the_verdicts_are_alone_with_the_name_and_the_sizes():
    lines = verdicts(base_bytes=None)
    assert lines[0] == "m"
    assert lines[1].startswith("3 tensors in 2 files")
    assert len(lines) == 2 + 6


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"fault": "no tensor for `x`"}, "✗ no tensor for `x`"),
        (
            {"claims": (replace(CLAIM, ok=False, holds="999"),)},
            "✗ `total_size`: 1,000, but it is 999",
        ),
        (
            {"claims": (replace(CLAIM, ok=False, holds="999", must=False),)},
            "! `total_size`: 1,000, but it is 999",
        ),
        ({"claims": (replace(CLAIM, holds="about 1 k"),)}, "✓ `total_size`: 1,000 · about 1 k"),
        (
            {"checks": (replace(CHECK, value=7.0, where="the end of x"),)},
            "✗ check failed: nothing is left over · 7 of 0 allowed · worst at the end of x",
        ),
        ({"notes": ("F4 was not looked at",)}, "! F4 was not looked at"),
        (
            {"lines": LINES[2:]},
            "there is no config.json: of which model these tensors are, is not known",
        ),
    ],
)
def test_each_verdict_can_be_another(changes, line):
    assert line in verdicts(**changes)
    assert line not in verdicts()


def test_matrices_that_are_equal_are_named_some_of_them():
    equal = Shared(kind="equal", names=tuple("abcde"), bytes=2 << 20)
    assert "a and b and c and 2 more hold the same numbers, 2 MiB each" in verdicts(shared=(equal,))


def test_what_a_stranger_wrote_is_spelled_out():
    claim = replace(CLAIM, says="\x1b[2J", ok=False)
    line = replace(LINES[1], source="a\x1b]0;x\x07", parameter="")
    text = loaded(replace(REPORT, claims=(claim,), fault="\x1b[1m"), lines=(line,))
    assert "\x1b" not in text
    assert "\\x1b[2J" in text

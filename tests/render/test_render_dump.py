"""The table of a dump: at every width, with what is not finite, with names of every kind."""

from __future__ import annotations

import io
import math
import re

import pytest
from rich.cells import cell_len
from rich.console import Console

from llmcli.commands.dump.report import DumpedTensor, DumpReport
from llmcli.commands.dump.view import render_dump
from llmcli.reports.checks import ViewCheck

CHECK = ViewCheck(name="formulas", words="2 tensors follow", value=0.25, tolerance=1.0)


def tensor(name="blocks.29.attn.pattern", **changes):
    return DumpedTensor(
        **{
            "name": name, "kind": "activation", "axes": ("H", "T", "S"), "shape": (9, 12, 12),
            "dtype": "float32", "formula": "A = softmax(S)", "mean": 0.0833333,
            "std": 0.25, "low": 0.0, "high": 1.0, "norm": 12.5, "masked": 0, "nan": 0,
            "infinite": 0, "first_bad": None, **changes,
        }
    )  # fmt: skip


def report(*tensors, **changes):
    return DumpReport(
        **{
            "dtype": "float32", "tokens": ((1, "In"), (2, " the"), (3, " end")),
            "prompt_tokens": 3, "tensors": tensors or (tensor(),), "checks": (CHECK,),
            "not_finite": "", **changes,
        }
    )  # fmt: skip


def shown(one, width=80, *, colour=False, **options):
    to = Console(
        file=io.StringIO(), width=width, color_system="standard" if colour else None,
        no_color=not colour, force_terminal=colour, highlight=False, markup=False, emoji=False,
        legacy_windows=False,
    )  # fmt: skip
    to.print(render_dump(one, "tiny (float32)", **options), crop=False)
    return "\n".join(line.rstrip() for line in to.file.getvalue().splitlines())


def test_all_there_is_to_say_in_a_wide_terminal():
    assert shown(report(), 200, file=("out.npz", 2048)).splitlines() == [
        "tiny (float32)",
        "1 tensor · 3 tokens · in out.npz, 2 KiB",
        "",
        "name                     shape       NaN, ±∞   axes      dtype        mean    std   min"
        "   max   norm   formula",
        "─" * 117,
        "blocks.29.attn.pattern   [9 12 12]         0   [H T S]   float32   0.08333   0.25     0"
        "     1   12.5   A = softmax(S)",
        "",
        "✓ 2 tensors follow · 0.25 of 1 allowed",
    ]


@pytest.mark.parametrize("width", range(40, 201, 20))
def test_no_line_is_too_long_and_names_stay(width):
    odd = tensor(masked=66, mean=-8.681e-05, low=-123456.789)
    bad = tensor(nan=3, infinite=1, first_bad=(0, 1, 2))
    for one in (odd, bad):
        lines = shown(report(one, tensor("logits")), width).splitlines()
        assert all(cell_len(line) <= width for line in lines)
        (row,) = [line for line in lines if line.startswith("blocks.29.attn.pattern ")]
        assert one is odd or " 3, 1 " in f"{row} ", "what is wrong with it stays at any width"
        assert width == 40 or "[9 12 12]" in row


@pytest.mark.parametrize(
    ("width", "columns"),
    [
        (30, "name"), (40, "name shape"), (48, "name shape mean"), (54, "name shape mean std"),
        (60, "name shape mean std norm"), (75, "name shape mean std min max norm"),
        (84, "name shape NaN, ±∞ mean std min max norm"),
        (200, "name shape NaN, ±∞ axes dtype mean std min max norm formula"),
    ],
)  # fmt: skip
def test_the_least_important_columns_go_first(width, columns):
    lines = shown(report(), width).splitlines()
    assert next(line for line in lines if line.startswith("name")).split() == columns.split()


@pytest.mark.parametrize("width", [36, 60, 80])
def test_what_has_no_column_stands_below_its_row(width):
    one = tensor(mean=-8.5e-05, std=3.5, low=-7.25, high=8.125, norm=99.5)
    text = shown(report(one), width)
    for part in ("float32", "[H T S]", "A = softmax(S)", "[9 12 12]"):
        assert part in text
    below = "\n".join(line for line in text.splitlines() if line.startswith("    "))
    for name, number in (("std", "3.5"), ("norm", "99.5"), ("max", "8.125"), ("NaN, ±∞", "0")):
        at = text.splitlines()[3].split("   ")
        assert name in [cell.strip() for cell in at] or f"{name} {number}" in below


def test_what_is_not_finite_is_counted_and_red():
    bad = tensor("blocks.0.mlp.post", nan=3, infinite=1, first_bad=(0, 1, 2), mean=math.nan)
    one = report(bad, tensor("embed"), not_finite="`blocks.0.mlp.post[0,1,2]` is nan")
    text = shown(one, 120)
    rows = {line.split()[0]: line for line in text.splitlines() if line}
    assert re.search(r"\] +3, 1 .* – ", rows["blocks.0.mlp.post"])
    assert re.search(r"\] +0 ", rows["embed"])
    assert text.splitlines()[-1] == "✗ `blocks.0.mlp.post[0,1,2]` is nan"
    red = [line for line in shown(one, 120, colour=True).splitlines() if "\x1b[1;31m" in line]
    assert len(red) == 2


def test_masked_scores_are_told():
    text = shown(report(tensor(masked=66), tensor("logits")), 120)
    assert "66 scores are −∞, of keys that may not be seen, and not in the statistics" in text
    assert "1 score is" in shown(report(tensor(masked=1)), 120)


def test_new_tokens_and_none():
    assert "1 tensor · 2 tokens and 1 new\n" in shown(report(prompt_tokens=2), 120)
    alone = shown(report(tokens=(), prompt_tokens=0, checks=()), 120)
    assert "\n1 tensor\n" in alone
    assert alone == alone.rstrip()


def test_a_check_that_fails_says_where():
    red = ViewCheck(name="f", words="x", value=2.0, tolerance=1.0, where="embed[1,2]")
    assert "✗ not so: x · 2 of 1 allowed · worst at embed[1,2]" in shown(report(checks=(red,)))


def test_control_characters_and_markup_are_text():
    text = shown(report(tensor("a\x1b[2Jb")), 120, file=("[red]\x07.npz", 1))
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "[red]" in text

"""The table of a dump: at every width, with what is not finite, with names of every kind."""

from __future__ import annotations

import io
import math
import re
from itertools import pairwise

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
    assert shown(report(), 200).splitlines() == [
        "tiny (float32)",
        "1 tensor · 3 tokens · no NaN, no infinity",
        "name                     shape       axes      dtype     norm      mean    std   min   max"
        "   formula",
        "─" * 107,
        "blocks.29.attn.pattern   [9 12 12]   [H T S]   float32   12.5   0.08333   0.25     0     1"
        "   A = softmax(S)",
    ]


@pytest.mark.parametrize("width", range(40, 201, 20))
def test_no_line_is_too_long_and_names_stay(width):
    odd = tensor(masked=66, mean=-8.681e-05, low=-123456.789)
    bad = tensor(nan=3, infinite=1, first_bad=(0, 1, 2))
    for one in (odd, bad):
        said = "" if one is odd else "`x` is nan"
        lines = shown(report(one, tensor("logits"), not_finite=said), width).splitlines()
        assert all(cell_len(line) <= width for line in lines)
        (row,) = [line for line in lines if line.startswith("blocks.29.attn.pattern ")]
        assert one is odd or " 3, 1 " in f"{row} ", "what is wrong with it stays at any width"
        assert width == 40 or "[9 12 12]" in row


@pytest.mark.parametrize(
    ("width", "columns"),
    [
        (28, "name"), (36, "name norm"), (44, "name shape norm"), (50, "name shape norm std"),
        (60, "name shape norm mean std"), (66, "name shape norm mean std max"),
        (75, "name shape norm mean std min max"), (82, "name shape dtype norm mean std min max"),
        (200, "name shape axes dtype norm mean std min max formula"),
    ],
)  # fmt: skip
def test_the_least_important_columns_go_first(width, columns):
    lines = shown(report(), width).splitlines()
    assert next(line for line in lines if line.startswith("name")).split() == columns.split()


@pytest.mark.parametrize("width", [36, 60, 80])
def test_with_all_what_has_no_column_stands_below_its_row(width):
    one = tensor(mean=-8.5e-05, std=3.5, low=-7.25, high=8.125, norm=99.5)
    text = shown(report(one), width, every=True)
    for part in ("float32", "[H T S]", "A = softmax(S)", "[9 12 12]"):
        assert part in text
    below = "\n".join(line for line in text.splitlines() if line.startswith("    "))
    (head,) = [line.split() for line in text.splitlines() if line.startswith("name ")]
    for name, number in (("std", "3.5"), ("norm", "99.5"), ("max", "8.125")):
        assert name in head or f"{name} {number}" in below
    assert len(shown(report(one), width).splitlines()) <= 6, "without, a line a tensor"


def layers(count, leaf="resid_post", **changes):
    return [tensor(f"blocks.{at}.{leaf}", **changes) for at in range(count)]


def rows_of(text):
    return [line.split()[0] for line in text.splitlines() if line.startswith(("blocks.", "embed"))]


def test_of_many_layers_some_are_shown_on_a_screen_and_all_with_all():
    one = report(tensor("embed"), *layers(30), tensor("logits"))
    text = shown(one)
    rows = rows_of(text)
    assert len(text.splitlines()) <= 20
    assert rows[:2] == ["embed", "blocks.0.resid_post"]
    assert rows[-1] == "blocks.29.resid_post"
    numbers = [int(name.split(".")[1]) for name in rows[1:]]
    assert {b - a for a, b in pairwise(numbers)} <= {2, 3}
    assert f"… {31 - len(rows)} tensors of other layers: --all or --json" in text
    assert len(rows_of(shown(one, every=True))) == 31
    assert "other layers" not in shown(one, every=True)


def test_layers_that_differ_are_all_represented_and_faults_stay():
    mixed = [*layers(9, "attn.z"), *layers(9, "mlp.post"), *layers(1, "ssm.x")]
    bad = tensor("blocks.4.attn.q", nan=1, first_bad=(0,))
    odd = [*layers(4, "attn.q"), bad, *layers(30, "attn.k")]
    assert {name.split(".", 2)[2] for name in rows_of(shown(report(*mixed)))} == {
        "attn.z", "mlp.post", "ssm.x"
    }  # fmt: skip
    assert "blocks.4.attn.q" in rows_of(shown(report(*odd, not_finite="x")))


def test_what_is_not_finite_is_counted_and_red():
    bad = tensor("blocks.0.mlp.post", nan=3, infinite=1, first_bad=(0, 1, 2), mean=math.nan)
    one = report(bad, tensor("embed"), not_finite="`blocks.0.mlp.post[0,1,2]` is nan")
    text = shown(one, 120)
    rows = {line.split()[0]: line for line in text.splitlines() if line}
    assert re.search(r" 3, 1 .* – ", rows["blocks.0.mlp.post"])
    assert re.search(r"embed +0 ", rows["embed"])
    assert text.splitlines()[-1] == "✗ `blocks.0.mlp.post[0,1,2]` is nan"
    red = [line for line in shown(one, 120, colour=True).splitlines() if "\x1b[1;31m" in line]
    assert len(red) == 2


def test_masked_scores_are_told():
    text = shown(report(tensor(masked=66), tensor("logits")), 120)
    assert "66 scores are −∞ (masked keys), not in the statistics" in text
    assert "1 score is" in shown(report(tensor(masked=1)), 120)


def test_new_tokens_and_none():
    assert "1 tensor · 2 tokens and 1 new · " in shown(report(prompt_tokens=2), 120)
    alone = shown(report(tokens=(), prompt_tokens=0, checks=()), 120)
    assert "\n1 tensor · no NaN" in alone
    assert alone == alone.rstrip()


def test_control_characters_and_markup_are_text():
    text = shown(report(tensor("a\x1b[2Jb[red]\x07")), 120)
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "[red]" in text

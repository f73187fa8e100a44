"""The table of a dump: at every width, with what is not finite, with names of every kind."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from drawn import lines_of, shown
from rich.cells import cell_len

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


def dump(one, width=80, colour=None, **options):
    return shown(render_dump(one, "tiny (float32)", **options), width=width, colour=colour)


def test_screens(golden):
    one = report(tensor(mean=-8.5e-05, std=3.5, low=-7.25, high=8.125, norm=99.5))
    bad = tensor("blocks.0.mlp.post", nan=3, infinite=1, first_bad=(0, 1, 2), mean=math.nan)
    bad = report(bad, tensor("embed"), not_finite="`blocks.0.mlp.post[0,1,2]` is nan")
    golden("dump", {
        "all there is to say in a wide terminal": dump(report(), 200),
        "the least important columns go first": [
            dump(report(), width).split("\n")[-3] for width in (82, 75, 66, 60, 50, 44, 36, 28)
        ],
        **{
            f"with all, what has no column is below its row, in {width} columns":
                dump(one, width, every=True)
            for width in (36, 60, 80)
        },
        "without, a line a tensor": dump(one, 36),
        "what is not finite is counted": dump(bad, 120),
        "and red": [line for line in dump(bad, 120, "standard").split("\n") if "[1;31m" in line],
        "masked scores are told": dump(report(tensor(masked=66), tensor("logits")), 120),
        "as one is": dump(report(tensor(masked=1)), 120).split("\n")[-1],
        "new tokens": dump(report(prompt_tokens=2), 120).split("\n")[1],
        "no tokens": dump(report(tokens=(), prompt_tokens=0, checks=()), 120),
        "control characters and markup are text": dump(report(tensor("a\x1b[2Jb[red]\x07")), 120),
    })  # fmt: skip


@pytest.mark.parametrize("width", range(40, 201, 20))
def test_no_line_is_too_long_and_names_stay(width):
    odd = tensor(masked=66, mean=-8.681e-05, low=-123456.789)
    bad = tensor(nan=3, infinite=1, first_bad=(0, 1, 2))
    for one in (odd, bad):
        said = "" if one is odd else "`x` is nan"
        view = render_dump(report(one, tensor("logits"), not_finite=said), "tiny (float32)")
        lines = lines_of(view, width=width)
        assert all(cell_len(line) <= width for line in lines)
        (row,) = [line for line in lines if line.startswith("blocks.29.attn.pattern ")]
        assert one is odd or " 3, 1 " in f"{row} ", "what is wrong with it stays at any width"
        assert width == 40 or "[9 12 12]" in row


def layers(count, leaf="resid_post", **changes):
    return [tensor(f"blocks.{at}.{leaf}", **changes) for at in range(count)]


def rows_of(text):
    return [line.split()[0] for line in text.splitlines() if line.startswith(("blocks.", "embed"))]


def test_of_many_layers_some_are_shown_on_a_screen_and_all_with_all():
    one = report(tensor("embed"), *layers(30), tensor("logits"))
    text = dump(one)
    rows = rows_of(text)
    assert len(text.splitlines()) <= 20
    assert rows[:2] == ["embed", "blocks.0.resid_post"]
    assert rows[-1] == "blocks.29.resid_post"
    numbers = [int(name.split(".")[1]) for name in rows[1:]]
    assert {b - a for a, b in pairwise(numbers)} <= {2, 3}
    assert f"… {31 - len(rows)} tensors of other layers: --all or --json" in text
    assert len(rows_of(dump(one, every=True))) == 31
    assert "other layers" not in dump(one, every=True)


def test_layers_that_differ_are_all_represented_and_faults_stay():
    mixed = [*layers(9, "attn.z"), *layers(9, "mlp.post"), *layers(1, "ssm.x")]
    bad = tensor("blocks.4.attn.q", nan=1, first_bad=(0,))
    odd = [*layers(4, "attn.q"), bad, *layers(30, "attn.k")]
    assert {name.split(".", 2)[2] for name in rows_of(dump(report(*mixed)))} == {
        "attn.z", "mlp.post", "ssm.x"
    }  # fmt: skip
    assert "blocks.4.attn.q" in rows_of(dump(report(*odd, not_finite="x")))

"""Views of many tokens, heads or layers at every width: no line is wider than the screen.

Nor do tokens, of whatever signs they are made, leave their cells. The other views are in the
transcripts, where a line that is wider than its terminal is an error.
"""

import re
from dataclasses import replace
from functools import cache

import pytest
from attention_reports import BAD, GOOD, matrix, pair, pattern, report
from covers import in_turn
from drawn import lines_of
from files_reports import experts_report, lens_report
from rich.cells import cell_len
from small_models import weights
from zoo import CONFIGS

from llmcli.commands.attention.options import AttentionOptions
from llmcli.commands.attention.view.screen import FollowUps, render_attention
from llmcli.commands.experts.view import render_experts
from llmcli.commands.ladder.measure.runner import plan_workload, run_ladder
from llmcli.commands.ladder.measure.texts import axis_sizes
from llmcli.commands.ladder.report import LadderReport
from llmcli.commands.ladder.view import render_ladder, render_rung
from llmcli.commands.lens.view import render_lens
from llmcli.records.text import Token
from llmcli.ui.layout import Line

TITLE = "tiny (float32)"
HOSTILE = (
    "[red]x[/]", "\x1b[31mred\x1b]0;t\x07", "a\nb\r\n", "漢字漢字漢字漢字", "e\u0301" * 9,
    "a\u200bb\u202e", "\\xf0\\x9f", "שלום", "👩‍👩‍👧", "   ", "", "\ud800", "a" * 60,
)  # fmt: skip
UNSEEN = {*map(chr, range(32)), *map(chr, range(127, 160)), "\u202e", "\ud800"}


def of_attention():
    texts = tuple(HOSTILE[at % len(HOSTILE)] for at in range(23))
    found = report(
        texts, pairs=(pair(3, 1), pair(8, 4, 0.1, 2.5)), matrices=(matrix(pattern(23)),),
        checks=(GOOD, BAD),
    )  # fmt: skip
    calls = FollowUps(same="llmcli attention x", repeated="llmcli attention --synthetic 32")
    everything = {"map": "effective_keys", "scale": "log", "metrics": "all", "top_pairs": 2}
    yield render_attention(found, "model", AttentionOptions(**everything), calls)
    yield render_attention(replace(found, matrices=()), "model", AttentionOptions(), calls)


def of_lens():
    for ranks in (False, True):
        yield render_lens(lens_report(60, first=0), TITLE, ranks=ranks)


def of_experts():
    for found in (
        experts_report(12), experts_report(90, layers=5, experts=128, per_token=8),
        experts_report(9, experts=64, per_token=6, first=8), experts_report(6, shared=False),
    ):  # fmt: skip
        yield render_experts(found, TITLE)


def of_ladder():
    of = weights(CONFIGS["window"])
    for budget in (0.0, 20.0):
        read = plan_workload(of, range(1, 7), more=1, sequences=2, rounds=0, budget=budget)
        found = LadderReport(
            tokens=HOSTILE[:6], ids=(1,) * 6, more=HOSTILE[6:7], dtype="float64",
            letters=axis_sizes(of.config, tokens=6, sequences=2),
            rungs=run_ladder(of, read, record=True),
        )  # fmt: skip
        for details in (True, False):
            yield from render_ladder(found, TITLE, details=details)
        for rung in found.rungs:
            yield from render_rung(rung, found, TITLE)


# the views, the fewest columns that they need, and what stays whole in each of them
VIEWS = {
    "attention": (of_attention, 40, []), "tokens of attention": (of_attention, 60, ["[red]"]),
    "experts": (of_experts, 40, []),
    "ladder": (of_ladder, 44, []),
    "lens": (of_lens, 40, ["positions ", " to 59 of 60 tokens", "more: --position :"]),
}  # fmt: skip


@cache
def views(name):
    return list(VIEWS[name][0]())


HOWS = [{}, {"encoding": "ascii"}, {"colour": "standard"}, {"colour": "truecolor"}]


@pytest.mark.parametrize(
    ("name", "width", "how"),
    in_turn(
        [pytest.param(name, width) for name in VIEWS for width in (40, 44, 60, 80, 120, 200)], HOWS
    ),
)
def test_it_fits(name, width, how):
    _, fewest, words = VIEWS[name]
    for view in views(name):
        lines = lines_of(view, width=width, **how)
        assert width < fewest or max(map(cell_len, lines)) <= width
        assert not UNSEEN & set("".join(lines))
        flat = " ".join(" ".join(lines).split())
        for word in words if width >= fewest and "encoding" not in how else ():
            assert word.strip() in flat or word in "".join(lines)


def test_a_number_stays_with_its_unit():
    words = "reads 84 MB of weights in 1.2 s, 61 % of 3.48 ms a token at 397 MFLOP"
    for width in range(20, 70):
        for line in lines_of(Line([words, "peak 5 GiB"]), width=width):
            assert not re.match(r"\s*(%|[kMG]i?B\b|MFLOP\b|ms\b)", line), (width, line)


def test_no_screen_is_wider_than_a_wide_one():
    short = tuple(Token(id=5, text=f"t{at}") for at in range(900))
    for view, ends in (
        (render_experts(replace(experts_report(900), tokens=short), TITLE), " 898 │899"),
        (render_lens(lens_report(500, first=0), TITLE), "499"),
    ):
        line = lines_of(view, width=10_000)[1].rstrip()
        assert line.endswith(ends)
        assert cell_len(line) <= 240

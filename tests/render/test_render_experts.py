"""Experts as text and as files: at every width, with and without colour, with odd tokens."""

from __future__ import annotations

import csv
import io
import json
import re
from dataclasses import replace

import numpy as np
import pytest
from files_reports import WRONG, experts_report
from rich.cells import cell_len
from test_render_lens import console, plain

from llmcli.commands.experts.view.export import COLUMNS, experts_csv, experts_page
from llmcli.commands.experts.view.picture import MOST, experts_png
from llmcli.commands.experts.view.screen import load_bars, render_experts
from llmcli.ui.cells import Ink
from llmcli.ui.layout import WIDEST

TITLE = "tiny (float32)"


def shown(report, width=80, *, colour=False, encoding="utf-8", **options):
    to = console(width, colour, encoding)
    to.print(render_experts(report, TITLE, **options), crop=False)
    to.file.flush()
    text = to.file.buffer.getvalue().decode(encoding)
    return "\n".join(line.rstrip() for line in text.splitlines())


def one(report, **changes):
    """The report with other tokens: short ones, so that every column is seen."""
    tokens = tuple((5, f"t{at}") for at in range(len(report.tokens)))
    return replace(report, tokens=tokens, **changes)


def test_a_screen():
    assert shown(one(experts_report())).splitlines() == [
        "tiny (float32)",
        "at    0    1    2   │3",
        "token t0   t1   t2  │t3",
        "   0  0█1▓ 1█2▓ 2█3▓│3█4▓",
        "   1  5█0▓ 0█1▓ 1█2▓│2█3▓",
        "the experts that each token takes in each layer, the largest score first",
        "│ from position 3 on the model wrote it",
        "weight of the chosen experts  0     ░░░░░░░░▒▒▒▒ 0.25 ▒▒▒▒▓▓▓▓▓▓▓▓████ 0.5",
        "",
        "layer   load     most             balance   unused   margin   min   shared",
        "─" * 74,
        "    0   ▄███▄·   1 50 %, 2 50 %      0.88        1      0.2   0.1        –",
        "    1   ███▄·▄   0 50 %, 1 50 %      0.88        1      0.2   0.1     25 %",
        "load: a sign is an expert, · nobody",
        "balance: entropy of the load / ln E, 1 where all are chosen alike",
        "margin: last chosen − first refused, mean and smallest, of sigmoid + correction",
        "or softmax",
        "within the best 2 of 3 groups by the sum of their 2 largest",
        "shared: ‖shared‖ / (‖shared‖ + ‖routed‖), mean",
    ]


def test_what_has_no_room_is_said_shorter_and_then_below():
    wide = shown(one(experts_report()), 120).splitlines()
    assert '3 50 %      0.88        1      0.2   0.1 at 0 "t0"        –' in wide[10]
    narrow = shown(one(experts_report()), 60).splitlines()
    assert '    margin 0.2 · min 0.1 at 0 "t0" · shared –' in narrow
    large = shown(one(experts_report(90, layers=16, experts=128, per_token=8))).splitlines()
    table = [line for line in large if re.match(" +\\d+   [▁-█·]", line)]
    assert len(table) == 16  # a line for each
    assert "min" in large[large.index("─" * len(table[0])) - 1]


def test_a_single_position_has_everything_of_it():
    lines = shown(one(experts_report(first=3))).splitlines()
    assert lines[1:3] == [
        'position 3 of 4: "t3", which the model wrote',
        "the experts that it takes, with what each counts",
    ]
    assert lines[-2:] == [
        "    0   3: 0.5, 4: 0.4        –        –",
        "    1   2: 0.5, 3: 0.4        –     25 %",
    ]


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
@pytest.mark.parametrize("colour", [True, False])
@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
@pytest.mark.parametrize(
    "report",
    [
        experts_report(12), experts_report(90, layers=5, experts=128, per_token=8),
        experts_report(9, experts=64, per_token=6, first=8), experts_report(6, shared=False),
    ],
    ids=["small", "large", "one position", "no shared expert"],
)  # fmt: skip
def test_it_fits_every_width(report, width, colour, encoding):
    text = plain(shown(report, width, colour=colour, encoding=encoding))
    assert max(cell_len(line) for line in text.splitlines()) <= width
    assert encoding == "utf-8" or text.isascii()


def test_a_narrow_screen_names_fewer_experts_and_the_last_positions():
    report = one(experts_report(30, experts=64, per_token=8))
    lines = shown(report, 40).splitlines()
    assert lines[1].split() == ["at", "25", "26", "27", "28", "│29"]
    assert lines[3].split() == ["0", "25█26▓", "26█27▓", "27█28▓", "28█29▓│29█30▓"]
    text = " ".join(lines)
    assert "the first 2 of 8" in text
    assert "positions 25 to 29 of 30 tokens" in text
    wide = shown(report, 120).splitlines()
    assert "the first 4 of 8" in " ".join(wide)
    assert shown(one(experts_report(900)), 10_000).splitlines()[1].endswith(" 898 │899")
    assert cell_len(shown(one(experts_report(900)), 10_000).splitlines()[1]) <= WIDEST


def test_colour_is_the_weight():
    coloured = shown(one(experts_report()), colour=True)
    first = coloured.splitlines()[3]
    assert plain(first).rstrip() == "   0  0 1  1 2  2 3 │3 4"
    found = re.findall(r"\x1b\[([\d;]+)m(\d) ", first)
    assert len({style for style, expert in found}) == 2  # two weights
    assert [expert for _, expert in found] == list("01122334")


def test_bars_of_the_load():
    ink = Ink("shades")
    assert load_bars((0, 1, 4, 8), 1, ink).plain == "·▁▄█"
    assert load_bars((0, 1, 4, 8), 2, ink).plain == "▁█"
    assert load_bars((0, 1, 4, 8), 1, Ink("shades", ascii=True)).plain == "-259"
    assert load_bars((0, 0), 1, ink).plain == "··"


def test_csv_has_a_line_for_every_choice():
    rows = list(csv.reader(io.StringIO(experts_csv(experts_report(), TITLE).decode())))
    assert tuple(rows[0]) == COLUMNS
    assert len(rows) == 1 + 2 * 4 * 2
    found = [dict(zip(COLUMNS, row, strict=True)) for row in rows[1:]]
    last = found[-1]
    assert (last["layer"], last["position"], last["place"], last["expert"]) == ("1", "3", "2", "3")
    assert last["generated"] == "1"
    assert last["margin"] == ""
    assert float(last["shared_share"]) == 0.25
    assert found[0]["shared_share"] == ""
    assert float(found[0]["weight"]) == 0.5


def test_the_page_has_every_choice_and_null_for_what_is_not_there():
    text = experts_page(experts_report(), TITLE).decode()
    data = json.loads(re.search(r'id="data">(.*?)</script>', text)[1])
    assert data["layers"][1]["chosen"] == [5, 0, 0, 1, 1, 2, 2, 3]
    assert data["layers"][1]["margins"][-1] is None
    assert data["layers"][0]["shared"] is None
    assert data["layers"][0]["mean_weights"][5] is None


@pytest.mark.parametrize(
    "report",
    [
        experts_report(3), experts_report(MOST + 50, layers=3, experts=128, per_token=8),
        experts_report(5, layers=40, experts=256, per_token=1), experts_report(check=WRONG),
    ],
)  # fmt: skip
def test_a_picture_of_bounded_size(report):
    from PIL import Image

    image = Image.open(io.BytesIO(experts_png(report, TITLE)))
    assert 1240 <= image.width <= 3000
    red = (np.asarray(image) == (200, 40, 30)).all(-1).any()
    assert bool(red) is not report.ok

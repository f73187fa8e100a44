"""Experts as text and as files: at every width, with and without colour, with odd tokens."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace

import numpy as np
import pytest
from drawn import shown
from files_reports import WRONG, experts_report

from llmcli.commands.experts.view.export import experts_page
from llmcli.commands.experts.view.picture import experts_png
from llmcli.commands.experts.view.screen import load_bars, render_experts
from llmcli.ui.cells import Ink
from llmcli.ui.png import MOST_TOKENS

TITLE = "tiny (float32)"


def one(report, **changes):
    """The report with other tokens: short ones, so that every column is seen."""
    tokens = tuple((5, f"t{at}") for at in range(len(report.tokens)))
    return replace(report, tokens=tokens, **changes)


def experts(report, width=80, colour=None, **options):
    return shown(render_experts(report, TITLE, **options), width=width, colour=colour)


def test_screens(golden):
    large = one(experts_report(90, layers=16, experts=128, per_token=8))
    many = one(experts_report(30, experts=64, per_token=8))
    ink = Ink("shades")
    golden("experts", {
        "of every token and layer": experts(one(experts_report())),
        "what has room": experts(one(experts_report()), 120),
        "what has not is said below": experts(one(experts_report()), 60),
        "of many layers a line for each": experts(large).partition("layer   ")[2],
        "a single position has everything of it": experts(one(experts_report(first=3))),
        "a narrow screen names fewer experts and the last positions":
            experts(many, 40).partition("\nlayer")[0],
        "a wide one more": [line for line in experts(many, 120).split("\n") if "of 8" in line],
        "colour is the weight": experts(one(experts_report()), colour="standard").split("\n")[3],
        "bars of the load, of one expert or two, of some or nobody": [
            load_bars((0, 1, 4, 8), 1, ink).plain, load_bars((0, 1, 4, 8), 2, ink).plain,
            load_bars((0, 1, 4, 8), 1, Ink("shades", ascii=True)).plain,
            load_bars((0, 0), 1, ink).plain,
        ],
    })  # fmt: skip


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
        experts_report(3), experts_report(MOST_TOKENS + 50, layers=3, experts=128, per_token=8),
        experts_report(5, layers=40, experts=256, per_token=1), experts_report(check=WRONG),
    ],
)  # fmt: skip
def test_a_picture_of_bounded_size(report):
    from PIL import Image

    image = Image.open(io.BytesIO(experts_png(report, TITLE)))
    assert 1240 <= image.width <= 3000
    red = (np.asarray(image) == (200, 40, 30)).all(-1).any()
    assert bool(red) is not report.ok

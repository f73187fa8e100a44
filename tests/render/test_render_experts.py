"""Experts as text and as files: at every width, with and without colour, with odd tokens."""

from __future__ import annotations

import io
import json
import re

import numpy as np
import pytest
from files_reports import WRONG, experts_report

from llmcli.commands.experts.view.export import experts_page
from llmcli.commands.experts.view.picture import experts_png
from llmcli.ui.png import MOST_TOKENS

TITLE = "tiny (float32)"


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

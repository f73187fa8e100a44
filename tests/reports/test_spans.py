"""Numbers of layers as people write them."""

import pytest

from llmcli.reports.spans import spans


@pytest.mark.parametrize(
    ("numbers", "text"),
    [((), ""), ((0,), "0"), ((0, 1, 2), "0-2"), ((0, 2, 3, 7), "0,2-3,7"), ((4, 5), "4-5")],
)
def test_spans(numbers, text):
    assert spans(numbers) == text

"""Numbers as people write them."""

import pytest

from llmcli.records.numbers import counted, spans


@pytest.mark.parametrize(
    ("numbers", "text"),
    [((), ""), ((0,), "0"), ((0, 1, 2), "0-2"), ((0, 2, 3, 7), "0,2-3,7"), ((4, 5), "4-5")],
)
def test_spans(numbers, text):
    assert spans(numbers) == text


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 tensors"), (1, "1 tensor"), (1200, "1,200 tensors")]
)
def test_counted(number, text):
    assert counted(number, "tensor") == text

"""Numbers and positions as people write them, and what a wrong one is answered."""

from __future__ import annotations

import pytest

from llmcli.errors import UsageError
from llmcli.shell.looking import parse_numbers, parse_span


def test_numbers():
    for text, found in (
        ("0", (0,)), ("0,3-5,-1", (0, 3, 4, 5, 7)), ("-2--1", (6, 7)), ("5,5,4-5", (5, 4)),
    ):  # fmt: skip
        assert parse_numbers(text, 8, "--layer", "layers") == found


FROM_0 = "from 0 to 7; -1 is the last"


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("5-3", "`--layer 5-3` is an empty range", "use `--layer 3-5`"),
        ("x", "takes numbers and ranges such as 0,3-5,-1, not `x`", FROM_0),
        ("", "takes numbers and ranges such as 0,3-5,-1, not ``", FROM_0),
        ("8", "there is no 8, for there are 8 layers", FROM_0),
    ],
)
def test_numbers_that_are_none(text, message, hint):
    with pytest.raises(UsageError, match="--layer") as caught:
        parse_numbers(text, 8, "--layer", "layers")
    assert message in caught.value.message
    assert hint in caught.value.hint


def test_a_head_as_results_write_it():
    with pytest.raises(UsageError) as caught:
        parse_numbers("18.6", 9, "--head", "heads")
    assert caught.value.hint == "head 18.6 is `--layer 18 --head 6`"


def test_spans():
    for text, span in (
        (None, (0, 9)), ("2:5", (2, 5)), (":3", (0, 3)), ("-2:", (7, 9)), ("-1", (8, 9)),
        (":", (0, 9)),
    ):  # fmt: skip
        assert parse_span(text, 9, "--query") == span
    for text in ("", "a", "1:2:3", "4:4", "5:2", "9"):
        with pytest.raises(UsageError, match="`--query") as caught:
            parse_span(text, 9, "--query")
        assert "go from 0 to 8" in caught.value.hint

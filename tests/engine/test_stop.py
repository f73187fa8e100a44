"""Stop strings across any cut of the text, against a reader of single characters."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmcli.engine.stop import StopMatcher
from llmcli.errors import UsageError


def oracle(text: str, stops: list[str]) -> tuple[str, bool]:
    """Reads on until the text so far ends with a stop string; of several, the longest goes."""
    for end in range(1, len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            return text[: end - max(map(len, ended))], True
    return text, False


def run(pieces: list[str], stops: list[str]) -> tuple[str, bool]:
    matcher = StopMatcher(stops)
    text = "".join(matcher.push(piece) for piece in pieces)
    return text + matcher.finish(), matcher.stopped


@settings(max_examples=300, deadline=None)
@given(
    pieces=st.lists(st.text("abc", max_size=4), max_size=10),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
)
def test_any_cut_of_the_text_stops_at_the_same_place(pieces: list[str], stops: list[str]) -> None:
    expected = oracle("".join(pieces), stops)
    assert run(pieces, stops) == expected
    assert run(list("".join(pieces)), stops) == expected


@settings(max_examples=200, deadline=None)
@given(
    pieces=st.lists(st.text("ab", max_size=3), max_size=10),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
)
def test_only_what_may_begin_a_stop_string_is_held_back(
    pieces: list[str], stops: list[str]
) -> None:
    matcher = StopMatcher(stops)
    seen = shown = ""
    for piece in pieces:
        seen += piece
        shown += matcher.push(piece)
        if matcher.stopped:
            return
        held = seen[len(shown) :]
        assert seen == shown + held
        longer = [seen[-n:] for n in range(len(held) + 1, len(seen) + 1)]
        assert held == "" or any(stop.startswith(held) for stop in stops)
        assert not any(stop.startswith(end) for end in longer for stop in stops)


def test_text_flows_at_once_without_stop_strings() -> None:
    matcher = StopMatcher([])
    assert matcher.push("anything") == "anything"
    assert matcher.finish() == ""


def test_a_false_start_is_released() -> None:
    matcher = StopMatcher(["</end>"])
    assert matcher.push("x</") == "x"
    assert matcher.push("en") == ""
    assert matcher.push("try") == "</entry"
    assert not matcher.stopped


def test_nothing_comes_after_the_stop_string() -> None:
    matcher = StopMatcher(["\n\n"])
    assert matcher.push("one\n") == "one"
    assert matcher.push("\ntwo") == ""
    assert matcher.stopped
    assert matcher.push("three") == ""
    assert matcher.finish() == ""


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(UsageError, match="empty"):
        StopMatcher(["a", ""])

"""Stop strings across any cut of the text, against a reader of single characters."""

from itertools import groupby

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmcli.engine.stop import StopMatcher
from llmcli.errors import UsageError

HIDDEN = "<>"  # characters of special tokens


def visible(text: str) -> str:
    return "".join(one for one in text if one not in HIDDEN)


def oracle(text: str, stops: list[str]) -> tuple[str, bool]:
    """Reads on until the text so far ends with a stop string; of several, the longest goes.

    With what is hidden or without it: the shortest text is left.
    """
    for end in range(1, len(text) + 1):
        left = [visible(text[: end - len(stop)]) for stop in stops if text[:end].endswith(stop)] + [
            seen[: -len(stop)]
            for seen in (visible(text[:end]),)
            for stop in stops
            if seen.endswith(stop)
        ]
        if left:
            return min(left, key=len), True
    return visible(text), False


def run(pieces: list[str], stops: list[str]) -> tuple[str, bool]:
    matcher = StopMatcher(stops)
    text = "".join(
        matcher.push("".join(part), hidden=hidden)
        for piece in pieces
        for hidden, part in groupby(piece, HIDDEN.__contains__)
    )
    return text + matcher.finish(), matcher.stopped


@settings(max_examples=300, deadline=None)
@given(
    pieces=st.lists(st.text("ab<>", max_size=4), max_size=10),
    stops=st.lists(st.text("ab<>", min_size=1, max_size=4), max_size=3),
)
def test_any_cut_of_the_text_stops_at_the_same_place(pieces, stops):
    expected = oracle("".join(pieces), stops)
    assert run(pieces, stops) == expected
    assert run(list("".join(pieces)), stops) == expected


@settings(max_examples=200, deadline=None)
@given(
    pieces=st.lists(st.text("ab", max_size=3), max_size=10),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
)
def test_only_what_may_begin_a_stop_string_is_held_back(pieces, stops):
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


def test_a_stop_string_may_be_a_special_token_or_reach_into_it_or_across_it():
    for stop, shown in {"<|end|>": "one", "e<|end|>": "on", "|>\nt": "one", "e\n": "on"}.items():
        matcher = StopMatcher([stop])
        passed = matcher.push("one") + matcher.push("<|end|>", hidden=True) + matcher.push("\ntwo")
        assert (passed, matcher.stopped) == (shown, True)
    matcher = StopMatcher(["e<|end|>"])  # a false start is released without what is hidden
    passed = matcher.push("one") + matcher.push("<|else|>", hidden=True) + matcher.push("two")
    assert passed + matcher.finish() == "onetwo"


def test_an_empty_stop_string_is_refused():
    with pytest.raises(UsageError, match="empty"):
        StopMatcher(["a", ""])

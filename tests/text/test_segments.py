"""Answers in parts: the markers of published templates, whichever way the text is cut."""

from itertools import groupby, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from text_fixtures import table

from llmcli.text.segments import FORMATS, Answer, Markers, Segmenter, begun, whole_answer

THINK = Markers.of("{{ content.split('</think>')[-1] }}<tool_call>")
EVERY = Markers.of("".join(sign for one in FORMATS for sign in one.signs))
# a template with the markers, what of the prompt begins a part, the answer, its content (null: all
# of it) and its reasoning
ANSWERS = {
    name: (Markers.of(template), *rest)
    for name, (template, *rest) in table("answers.jsonl").items()
}


def merged(segments):
    """Neighbours of the same kind joined: how a text was cut is then not seen."""
    return [
        (*key, "".join(one.text for one in group))
        for key, group in groupby(segments, lambda one: (one.kind, one.marker))
    ]


def segments(markers, prompt, pieces):
    segmenter = Segmenter(markers, prompt)
    return [*(one for piece in pieces for one in segmenter.push(piece)), *segmenter.finish()]


@pytest.mark.parametrize("name", ANSWERS)
def test_published_formats(name):
    markers, prompt, text, content, reasoning = ANSWERS[name]
    whole = segments(markers, prompt, [text])
    assert "".join(one.text for one in whole) == text
    assert merged(segments(markers, prompt, text)) == merged(whole), "letter by letter"
    wanted = Answer(content=text if content is None else content, reasoning=reasoning)
    assert whole_answer(markers, text, prompt) == wanted


PIECES = st.sampled_from(
    [
        "<think>", "</think>", "<|channel|>", "analysis", "<|message|>", "<|end|>", "final", "\n",
        "<|start|>assistant", " to=", "<|call|>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]",
        "a", " ", "<", "|", "th", "ink>", "<|channel>thought\n", "<channel|>", "Here is my ",
    ]
)  # fmt: skip


@given(
    st.lists(PIECES, max_size=12).map("".join), st.lists(st.integers(0, 99)),
    st.sampled_from(["", "<think>\n", "<|start|>assistant"]), st.sampled_from([THINK, EVERY]),
)  # fmt: skip
def test_however_it_is_cut_the_segments_are_the_same(text, cuts, prompt, markers):
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in pairwise(places)]
    found = segments(markers, prompt, pieces)
    assert "".join(one.text for one in found) == text
    assert merged(found) == merged(segments(markers, prompt, [text]))


def test_text_is_not_held_longer_than_it_must_be():
    segmenter = Segmenter(THINK)
    assert segmenter.push("<thin") == []
    assert [one.text for one in segmenter.push("g and <thi")] == ["<", "thing and <thi"]
    assert [one.text for one in segmenter.push("more <tool")] == ["more "]


def test_what_may_be_a_beginning():
    assert begun("abc", ["cd", "bcd"]) == 1
    assert begun("abc", ["abc"]) == 3, "a whole mark is no beginning"
    assert begun("abc", []) == 3
    assert begun("", ["a"]) == 0


def test_every_format_is_found_by_its_own_markers():
    for one in FORMATS:
        source = "".join(part.open + part.close for part in one.parts)
        assert {*one.parts} <= {*Markers.of(source).parts}

"""Answers in parts: the markers of published templates, whichever way the text is cut."""

from itertools import groupby, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmcli.text.segments import FORMATS, Answer, Markers, Segmenter, begun, whole_answer

THINK = Markers.of("{{ content.split('</think>')[-1] }}<tool_call>")
HARMONY = Markers.of("{{ '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking }}")
EVERY = Markers(FORMATS)
# markers, what of the prompt begins a part, the answer, its content and its reasoning
ANSWERS = {
    "qwen 3": (THINK, "A\n", "<think>\nHm.\n\nSo.\n</think>\n\nYes.", "Yes.", "Hm.\n\nSo."),
    "qwen 3 without": (THINK, "A\n<think>\n\n</think>\n\n", "Yes.\n", "Yes.\n", ""),
    "opened by the prompt": (THINK, "A<think>\n", "Hm.</think>\n\nYes.", "Yes.", "Hm."),
    "cut off inside": (THINK, "A<think>\n", "Hm. Then", "", "Hm. Then"),
    "a marker that is cut off": (THINK, "A", "<think>\nHm.</thi", "", "Hm.</thi"),
    "glm 4.5": (THINK, "A", "\n<think>Hm.</think>\nYes.", "Yes.", "Hm."),
    "nothing thought": (THINK, "A", "<think></think>Yes.", "Yes.", ""),
    "spoken of": (THINK, "A", "Tags: <think>, </think>.", "Tags: <think>, </think>.", ""),
    "a tool": (
        THINK, "A", "<think>Hm.</think>I look.\n<tool_call>\n{}\n</tool_call>\n",
        "I look.\n<tool_call>\n{}\n</tool_call>\n", "Hm.",
    ),
    "thought again": (
        THINK, "A", "<think>a</think>\n<tool_call>b</tool_call>\n<think>c</think>d",
        "<tool_call>b</tool_call>\n\nd", "a\n\nc",
    ),
    "gpt-oss": (
        HARMONY, "<|start|>assistant",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
        "Yes.", "Hm.",
    ),
    "gpt-oss with a preamble": (
        HARMONY, "<|start|>assistant",
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary "
        "to=functions.x json<|message|>{}<|call|>",
        "I look.\n\n<|channel|>commentary to=functions.x json<|message|>{}<|call|>", "",
    ),
    "gpt-oss that calls": (
        HARMONY, "<|start|>assistant",
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant to=functions.x<|channel|>b",
        "<|start|>assistant to=functions.x<|channel|>b", "a",
    ),
    "gpt-oss that calls what is built in": (
        HARMONY, "<|start|>assistant",
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis to=python "
        "code<|message|>1+1<|call|>",
        "<|channel|>analysis to=python code<|message|>1+1<|call|>", "a",
    ),
    "gpt-oss in a given form": (
        HARMONY, "<|start|>assistant",
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final "
        '<|constrain|>json<|message|>{"b":1}',
        '{"b":1}', "a",
    ),
    "gpt-oss cut off": (
        HARMONY, "<|start|>assistant", "<|channel|>analysis<|message|>a<|end|><|start|>assistant",
        "", "a",
    ),
    "magistral": (Markers.of("[THINK]"), "[/INST]", "[THINK]a[/THINK]b", "b", "a"),
    "gemma 4": (
        Markers.of("<channel|>"), "<|turn>model\n", "<|channel>thought\na\n<channel|>b", "b", "a"
    ),
    "gemma 4 without": (
        Markers.of("<channel|>"), "<|turn>model\n<|channel>thought\n<channel|>", "b", "b", ""
    ),
    "command r7b": (
        Markers.of("<|START_THINKING|>"), "A",
        "<|START_THINKING|>a<|END_THINKING|><|START_RESPONSE|>b<|END_RESPONSE|>", "b", "a",
    ),
    "granite 3.2": (
        Markers.of("Here is my thought process:"), "A",
        "Here is my thought process:\na\n\nHere is my response:\nb", "b", "a",
    ),
    "no markers": (Markers.of("{{ content }}"), "A<think>", " <think>a</think>", None, ""),
}  # fmt: skip


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
        assert one in Markers.of(source).formats

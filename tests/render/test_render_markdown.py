"""Markdown while it comes: what is shown stays as it is, and is the same however it is cut."""

import json
import re
from pathlib import Path
from time import perf_counter

import pytest
from drawn import console, plain
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from llmcli.ui.markdown import DimmedStream, MarkdownStream

STYLE = re.compile(r"\x1b\[[0-9;]*m")


def on(colour=False, width=40, encoding="utf-8"):
    return console(width, "standard" if colour else None, encoding)


def shown(text, pieces=None, **how):
    stream = MarkdownStream(on(**how))
    return "".join([stream.push(one) for one in pieces or [text]]) + stream.finish()


def bare(text, **how):
    """What is seen of it on a terminal with colours."""
    return plain(shown(text, colour=True, **how))


def test_what_is_seen(as_written):
    """What is written and what is seen with colours, in each line of a file."""
    file, found = Path(__file__).parent / "golden" / "markdown.txt", []
    for row in file.read_text("utf-8").splitlines():
        given = row.partition(" → ")[0]
        text = json.loads(given.partition(": ")[2])
        seen = bare(text)
        assert bare(text, pieces=list(text)) == seen
        found.append(f"{given} → {json.dumps(seen, ensure_ascii=False)}\n")
    as_written(file, "".join(found))


TABLE = "| a | **b** |\n|---|---:|\n| `x` | 1 |\n| y | 22 |"


def test_a_table_is_drawn_when_it_ends():
    stream = MarkdownStream(on())
    assert [stream.push(line + "\n") for line in TABLE.split("\n")] == [""] * 4
    rows = [line.split() for line in stream.push("after").splitlines()]
    assert rows == [["a", "**b**"], ["─" * 11], ["`x`", "1"], ["y", "22"]]
    assert stream.finish() == "after\n"
    assert bare(TABLE).split() == bare(TABLE + "\n").split()
    assert "\x1b[36mx\x1b[0m" in shown(TABLE, colour=True)
    for line in shown("| a |\n|-|\n| " + "long " * 30 + "|").splitlines():
        assert cell_len(line) <= 40


HEAD = "| a | b |\n|---|:-:|\n"


def test_a_table_is_drawn_where_it_fits():
    wide = "|" + "a|" * 9 + "\n|" + "-|" * 9 + "\n"
    assert bare(wide, width=40) == wide
    assert "─" in bare(wide, width=60)


def test_a_long_line_below_a_header_costs_no_more_than_its_length():
    begin = perf_counter()
    assert bare("| a |\n|" + "-" * 50_000 + "x\n", width=100_000).count("-") == 50_000
    assert perf_counter() - begin < 5


def test_styles_end_with_their_line():
    lines = shown("a **b\nc `d\n# e\nf", colour=True).splitlines()
    assert lines == ["a \x1b[1mb\x1b[0m", "c \x1b[36md\x1b[0m", "\x1b[1;4me\x1b[0m", "f"]


def test_code_is_coloured_line_by_line():
    stream = MarkdownStream(on(colour=True))
    stream.push("```python\n")
    assert stream.push('x = """a') == ""
    assert "\x1b[" in stream.push("\n")
    inside = stream.push('b """\n')
    assert inside.startswith("\x1b[33mb "), "a string goes on from one line to the next"
    assert shown("```nonsense\na\n```", colour=True).splitlines()[1] == "a"


@pytest.mark.parametrize("width", [10, 24, 40])
def test_lines_break_between_words_with_hanging_indents(width):
    text = "- one two three four five six seven\n> eight nine ten eleven twelve"
    lines = bare(text, width=width).splitlines()
    assert max(map(cell_len, lines)) <= width
    words = [word for line in lines for word in line.split() if word not in "•│"]
    assert " ".join(words) == re.sub("^[->] ", "", text, flags=re.M).replace("\n", " ")
    quote = [line.startswith("│ ") for line in lines]
    assert quote == sorted(quote)
    for line in lines[1 : quote.index(True)]:
        assert line.startswith("  ")


def test_wide_characters_break_anywhere_and_a_long_word_where_it_must():
    lines = bare("これは長い文章です。" * 4, width=20).splitlines()
    assert {cell_len(line) for line in lines[:-1]} == {20}
    assert not any(line.startswith("。") for line in lines)
    assert bare("x" * 50, width=20) == f"{'x' * 20}\n{'x' * 20}\n{'x' * 10}\n"
    stream = MarkdownStream(on(width=20))
    assert len(stream.push("x" * 30)) > 20, "it is not held back to its end"


def test_a_word_is_shown_when_the_next_token_comes():
    stream = MarkdownStream(on(colour=True))
    assert stream.push("Hello") == "", "it may go on"
    assert stream.push(" **wor") == "Hello"
    assert stream.push("ld** and") == " \x1b[1mworld\x1b[0m"
    assert stream.push(".\n") == " and.\n"
    assert stream.finish() == ""


def test_without_colours_the_text_keeps_its_markers():
    text = "# A **b**\n- `c` _d_ [e](f)\n> \\* ~~g~~\n```x\nh\n```\n---"
    assert shown(text) == text + "\n"
    assert bare("- a\n> b\n\n---", encoding="ascii") == f"- a\n| b\n\n{'-' * 40}\n"


PIECES = st.sampled_from(
    [*"\n\n *_`~#-+>|[]()\\1.ax文", "**", "```", "  ", "- ", "1. ", "> ", "| a |", "|-|", "\n\n",
     "[a](b)", "word ", "\t", "\x1b[2J", "\r", "\u202e"]
)  # fmt: skip


@given(st.lists(PIECES, max_size=30), st.booleans(), st.integers(8, 30))
def test_however_it_is_cut_the_same_is_shown(pieces, colour, width):
    text = "".join(pieces)
    whole = shown(text, width=width, colour=colour)
    assert shown(text, pieces, width=width, colour=colour) == whole
    assert shown(text, list(text), width=width, colour=colour) == whole
    seen = plain(whole) if colour else whole
    assert all(character == "\n" or character.isprintable() for character in seen)
    assert whole == "" or whole.endswith("\n")


WORDS = st.sampled_from([*"\n *_`~#->[]()\\1.ax", "**", "```", "- ", "1. ", "word "])


@given(st.lists(WORDS, max_size=30).map("".join))
def test_nothing_is_lost(text):
    assert "".join(shown(text).split()) == "".join(text.split()), "without colours, all of it"
    letters = re.sub(r"[^a-z1]", "", text)
    assert re.sub(r"[^a-z1]", "", bare(text)) == letters, "with colours, all but markers"


CELLS = st.text(st.sampled_from([*"abc1 *_`~\\\\|-<>[]()文"]), max_size=12)
ROWS = st.lists(st.lists(CELLS, min_size=2, max_size=2), max_size=5)


@given(ROWS, st.booleans(), st.integers(8, 40))
def test_nothing_of_a_table_is_lost(rows, colour, width):
    text = HEAD + "".join(f"| {' | '.join(row)} |\n" for row in rows)
    out = plain(shown(text, colour=colour, width=width))
    assert sorted(re.sub(r"[^a-z1文]", "", out)) == sorted(re.sub(r"[^a-z1文]", "", text))


@given(st.lists(PIECES, max_size=30), st.booleans())
def test_dimmed_text_is_whole_and_only_dim(pieces, colour):
    stream = DimmedStream(on(colour, 12), "thinking …")
    out = "".join([stream.push(one) for one in pieces]) + stream.finish()
    if not "".join(pieces):
        return
    assert set(STYLE.findall(out)) <= {"\x1b[2m", "\x1b[0m"}
    title, *lines = plain(out).splitlines()
    assert title == "thinking …"
    assert all(line.startswith("│ ") and line.isprintable() for line in lines)
    assert out.endswith("\n")

"""The logit lens as text: at every width, with and without colour, with tokens of every kind."""

from __future__ import annotations

import csv
import io
import re
from dataclasses import replace

import pytest
from rich.cells import cell_len
from rich.console import Console

from llmcli.commands.lens.report import LensCell, LensReport, LensRow, LensToken
from llmcli.commands.lens.view.export import COLUMNS, lens_csv
from llmcli.commands.lens.view.screen import render_lens, room
from llmcli.reports.checks import ViewCheck
from llmcli.ui.layout import WIDEST

ROWS = ("blocks.0.resid_pre", "blocks.0.resid_mid", "blocks.0.resid_post", "blocks.1.resid_post")
# the third is not among the rows that are shown
SETTLED = ("blocks.0.resid_pre", "blocks.0.resid_mid", "blocks.44.resid_post", ROWS[3])
CHECK = ViewCheck(name="output", words="the last row is the output", value=1e-7, tolerance=1e-5)


def token(id=5, text=" the", probability=0.5):
    return LensToken(id=id, text=text, probability=probability)


def cell(*top, entropy=1.5, kl=0.25, rank=3, probability=0.125):
    return LensCell(
        top=top or (token(), token(6, " a", 0.2)), entropy=entropy, kl=kl, target_rank=rank,
        target_probability=probability,
    )  # fmt: skip


def report(tokens=((1, "In"), (2, " the"), (3, " end")), first=0, cells=None, **changes):
    """A report of all positions from `first` on; `cells(row, position)` where they differ."""
    cells = cells or (lambda row, at: cell())
    positions = tuple(range(first, len(tokens)))
    return LensReport(
        **{
            "dtype": "float32", "vocabulary": 100, "tokens": tokens,
            "prompt_tokens": len(tokens), "positions": positions, "target": "the model's top token",
            "targets": tuple(token(7, " of", 0.25) for _ in positions),
            "rows": tuple(
                LensRow(
                    name=name, layer=None if name.endswith("pre") else int(name.split(".")[1]),
                    cells=tuple(cells(row, at) for at in positions),
                )
                for row, name in enumerate(ROWS)
            ),
            "settled": tuple(SETTLED[at % 4] for at in positions), "checks": (CHECK,), **changes,
        }
    )  # fmt: skip


def console(width, colour=False, encoding="utf-8"):
    return Console(
        file=io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="replace"), width=width,
        color_system="standard" if colour else None, no_color=not colour, force_terminal=colour,
        highlight=False, markup=False, emoji=False, legacy_windows=False,
    )  # fmt: skip


def shown(one, width=80, *, colour=False, encoding="utf-8", **options):
    to = console(width, colour, encoding)
    to.print(render_lens(one, "tiny (float32)", **options), crop=False)
    to.file.flush()
    text = to.file.buffer.getvalue().decode(encoding)
    return "\n".join(line.rstrip() for line in text.splitlines())


def plain(text):
    return re.sub(r"\x1b\[[\d;]*m", "", text)


def test_a_grid_has_a_line_for_each_row_and_a_column_for_each_position():
    words = [("x", " y", "\n"), ("a", "b", "c"), ("d", "e", "f"), ("g", "h", "i")]

    def cells(row, at):
        return cell(token(9, words[row][at], (0.005, 0.5, 0.996)[at]))

    assert shown(report(cells=cells)).splitlines()[:9] == [
        "tiny (float32)",
        "position  0          1          2",
        "token     In         ␣the       ␣end",
        "layer " + "─" * 34,
        "embed     x       0  ␣y     50  \\n   100",
        "0 mid     a       0  b      50  c    100",
        "0         d       0  e      50  f    100",
        "1         g       0  h      50  i    100",
        "─" * 40,
    ]
    assert shown(report()).splitlines()[9] == "settled   embed      0 mid      44"
    text = "likeliest next token after each layer and its probability in % · ␣ is a space"
    assert text in shown(report())
    settled = "settled: from this layer on the output's token stays likeliest"
    assert settled in shown(report())
    assert "the model wrote it" not in shown(report())


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
@pytest.mark.parametrize("colour", [True, False])
def test_a_line_stands_before_the_tokens_that_the_model_wrote(colour, encoding):
    bar = "│" if encoding == "utf-8" else "|"
    lines = plain(shown(report(prompt_tokens=2), colour=colour, encoding=encoding)).splitlines()
    where = {line.index(bar) for line in (*lines[1:3], *lines[4:8], lines[9])}
    assert len(where) == 1
    assert all(line.count(bar) == 1 for line in lines[1:3])
    assert lines[1].split() == ["position", "0", "1", bar, "2"]
    if encoding == "utf-8":
        assert lines[3].index("┼") == where.pop()
    assert f"{bar} from position 2 on the model wrote it" in " ".join(lines)
    one = shown(report(first=2, prompt_tokens=2))
    assert 'position 2 of 3: after " end", which the model wrote' in " ".join(one.split())


def test_ranks_instead_of_tokens():
    lines = shown(report(cells=lambda row, at: cell(rank=10**row)), ranks=True).splitlines()
    assert lines[3].split() == ["target", "␣of", "␣of", "␣of"]
    assert [line.split()[-2:] for line in lines[5:9]] == [
        ["1", "(12%)"], ["10", "(12%)"], ["100", "(12%)"], ["1000", "(12%)"],
    ]  # fmt: skip
    text = " ".join(lines)
    assert "rank of the model's top token (1: likeliest) after each layer and its" in text
    coloured = plain(shown(report(cells=lambda row, at: cell(rank=7)), ranks=True, colour=True))
    assert coloured.splitlines()[5].split() == ["embed", "7", "7", "7"]


def test_colour_is_the_probability_and_then_there_is_no_number():
    probabilities = (0.9, 0.3, 0.06, 0.01)
    text = shown(report(cells=lambda row, at: cell(token(9, "x", probabilities[row]))), colour=True)
    lines = text.splitlines()[4:8]
    for line, code in zip(lines, ("32", "36", "33", "31"), strict=True):
        assert f"\x1b[{code}mx" in line
        assert "\x1b[2;3" not in line  # the cells are not faint
    assert plain(lines[0]).split() == ["embed", "x", "x", "x"]
    assert "75 % and more" in text
    assert "%" not in "".join(lines)


@pytest.mark.parametrize("colour", [True, False])
@pytest.mark.parametrize("width", [40, 47, 60, 80, 120, 200])
@pytest.mark.parametrize("ranks", [True, False])
def test_every_line_fits_and_the_last_positions_are_shown(width, colour, ranks):
    tokens = tuple((i, f" word{i}") for i in range(60))
    text = plain(shown(report(tokens), width, colour=colour, ranks=ranks))
    lines = text.splitlines()
    assert max(map(cell_len, lines)) <= width
    numbers = [int(number) for number in lines[1].split()[1:]]
    assert numbers == list(range(60 - len(numbers), 60))
    assert len(numbers) <= room(width)
    said = re.search(r"positions (\d+) to (\d+) of (\d+) tokens", " ".join(lines))
    assert tuple(map(int, said.groups())) == (numbers[0], 59, 60)
    assert f"more: --position :{numbers[0]}" in text
    assert "--all" not in text, "that is for the caller to say"
    # one more would not fit
    row = max(cell_len(line) for line in lines if line.startswith(("embed", "0 ", "1 ")))
    assert width - row < 24


def test_a_pipe_is_not_wider_than_a_wide_screen():
    tokens = tuple((i, "w") for i in range(500))
    lines = shown(report(tokens), 10_000).splitlines()
    assert max(map(cell_len, lines[1:10])) <= WIDEST
    assert room(10_000) == room(WIDEST)


def test_nothing_is_said_to_be_left_out_where_nothing_is():
    assert "positions" not in shown(report())
    assert "positions 1 to 2 of 3 tokens" in shown(report(first=1))


HOSTILE = {
    "escape": "\x1b[31mred\x1b]0;t\x07", "newline": "a\nb\r\n", "markup": "[bold]x[/bold]",
    "wide": "漢字漢字漢字漢字", "joined": "e\u0301" * 9, "zero": "a\u200bb\u202e",
    "half": "\\xf0\\x9f", "rtl": "שלום", "emoji": "👩‍👩‍👧", "spaces": "   ",
    "empty": "", "surrogate": "\ud800",
}  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("width", [40, 80])
def test_tokens_cannot_leave_their_cells(text, width):
    strange = report(
        tokens=((1, text), (2, text), (3, "end")), cells=lambda row, at: cell(token(9, text))
    )
    for one in (strange, report(tokens=((1, text),), cells=lambda r, a: cell(token(9, text)))):
        found = shown(one, width)
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e\ud800]", found)
        assert all(cell_len(line) <= width for line in found.splitlines())
        assert any(line.startswith("embed") for line in found.splitlines())
        if text == "":
            assert "9" in next(line for line in found.splitlines() if line.startswith("embed"))
        if text.startswith("[bold]"):
            assert "[bold]" in found


def test_a_terminal_without_signs_gets_ascii_cells():
    found = shown(report(cells=lambda row, at: cell(token(9, " é"))), encoding="ascii")
    assert next(line for line in found.splitlines() if line.startswith("embed")).split() == (
        ["embed", "_\\xe9", "50", "_\\xe9", "50", "_\\xe9", "50"]
    )
    assert "_ is a space" in found


def one_position(**changes):
    tops = [
        (token(8, " end", 1.0), token(9, "x", 1e-5)), (token(8, " a", 0.5), token(9, "b", 0.25)),
        (token(7, " of", 0.4), token(9, "b", 0.25)), (token(7, " of", 0.25), token(9, "b", 0.2)),
    ]  # fmt: skip
    numbers = [(0.0, 9.0, 71), (1.0, 2.0, 2), (2.3026, 1.0, 1), (4.6052, 0.0, 1)]

    def cells(row, at):
        entropy, kl, rank = numbers[row]
        return cell(*tops[row], entropy=entropy, kl=kl, rank=rank)

    return report(first=2, cells=cells, **changes)


def test_one_position_has_everything_about_it():
    lines = shown(one_position(), 120).splitlines()
    assert lines[1] == ('position 2 of 3: after " end" · output " of" 25.00% · settled at 44')
    heads = ["layer", "token", "prob", "target", "rank", "entropy", "KL", "then"]
    assert lines[2].split() == heads
    assert [re.split(r"\s{3,}", line) for line in lines[4:8]] == [
        ["embed", '" end"', "100.00%", "12.50%", "71", "0.00", "9.00", "█" * 10, '"x" 0.001%'],
        ["0 mid", '" a"', "50.00%", "12.50%", "2", "1.00", "██", "2.00", "█" * 5, '"b" 25.00%'],
        ["0", '" of"', "40.00%", "12.50%", "1", "2.30", "█" * 5, "1.00", "███", '"b" 25.00%'],
        ["1", '" of"', "25.00%", "12.50%", "1", "4.61", "█" * 10, "0.00", '"b" 20.00%'],
    ]
    text = " ".join(" ".join(lines).split())
    assert 'target, rank: probability and rank of " of", the model\'s top token' in text
    assert "bars: entropy up to ln 100 = 4.61, that of knowing nothing" in text
    assert "KL up to 9.00, its largest here, as log(1 + KL)" in text


def test_a_divergence_that_is_infinite_or_nowhere_has_a_bar_too():
    def bars(*divergences):
        made = report(first=2, cells=lambda row, at: cell(entropy=0.0, kl=divergences[row]))
        return [line.count("█") for line in shown(made, 120).splitlines()[4:8]]

    assert bars(float("inf"), 3.0, 0.0, 0.0) == [10, 10, 0, 0]
    assert bars(0.0, 0.0, 0.0, 0.0) == [0, 0, 0, 0]


def test_a_target_that_is_not_the_output_is_named():
    other = one_position(target="the token given", targets=(token(3, " cat", 0.001),))
    text = shown(other, 120)
    assert '· target " cat" 0.10% ·' in text
    assert 'probability and rank of " cat", the token given' in text


@pytest.mark.parametrize("colour", [True, False])
@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
def test_one_position_fits_and_says_all_it_knows(width, colour):
    many = tuple(token(at, f" word{at}", 0.3 - at / 100) for at in range(6))
    long = (many[0], token(9, "a" * 90, 0.00012345), *many[2:])
    made = report(first=2, cells=lambda row, at: cell(*(long if row == 2 else many), entropy=9.87))
    lines = plain(shown(made, width, colour=colour)).splitlines()
    assert max(map(cell_len, lines)) <= width
    rows = " ".join(lines).split("embed ")[1]
    for whole in ("30.00%", "12.50%", "9.87", "0.25", '" word5" 25.00%', "0.012%"):
        assert whole in rows
    assert rows.count('" word5" 25.00%') == 4
    assert ("█" in rows) == (width == 200)
    assert ("bars: " in " ".join(lines)) == (width == 200)


@pytest.mark.parametrize("width", [80, 120])
def test_what_has_no_column_is_on_the_next_line(width):
    many = tuple(token(at, f" word{at}", 0.3 - at / 100) for at in range(9))
    lines = shown(report(first=2, cells=lambda row, at: cell(*many)), width).splitlines()
    first = next(at for at, line in enumerate(lines) if line.startswith("embed"))
    assert lines[first].split()[:8] == (
        ["embed", '"', 'word0"', "30.00%", "12.50%", "3", "1.50", "0.25"]
    )
    below = " · ".join(line.strip() for line in lines[first + 1 :]).split("0 mid ")[0]
    known = [*re.findall("word[0-9]", lines[first]), *re.findall("word[0-9]", below)]
    assert known == [f"word{at}" for at in range(9)]
    assert lines[first + 1].startswith('    " word')


def deep(layers=40, first=0, **changes):
    made = report(first=first, **changes)
    rows = [replace(made.rows[2], name=f"blocks.{n}.resid_post") for n in range(layers)]
    return replace(made, rows=(made.rows[0], *rows), settled=("blocks.3.resid_post",) * (3 - first))


@pytest.mark.parametrize("height", [10, 24, 30, 50])
@pytest.mark.parametrize("colour", [True, False])
@pytest.mark.parametrize("options", [{}, {"ranks": True}, {"first": 2}])
def test_of_many_layers_as_many_as_fit_the_screen(height, colour, options):
    one = deep(first=options.get("first", 0))
    how = {"ranks": options.get("ranks", False), "colour": colour}
    lines = plain(shown(one, height=height, whole="--all", **how)).splitlines()
    assert len(lines) + 2 < max(height, 19), "two lines of checks, and the prompt of the shell"
    there = [line for line in lines if re.match(r"(embed|\d+) ", line) and "rows" not in line]
    names = [line.split()[0] for line in there]
    assert (names[0], names[-1]) == ("embed", "39")
    said = re.search(r"(\d+) of 41 rows · more: --all", " ".join(lines))
    assert int(said[1]) == len(names)
    if height >= 24:
        assert len(lines) + 2 >= height - 4, "the room is used"
    assert "rows" not in plain(shown(one, **how))


@pytest.mark.parametrize("first", [0, 2])
def test_layers_where_the_likeliest_token_changes_are_among_them(first):
    one = deep(first=first)
    changed = (7, 17, 18, 38)
    rows = [
        replace(row, cells=tuple(
            cell(token(100 + sum(at > place for place in changed))) for _ in row.cells
        ))
        for at, row in enumerate(one.rows)
    ]  # fmt: skip
    lines = plain(shown(replace(one, rows=tuple(rows)), height=24, whole="--all")).splitlines()
    there = [line.split()[0] for line in lines if re.match(r"(embed|\d+) ", line)]
    assert {"embed", *map(str, changed), "39"} < set(there)


def test_few_layers_are_all_shown_on_a_screen():
    assert "rows" not in shown(report(), height=24)
    assert "more:" not in shown(one_position(), height=24)


def test_the_table_for_other_programs_has_every_token_of_every_cell():
    one = report(tokens=((1, 'a "quoted", one\n'), (2, "=1+1")), prompt_tokens=1)
    text = lens_csv(one).decode()
    lines = list(csv.DictReader(io.StringIO(text)))
    assert tuple(lines[0]) == COLUMNS
    assert len(lines) == 4 * 2 * 2
    assert lines[0] == {
        "row": "blocks.0.resid_pre", "layer": "", "position": "0",
        "position_token": 'a "quoted", one\\n', "generated": "0", "place": "1",
        "id": "5", "token": " the", "probability": "0.5", "entropy": "1.5", "kl": "0.25",
        "target_id": "7", "target_rank": "3", "target_probability": "0.125",
    }  # fmt: skip
    assert lines[2]["position_token"] == "'=1+1"
    assert [line["place"] for line in lines[:4]] == ["1", "2", "1", "2"]
    assert lines[-1]["row"] == "blocks.1.resid_post"
    assert lines[-1]["layer"] == "1"
    assert [line["generated"] for line in lines[:4]] == ["0", "0", "1", "1"]

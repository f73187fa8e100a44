"""The logit lens as text: at every width, with and without colour, with tokens of every kind."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from drawn import lines_of
from rich.cells import cell_len

from llmcli.commands.lens.report import LensCell, LensReport, LensRow, LensToken
from llmcli.commands.lens.view.screen import render_lens, room
from llmcli.records.checks import ViewCheck

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


def lens(one, width=80, *, colour=False, encoding="utf-8", **options):
    """The lines, without spaces at their ends."""
    view = render_lens(one, "tiny (float32)", **options)
    lines = lines_of(view, width=width, colour="standard" if colour else None, encoding=encoding)
    return [line.rstrip() for line in lines]


@pytest.mark.parametrize("colour", [True, False])
@pytest.mark.parametrize("width", [40, 47, 60, 80, 120, 200])
@pytest.mark.parametrize("ranks", [True, False])
def test_every_line_fits_and_the_last_positions_are_shown(width, colour, ranks):
    tokens = tuple((i, f" word{i}") for i in range(60))
    lines = lens(report(tokens), width, colour=colour, ranks=ranks)
    text = "\n".join(lines)
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
    lines = lens(one, height=height, whole="--all", **how)
    assert len(lines) + 2 < max(height, 19), "two lines of checks, and the prompt of the shell"
    there = [line for line in lines if re.match(r"(embed|\d+) ", line) and "rows" not in line]
    names = [line.split()[0] for line in there]
    assert (names[0], names[-1]) == ("embed", "39")
    said = re.search(r"(\d+) of 41 rows · more: --all", " ".join(lines))
    assert int(said[1]) == len(names)
    if height >= 24:
        assert len(lines) + 2 >= height - 4, "the room is used"
    assert "rows" not in "".join(lens(one, **how))


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
    lines = lens(replace(one, rows=tuple(rows)), height=24, whole="--all")
    there = [line.split()[0] for line in lines if re.match(r"(embed|\d+) ", line)]
    assert {"embed", *map(str, changed), "39"} < set(there)

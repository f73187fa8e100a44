"""Heatmaps as text: every width, with and without colour, every token, masked unlike zero."""

import re
from dataclasses import replace

import numpy as np
import pytest
from attention_reports import matrix, pattern
from covers import in_turn
from drawn import lines_of, plain, printed, shown
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.color import ColorSystem

from llmcli.records.document import ViewCheck
from llmcli.ui.grid import ColourBar, Heatmap, Panels, pooled, ticks
from llmcli.ui.layout import fitted, render_checks
from llmcli.ui.palette import DIVERGING, KINDS, VIRIDIS, Ink, Scale, painted, rgb
from llmcli.ui.theme import quoted

SHARE = Scale(low=0.0, high=1.0)
HARD = ("\n", "\x1b[31m", " [red]x[/]", " 中文", "שלום", "e\u0301", "\\xf0", "\u202e", "a" * 60, "")


def heatmap(values, tokens=None, scale=SHARE, **where):
    found = matrix(np.asarray(values), **where)
    last = max(found.queries[1], found.keys[1])
    return Heatmap(matrix=found, tokens=tokens or [f" t{at}" for at in range(last)], scale=scale)


def cells(line, ink):
    """(signs, foreground, background) of every column of a painted line."""
    found = []
    for segment in line:
        style = segment.style
        both = (style.color, style.bgcolor) if style else (None, None)
        colours = [None if one is None else (one.triplet or one.number) for one in both]
        found += [(sign, *colours) for sign in segment.text]
    return found


# palette


def test_the_maps_have_the_ends_that_they_are_known_by():
    assert VIRIDIS.shape == DIVERGING.shape == (256, 3)
    ends = ((0, [0x44, 0x01, 0x54]), (100, [0x2A, 0x76, 0x8E]), (255, [0xFD, 0xE7, 0x25]))
    for place, colour in ends:
        assert VIRIDIS[place].tolist() == colour
    low, middle, high = rgb(np.array([0.0, 0.5, 1.0]), diverging=True).astype(int)
    assert low[2] > low[0]
    assert high[0] > high[2]
    assert np.ptp(middle) < 8  # grey
    light = rgb(np.linspace(0, 1, 256)).astype(float) @ [0.299, 0.587, 0.114]
    assert (np.diff(light) > -1.0).all(), "more is brighter all along"
    assert light[-1] - light[0] > 180


@given(st.floats(0, 1), st.sampled_from(KINDS), st.booleans(), st.floats(1e-3, 1e6))
def test_a_place_on_a_scale_leads_back_to_its_value(place, kind, signed, high):
    scale = Scale(low=-high if signed else 0.0, high=high, kind=kind, signed=signed)
    assert scale.fractions(np.array([scale.value(place)]))[0] == pytest.approx(place, abs=1e-6)


def test_scales_by_hand():
    values = np.array([0.0, 1e-4, 0.01, 0.25, 1.0, np.nan])
    found = {kind: Scale(low=0, high=1, kind=kind).fractions(values) for kind in KINDS}
    np.testing.assert_allclose(found["linear"], values)
    np.testing.assert_allclose(found["sqrt"], [0, 0.01, 0.1, 0.5, 1, np.nan])
    np.testing.assert_allclose(found["log"], [0, 0, 0.5, 1 + np.log10(0.25) / 4, 1, np.nan])
    around = Scale.around([np.array([np.nan, -3.0, np.inf, 2.0])])
    assert (around.low, around.high) == (-3.0, 3.0)
    assert around.fractions(np.array([0.0, 3.0]))[0] == 0.5
    assert Scale.around([np.array([np.nan])]).high == 1.0


# cells


def test_a_line_holds_two_rows_in_their_own_colours():
    rows = np.array([[0.0, 1.0, 0.5, np.nan, np.nan], [1.0, 1.0, np.nan, 0.25, np.nan]])
    ink = Ink("rgb")
    [line, odd] = painted(np.concatenate([rows, rows[:1]]), ink, width=1)
    colour = {place: tuple(rgb(np.array([place]))[0].tolist()) for place in (0, 0.25, 0.5, 1)}
    assert cells(line, ink) == [
        ("▀", colour[0], colour[1]), (" ", (0, 0, 0), colour[1]), ("▀", colour[0.5], None),
        ("▄", colour[0.25], None), ("·", None, None),
    ]  # fmt: skip
    assert cells(odd, ink)[:3] == [("▀", colour[place], None) for place in (0, 1, 0.5)]
    [[alone]] = painted(np.zeros((2, 500)), ink, width=1)
    assert alone.cell_length == 500, "equal neighbours are one piece"


@pytest.mark.parametrize(("kind", "black", "white"), [("rgb", 16, 231), ("ansi", 0, 15)])
def test_letters_are_black_or_white_whatever_a_theme_makes_of_these_names(kind, black, white):
    """256 colours have black and white of their own, which no theme changes."""
    ink = Ink(kind)
    shades = ink.codes(np.array([0.0, 1.0])).tolist()
    letters = [ink.behind(shade).color.downgrade(ColorSystem.EIGHT_BIT) for shade in shades]
    assert [one.number for one in letters] == [white, black]


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(
    "ink", [Ink(kind, ascii) for kind in ("shades", "ansi", "rgb") for ascii in (False, True)]
)
def test_every_cell_has_its_columns_and_masked_is_unlike_any_value(ink, wide):
    half = ink.halves and not wide
    for rows, columns in ((1, 1), (2, 3), (5, 4)):
        lines = painted(np.zeros((rows, columns)), ink, width=1 + wide)
        assert len(lines) == (-(-rows // 2) if half else rows)
        assert {sum(s.cell_length for s in line) for line in lines} == {columns * (1 + wide)}
    values = np.concatenate([[np.nan], np.linspace(0, 1, 300)])[None]
    masked, *others = cells(painted(values, ink, width=1 + wide)[0], ink)
    others = others[int(wide) :]
    assert masked == (ink.dot, None, None)
    assert masked not in others
    assert len(set(others)) >= 5  # and values are unlike each other
    assert not ink.ascii or "".join(sign for sign, *_ in (masked, *others)).isascii()


@given(st.text(max_size=30), st.integers(1, 20), st.booleans())
@example("שלום", 8, False)  # letters from the right do not move what follows
@settings(max_examples=300)
def test_labels_take_exactly_their_columns(text, width, ascii):
    label = fitted(quoted(text), width, Ink("shades", ascii))
    assert cell_len(label) == width
    assert not {"\n", "\x1b"} & set(label)
    assert text != "שלום" or label == '"שלום"\u200e  '


# heatmap


def test_screens(golden):
    short = ["In", " the", "\n", " a"]
    names = [" because", " the", "中文字字", "a", "  "]
    words = [f"w{at}" for at in range(90)]
    part = heatmap(pattern(90)[40:44, :6], words, queries=(40, 44), keys=(0, 6))
    band = pattern(90)[40:43]
    bands = [matrix(band, queries=(40, 43), keys=(0, 90))] * 2
    bands = Panels(matrices=bands, titles=["a", "b"], scale=SHARE)
    written = [matrix(pattern(23)[9:], head=at, queries=(9, 23)) for at in range(2)]
    written = Panels(matrices=written, titles=["a", "b"], scale=SHARE, given=20)
    some = [matrix(pattern(120), head=at) for at in range(2)]
    some = Panels(matrices=some, titles=["a", "b"], scale=SHARE)
    four = [matrix(pattern(31), head=at) for at in range(4)]
    four = Panels(matrices=four, titles=[f"3.{at}" for at in range(4)], scale=SHARE)
    unlike = [matrix(np.full((2, 2), by), head=at) for at, by in enumerate((0.01, 1.0))]
    unlike = Panels(matrices=unlike, titles=["a", "b"], scale=SHARE)
    signed = np.array([[-2.0, np.nan], [0.0, 2.0]])
    values = np.zeros((100, 100), np.float32)
    values[57, 33] = 0.9
    checks = [
        ViewCheck(name="a", words="every row sums to 1", value=2e-7, tolerance=1e-5, where="w"),
        ViewCheck(name="b", words="masked is 0", value=0.0, tolerance=0.0),
        ViewCheck(name="c", words="x = y", value=0.5, tolerance=1e-5, where="layer 1\n, [2,3]"),
        ViewCheck(name="d", words="z", value=float("nan"), tolerance=1.0),
    ]
    bars = [
        Scale(low=0, high=1, kind="sqrt"), Scale(low=0, high=1, kind="log"),
        Scale(low=-5.5, high=5.5, signed=True),
    ]  # fmt: skip
    golden("heatmap", {
        "a small matrix": lines_of(heatmap(pattern(4), short)),
        "in colours that are not seen here": lines_of(
            heatmap(pattern(4), short), colour="truecolor"
        ),
        "cells without room for numbers are shades": lines_of(heatmap(pattern(4), short), width=23),
        "names below columns are as wide as these": lines_of(
            heatmap(pattern(5), names), width=120
        ),
        "and cut where these are narrow": lines_of(heatmap(pattern(5), names), width=40),
        **{
            f"tokens that the model wrote from {given} on are marked, in {width} columns": lines_of(
                replace(heatmap(pattern(tokens)), given=given), width=width
            )
            for tokens, given, width in ((23, 1, 40), (23, 20, 80), (6, 4, 200))
        },
        "and are not where there are none": lines_of(replace(heatmap(pattern(3)), given=3)),
        "four beside each other": lines_of(four, width=150)[:2],
        "without unicode no sign": lines_of(
            heatmap(pattern(6), ["é", "中", "שלום", "a", "b", "c"]), encoding="ascii"
        ),
        "both colours of signed values": shown(
            heatmap(signed, scale=Scale.around([signed])), colour="truecolor"
        ),
        "faint and strong panels have one scale": shown(unlike, colour="truecolor"),
        "half blocks have two tokens a line": lines_of(
            heatmap(pattern(31)), width=60, colour="truecolor"
        ),
        "a part names its keys where its rows do not": lines_of(part),
        "below, where there is no room under the columns": lines_of(part, width=27),
        "a window is masked on both sides": lines_of(heatmap(pattern(5, window=2))),
        "tokens that were never written are no rows": lines_of(
            heatmap(np.zeros((0, 3)), queries=(3, 3), keys=(0, 3))
        ),
        "all masked": lines_of(heatmap(np.full((2, 2), np.nan))),
        "what is pooled is said": lines_of(heatmap(values), width=40),
        "panels have the numbers of their queries, and which the model wrote":
            lines_of(written, width=40),
        "two a line in colours": lines_of(written, width=40, colour="truecolor"),
        "pooled panels number the first query of a cell": lines_of(some, width=64),
        "a few rows of many keys have a line each": lines_of(
            heatmap(band, words, queries=(40, 43), keys=(0, 90)), width=60
        ),
        "in panels, too": lines_of(bands, width=64),
        "bars have both ends, the middle and the mask": [
            line for scale in bars for line in lines_of(ColourBar("x", scale))
        ],
        "and no mask where nothing is masked": lines_of(ColourBar("x", bars[0], "")),
        "a bar of 40 columns": lines_of(ColourBar("pattern", bars[0]), width=40),
        "of 200": lines_of(ColourBar("pattern", bars[0]), width=200),
        "a check that fails is marked and says where": lines_of(render_checks(checks)),
        "in a terminal with few columns": lines_of(render_checks(checks[:1]), width=24),
        "and without signs": lines_of(render_checks(checks[::2]), width=24, encoding="ascii"),
        "red": shown(render_checks(checks[2:]), colour="standard"),
    })  # fmt: skip
    assert "1 cell" not in "".join(lines_of(heatmap(values), width=200))
    assert len(pooled(matrix(np.zeros((65, 140))), 70).values) == 33, "more than a screen has"
    assert len(pooled(matrix(band, pool=2), 45).values) == 2, "pooled before, as it was"
    assert max(map(len, lines_of(render_checks(checks), width=24))) <= 24


@pytest.mark.parametrize(
    ("tokens", "width", "colour"),
    in_turn(
        [1, 2, 7, 31, 32, 150, 151, 700],
        [40, 60, 80, 120, 200], [None, "standard", "256", "truecolor"],
    ),
)
def test_nothing_is_wider_than_the_screen(tokens, width, colour):
    texts = [HARD[at % len(HARD)] for at in range(tokens)]
    matrices = [matrix(pattern(min(tokens, 31)), head=at) for at in range(4)]
    some = Panels(matrices=matrices, titles=[f"3.{at}" for at in range(4)], scale=SHARE)
    for view in (heatmap(pattern(tokens), texts), some):
        text = printed(view, width=width, colour=colour)
        assert max(map(cell_len, plain(text).splitlines())) <= width
        assert "\x1b" not in plain(text)
        if tokens > 7:  # the colours of the terminal, and no others
            assert ("38;2;" in text or "48;2;" in text) == (colour == "truecolor")
            assert ("38;5;" in text or "48;5;" in text) == (colour == "256")


def test_a_screen_of_a_few_columns_is_drawn_over_its_edge():
    some = Panels(matrices=[matrix(pattern(3))], titles=["a"], scale=SHARE)
    for view in (heatmap(pattern(3)), some):
        assert "0" in printed(view, width=3)


@given(
    st.integers(1, 30), st.integers(1, 30), st.integers(1, 12), st.integers(0, 2**32 - 1),
    st.booleans(),
)  # fmt: skip
@settings(max_examples=60)
def test_pooling_against_loops(rows, columns, most, seed, signed):
    """A cell is the largest of those that it stands for, of a signed map that of either sign."""
    rng = np.random.default_rng(seed)
    values = np.where(rng.random((rows, columns)) < 0.4, np.nan, rng.normal(size=(rows, columns)))
    found = pooled(replace(matrix(values), signed=signed), most)
    assert found.signed == signed
    side = found.pool
    tall = side if 2 * rows > columns else 1  # few rows of many columns stay apart
    assert found.values.shape[1] <= most
    for row in range(found.values.shape[0]):
        for column in range(found.values.shape[1]):
            part = values[row * tall : (row + 1) * tall, column * side : (column + 1) * side]
            seen = part[~np.isnan(part)]
            got = found.values[row, column]
            if not seen.size:
                assert np.isnan(got)
            else:
                assert got == np.float32(max(seen, key=abs if signed else float))


@given(st.integers(0, 99_999), st.integers(1, 9), st.integers(1, 80), st.integers(1, 2))
def test_ticks_stand_under_their_cells(first, pool, columns, cell):
    line = ticks(first, pool, columns, cell)
    assert line.startswith(str(first))
    for found in re.finditer(r"\d+", line):
        assert int(found[0]) == first + found.start() // cell * pool
        assert found.start() % cell == 0
    assert len(line) <= max(columns * cell, len(str(first)))

"""Heatmaps as text: every width, with and without colour, every token, masked unlike zero."""

import io
import re

import numpy as np
import pytest
from attention_reports import matrix, pattern
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.color import ColorSystem
from rich.console import Console
from rich.segment import Segment

from llmcli.reports.checks import ViewCheck
from llmcli.ui.cells import Ink, fitted, painted
from llmcli.ui.checks import render_checks
from llmcli.ui.heatmap import ColourBar, Heatmap, Panels, brief, pooled, ticks
from llmcli.ui.palette import DIVERGING, KINDS, VIRIDIS, Scale, rgb

SHARE = Scale(low=0.0, high=1.0)
HARD = ("\n", "\x1b[31m", " [red]x[/]", " 中文", "שלום", "e\u0301", "\\xf0", "\u202e", "a" * 60, "")


class Ascii(io.StringIO):
    """A stream that can write ASCII only."""

    encoding = "ascii"


def console(width=80, colour=None, *, file=None):
    return Console(
        file=file or io.StringIO(), width=width, color_system=colour, force_terminal=bool(colour),
        no_color=colour is None, highlight=False, markup=False, emoji=False, legacy_windows=False,
    )  # fmt: skip


def shown(renderable, width=80, colour=None, *, ascii=False):
    screen = console(width, colour, file=Ascii() if ascii else None)
    screen.print(renderable, crop=False)
    return screen.file.getvalue()


def lines_of(renderable, **options):
    return re.sub(r"\x1b\[[0-9;]*m", "", shown(renderable, **options)).splitlines()


def heatmap(values, tokens=None, scale=SHARE, **where):
    found = matrix(np.asarray(values), **where)
    last = max(found.queries[1], found.keys[1])
    return Heatmap(matrix=found, tokens=tokens or [f" t{at}" for at in range(last)], scale=scale)


def cells(line, ink):
    """(signs, foreground, background) of every column of a painted line."""
    found = []
    for segment in line:
        style = segment.style
        colours = [None if c is None else (c.triplet or c.number) for c in
                   ((style.color, style.bgcolor) if style else (None, None))]  # fmt: skip
        found += [(sign, *colours) for sign in segment.text]
    return found


# palette


def test_the_maps_have_the_ends_that_they_are_known_by():
    assert VIRIDIS.shape == DIVERGING.shape == (256, 3)
    assert VIRIDIS[0].tolist() == [0x44, 0x01, 0x54]
    assert VIRIDIS[255].tolist() == [0xFD, 0xE7, 0x25]
    assert VIRIDIS[100].tolist() == [0x2A, 0x76, 0x8E]
    low, middle, high = rgb(np.array([0.0, 0.5, 1.0]), diverging=True).astype(int)
    assert low[2] > low[0]
    assert high[0] > high[2]
    assert np.ptp(middle) < 8  # grey


def test_more_is_brighter_all_along():
    light = rgb(np.linspace(0, 1, 256)).astype(float) @ [0.299, 0.587, 0.114]
    assert (np.diff(light) > -1.0).all()
    assert light[-1] - light[0] > 180


@given(st.floats(0, 1), st.sampled_from(KINDS), st.booleans(), st.floats(1e-3, 1e6))
def test_a_place_on_a_scale_leads_back_to_its_value(place, kind, signed, high):
    scale = Scale(low=-high if signed else 0.0, high=high, kind=kind, signed=signed)
    assert scale.fractions(np.array([scale.value(place)]))[0] == pytest.approx(place, abs=1e-6)


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=20), st.sampled_from(KINDS))
def test_scales_keep_the_order(values, kind):
    ordered = np.array(sorted(values))
    scale = Scale.around([ordered], kind)
    found = scale.fractions(ordered)
    assert (np.diff(found) >= 0).all()
    assert found.min() >= 0
    assert found.max() <= 1


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
    [line] = painted(rows, ink, width=1)
    colour = {place: tuple(rgb(np.array([place]))[0].tolist()) for place in (0, 0.25, 0.5, 1)}
    assert cells(line, ink) == [
        ("▀", colour[0], colour[1]), (" ", (0, 0, 0), colour[1]), ("▀", colour[0.5], None),
        ("▄", colour[0.25], None), ("·", None, None),
    ]  # fmt: skip


@pytest.mark.parametrize(("kind", "black", "white"), [("rgb", 16, 231), ("ansi", 0, 15)])
def test_letters_are_black_or_white_whatever_a_theme_makes_of_these_names(kind, black, white):
    """256 colours have black and white of their own, which no theme changes."""
    ink = Ink(kind)
    shades = ink.codes(np.array([0.0, 1.0])).tolist()
    letters = [ink.behind(shade).color.downgrade(ColorSystem.EIGHT_BIT) for shade in shades]
    assert [one.number for one in letters] == [white, black]


def test_an_odd_last_row_leaves_the_half_below_it_alone():
    lines = painted(np.full((3, 2), 0.5), Ink("rgb"), width=1)
    assert len(lines) == 2
    assert [cell[0] for cell in cells(lines[1], Ink("rgb"))] == ["▀", "▀"]
    assert {cell[2] for cell in cells(lines[1], Ink("rgb"))} == {None}


def test_equal_neighbours_are_one_piece():
    [line] = painted(np.zeros((2, 500)), Ink("rgb"), width=1)
    assert len(line) == 1
    assert line[0].cell_length == 500


@pytest.mark.parametrize("ink", [Ink("rgb"), Ink("ansi"), Ink("shades"), Ink("shades", True)])
@pytest.mark.parametrize("wide", [False, True])
def test_masked_is_unlike_any_value(ink, wide):
    values = np.concatenate([[np.nan], np.linspace(0, 1, 300)])[None]
    found = cells(painted(values, ink, width=1 + wide)[0], ink)
    step = 2 if wide else 1
    masked, others = found[0], found[step:]
    assert masked[0] == ink.dot
    assert masked[1:] == (None, None)
    assert masked not in others
    assert len(set(others)) >= 5  # and values are unlike each other


@pytest.mark.parametrize("ink", [Ink("shades"), Ink("shades", True), Ink("ansi"), Ink("rgb")])
@pytest.mark.parametrize("shape", [(1, 1), (2, 3), (5, 4)])
def test_every_cell_has_its_columns(ink, shape):
    for wide in (False, True):
        lines = painted(np.zeros(shape), ink, width=1 + wide)
        half = ink.halves and not wide
        assert len(lines) == (-(-shape[0] // 2) if half else shape[0])
        assert {sum(s.cell_length for s in line) for line in lines} == {shape[1] * (1 + wide)}


def test_ascii_signs_are_ascii():
    lines = painted(np.array([[0.0, 0.3, 1.0, np.nan]]), Ink("shades", True), width=2)
    assert "".join(s.text for s in lines[0]).isascii()
    coloured = painted(np.array([[0.0, 0.3, 1.0, np.nan]] * 2), Ink("rgb", True), width=1)
    assert len(coloured) == 2  # no half blocks
    assert "".join(s.text for line in coloured for s in line).isascii()


@given(st.text(max_size=30), st.integers(1, 20), st.booleans())
@settings(max_examples=300)
def test_labels_take_exactly_their_columns(text, width, ascii):
    from llmcli.ui.theme import quoted

    label = fitted(quoted(text), width, Ink("shades", ascii))
    assert cell_len(label) == width
    assert "\n" not in label
    assert "\x1b" not in label


def test_letters_from_the_right_do_not_move_what_follows():
    assert fitted("שלום", 6, Ink("rgb")) == "שלום\u200e  "
    assert fitted("abc", 6, Ink("rgb")) == "abc   "
    assert fitted(" 中文字", 6, Ink("rgb")) == " 中文…"


# heatmap


def test_a_small_matrix_as_text():
    picture = heatmap(pattern(4), ["In", " the", "\n", " a"])
    assert lines_of(picture) == [
        '0 "In"        █1.0    ·    ·    · ',
        '1 " the"      ▒.50 ▒.50    ·    · ',
        '2 "\\n"        ▒.50  .00 ▒.50    · ',
        '3 " a"        ▒.50  .00  .00 ▒.50 ',
        "          key    0    1    2    3",
        "                In  the   \\n    a",
    ]
    assert lines_of(picture, colour="truecolor")[3:] == [
        '3 " a"        .50 .00 .00 .50 ',
        "          key   0   1   2   3",
        "               In the  \\n   a",
    ]


def test_cells_without_room_for_numbers_are_shades():
    found = lines_of(heatmap(pattern(4), ["In", " the", "\n", " a"]), width=23)
    assert "values 0 … 1" in found
    assert found[:5] == [
        '0 "In"        ██· · · ',
        '1 " the"      ▒▒▒▒· · ',
        '2 "\\n"        ▒▒  ▒▒· ',
        '3 " a"        ▒▒    ▒▒',
        "          key 0 1 2 3",
    ]


def test_a_name_below_a_column_is_as_wide_as_its_cell():
    names = [" because", " the", "中文字字", "a", "  "]
    found = lines_of(heatmap(pattern(5), names), width=120)
    assert found[6].split() == ["because", "the", "中文字字", "a", "␣␣"]
    narrow = lines_of(heatmap(pattern(5), names), width=40)
    assert narrow[6].split() == ["beca", "the", "中文", "a", "␣␣"]
    assert [cell_len(line) for line in narrow[:5]] == [39] * 5


@pytest.mark.parametrize(
    ("value", "words"),
    [(0.0, ".00"), (0.004, ".00"), (-0.004, ".00"), (0.07, ".07"), (0.994, ".99"), (0.996, "1.0"),
     (-0.5, "−.50"), (-3.44, "−3.4"), (9.96, "10"), (-123.4, "−123")],
)  # fmt: skip
def test_numbers_in_cells_are_short(value, words):
    assert brief(value) == words


def test_half_blocks_have_two_tokens_a_line():
    found = lines_of(heatmap(pattern(31)), width=60, colour="truecolor")
    assert len(found) == 16 + 2
    assert found[0].startswith(' 0 " t0"')
    assert '" t1"' in found[0]
    assert found[15].startswith('30 " t30"')
    assert '" t31"' not in found[15]


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
@pytest.mark.parametrize("tokens", [1, 2, 7, 31, 150, 700])
@pytest.mark.parametrize("colour", [None, "standard", "256", "truecolor"])
def test_nothing_is_wider_than_the_screen(width, tokens, colour):
    texts = [HARD[at % len(HARD)] for at in range(tokens)]
    for line in lines_of(heatmap(pattern(tokens), texts), width=width, colour=colour):
        assert cell_len(line) <= width
        assert "\x1b" not in line


@pytest.mark.parametrize("colour", ["standard", "256", "truecolor"])
def test_colours_are_those_of_the_terminal(colour):
    text = shown(heatmap(pattern(40)), width=60, colour=colour)
    assert ("38;2;" in text or "48;2;" in text) == (colour == "truecolor")
    assert ("38;5;" in text or "48;5;" in text) == (colour == "256")


def test_without_colour_there_is_no_escape_and_without_unicode_no_sign():
    assert "\x1b" not in shown(heatmap(pattern(20)))
    rows = lines_of(heatmap(pattern(6), ["é", "中", "שלום", "a", "b", "c"]), ascii=True)[:6]
    assert all(line.isascii() for line in rows)
    assert rows[2].startswith('2 "\\u')


def test_what_is_pooled_is_said_and_is_the_largest():
    values = np.zeros((100, 100), np.float32)
    values[57, 33] = 0.9
    shown_ = pooled(matrix(values), 26)
    assert shown_.values.shape == (25, 25)
    assert shown_.pool == 4
    assert shown_.values[14, 8] == np.float32(0.9)
    assert (shown_.values > 0).sum() == 1
    text = "\n".join(lines_of(heatmap(values), width=40))
    assert "1 cell = the largest of 4 × 4" in text
    assert "1 cell" not in "\n".join(lines_of(heatmap(values), width=200))


@given(st.integers(1, 30), st.integers(1, 30), st.integers(1, 12), st.integers(0, 2**32 - 1))
@settings(max_examples=60)
def test_pooling_against_loops(rows, columns, most, seed):
    rng = np.random.default_rng(seed)
    values = np.where(rng.random((rows, columns)) < 0.4, np.nan, rng.normal(size=(rows, columns)))
    found = pooled(matrix(values), most)
    side = found.pool
    assert found.values.shape[1] <= most
    for row in range(found.values.shape[0]):
        for column in range(found.values.shape[1]):
            part = values[row * side : (row + 1) * side, column * side : (column + 1) * side]
            seen = part[~np.isnan(part)]
            got = found.values[row, column]
            assert np.isnan(got) if not seen.size else got == np.float32(seen.max())


def test_a_part_names_its_keys_where_its_rows_do_not():
    part = heatmap(pattern(90)[40:44, :6], [f"w{at}" for at in range(90)], queries=(40, 44),
                   keys=(0, 6))  # fmt: skip
    found = lines_of(part)
    assert found[0].startswith('40 "w40"')
    assert found[4].split() == ["key", *"012345"]
    assert found[5].split() == [f"w{at}" for at in range(6)]
    assert "queries 40:44 down, keys 0:6 across" in found[6]
    narrow = " ".join(lines_of(part, width=27))  # no room for names below the columns
    assert narrow.endswith('keys · 0 "w0" · 1 "w1" 2 "w2" · 3 "w3" · 4 "w4" 5 "w5"')


def test_a_window_is_seen_as_masked_on_both_sides():
    found = lines_of(heatmap(pattern(5, window=2)))
    assert found[3].endswith(" ·    · ▒.50 ▒.50    · ")
    assert found[4].endswith(" ·    ·    · ▒.50 ▒.50 ")


def test_tokens_that_were_never_written_are_no_rows():
    found = lines_of(heatmap(np.zeros((0, 3)), queries=(3, 3), keys=(0, 3)))
    assert "all masked" in found[1]


def test_all_masked():
    assert "all masked" in "\n".join(lines_of(heatmap(np.full((2, 2), np.nan))))


@given(st.integers(0, 99_999), st.integers(1, 9), st.integers(1, 80), st.integers(1, 2))
def test_ticks_stand_under_their_cells(first, pool, columns, cell):
    line = ticks(first, pool, columns, cell)
    assert line.startswith(str(first))
    for found in re.finditer(r"\d+", line):
        assert int(found[0]) == first + found.start() // cell * pool
        assert found.start() % cell == 0
    assert len(line) <= max(columns * cell, len(str(first)))


def test_signed_values_use_both_colours():
    values = np.array([[-2.0, np.nan], [0.0, 2.0]])
    picture = heatmap(values, scale=Scale.around([values]))
    [negative, zero, positive] = rgb(np.array([0.0, 0.5, 1.0]), diverging=True).tolist()
    text = shown(picture, colour="truecolor")
    for colour in (negative, zero, positive):
        assert ";".join(map(str, colour)) in text


# several


def test_panels_stand_beside_each_other_as_wide_as_they_may():
    some = [matrix(pattern(31), head=at) for at in range(4)]
    panels = Panels(matrices=some, titles=[f"3.{at}" for at in range(4)], scale=SHARE)
    narrow, wide = lines_of(panels, width=40), lines_of(panels, width=150)
    assert narrow[0].strip() == "3.0"
    assert wide[0].split() == ["3.0", "3.1", "3.2", "3.3"]
    for width in (40, 60, 80, 200):
        for colour in (None, "truecolor"):
            for line in lines_of(panels, width=width, colour=colour):
                assert cell_len(line) <= width


@pytest.mark.parametrize(("width", "colour", "step"), [(40, None, 1), (40, "truecolor", 2)])
def test_panels_have_the_numbers_of_their_queries(width, colour, step):
    some = [matrix(pattern(31)[9:], head=at, queries=(9, 31)) for at in range(2)]
    panels = Panels(matrices=some, titles=["a", "b"], scale=SHARE, given=20)
    lines = lines_of(panels, width=width, colour=colour)
    numbers = [line.split()[0] for line in lines[1 : 1 + 22 // step]]
    expected = [f"{at}{'+' if at >= 20 else ''}" for at in range(9, 31, step)]
    assert [number.strip("·░▒▓█▀▄") for number in numbers] == expected
    assert "+ written by the model, from 20 on" in "\n".join(lines)


def test_pooled_panels_number_the_first_query_of_a_cell():
    some = [matrix(pattern(120), head=at) for at in range(2)]
    lines = lines_of(Panels(matrices=some, titles=["a", "b"], scale=SHARE), width=64)
    numbers = [int(line.split()[0]) for line in lines[1:] if re.match(r" *\d+   ?\S", line)]
    side = int(re.search(r"the largest of (\d+)", "\n".join(lines))[1])
    assert side > 1
    assert numbers[: -(-120 // side)] == list(range(0, 120, side))
    assert "a part at a time: --query and --key" in "\n".join(lines)


@pytest.mark.parametrize("colour", [None, "truecolor"])
@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("given", [1, 7, 20, 22])
def test_tokens_that_the_model_wrote_are_marked(width, colour, given):
    picture = heatmap(pattern(23), tokens=[f"t{at}" for at in range(23)])
    picture = Heatmap(matrix=picture.matrix, tokens=picture.tokens, scale=SHARE, given=given)
    lines = lines_of(picture, width=width, colour=colour)
    text = "\n".join(lines)
    assert {int(at) for at in re.findall(r'\+"t(\d+)"', text)} <= set(range(given, 23))
    assert {int(at) for at in re.findall(r'[^+]"t(\d+)"', text)} <= set(range(given))
    keys = next(number for number, line in enumerate(lines) if line.split()[:2] == ["key", "0"])
    mark = lines[keys + (2 if width == 200 else 1)]  # below names, where these have room
    where = mark.index("^")  # below the first key that the model wrote
    if width > 40:
        assert f"from {given} on written by the model" in mark
    row = next(line for line in lines if re.match(f" *{given} ", line)) if not colour else None
    if row is not None:
        assert row[where] in " ░▒▓█"
        assert row[where + {40: 1, 80: 2, 200: 5}[width] :].strip("· ") == ""
    assert f"+ written by the model, from {given} on" in text
    assert max(map(cell_len, lines)) <= width


def test_without_written_tokens_nothing_is_marked():
    for count in (None, 23):
        picture = Heatmap(matrix=matrix(pattern(23)), tokens=["t"] * 23, scale=SHARE, given=count)
        assert "+" not in "\n".join(lines_of(picture))


def test_panels_share_one_scale():
    faint = matrix(np.full((2, 2), 0.01))
    strong = matrix(np.full((2, 2), 1.0), head=1)
    text = shown(
        Panels(matrices=[faint, strong], titles=["a", "b"], scale=SHARE), colour="truecolor"
    )
    for place in (0.01, 1.0):
        assert ";".join(map(str, rgb(np.array([place]))[0])) in text


# bar and footer


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_bar_has_both_ends_the_middle_and_the_mask(width):
    scale = Scale(low=0, high=1, kind="sqrt")
    lines = lines_of(ColourBar("pattern", scale), width=width)
    words, bar = lines if width == 40 else (lines[0][:20], lines[0][22:])
    assert words == "pattern (sqrt scale)"
    assert re.fullmatch(r"0 .+ 0\.25 .+ 1   · masked", bar)
    assert all(cell_len(line) <= width for line in lines)
    assert "masked" not in "\n".join(lines_of(ColourBar("x", scale, ""), width=width))
    log = lines_of(ColourBar("x", Scale(low=0, high=1, kind="log")))
    assert log[0].startswith("x (log scale)  <0.0001 ")
    signed = Scale(low=-5.5, high=5.5, signed=True)
    assert re.fullmatch(r"x  −5\.5 .+ 0 .+ 5\.5   · masked", lines_of(ColourBar("x", signed))[0])


def test_a_check_that_fails_is_marked_and_says_where():
    good = ViewCheck(name="a", words="every row sums to 1", value=2e-7, tolerance=1e-5, where="w")
    exact = ViewCheck(name="b", words="masked is 0", value=0.0, tolerance=0.0)
    bad = ViewCheck(name="c", words="x = y", value=0.5, tolerance=1e-5, where="layer 1\n, [2,3]")
    undefined = ViewCheck(name="d", words="z", value=float("nan"), tolerance=1.0)
    found = lines_of(render_checks([good, exact, bad, undefined]), width=80)
    assert found == [
        "✓ every row sums to 1 · 2e-07 of 1e-05 allowed",
        "✓ masked is 0 · exactly",
        "✗ check failed: x = y · 0.5 of 1e-05 allowed · worst at layer 1\\n, [2,3]",
        "✗ check failed: z · nan",
    ]
    assert "\x1b[1;31m✗" in shown(render_checks([bad]), colour="standard")
    plain = lines_of(render_checks([good, bad]), width=24, ascii=True)
    assert plain[0].startswith("ok every row")
    assert plain[1].startswith("   ")
    assert any(line.startswith("FAIL check") for line in plain)
    assert max(map(len, plain)) <= 24
    narrow = lines_of(render_checks([good]), width=24)
    assert all(cell_len(line) <= 24 for line in narrow)
    assert narrow[1].startswith("  ")


def test_a_segment_is_never_a_control_code():
    found = console(60, "truecolor").render(heatmap(pattern(40), list(HARD) * 4))
    assert all(isinstance(part, Segment) and part.control is None for part in found)

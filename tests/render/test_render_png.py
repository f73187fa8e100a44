"""Pictures: every cell has the colour of its number, at its place, with labels any token can be."""

import io
import re
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from attention_reports import matrix
from files_reports import EVIL, WRONG, attention_report, lens_report, patterns
from PIL import Image

from llmcli.commands.attention.view.files import attention_png, head_map_png
from llmcli.commands.attention.view.heads import ranked
from llmcli.commands.lens.view import lens_png
from llmcli.records.text import Token
from llmcli.ui import png
from llmcli.ui.palette import DIVERGING, VIRIDIS, Scale, rgb
from llmcli.ui.png import INK, MASKED, RED, Sheet

TITLE = "SmolLM2-135M-Instruct · Q4_1 · 12 tokens"


def opened(data):
    image = Image.open(io.BytesIO(data))
    image.load()
    assert image.format == "PNG"
    assert image.info["dpi"] == pytest.approx((300, 300), abs=0.1)
    return np.asarray(image.convert("RGB"))


def counted(pixels):
    packed = pixels.reshape(-1, 3).astype(np.int64) @ np.array([65536, 256, 1])
    numbers, counts = np.unique(packed, return_counts=True)
    colours = np.stack([numbers >> 16, numbers >> 8 & 255, numbers & 255], 1).tolist()
    return Counter(dict(zip(map(tuple, colours), counts.tolist(), strict=True)))


def box(pixels, colour):
    """Top, left, bottom and right of all that has a colour."""
    rows, columns = np.nonzero((pixels == np.array(colour, np.uint8)).all(-1))
    return rows.min(), columns.min(), rows.max() + 1, columns.max() + 1


def causal(values):
    return np.where(np.tri(*values.shape, dtype=bool), values, np.nan).astype(np.float32)


def blocks(pixels, cell, left_top, shape):
    """The colour in the middle of every cell, `[rows, columns, 3]`."""
    top, left = left_top
    rows = top + cell // 2 + cell * np.arange(shape[0])
    columns = left + cell // 2 + cell * np.arange(shape[1])
    return pixels[rows[:, None], columns]


@pytest.mark.parametrize("kind", ["linear", "sqrt", "log"])
def test_every_cell_has_the_colour_of_its_weight(kind):
    values = causal(patterns(1, 1, 12)[0][0])
    pixels = opened(attention_png(attention_report(matrices=[matrix(values)]), TITLE, kind=kind))
    expected = rgb(Scale(low=0, high=1, kind=kind).fractions(values))
    expected[np.isnan(values)] = MASKED
    # the first row sees itself alone: its colour is the last of the map, left above in the matrix
    top, left = np.argwhere((pixels[:, : pixels.shape[1] // 2] == VIRIDIS[255]).all(-1))[0]
    cell = int((pixels[top, left : left + 200] == VIRIDIS[255]).all(-1).sum())
    assert cell >= 40
    assert np.array_equal(blocks(pixels, cell, (top, left), (12, 12)), expected)


def test_scores_are_signed_and_what_is_masked_is_hatched():
    values = causal(np.random.default_rng(0).normal(size=(12, 12)))
    values[3, 1] = 0.0
    report = replace(attention_report(matrices=[matrix(values)]), what="scores")
    pixels = opened(attention_png(report, TITLE))
    colours = rgb(Scale.around([values]).fractions(values), diverging=True)
    found = counted(pixels)
    for colour in colours[~np.isnan(values)]:
        assert found[tuple(colour.tolist())] >= 40 * 40
    assert found[png.HATCH] > 66 * 40 * 40 * 0.1
    assert np.array_equal(colours[3, 1], DIVERGING[128])


def test_heads_are_drawn_on_one_scale_each_with_its_name():
    made = patterns(2, 3, 12)
    matrices = [
        matrix(causal(made[layer][head]), layer=layer, head=head)
        for layer in range(2)
        for head in range(3)
    ]
    pixels = opened(attention_png(attention_report(matrices=matrices), TITLE))
    assert pixels.shape[1] <= png.WIDE + 40
    found = counted(pixels)
    cell = 24
    for one in matrices:
        for colour in rgb(one.values[~np.isnan(one.values)].astype(np.float64)):
            assert found[tuple(colour.tolist())] >= cell * cell


@pytest.mark.parametrize("tokens", [1, 2, 40, 700])
def test_any_number_of_tokens_fits_a_page(tokens):
    values = causal(np.full((tokens, tokens), 0.5))
    report = attention_report(tokens=tokens, generated=0, matrices=[matrix(values)])
    pixels = opened(attention_png(report, TITLE))
    assert pixels.shape[1] <= png.WIDE
    assert pixels.shape[0] <= 2200
    cell = max(1, min(64, 1400 // tokens))
    half = tuple(VIRIDIS[round(255 * 0.5)].tolist())
    assert counted(pixels)[half] >= tokens * (tokens + 1) / 2 * cell * cell * 0.5


@pytest.fixture
def said(monkeypatch):
    """The words that are drawn."""
    words = []

    def heard(write):
        return lambda self, at, text, *rest: (words.append(text), write(self, at, text, *rest))

    for name in ("text", "turned"):
        monkeypatch.setattr(Sheet, name, heard(getattr(Sheet, name)))
    return words


def test_pooled_and_zoomed_matrices_say_which_tokens_they_show(said):
    zoomed = matrix(np.full((4, 6), 0.25), pool=2, queries=(20, 28), keys=(4, 16))
    attention_png(attention_report(tokens=40, matrices=[zoomed]), TITLE)
    assert [words for words in dict.fromkeys(said) if words.startswith("␣word")] == [
        *("␣word11 20", "␣word13 22", "␣word15 24", "␣word17 26"),
        *("␣word1 10", "␣word3 12", "␣word5 14"),
    ]
    assert "1 cell is the largest of 2 x 2" in said[-1]


def test_the_bar_of_a_logarithm_says_that_it_has_no_zero(said):
    def marks(value, what="pattern", **kind):
        said.clear()
        report = attention_report(matrices=[matrix(causal(np.full((2, 2), value)))])
        attention_png(replace(report, what=what), TITLE, **kind)
        return [word for word in said if re.fullmatch(r"[<\d .e-]+", word)]

    assert marks(0.25, kind="log") == ["< 1e-04", "0.001", "0.01", "0.1", "1"]
    assert marks(0.25, kind="linear") == ["0", "0.25", "0.5", "0.75", "1"]
    assert marks(2, "scores") == ["-2", "-1", "0", "1", "2"]


def test_the_map_has_a_colour_for_every_head_and_none_without_rows():
    report = attention_report(layers=2, heads=4)
    values = [head.metrics["previous_token"] for head in report.heads.values()]
    defined = sorted(filter(np.isfinite, values), reverse=True)
    assert [value for value, *_ in ranked(report, "previous_token")] == defined
    pixels = opened(head_map_png(report, "previous_token", TITLE))
    found = counted(pixels)
    for layer in report.layers:
        for head in layer.heads:
            value = head.metrics["previous_token"]
            if np.isfinite(value):
                colour = tuple(rgb(np.array(value)).tolist())
                assert found[colour] > 3000, (layer.layer, head.head)
    assert found[MASKED] > 3000
    # heads 0 and 1 share keys, and so do 2 and 3: the gap between the groups is larger
    places = {
        head: box(pixels, rgb(np.array(report.layers[1].heads[head].metrics["previous_token"])))
        for head in range(4)
    }
    steps = [places[head + 1][1] - places[head][1] for head in range(3)]
    assert steps[0] == steps[2] < steps[1]


def test_a_metric_without_a_bound_ends_at_its_largest(monkeypatch):
    said = []
    monkeypatch.setattr(png.Sheet, "headings", lambda sheet, *words: said.extend(words))
    report = attention_report(layers=2, heads=4)
    pixels = opened(head_map_png(report, "entropy", TITLE))
    assert said == ["entropy", f"{TITLE} · how spread out"]
    assert max(head.metrics["entropy"] for row in report.layers for head in row.heads) == 5.5
    assert counted(pixels)[tuple(VIRIDIS[255].tolist())] > 3000
    with pytest.raises(KeyError):
        head_map_png(report, "sink", TITLE)
    with pytest.raises(ValueError, match="no matrix"):
        attention_png(report, TITLE)


@pytest.mark.parametrize(("layers", "heads"), [(1, 1), (80, 64)])
def test_maps_of_small_and_large_models_fit_a_page(layers, heads):
    report = attention_report(layers, heads if heads > 1 else 2)
    pixels = opened(head_map_png(report, "previous_token", TITLE))
    assert pixels.shape[1] <= png.WIDE + 60
    assert pixels.shape[0] <= 3200


def test_the_lens_has_the_colour_of_every_probability():
    report = lens_report(positions=5, rows=4)
    pixels = opened(lens_png(report, TITLE))
    found = counted(pixels)
    for row in report.rows:
        for cell in row.cells:
            colour = tuple(rgb(np.array(cell.top[0].probability)).tolist())
            assert found[colour] > 3000
    lines = np.nonzero((pixels == np.array(RED, np.uint8)).all(-1))
    # one for each position that settles where it is seen, three pixels thick
    assert len(lines[0]) == 4 * 3 * (170 - 3)
    assert len(set(lines[0].tolist())) == 4 * 3


def test_of_a_long_lens_the_last_positions_are_shown():
    pixels = opened(lens_png(lens_report(positions=90, rows=2), TITLE))
    lines = np.nonzero((pixels == np.array(RED, np.uint8)).all(-1))
    assert len(lines[0]) == (png.MOST_TOKENS - 1) * 3 * (100 - 3)


@pytest.mark.parametrize("generated", [0, 1, 4, 5])
def test_a_line_stands_before_what_the_model_wrote(generated):
    pixels = opened(lens_png(lens_report(positions=5, generated=generated), TITLE))
    ink = (pixels == np.array(INK, np.uint8)).all(-1)
    columns = np.nonzero(ink.sum(0) > 4 * 36)[0]  # as long as all rows
    if not generated:
        assert not len(columns)
        return
    assert len(columns) == 3
    red = np.nonzero((pixels == np.array(RED, np.uint8)).all(-1))[1]
    assert columns.tolist() == [red.min() + (5 - generated) * 170 - at for at in (3, 2, 1)]


@pytest.mark.parametrize(
    "draw",
    [
        lambda r, lens: attention_png(replace(r, matrices=(matrix(np.ones((2, 2))),)), TITLE),
        lambda r, lens: head_map_png(r, "entropy", TITLE), lambda r, lens: lens_png(lens, TITLE),
    ],
)  # fmt: skip
def test_a_picture_with_a_failed_check_says_so(draw):
    below = [
        counted(opened(draw(attention_report(check=check), lens_report(check=check)))[-60:])[RED]
        for check in (WRONG, attention_report().checks[0])
    ]
    assert below[0] > 100
    assert below[1] == 0


# ---- text


def test_a_sign_that_no_font_has_is_spelled_out(monkeypatch):
    monkeypatch.setattr(png, "_FONTS", ("no such font.ttf",))
    png._chosen.cache_clear()
    png._font.cache_clear()
    try:
        assert png.width("日", 30) == png.width("\\u65e5", 30)
        assert png.width("×≥", 30) == png.width("x>=", 30)
        assert png.width("😀", 30) == png.width("\\U0001f600", 30)
        assert png.width("é", 30) > 0
    finally:
        png._chosen.cache_clear()
        png._font.cache_clear()


def test_labels_show_spaces_and_spell_control_characters():
    assert png.label(Token(id=7, text=" the")) == "␣the"
    assert png.label(Token(id=7, text="")) == "#7"
    assert png.label(Token(id=7, text="\n\x1b[31m")) == "\\n\\x1b[31m"
    assert all(png.label(Token(id=7, text=text)).isprintable() for text in EVIL)
    assert png.width("e\u0301", 30) == png.width("é", 30), "marks stay with their letter"
    words = png.fitted("a long name of a model", 30, 150)
    assert words.endswith("…")
    assert png.width(words, 30) <= 150, "what does not fit is cut at its end"
    assert png.fitted("short", 30, 150) == "short"
    marked = "x\u0301" * 20  # there is no single sign for x with an acute
    cut = {png.fitted(marked, 30, room) for room in range(40, 300, 7)}
    assert len(cut) > 2
    assert all(re.fullmatch("(x\u0301)*…?", words) for words in cut)


@pytest.mark.parametrize("anchor", ["l", "m", "r"])
def test_text_stands_where_it_is_put(anchor):
    sheet = Sheet(600, 80)
    sheet.text((300, 40), "middle", 30, (0, 0, 0), f"{anchor}m")
    rows, columns = np.nonzero(np.asarray(sheet.image.convert("L")) < 128)
    wide = png.width("middle", 30)
    left = {"l": 300, "m": 300 - wide / 2, "r": 300 - wide}[anchor]
    assert columns.min() == pytest.approx(left, abs=4)
    assert columns.max() == pytest.approx(left + wide, abs=4)
    assert rows.mean() == pytest.approx(40, abs=4)


def test_turned_text_reads_upwards_and_ends_below_its_place():
    sheet = Sheet(80, 300)
    sheet.turned((40, 50), "Iiiiiiiiiiiiiii.", 30, (0, 0, 0))
    rows, columns = np.nonzero(np.asarray(sheet.image.convert("L")) < 128)
    assert rows.min() >= 50
    assert columns.mean() == pytest.approx(40, abs=6)
    widest = [columns[rows == row].max() - columns[rows == row].min() for row in sorted(set(rows))]
    assert widest[-3] > widest[2]  # the I, which is taller than the dot, is below

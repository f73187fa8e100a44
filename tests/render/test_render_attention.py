"""The page of `llmcli attention` as text: map of heads, tables, panels, footer."""

import io
import math
import re
from dataclasses import replace

import numpy as np
import pytest
from attention_reports import (
    BAD,
    GOOD,
    METRICS,
    grouped_layers,
    head,
    matrix,
    pair,
    pattern,
    report,
)
from rich.cells import cell_len
from rich.console import Console

from llmcli.render.attention import heatmaps, metric_map, overview, render_attention
from llmcli.render.attention_map import HeadMap, scale_of, short
from llmcli.render.attention_tables import metric_table, pair_table
from llmcli.render.palette import rgb
from llmcli.reports.attention import LayerReport

ENTROPY, KEYS, PREVIOUS, INDUCTION = METRICS
HARD = ("\n", "\x1b[31m", " [red]x[/]", " 中文", "שלום", "e\u0301", "\\xf0", "\u202e", "a" * 60, "")


def shown(renderable, width=80, colour=None):
    console = Console(
        file=io.StringIO(), width=width, color_system=colour, force_terminal=bool(colour),
        no_color=colour is None, highlight=False, markup=False, emoji=False, legacy_windows=False,
    )  # fmt: skip
    console.print(renderable, crop=False)
    return console.file.getvalue()


def lines_of(renderable, **options):
    return re.sub(r"\x1b\[[0-9;]*m", "", shown(renderable, **options)).splitlines()


def head_map(found, metric=ENTROPY, *, numbers=False):
    return HeadMap(report=found, metric=metric, scale=scale_of(found, metric), numbers=numbers)


def test_the_map_has_letters_and_groups():
    assert lines_of(head_map(report())) == [
        "layer   0  1   2  3",
        "0       -  -│  -  -",
        "1       -  p│  -  -",
        "2      pb  -│  -  -",
    ]


def test_heads_that_share_nothing_have_no_bar_between_them():
    found = report(layers=grouped_layers(group=1))
    assert lines_of(head_map(found))[1] == "0       -  -  -  -"


def test_numbers_and_what_is_undefined():
    assert lines_of(head_map(report(), PREVIOUS, numbers=True)) == [
        "layer    0   1    2   3",
        "0      .10 .10│ .10 .10",
        "1      .10 .93│ .10 .10",
        "2      .50 .10│ .10 .10",
    ]
    assert lines_of(head_map(report(), INDUCTION, numbers=True))[3] == "2        · .10│ .10 .10"
    text = "\n".join(lines_of(metric_map(report(), INDUCTION, "linear")))
    assert "· undefined" in text
    assert "undefined" not in "\n".join(lines_of(metric_map(report(), PREVIOUS, "linear")))


def test_a_scale_without_end_goes_to_the_largest():
    assert (scale_of(report(), KEYS).low, scale_of(report(), KEYS).high) == (1.0, 12.5)
    assert (scale_of(report(), PREVIOUS).low, scale_of(report(), PREVIOUS).high) == (0.0, 1.0)
    undefined = tuple(
        replace(layer, heads=tuple(replace(h, metrics=dict.fromkeys(h.metrics, math.nan))
                                   for h in layer.heads)) for layer in grouped_layers()
    )  # fmt: skip
    assert scale_of(report(layers=undefined), KEYS).high == 2.0


@pytest.mark.parametrize(
    ("value", "share", "words"),
    [(0.07, True, ".07"), (0.999, True, "1.0"), (0.0, True, ".00"), (1.0, True, "1.0"),
     (7.434, False, "7.43"), (9.999, False, "10.0"), (99.96, False, "100"),
     (1234.4, False, "1234")],
)  # fmt: skip
def test_short_numbers(value, share, words):
    assert short(value, share) == words
    assert len(words) <= 4


def test_colours_are_those_of_the_metric():
    text = shown(head_map(report(), PREVIOUS, numbers=True), colour="truecolor")
    for value in (0.1, 0.5, 0.93):
        colour = ";".join(map(str, rgb(np.array([value]))[0]))
        assert f"48;2;{colour}m" in text


def test_a_window_stands_beside_its_layer():
    mixed = (*grouped_layers(1), *grouped_layers(1, kind="window 4"))
    found = lines_of(head_map(report(layers=(mixed[0], replace(mixed[1], layer=1)))))
    assert found[1].startswith("0 full     ")
    assert found[2].startswith("1 window 4 ")


@pytest.mark.parametrize("width", [40, 60, 80, 200])
@pytest.mark.parametrize("heads", [1, 9, 32, 71, 128])
@pytest.mark.parametrize("numbers", [False, True])
def test_every_head_is_there_at_every_width(width, heads, numbers):
    group = {9: 3, 32: 4, 128: 16}.get(heads, 1)
    layer = LayerReport(
        layer=0, kind="full", kv_heads=heads // group,
        heads=tuple(head(n, n // group, previous_token=n / heads) for n in range(heads)),
    )  # fmt: skip
    found = lines_of(head_map(report(layers=(layer,)), PREVIOUS, numbers=numbers), width=width)
    assert all(cell_len(line) <= width for line in found)
    rows = [line.removeprefix("0      ") for line in found if line.startswith("0 ")]
    signs = [sign for row in rows for sign in re.split(r"[ │]+", row) if sign]
    assert len(signs) == heads
    if numbers:
        assert signs == [short(n / heads, True) for n in range(heads)]
    assert "".join(rows).count("│") <= heads // group - 1


def test_blocks_end_where_groups_do():
    layer = LayerReport(
        layer=0, kind="full", kv_heads=4, heads=tuple(head(n, n // 4) for n in range(16))
    )
    found = lines_of(head_map(report(layers=(layer,)), PREVIOUS, numbers=True), width=40)
    headers = [line.split()[1:] for line in found if line.startswith("layer")]
    assert headers == [[str(n) for n in range(8)], [str(n) for n in range(8, 16)]]


def test_the_overview_names_what_it_found_and_by_which_rule():
    found = lines_of(overview(report()))
    assert "p previous-token (previous_token ≥ 0.4, 3 rows): 2 heads · 1.1 .93 · 2.0 .50" in found
    assert "i induction (induction ≥ 0.4, 3 rows): none" in found
    assert "b broad (normalized_entropy ≥ 0.8, 3 rows): 1 head · 2.0 .90" in found
    assert "to see one (previous-token): --layer 1 --head 1" in found
    assert "a head is written layer.head; bars part heads that share keys and values" in found
    assert any("--synthetic 32" in line for line in found)


def test_a_text_that_repeats_is_not_told_to_repeat():
    twice = ("s", "a", "b", "c", "a", "b", "c")
    found = replace(report(), tokens=tuple((ord(text), text) for text in twice))
    assert not any("--synthetic" in line for line in lines_of(overview(found)))


def test_a_bare_model_has_no_kinds_and_no_bars():
    layer = LayerReport(layer=0, kind="full", kv_heads=2, heads=(head(0), head(1)))
    found = lines_of(overview(report(layers=(layer,))))
    assert "to see one: --layer 0 --head 0" in found
    assert "a head is written layer.head" in found


def test_the_page_ends_with_its_checks_and_says_what_was_left_out():
    found = report(checks=(GOOD, BAD), skipped=(("effective_rank", "too long"),), weighted=True)
    lines = lines_of(render_attention(found, "tiny [b]\x1b", [overview(found)]))
    assert lines[0] == "tiny [b]\\x1b"
    assert lines[1] == '3 tokens · 0 "a" · 1 " b" · 2 " c"'
    assert "effective_rank was left out: too long" in lines
    assert any("A[i,j] ‖v_j W_O‖" in line for line in lines)
    assert lines[-2].startswith("✓ every row sums to 1")
    assert lines[-1].startswith("✗ not so: pattern @ values = z")
    assert "\x1b[1;31m✗" in shown(render_attention(found, "t", []), colour="standard")


def test_generated_tokens_are_told():
    lines = lines_of(render_attention(report(prompt_tokens=2), "t", []))
    assert lines[1].startswith("3 tokens, from 2 on generated · 0")
    many = report(tuple("abcdefghijklmnopqrstuvwxyz"))
    assert "… 10 more" in "\n".join(lines_of(render_attention(many, "t", [])))


def test_one_head_has_its_tokens_several_their_names():
    one = report(matrices=(matrix(pattern(3), layer=1, head=2, kv_head=1),))
    lines = lines_of(heatmaps(one, "sqrt"))
    assert lines[0] == "layer 1 (full), head 2, keys and values of kv head 1"
    assert lines[1].startswith('0 "a"')
    assert "pattern: the weights of every query, 1 in all (sqrt scale)" in lines
    two = report(matrices=tuple(matrix(pattern(3), head=n, kv_head=n // 2) for n in (1, 2)))
    assert lines_of(heatmaps(two, "linear"))[0].split() == ["0.1", "kv", "0", "0.2", "kv", "1"]


def test_scores_have_their_own_scale_around_zero():
    values = np.array([[-4.0, np.nan], [1.0, 2.0]])
    lines = lines_of(heatmaps(report(what="scores", matrices=(matrix(values),)), "linear"))
    assert any(line.startswith("−4 ") and " 4 " in line for line in lines)
    assert any(line.startswith("scores:") for line in lines)


def test_a_token_without_text_is_its_id():
    lines = lines_of(heatmaps(report(("", ""), matrices=(matrix(pattern(2)),)), "linear"))
    assert lines[1].startswith('0 "id 10"')
    assert "0 id 10" in "\n".join(lines_of(render_attention(report(("", "")), "t", [])))


def test_the_table_has_every_metric_of_every_head():
    for width in (60, 80, 200):
        lines = lines_of(metric_table(report(), METRICS), width=width)
        text = "\n".join(lines)
        for metric in METRICS:
            assert metric.name in text
            assert f"{metric.name}: {metric.formula}" in text.replace("\n", " ")
        rows = [line.split() for line in lines if line.startswith("1.1 ")]
        numbers = [value for row in rows for value in row[2:]]
        assert numbers == ["0.1", "1", "0.93", "0.1"]
        assert all(row[1] == "0" for row in rows)
        assert "–" in [line.split()[-1] for line in lines if line.startswith("2.0 ")]
        assert all(cell_len(line) <= width for line in lines)
    assert "no row counts" not in "\n".join(lines_of(metric_table(report(), [ENTROPY])))


def test_pairs_are_named_by_their_tokens():
    lines = lines_of(pair_table(report(pairs=(pair(2, 1), pair(1, 0, 0.5))), everything=False))
    assert lines[0].split() == ["head", "query", "key", "weight"]
    assert lines[2].split() == ["1.2", "2", '"', 'c"', "1", '"', 'b"', "0.7500"]
    assert lines[-1].endswith("ranked by weight: the first token and each token itself left out")
    ranked = report(pairs=(pair(2, 1, 0.75, 3.5),))
    lines = lines_of(pair_table(ranked, everything=True))
    assert lines[0].endswith("× ‖v W_O‖")
    assert lines[2].endswith("3.5")
    assert lines[-1] == "pairs of tokens ranked by weight × ‖v W_O‖"
    assert lines_of(pair_table(report(), everything=True)) == ["no pair of tokens"]


@pytest.mark.parametrize("width", [40, 60, 80, 200])
@pytest.mark.parametrize("colour", [None, "standard", "256", "truecolor"])
def test_every_view_fits_with_any_token(width, colour):
    texts = tuple(HARD[at % len(HARD)] for at in range(23))
    found = report(
        texts,
        pairs=(pair(3, 1), pair(8, 4, 0.1, 2.5)),
        matrices=(matrix(pattern(23)),),
        checks=(GOOD, BAD),
    )
    views = [
        overview(found), metric_map(found, KEYS, "log"), heatmaps(found, "log"),
        pair_table(found, everything=False), metric_table(found, METRICS),
    ]  # fmt: skip
    text = shown(render_attention(found, "model", views), width=width, colour=colour)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert "\x1b" not in plain
    assert "\u202e" not in plain
    assert "[red]" in plain
    assert max(map(cell_len, plain.splitlines())) <= width

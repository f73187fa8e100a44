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
    LABELS,
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

from llmcli.commands.attention.report.heads import LayerReport
from llmcli.commands.attention.view.map import (
    Found,
    HeadMap,
    kinds_found,
    quiet_kinds,
    scale_of,
    short,
)
from llmcli.commands.attention.view.screen import (
    Calls,
    head_summary,
    heatmaps,
    is_single,
    metric_map,
    overview,
    render_attention,
)
from llmcli.commands.attention.view.tables import MetricTable, metric_table, pair_table
from llmcli.ui.palette import rgb

CALLS = Calls(same="llmcli attention x", repeated="llmcli attention --synthetic 32")
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


def test_kinds_of_layers_are_named_where_there_are_several():
    mixed = (*grouped_layers(1), *grouped_layers(1, kind="window 4"))
    found = report(layers=(mixed[0], replace(mixed[1], layer=1)))
    assert "full: layer 0 · window 4: layer 1" in lines_of(overview(found, CALLS))
    assert "window" not in "\n".join(lines_of(overview(report(), CALLS)))


def tall(layers, heads, group=1, **metrics):
    """So many layers of plain heads; the metric of head h of layer n is n + h / heads."""
    return report(layers=tuple(
        LayerReport(
            layer=n, kind="full", kv_heads=heads // group,
            heads=tuple(
                head(h, h // group, previous_token=(n + h / heads) / layers, **metrics)
                for h in range(heads)
            ),
        )
        for n in range(layers)
    ))  # fmt: skip


@pytest.mark.parametrize(
    ("layers", "heads", "group", "width", "lines"),
    [(30, 9, 3, 80, 10), (12, 12, 1, 80, 6), (24, 16, 8, 80, 8), (32, 32, 4, 80, 16),
     (32, 32, 4, 120, 11), (30, 9, 3, 40, 10), (80, 64, 8, 80, 80), (9, 9, 3, 80, 9)],
)  # fmt: skip
def test_layers_stand_beside_each_other_where_there_are_many(layers, heads, group, width, lines):
    found = lines_of(head_map(tall(layers, heads, group)), width=width)
    assert len(found) == 1 + lines
    assert all(cell_len(line) <= width for line in found)
    # what is beside each other is read down, then on to the right
    columns = [re.findall(r"(?:^|  ) ?(\d+) (?=[ -])", line) for line in found[1:]]
    numbers = sorted(int(number) for row in columns for number in row)
    assert numbers == list(range(layers))
    assert [int(row[0]) for row in columns] == list(range(lines))


def test_numbers_of_layers_beside_each_other_are_those_of_the_heads():
    found = lines_of(head_map(tall(30, 9, 3), PREVIOUS, numbers=True))
    assert len(found) == 16
    for row, line in enumerate(found[1:]):
        numbers = line.split()
        for layer, own in ((row, numbers[:10]), (row + 15, numbers[10:])):
            expected = [short((layer + h / 9) / 30, True) for h in range(9)]
            assert own == [str(layer), *expected]


def test_a_kind_that_most_heads_are_of_is_quiet():
    def layers(sinks, broad):
        heads = tuple(
            head(n, n, ("sink",) * (n < sinks) + ("broad",) * (n < broad),
                 normalized_entropy=0.9 if n < broad else 0.1)
            for n in range(8)
        )  # fmt: skip
        return report(layers=(LayerReport(layer=0, kind="full", kv_heads=8, heads=heads),),
                      labels=(*LABELS, SINK))  # fmt: skip

    SINK = replace(LABELS[0], name="sink", letter="s", metric="induction")
    often = layers(6, 1)
    assert quiet_kinds(often) == ("sink",)
    assert lines_of(head_map(often))[1].split() == ["0", "b", *"·····", "-", "-"]
    assert any(line.startswith("· sink ≥ 0.4: 6 of 8 heads · ") for line in
               lines_of(kinds_found(often), width=200))  # fmt: skip
    rare = layers(2, 0)
    assert quiet_kinds(rare) == ()
    assert lines_of(head_map(rare))[1].split() == ["0", "s", "s", *"------"]
    coloured = shown(head_map(often), colour="truecolor")
    assert re.search(r"\x1b\[2;[\d;]*m +·", coloured)  # dim
    assert re.search(r"\x1b\[1;[\d;]*m +b", coloured)  # bold


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
    rows = [re.sub("^0 +", "", line) for line in found if re.match("0 +[-.]", line)]
    signs = [sign for row in rows for sign in re.split(r"[ │]+", row) if sign]
    if numbers:
        assert signs == [short(n / heads, True) for n in range(heads)]
    else:
        assert "".join(signs) == "-" * heads
    assert "".join(rows).count("│") <= heads // group - 1


def test_blocks_end_where_groups_do():
    layer = LayerReport(
        layer=0, kind="full", kv_heads=4, heads=tuple(head(n, n // 4) for n in range(16))
    )
    found = lines_of(head_map(report(layers=(layer,)), PREVIOUS, numbers=True), width=40)
    headers = [line.split()[1:] for line in found if line.startswith("layer")]
    assert headers == []
    headers = [line.split() for line in found if not line.startswith("0")]
    assert [header for header in headers if header] == [
        [str(n) for n in range(8)], [str(n) for n in range(8, 16)]
    ]  # fmt: skip


def test_the_overview_names_what_it_found_and_by_which_rule():
    found = lines_of(overview(report(), CALLS))
    assert "p previous-token ≥ 0.4: 2 of 12 heads · 1.1 .93 · 2.0 .50" in found
    assert "no head: induction (highest 0.0 .10)" in found
    assert "b broad ≥ 0.8: 1 of 12 heads · 2.0 .90" in found
    assert "head 1.1 (previous-token): llmcli attention x --layer 1 --head 1" in found


@pytest.mark.parametrize(
    ("rows", "words"),
    [(0, "no token comes twice"), (1, "1 row of repeated tokens only"),
     (31, "31 rows of repeated tokens only"), (32, None)],
)  # fmt: skip
def test_few_rows_of_repeated_tokens_are_mentioned(rows, words):
    found = report(rows={metric.name: 50 for metric in METRICS} | {"induction": rows})
    lines = [line for line in lines_of(overview(found, CALLS), width=200) if "--synthetic" in line]
    expected = f"induction, duplicate: {words}; try: llmcli attention --synthetic 32"
    assert lines == ([] if words is None else [expected])
    repeated = overview(found, replace(CALLS, repeated=None))
    assert "--synthetic" not in "\n".join(lines_of(repeated))


def test_repeated_text_leads_to_an_induction_head():
    layer = LayerReport(
        layer=4, kind="full", kv_heads=4,
        heads=(head(0, labels=("previous-token",), previous_token=0.9),
               head(1, labels=("induction",), induction=0.5),
               head(2, labels=("induction", "broad"), induction=0.7, normalized_entropy=0.8)),
    )  # fmt: skip

    def proposed(calls):
        text = "\n".join(lines_of(overview(report(layers=(layer,)), calls), width=200))
        return re.findall(r"head \S+ \((\S+)\): llmcli attention x (.*)", text)

    assert proposed(replace(CALLS, repeated=None)) == [("induction", "--layer 4 --head 2")]
    assert proposed(CALLS) == [("previous-token", "--layer 4 --head 0")]


def many_heads(count):
    return report(
        layers=(
            LayerReport(
                layer=10, kind="full", kv_heads=count,
                heads=tuple(
                    head(n, labels=("previous-token",), previous_token=0.9 - n / 1000)
                    for n in range(count)
                ),
            ),
        )
    )  # fmt: skip


@pytest.mark.parametrize("width", [40, 80, 120, 200])
@pytest.mark.parametrize("count", [1, 7, 90, 300])
def test_as_many_heads_are_named_as_a_line_holds(width, count):
    lines = lines_of(Found(many_heads(count), LABELS[0]), width=width)
    assert len(lines) <= (1 if width > 40 else 2)  # of 40 columns the rule alone fills one
    assert max(map(len, lines)) <= width
    named = re.findall(r"10\.\d+ \.\d\d", " ".join(lines))
    more = re.search(r"(\d+) more$", lines[-1])
    assert len(named) + (int(more[1]) if more else 0) == count
    assert named == [f"10.{n} {short(0.9 - n / 1000, True)}" for n in range(len(named))]
    if width >= 80 and more:
        assert sum(map(len, lines)) > width - 25  # no room is left for two more


def test_a_kind_that_cannot_be_told_says_why():
    layer = LayerReport(
        layer=0, kind="full", kv_heads=2, heads=(head(0, previous_token=0.9), head(1))
    )
    found = report(layers=(layer,), unlabelled=(("previous-token", "only 2 rows qualify"),))
    lines = lines_of(kinds_found(found))
    assert lines[-1] == "undetermined: previous-token (only 2 rows qualify)"
    assert lines[-2].startswith("no head: induction (highest")
    assert "undetermined" not in "\n".join(lines_of(kinds_found(found, ["previous-token"])))
    [line] = lines_of(Found(replace(found, layers=grouped_layers()), LABELS[0]), width=200)
    assert ": 2 of 12 heads · 1.1 .93" in line
    lines = lines_of(kinds_found(replace(found, layers=grouped_layers())))
    assert lines[-1] == "undetermined: previous-token (only 2 rows qualify)"
    single = replace(found, layers=(replace(layer, heads=layer.heads[:1]),))
    assert lines_of(head_summary(single, numbers=False)) == [
        "of no kind · undetermined: previous-token (only 2 rows qualify)"
    ]


def test_a_value_below_the_threshold_is_not_rounded_up_to_it():
    layer = LayerReport(layer=0, kind="full", kv_heads=1, heads=(head(0, previous_token=0.3999),))
    assert Found(report(layers=(layer,)), LABELS[0]).highest == "previous-token (highest 0.0 .39)"
    undefined = replace(layer, heads=(head(0, previous_token=math.nan),))
    assert Found(report(layers=(undefined,)), LABELS[0]).highest == "previous-token"


def test_a_bare_model_has_no_kinds_and_no_bars():
    layer = LayerReport(layer=0, kind="full", kv_heads=2, heads=(head(0), head(1)))
    found = lines_of(overview(report(layers=(layer,)), CALLS))
    assert "head 0.0: llmcli attention x --layer 0 --head 0" in found
    assert "│" not in "\n".join(found)


def test_the_page_says_what_was_left_out():
    found = report(checks=(GOOD, BAD), skipped=(("effective_rank", "too long"),), weighted=True)
    lines = lines_of(render_attention(found, "tiny [b]\x1b", [overview(found, CALLS)]))
    assert lines[0] == "tiny [b]\\x1b"
    assert lines[1] == '3 tokens · 0 "a" · 1 " b" · 2 " c"'
    assert "effective_rank was left out: too long" in lines
    assert any("A[i,j] ‖v_j W_O‖" in line for line in lines)
    assert not any(line[:1] in "✓✗" for line in lines if line)  # `Output.present` shows checks


@pytest.mark.parametrize("width", [30, 40, 80, 200])
def test_the_prompt_is_a_line(width):
    lines = lines_of(render_attention(report(prompt_tokens=2), "t", []), width=width)
    assert lines[1].startswith("3 tokens, from 2 on generated")
    many = report(tuple("abcdefghijklmnopqrstuvwxyz"))
    lines = lines_of(render_attention(many, "t", []), width=width)
    assert len(lines) == 2
    named = [int(at) for at in re.findall(r'(\d+) "', lines[1])]
    more = re.search(r"… (\d+) more", lines[1])
    assert len(named) + (int(more[1]) if more else 0) == 26
    assert named == sorted(named)
    if width >= 80:
        assert {0, 25} <= set(named)


def test_one_head_has_its_tokens_several_their_names():
    one = report(matrices=(matrix(pattern(3), layer=1, head=2, kv_head=1),))
    lines = lines_of(heatmaps(one, "sqrt"))
    assert lines[0] == "layer 1 (full), head 2, kv head 1, 3 tokens, queries down, keys across"
    assert lines[1].startswith('0 "a"')
    assert any(line.startswith("pattern: each row sums to 1 (sqrt scale)  0 ") for line in lines)
    two = report(matrices=tuple(matrix(pattern(3), head=n, kv_head=n // 2) for n in (1, 2)))
    assert lines_of(heatmaps(two, "linear"))[0].split() == ["0.1", "kv", "0", "0.2", "kv", "1"]


def test_scores_have_their_own_scale_around_zero():
    values = np.array([[-4.0, np.nan], [1.0, 2.0]])
    lines = lines_of(heatmaps(report(what="scores", matrices=(matrix(values),)), "linear"))
    assert any(re.fullmatch(r"scores: .*  −4 .* 0 .* 4   · masked", line) for line in lines)
    assert [re.findall(r"−?\d\.\d", line) for line in lines[1:3]] == [["−4.0"], ["1.0", "2.0"]]


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
    assert "no row qualifies" not in "\n".join(lines_of(metric_table(report(), [ENTROPY])))


SMALL = (0.0001234, 3.25e-06, 0.1, math.nan, 1.0, 12345.678, 1e-300)


def test_a_table_of_metrics_fits_every_width():
    layer = LayerReport(
        layer=11, kind="full", kv_heads=4,
        heads=tuple(
            head(n, n // 2, **{m.name: SMALL[(n + at) % 7] for at, m in enumerate(METRICS)})
            for n in range(8)
        ),
    )  # fmt: skip
    found = report(layers=(layer,))
    for width in range(40, 201):
        lines = lines_of(MetricTable(found, METRICS), width=width)
        assert max(map(cell_len, lines)) <= width
        numbers = [n for line in lines if line.startswith("11.0 ") for n in line.split()[2:]]
        assert numbers == ["0.0001234", "3.25e-06", "0.1", "–"]


def one_head(**changed):
    layer = LayerReport(
        layer=1, kind="full", kv_heads=1,
        heads=(head(3, 1, ("previous-token",), previous_token=0.93, induction=math.nan),),
    )  # fmt: skip
    return report(layers=(layer,), **changed)


def test_the_metrics_of_one_head_stand_below_each_other():
    lines = lines_of(metric_table(one_head(), METRICS), width=200)
    assert lines[0].split() == ["metric", "value", "definition", "rows", "source"]
    assert [line.split()[:2] for line in lines[2:6]] == [
        ["normalized_entropy", "0.1"], ["effective_keys", "1"],
        ["previous_token", "0.93"], ["induction", "–"],
    ]  # fmt: skip
    assert all(metric.formula in line for metric, line in zip(METRICS, lines[2:], strict=False))
    narrow = lines_of(metric_table(one_head(), METRICS), width=60)
    assert "    mean over i ≥ 1 of A[i,i−1] · rows 3" in narrow


def test_one_head_tells_its_kinds_and_its_numbers():
    kinds = lines_of(head_summary(one_head(), numbers=False))
    assert kinds == ["previous-token (.93 ≥ 0.4)"]
    numbers = "\n".join(lines_of(head_summary(one_head(), numbers=True)))
    assert "effective_keys 1.00" in numbers
    assert "previous_token .93" not in numbers
    assert "induction" not in numbers  # it has none
    assert is_single(one_head())
    assert not is_single(report())
    plain = report(layers=(LayerReport(layer=0, kind="full", kv_heads=1, heads=(head(0),)),))
    assert lines_of(head_summary(plain, numbers=False))[0].startswith("of no kind")


def test_what_is_weighted_is_said_where_it_is():
    drawn = heatmaps(one_head(weighted=True, matrices=(matrix(pattern(3), layer=1),)), "sqrt")
    text = "\n".join(lines_of(render_attention(one_head(weighted=True), "t", [drawn])))
    assert "a heatmap is of A[i,j] itself" in text
    assert "metrics of A[i,j] ‖v_j W_O‖" not in text
    found = report(weighted=True)
    for view in (
        overview(found, CALLS), metric_map(found, PREVIOUS, "linear"),
        head_summary(one_head(weighted=True), numbers=True), metric_table(found, METRICS),
    ):  # fmt: skip
        assert "metrics of A[i,j] ‖v_j W_O‖" in "\n".join(lines_of(view))
    assert "‖v_j W_O‖" not in "\n".join(lines_of(overview(report(), CALLS)))


def test_a_map_without_colour_has_no_key_of_shades():
    undefined = report(layers=tuple(
        replace(layer, heads=tuple(replace(h, metrics=h.metrics | {ENTROPY.name: math.nan})
                                   for h in layer.heads)) for layer in grouped_layers()
    ))  # fmt: skip
    for found in (report(), undefined):
        plain = "\n".join(lines_of(overview(found, CALLS)))
        coloured = "\n".join(lines_of(overview(found, CALLS), colour="truecolor"))
        assert not set("░▒▓█") & set(plain)
        assert "how spread out" not in plain
        assert "- of no kind" in plain
        assert ("? undefined" in plain) == (found is undefined)
        assert "colour: normalized_entropy " in coloured
    numbers = "\n".join(lines_of(metric_map(report(), PREVIOUS, "linear")))
    assert "previous_token, attention to the token before" in numbers
    assert not set("░▒▓█") & set(numbers)


def test_pairs_are_named_by_their_tokens():
    found = report(pairs=(pair(2, 1), pair(1, 0, 0.5)))
    lines = lines_of(pair_table(found, everything=False), width=100)
    assert lines[0].split() == ["head", "query", "key", "weight"]
    assert lines[2].split() == ["1.2", "2", '"', 'c"', "1", '"', 'b"', "0.7500"]
    left = "pairs of tokens: the first token and each token itself left out; ranked by weight"
    assert lines[-1] == left
    lines = lines_of(pair_table(report(), everything=True, spans=((1, 9), (0, 2))))
    assert lines == ["no pair of tokens of queries 1:3 and keys 0:2"]
    ranked = report(pairs=(pair(2, 1, 0.75, 3.5),))
    lines = lines_of(pair_table(ranked, everything=True))
    assert lines[0].endswith("× ‖v W_O‖")
    assert lines[2].endswith("3.5")
    assert lines[-1] == "pairs of tokens; ranked by weight × ‖v W_O‖"
    assert lines_of(pair_table(report(), everything=True)) == ["no pair of tokens"]


@pytest.mark.parametrize("width", [40, 60, 80, 200])
@pytest.mark.parametrize("colour", [None, "standard", "256", "truecolor"])
def test_every_view_fits_with_any_token(width, colour):
    texts = tuple(HARD[at % len(HARD)] for at in range(23))
    found = report(
        texts, pairs=(pair(3, 1), pair(8, 4, 0.1, 2.5)), matrices=(matrix(pattern(23)),),
        checks=(GOOD, BAD),
    )  # fmt: skip
    views = [
        overview(found, CALLS), metric_map(found, KEYS, "log"), heatmaps(found, "log"),
        pair_table(found, everything=False), metric_table(found, METRICS),
    ]  # fmt: skip
    text = shown(render_attention(found, "model", views), width=width, colour=colour)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert "\x1b" not in plain
    assert "\u202e" not in plain
    assert "[red]" in plain
    assert max(map(cell_len, plain.splitlines())) <= width


def test_a_metric_that_no_head_has_is_a_sentence():
    undefined = report(layers=tuple(
        replace(layer, heads=tuple(replace(h, metrics=h.metrics | {"induction": math.nan})
                                   for h in layer.heads)) for layer in grouped_layers()
    ))  # fmt: skip
    why = "undefined for every head, because no token of this text occurs again within what a head"
    lines = lines_of(metric_map(undefined, INDUCTION, "linear", CALLS), width=120)
    assert lines == [
        f"induction: {why} sees", "try: llmcli attention --synthetic 32 --map induction"
    ]  # fmt: skip
    table = lines_of(metric_table(undefined, METRICS), width=120)
    assert "induction" not in table[0]
    assert any(line.startswith(f"induction: {why}") for line in table)
    alone = lines_of(metric_table(undefined, [INDUCTION]), width=120)
    assert alone == [f"induction: {why} sees"]
    assert "because" not in "\n".join(lines_of(metric_table(report(), METRICS)))


@pytest.mark.parametrize("colour", [None, "truecolor"])
def test_screens_of_a_small_model_fit_80_by_24(colour):
    """30 layers of 9 heads, 13 tokens; below stand a blank line, the checks and the next prompt."""
    labels = ("previous-token", "induction", "broad")
    layers = tuple(
        LayerReport(
            layer=n, kind="full", kv_heads=3,
            heads=tuple(head(h, h // 3, (labels[(n + h) % 3],)) for h in range(9)),
        )
        for n in range(30)
    )  # fmt: skip
    texts = [" because", " cat", " sat", " on", " the", " mat"] * 3
    found = report(tuple(texts[:13]), layers=layers, rows={"induction": 3})
    page = render_attention(found, "m", [overview(found, CALLS)])
    assert len(lines_of(page, colour=colour)) <= 21
    one = replace(
        found, matrices=(matrix(pattern(13), layer=1, head=2),),
        layers=(replace(layers[1], heads=layers[1].heads[2:3]),),
    )  # fmt: skip
    views = [heatmaps(one, "sqrt"), head_summary(one, numbers=True)]
    lines = lines_of(render_attention(one, "m", views), colour=colour)
    assert len(lines) <= 21 + 1  # these two views are one in the command, without a line between
    assert max(map(cell_len, lines)) <= 80
    assert lines[2].split()[:2] == ["0", '"']
    assert "1.0" in lines[2]
    assert lines[16].split()[:3] == ["beca", "cat", "sat"]

"""The page of `llmcli attention` as text: map of heads, tables, panels, footer."""

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
from drawn import lines_of, shown
from rich.cells import cell_len

from llmcli.commands.attention.report.heads import LayerReport
from llmcli.commands.attention.view import map as maps
from llmcli.commands.attention.view import screen
from llmcli.commands.attention.view.tables import metric_table, pair_table

CALLS = screen.Calls(same="llmcli attention x", repeated="llmcli attention --synthetic 32")
ENTROPY, KEYS, PREVIOUS, INDUCTION = METRICS
def head_map(found, metric=ENTROPY, *, numbers=False):
    scale = maps.scale_of(found, metric)
    return maps.HeadMap(report=found, metric=metric, scale=scale, numbers=numbers)


def of(*heads, layer=0, group=1, **changed):
    """A report of one layer of those heads."""
    one = LayerReport(layer=layer, kind="full", kv_heads=len(heads) // group or 1, heads=heads)
    return report(layers=(one,), **changed)


def one_head(**changed):
    return of(head(3, 1, ("previous-token",), previous_token=0.93, induction=math.nan), layer=1,
              **changed)  # fmt: skip


def undefined(*names):
    """The heads have no number of those metrics."""
    return report(layers=tuple(
        replace(layer, heads=tuple(
            replace(one, metrics=one.metrics | dict.fromkeys(names, math.nan))
            for one in layer.heads
        ))
        for layer in grouped_layers()
    ))  # fmt: skip


def tall(layers, heads, group=1):
    """So many layers of plain heads; the metric of head h of layer n is n + h / heads."""
    return report(layers=tuple(
        LayerReport(
            layer=n, kind="full", kv_heads=heads // group,
            heads=tuple(
                head(h, h // group, previous_token=(n + h / heads) / layers) for h in range(heads)
            ),
        )
        for n in range(layers)
    ))  # fmt: skip


def sinks(count, broad):
    """Of eight heads so many are sinks, and so many broad."""
    label = replace(LABELS[0], name="sink", letter="s", metric="induction")
    heads = [
        head(n, n, ("sink",) * (n < count) + ("broad",) * (n < broad),
             normalized_entropy=0.9 if n < broad else 0.1)
        for n in range(8)
    ]  # fmt: skip
    return of(*heads, labels=(*LABELS, label))


def test_maps_and_kinds(golden):
    mixed = (*grouped_layers(1), replace(*grouped_layers(1, kind="window 4"), layer=1))
    numbers = {"numbers": True}
    few = {rows: report(rows={metric.name: 50 for metric in METRICS} | {"induction": rows})
           for rows in (0, 1, 31, 32)}  # fmt: skip
    repeated = of(
        head(0, labels=("previous-token",), previous_token=0.9),
        head(1, labels=("induction",), induction=0.5),
        head(2, labels=("induction", "broad"), induction=0.7, normalized_entropy=0.8), layer=4,
    )  # fmt: skip
    untold = {"unlabelled": {"previous-token": "only 2 rows qualify"}}
    alone = of(head(0, previous_token=0.9), head(1), **untold)
    told = report(**untold)
    golden("attention-map", {
        "letters, and bars between heads that share no keys": lines_of(head_map(report())),
        "no bars where no heads share keys": lines_of(
            head_map(report(layers=grouped_layers(group=1)))
        ),
        "numbers": lines_of(head_map(report(), PREVIOUS, **numbers)),
        "numbers, one of which is undefined, which is said below": lines_of(
            screen.metric_map(report(), INDUCTION, "linear")
        ),
        "with words, and no shades without colour": lines_of(
            screen.metric_map(report(), PREVIOUS, "linear")
        ),
        "numbers of layers beside each other are those of their heads": lines_of(
            head_map(tall(30, 9, 3), PREVIOUS, **numbers)
        ),
        "blocks end where groups do": lines_of(
            head_map(of(*(head(n, n // 4) for n in range(16)), group=4), PREVIOUS, **numbers),
            width=40,
        ),
        "the overview: what was found, by which rule, and where to look; no key without colour":
            lines_of(screen.overview(report(), CALLS), width=200),
        "kinds of layers are named where there are several":
            lines_of(screen.overview(report(layers=mixed), CALLS)),
        "a kind that most heads are of is quiet": lines_of(head_map(sinks(6, 1)))
            + lines_of(maps.kinds_found(sinks(6, 1)), width=200),
        "one that few are of has its letter": lines_of(head_map(sinks(2, 0))),
        "a bare model has no kinds and no bars":
            lines_of(screen.overview(of(head(0), head(1)), CALLS)),
        "heads without a number are unclassified":
            lines_of(screen.overview(undefined(ENTROPY.name), CALLS)),
        "few rows of repeated tokens are mentioned": [
            line for found in few.values()
            for line in lines_of(screen.overview(found, CALLS), width=200) if "--synthetic" in line
        ],
        "repeated text leads to an induction head": lines_of(
            screen.overview(repeated, replace(CALLS, repeated=None)), width=200
        ),
        "other text to the first kind": lines_of(screen.overview(repeated, CALLS), width=200)[-1:],
        **{
            f"colours are those of the metric, and {title}": shown(view, colour="truecolor")
            for title, view in (
                ("cells have the number's", head_map(report(), PREVIOUS, numbers=True)),
                ("a quiet kind is dim, another bold", head_map(sinks(6, 1))),
            )
        },
        "which is named where there are colours": [
            line for found in (report(), undefined(ENTROPY.name))
            for line in lines_of(screen.overview(found, CALLS), colour="truecolor")
            if line.startswith("colour")
        ],
        "a value below the threshold is not rounded up to it": [
            maps.Found(of(head(0, previous_token=value)), LABELS[0]).highest
            for value in (0.3999, math.nan)
        ],
        "a kind that cannot be told says why": lines_of(maps.kinds_found(alone)),
        "unless it is not asked for": lines_of(maps.kinds_found(alone, ["previous-token"])),
        "and also where some heads are of it": lines_of(maps.kinds_found(told)),
        "of one head": lines_of(screen.head_summary(
            of(head(0, previous_token=0.9), **untold), numbers=False
        )),
    })  # fmt: skip
    alone = screen.overview(few[0], replace(CALLS, repeated=None))
    assert "--synthetic" not in "".join(lines_of(alone))
    assert (maps.quiet_kinds(sinks(6, 1)), maps.quiet_kinds(sinks(2, 0))) == (("sink",), ())


def test_heads_and_tables(golden):
    left_out = report(checks=(GOOD, BAD), skipped={"effective_rank": "too long"})
    two = report(matrices=tuple(matrix(pattern(3), head=n, kv_head=n // 2) for n in (1, 2)))
    scores = report(what="scores", matrices=(matrix(np.array([[-4.0, np.nan], [1.0, 2.0]])),))
    nowhere = undefined("induction")
    numbers = (0.0001234, 3.25e-06, 12345.678, 1e-300)
    small = of(*(
        head(n, n // 2, **{m.name: numbers[(n + at) % 4] for at, m in enumerate(METRICS)})
        for n in range(4)
    ), layer=11, group=2)  # fmt: skip
    golden("attention-heads", {
        "what was left out, and the prompt; checks are shown by another":
            lines_of(screen.render_attention(
                left_out, "tiny [b]\x1b", [screen.overview(left_out, CALLS)]
            )),
        "one head with its tokens": lines_of(screen.heatmaps(
            report(matrices=(matrix(pattern(3), layer=1, head=2, kv_head=1),)), "sqrt"
        )),
        "several with their names": lines_of(screen.heatmaps(two, "linear")),
        "scores have their own scale around zero": lines_of(screen.heatmaps(scores, "linear")),
        "a token without text is its id": lines_of(screen.render_attention(
            report(("", "")), "t",
            [screen.heatmaps(report(("", ""), matrices=(matrix(pattern(2)),)), "linear")],
        )),
        "the prompt is a line": [
            line for found in (report(prompt_tokens=2), report(tuple("abcdefghijklmnopqrstuvwxyz")))
            for width in (30, 40, 80, 200)
            for line in lines_of(screen.render_attention(found, "t", []), width=width)[1:]
        ],
        "large and small numbers are whole in few columns": lines_of(
            metric_table(small, METRICS), width=40
        ),
        "every metric of every head": lines_of(metric_table(report(), METRICS), width=200),
        "in 60 columns, below each other": lines_of(metric_table(report(), METRICS), width=60),
        "of one metric": lines_of(metric_table(report(), [ENTROPY])),
        "of one head": lines_of(metric_table(one_head(), METRICS), width=200),
        "of one head, in 60 columns": lines_of(metric_table(one_head(), METRICS), width=60),
        "the kinds of one head": lines_of(screen.head_summary(one_head(), numbers=False)),
        "its other numbers, without those that it has not":
            lines_of(screen.head_summary(one_head(), numbers=True)),
        "one unclassified": lines_of(screen.head_summary(of(head(0)), numbers=False)),
        "pairs are named by their tokens": lines_of(
            pair_table(report(pairs=(pair(2, 1), pair(1, 0, 0.5)))), width=100
        ),
        "pairs by another rank": lines_of(
            pair_table(report(pairs=(pair(2, 1, 0.75, 3.5),)))
        ),
        "no pairs": lines_of(pair_table(report())),
        "no pairs of a part":
            lines_of(pair_table(report(), ((1, 9), (0, 2)))),
        "a metric that no head has": lines_of(
            screen.metric_map(nowhere, INDUCTION, "linear", CALLS), width=120
        ),
        "it has no column": lines_of(metric_table(nowhere, METRICS), width=120),
        "alone it is a sentence": lines_of(metric_table(nowhere, [INDUCTION]), width=120),
    })  # fmt: skip
    assert screen.is_single(one_head())
    assert not screen.is_single(report())


def test_a_scale_without_end_goes_to_the_largest():
    for metric, low, high in ((KEYS, 1.0, 12.5), (PREVIOUS, 0.0, 1.0)):
        scale = maps.scale_of(report(), metric)
        assert (scale.low, scale.high) == (low, high)
    assert maps.scale_of(undefined(*(metric.name for metric in METRICS)), KEYS).high == 2.0


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


@pytest.mark.parametrize("width", [40, 60, 80, 200])
@pytest.mark.parametrize("heads", [1, 9, 32, 71, 128])
@pytest.mark.parametrize("numbers", [False, True])
def test_every_head_is_there_at_every_width(width, heads, numbers):
    group = {9: 3, 32: 4, 128: 16}.get(heads, 1)
    one = of(*(head(n, n // group, previous_token=n / heads) for n in range(heads)), group=group)
    found = lines_of(head_map(one, PREVIOUS, numbers=numbers), width=width)
    assert all(cell_len(line) <= width for line in found)
    rows = [re.sub("^0 +", "", line) for line in found if re.match("0 +[-.]", line)]
    signs = [sign for row in rows for sign in re.split(r"[ │]+", row) if sign]
    if numbers:
        assert signs == [maps.short(n / heads, True) for n in range(heads)]
    else:
        assert "".join(signs) == "-" * heads
    assert "".join(rows).count("│") <= heads // group - 1


def many_heads(count):
    return of(*(
        head(n, labels=("previous-token",), previous_token=0.9 - n / 1000) for n in range(count)
    ), layer=10)  # fmt: skip


@pytest.mark.parametrize("width", [40, 80, 120, 200])
@pytest.mark.parametrize("count", [1, 7, 90, 300])
def test_as_many_heads_are_named_as_a_line_holds(width, count):
    lines = lines_of(maps.Found(many_heads(count), LABELS[0]), width=width)
    assert len(lines) <= (1 if width > 40 else 2)  # of 40 columns the rule alone fills one
    assert max(map(len, lines)) <= width
    named = re.findall(r"10\.\d+ \.\d\d", " ".join(lines))
    more = re.search(r"(\d+) more$", lines[-1])
    assert len(named) + (int(more[1]) if more else 0) == count
    assert named == [f"10.{n} {maps.short(0.9 - n / 1000, True)}" for n in range(len(named))]
    if width >= 80 and more:
        assert sum(map(len, lines)) > width - 25  # no room is left for two more


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
    page = screen.render_attention(found, "m", [screen.overview(found, CALLS)])
    assert len(lines_of(page, colour=colour)) <= 21
    one = replace(
        found, matrices=(matrix(pattern(13), layer=1, head=2),),
        layers=(replace(layers[1], heads=layers[1].heads[2:3]),),
    )  # fmt: skip
    views = [screen.heatmaps(one, "sqrt"), screen.head_summary(one, numbers=True)]
    lines = lines_of(screen.render_attention(one, "m", views), colour=colour)
    assert len(lines) <= 21 + 1  # these two views are one in the command, without a line between
    assert max(map(cell_len, lines)) <= 80
    assert lines[2].split()[:2] == ["0", '"']
    assert "1.0" in lines[2]
    assert lines[16].split()[:3] == ["beca", "cat", "sat"]

"""What the heads of a model attend to, or what its states remember, as one page of a terminal."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.text import Text

from llmcli.commands.attention.options import AttentionOptions
from llmcli.commands.attention.report import (
    AttentionReport,
    HeadStates,
    LayerStates,
    Pair,
    StatesReport,
    grouped,
)
from llmcli.commands.attention.view.heads import (
    definition,
    head_map,
    kinds_found,
    metric_notes,
    metric_table,
    ranked,
    unclear_kinds,
    undefined_metrics,
    unknown_values,
)
from llmcli.records.attention import COLOURED_BY, COMMON, LINEAR, Label, Metric
from llmcli.records.numbers import counted, numbered
from llmcli.ui.grid import ColourBar, Fit, Heatmap, Panels
from llmcli.ui.layout import SEPARATOR, WIDEST, Column, Line, in_words, table
from llmcli.ui.numbers import short, size, span
from llmcli.ui.palette import Ink, Kind, Scale
from llmcli.ui.theme import FAINT, HEADING, NUMBER, one_line

FEW = 64  # tokens that the rows of a heatmap name
FEW_ROWS = 32  # of repeated tokens: as many as `--synthetic 32` has
BY_REPEATS = ("induction", "duplicate")
STEPS, ASCII_STEPS = "▁▂▃▄▅▆▇█", ".:-=+*#@"
TABLE_GAP = 3  # columns between two of a table
# shown of a single head besides the metrics of its kinds
SPREAD = ("effective_keys", "max_weight", "distance")
HIGHEST = 5  # heads that are named below a map of their values


@dataclass(frozen=True)
class FollowUps:
    """Command lines that hints begin with: the `same` run, and one over `repeated` tokens.

    `repeated` is None where tokens are repeated already. The last `answer` tokens are the model's
    last answer (0: unknown).
    """

    same: str
    repeated: str | None
    answer: int = 0


def render_attention(
    report: AttentionReport, title: str, options: AttentionOptions, calls: FollowUps
) -> RenderableType:
    """The model's line, the prompt, and what is requested, in the order of the options."""
    shown: list[RenderableType] = [Text(one_line(title), style=HEADING)]
    if not _names_all(report):
        shown.append(Fit(lambda width, ink: _prompt_line(report, width)))
    metrics = [metric for metric in options.table if metric in report.metrics]
    views: list[RenderableType] = []
    if report.matrices:
        views.append(heatmaps(report, options.matrix_scale))
        if len(report.heads) == 1:
            views[-1] = Group(views[-1], head_summary(report, numbers=not metrics))
    if (mapped := options.mapped) is not None:
        views.append(metric_map(report, mapped, options.scale or "linear", calls))
    if metrics:
        views.append(metric_table(report, metrics))
    if options.top_pairs:
        views.append(pair_table(report, zoomed=options.zoomed))
    for number, view in enumerate(views or [overview(report, calls)]):
        shown += [Text(), view] if number else [view]
    left = [f"{name} was left out: {why}" for name, why in report.skipped.items()]
    return Group(*shown, *(Text(note, style=FAINT) for note in (*layer_notes(report), *left)))


def _names_all(report: AttentionReport) -> bool:
    """Whether the rows of a heatmap name all tokens."""
    count = len(report.tokens)
    return [one.queries for one in report.matrices] == [(0, count)] and count <= FEW


def _prompt_line(report: AttentionReport, width: int) -> Iterator[RenderableType]:
    """How many tokens there are, and as many of the first and the last as a line holds."""
    count, words, width = len(report.tokens), _count(report), min(width, WIDEST)
    line = words
    for kept in range(min(count, WIDEST), -1, -1):
        last = kept // 3
        left = [f"… {count - kept} more"] if kept < count else []
        tokens = [token(report, at) for at in (*range(kept - last), *range(count - last, count))]
        tokens[kept - last : kept - last] = left
        if cell_len(longer := SEPARATOR.join([words, *tokens])) <= width:
            line = longer
            break
    yield Text(line, style=FAINT)


def _count(report: AttentionReport) -> str:
    words = f"{len(report.tokens)} token" + "s" * (len(report.tokens) != 1)
    if len(report.tokens) > report.prompt_tokens:
        words += f", from {report.prompt_tokens} on generated"
    return words


def layer_notes(report: AttentionReport) -> Iterator[str]:
    """What maps are that are no softmax: a sentence for each kind of layer."""
    alike = grouped((layer.note, layer) for layer in report.layers if layer.note)
    for note, layers in alike.items():
        kinds = ", ".join(dict.fromkeys(layer.kind for layer in layers))
        yield f"{numbered('layer', [layer.layer for layer in layers])} ({kinds}): {note}"


def overview(report: AttentionReport, calls: FollowUps) -> RenderableType:
    """The map of all heads with the letters of their kinds, the heads found, and what is next."""
    metric = next(metric for metric in report.metrics if metric.name == COLOURED_BY)
    left = BY_REPEATS if calls.repeated else ()
    found = [head_map(report, metric, numbers=False), kinds_found(report, left)]
    hints = [_hint(*hint) for hint in _next(report, calls)]
    return Group(*found, *metric_notes(report), *hints)


def metric_map(
    report: AttentionReport, metric: Metric, kind: Kind, calls: FollowUps
) -> RenderableType:
    """The map of one metric with its values, and its definition; a sentence where it has none."""
    if (why := next(undefined_metrics(report, [metric]), None)) is not None:
        repeats = calls.repeated is not None and metric.name in BY_REPEATS
        hint = [_hint("try:", f"{calls.repeated} --map {metric.name}")] if repeats else []
        return Group(Text(why), *hint)
    about = Line(definition(report, metric), FAINT)
    shown = head_map(report, metric, numbers=True, kind=kind)
    found, share = ranked(report, metric.name)[:HIGHEST], metric.high == 1.0
    first, *others = [f"{name} {short(value, share)}" for value, name, _ in found]
    highest = [Line([f"highest: {first}", *others])] if others else []
    notes = (*unknown_values(report, [metric]), *metric_notes(report))
    return Group(shown, *highest, about, *notes)


def _hint(words: str, call: str) -> RenderableType:
    """Words and a command line, which is never wrapped, so that it can be copied."""

    def draw(width: int, ink: Ink) -> Iterator[RenderableType]:
        beside = cell_len(f"{words} {call}") <= width
        if not beside:
            yield Text(words, style=FAINT)
        line = f"{words} {call}" if beside else call
        yield Text(line, style=FAINT, no_wrap=True, overflow="ignore")

    return Fit(draw)


def _next(report: AttentionReport, calls: FollowUps) -> Iterator[tuple[str, str]]:
    """What to run next: repeated text where there is little, and the clearest head.

    The clearest head of a kind is the one with the largest value. Unusual kinds come first, and
    those of repeated tokens where the text was made to show them.
    """
    rows = report.rows.get("induction", 0)
    if calls.repeated is not None and rows < FEW_ROWS:
        few = f"{counted(rows, 'row')} of repeated tokens only" if rows else "no token comes twice"
        yield f"induction, duplicate: {few}; try:", calls.repeated

    def common(label: Label) -> tuple[bool, bool]:
        return label.name in COMMON, calls.repeated is None and label.name not in BY_REPEATS

    clearest = (
        (name, f" ({label.name})")
        for label in sorted(report.labels, key=common)
        for _, name, head in ranked(report, label.metric)
        if label.name in head.labels
    )
    name, kind = next(clearest, (next(iter(report.heads)), ""))
    layer, head = name.split(".")
    call = f"{calls.same} --layer {layer} --head {head}"
    yield f"head {name}{kind}:", call
    if 0 < calls.answer < len(report.tokens):
        yield "the rows of the last answer:", f"{call} --query -{calls.answer}:"


def heatmaps(report: AttentionReport, kind: Kind) -> RenderableType:
    """The matrices of the report, all on one scale: one with its tokens, several as panels."""
    scale, given = matrix_scale(report, kind), report.prompt_tokens
    words = "pattern: each row sums to 1" + " with its sink" * report.sinks
    if report.what == "scores":
        words = "scores: q·k before softmax"
    elif scale.signed:
        words = "pattern: weights with their signs, around 0"
    bar, shared = ColourBar(words, scale), report.shares_keys
    if len(report.matrices) > 1:
        titles = [
            f"{one.layer}.{one.head}" + f" kv {one.kv_head}" * shared for one in report.matrices
        ]
        return Group(Panels(matrices=report.matrices, titles=titles, scale=scale, given=given), bar)
    [matrix] = report.matrices
    tokens = [one.text or f"id {one.id}" for one in report.tokens]
    kinds = {layer.layer: layer.kind for layer in report.layers}
    words = f"layer {matrix.layer} ({kinds[matrix.layer]}), head {matrix.head}"
    words += f", kv head {matrix.kv_head}" * shared
    if _names_all(report):
        words += f", {_count(report)}"
    heading = Text(f"{words}, queries down, keys across", style=HEADING)
    return Group(heading, Heatmap(matrix=matrix, tokens=tokens, scale=scale, given=given), bar)


def matrix_scale(report: AttentionReport, kind: Kind) -> Scale:
    """The scale of all matrices: weights are 0 … 1 on every one.

    Scores, and weights with signs, are as far from zero as the largest of them.
    """
    if report.what == "scores" or any(matrix.signed for matrix in report.matrices):
        return Scale.around([matrix.values for matrix in report.matrices], kind)
    return Scale(low=0.0, high=1.0, kind=kind)


def head_summary(report: AttentionReport, *, numbers: bool) -> RenderableType:
    """The kinds of the report's only head; `numbers`: with the metrics that say most.

    Left out are metrics of its kinds, which stand beside these, and metrics without a value.
    """
    [head] = report.heads.values()
    parts = [
        f"{label.name} ({short(head.metrics[label.metric], True)} ≥ {label.threshold:g})"
        for label in report.labels
        if label.name in head.labels
    ] or ["unclassified"]
    if unclear := unclear_kinds(report):
        parts.append(f"undetermined: {', '.join(unclear)}")
    if not numbers:
        return Line(parts)
    said = (*head.labels, *report.unlabelled)
    shown = [label.metric for label in report.labels if label.name not in said]
    for metric in report.metrics:
        value = head.metrics[metric.name]
        if metric.name in (*shown, *SPREAD, *LINEAR) and not math.isnan(value):
            parts.append(f"{metric.name} {short(value, metric.high == 1.0)}")
    return Group(Line([*parts, "all: --metrics all"]), *metric_notes(report))


def pair_table(report: AttentionReport, *, zoomed: bool) -> RenderableType:
    """Which tokens attend to which, the largest first; `zoomed`: of a part of the tokens."""
    ranked = any(pair.rank_value != pair.weight for pair in report.pairs)
    columns: list[tuple[Column, Callable[[Pair], Text | str]]] = [
        (Column("head", right=False), lambda of: f"{of.layer}.{of.head}"),
        (Column("query", right=False, cut=True), lambda of: token(report, of.query)),
        (Column("key", right=False, cut=True), lambda of: token(report, of.key)),
        (Column("weight", drop=int(ranked)), lambda of: Text(f"{of.weight:.4f}", style=NUMBER)),
    ]
    if ranked:
        columns.append((Column("of its row"), lambda of: f"{of.rank_value:.4g}"))
    left = ": the first token and each token itself left out"
    if zoomed:
        last = len(report.tokens)
        queries, keys = (span((low, min(high, last))) for low, high in report.part)
        left = f" of queries {queries} and keys {keys}{left}"
    if not report.pairs:
        return Text(f"no pair of tokens{left}", style=FAINT)
    signs = ", where these have signs by its share |A[i,j]| / Σ_j |A[i,j]|" * report.signed
    note = f"pairs of tokens{left}; ranked by weight{signs}"
    return Group(table(report.pairs, columns), Text(note, style=FAINT))


def token(report: AttentionReport, at: int) -> str:
    """`12 " the"`: a position with its token, its id where it has no text."""
    return f"{at} {in_words(report.tokens[at])}"


def render_states(report: StatesReport, title: str) -> RenderableType:
    """The model's line, and a table for each layer."""
    shown: list[RenderableType] = [Text(one_line(title), style=HEADING)]
    new = len(report.tokens) - report.prompt_tokens
    words = [counted(len(report.tokens), "token") + (f", {new} of them generated" if new else "")]
    shown.append(Line([*words, f"states after {_listed(report.positions)}"], FAINT))
    for layer in report.layers:
        heading = f"layer {layer.layer} ({layer.kind}), a state of {layer.rows} × {layer.columns}"
        constant = f"{size(layer.bytes)} for all heads, however long the text"
        curves = Fit(partial(_curves, layer))
        shown += [Text(), Text(heading, style=HEADING), Line([constant], FAINT), curves]
    notes = [
        "norm: √(Σ S²), the curve from 0 to the head's most",
        "rank: exp(−Σ p ln p), p = σ / Σσ of S, the curve from 0 to the most that is possible",
    ]
    return Group(*shown, Text(), Line(notes, FAINT))


def _listed(positions: Sequence[int]) -> str:
    """`positions 8, 16 … 199`."""
    if len(positions) < 4:
        return f"position{'s' * (len(positions) > 1)} {', '.join(map(str, positions))}"
    return f"positions {positions[0]}, {positions[1]} … {positions[-1]}"


def _curves(layer: LayerStates, width: int, ink: Ink) -> Iterator[RenderableType]:
    """A row for each head; where there is little room, of fewer positions, or numbers alone."""
    most = min(layer.rows, layer.columns)
    numbers = [(f"{head.norms[-1]:.4g}", f"{head.effective_ranks[-1]:.1f}") for head in layer.heads]
    widest = sum(max(4, *map(len, column)) for column in zip(*numbers, strict=True))
    room = (width - 4 - widest - len(f"of {most}") - 5 * TABLE_GAP) // 2
    columns: list[tuple[Column, Callable[[HeadStates], Text | str]]] = [
        (Column("head"), lambda of: str(of.head)),
        (Column("norm", right=False, drop=1),
         lambda of: _curve(of.norms, max(of.norms), room, ink)),
        (Column("last"), lambda of: Text(f"{of.norms[-1]:.4g}", style=NUMBER)),
        (Column("rank", right=False, drop=1),
         lambda of: _curve(of.effective_ranks, most, room, ink)),
        (Column("last"), lambda of: Text(f"{of.effective_ranks[-1]:.1f}", style=NUMBER)),
        (Column(f"of {most}", drop=2),
         lambda of: Text(f"{of.effective_ranks[-1] / most:.0%}", style=FAINT)),
    ]  # fmt: skip
    yield table(layer.heads, columns)


def _curve(values: Sequence[float], most: float, room: int, ink: Ink) -> str:
    """A sign for each value, from 0 to `most`; of fewer, the last of every few, in less room."""
    signs = ASCII_STEPS if ink.ascii else STEPS
    every = max(1, -(-len(values) // max(1, room)))
    kept = values[::-1][::every][::-1]
    places = [round(value / (most or 1.0) * (len(signs) - 1)) for value in kept]
    return "".join(signs[min(place, len(signs) - 1)] for place in places)

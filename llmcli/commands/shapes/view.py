"""All tensors, repeated layers folded: one table of the model, details of each, their names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.text import Text

from llmcli.commands.shapes.report import (
    LayerKind,
    LetterValue,
    NamesReport,
    ShapeRow,
    ShapesReport,
    Stored,
)
from llmcli.records.numbers import counted, spans
from llmcli.ui.facts import axis_line, model_line, state_words
from llmcli.ui.layout import GAP, Column, Indented, Line, in_words, table
from llmcli.ui.numbers import scaled, size
from llmcli.ui.theme import FAINT, HEADING, NUMBER, one_line

_WHAT = ("what it is", "its formula", "what others call it: {i} is a layer's number")
_NARROW = "  "  # between the columns of the table of the model
ENDS = 12  # tokens of a long prompt that are shown at each end
_SECTIONS = (
    ("parameter", "parameters"),
    ("activation", "activations"),
    ("state", "cache"),
)


def render_shapes(
    report: ShapesReport, model: Mapping[str, Any], *, detailed: bool
) -> RenderableType:
    """The model in the order of computation: parameters in few lines, then a line a tensor.

    Without the divisors of norms, and without views that are what they are views of. `detailed`:
    everything about every tensor, a table for each kind, and totals.
    """
    parts: list[RenderableType] = [Text(one_line(model_line(model)), style=HEADING)]
    if detailed:
        parts += sizes_of_letters(report.letters, report.example)
    else:
        letters = [
            axis_line(one.letter, one.letter, one.values, one.segments) for one in report.letters
        ]
        example = ["T is an example: --tokens"] if report.example else []
        parts.append(Line([*letters, *example], FAINT))
    if report.prompt:  # of a long one the first and the last tokens
        texts = [*map(in_words, report.prompt)]
        if len(texts) > 2 * ENDS:
            texts = [*texts[:ENDS], f"… {len(texts) - 2 * ENDS} more …", *texts[-ENDS:]]
        parts.append(Line([f"prompt of {counted(len(report.prompt), 'token')}", *texts], FAINT))
    return Group(*parts, *(_sections if detailed else _overview)(report, model))


def _overview(report: ShapesReport, model: Mapping[str, Any]) -> Iterator[RenderableType]:
    held = f"{size(model['weight_bytes'])} in {model['weight_format']}"
    yield Text(f"\nparameters: {model['parameters']:,} · {held}", style=HEADING)
    weights, before = [], ""
    for row in report.rows:  # the first of those that layers share says which layers
        if row.first.kind == "parameter":
            place, name = _place(row.name)
            many = f"{place} × {len(row.layers)}: " if len(row.layers) > 1 else f"{place}: "
            shared = many if place and place != before else ""
            weights.append(f"{shared}{name} {listed(row.first.shape)}")
            before = place
    yield Line(weights)
    formulas: dict[str, str] = {}
    rows = []
    for row in report.rows:
        known = formulas.get(row.memory.removeprefix("view of ")) == row.formula
        formulas[row.name] = row.formula
        if row.first.kind != "parameter" and row.first.axes[-1] != "1" and not known:
            rows.append(row)
    yield Text()
    yield Overview(rows, report.layers, report.phases)
    flops = ", ".join(f"{scaled(call.flops)} {call.phase}" for call in report.flops)
    totals = [f"cache {size(report.cache.per_token)} a token", f"FLOPs {flops}"]
    yield Line([*totals, "--all: dtypes, bytes, memory, sources"], FAINT)


def _sections(report: ShapesReport, model: Mapping[str, Any]) -> Iterator[RenderableType]:
    for kind, words in _SECTIONS:
        rows = [row for row in report.rows if row.first.kind == kind]
        if rows:
            dtypes = {tensor.dtype for row in rows for tensor in row.phases}
            yield Text()
            yield Text(_heading(words, rows, report, dtypes), style=HEADING)
            # a dtype that all of them have is in the heading
            columns = [
                (column, cell)
                for column, cell in _columns(kind, report)
                if any(map(cell, rows)) and (column.name != "dtype" or len(dtypes) > 1)
            ]
            yield table(rows, columns, below=True)
            yield from _below(kind, rows, report, model)
    # how many layers rows stand for, and that they are identical up to their number
    folded = {row.layers for row in report.rows if len(row.layers) > 1}
    # the first layer's input stands apart: the others' is in what is said of all
    whole = [layers for layers in folded if not any(set(layers) < set(more) for more in folded)]
    yield from [Text()] if whole else []
    for layers in sorted(whole):
        parts = [f"×{len(layers)}, layers {spans(layers)}, identical"]
        window = next(kind for kind in report.layers if layers[0] in kind.layers).window
        if window is not None:
            parts.append(f"a token sees {window} keys at most")
        yield Line(parts, FAINT)


def _place(name: str) -> tuple[str, str]:
    """`blocks.{0-29}` and `attn.q`; the first is empty outside the blocks."""
    if not name.startswith("blocks."):
        return "", name
    head, number, rest = name.split(".", 2)
    return f"{head}.{number}", rest


@dataclass(frozen=True)
class Overview:
    """Names, letters, sizes in the `phases` and formulas, blocks under the layers that share them.

    Where they leave no room for the formulas, the first phase alone. A formula that is still too
    long for its column is below its row; on few columns all are.
    """

    rows: Sequence[ShapeRow]
    kinds: Sequence[LayerKind]
    phases: Sequence[str]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for phases in (self.phases, self.phases[:1]):
            lines = [*self._lines(phases)]
            *widths, longest = (
                max(map(cell_len, column))
                for column in zip(*(line for line in lines if len(line) > 1), strict=True)
            )
            room = options.max_width - sum(widths) - len(widths) * len(_NARROW)
            if room >= longest:
                break
        beside = room >= sum(widths) // 2
        for number, line in enumerate(lines):
            style = HEADING if not number or len(line) == 1 else ""
            if len(line) == 1:
                yield Text(line[0], style=style)
                continue
            formula = line[-1]
            cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=False)]
            if beside:
                short = cell_len(formula) <= room
                yield Text(_NARROW.join([*cells, formula * short]).rstrip(), style=style)
                if not short:
                    yield Indented(Text(formula))
            else:
                yield Text(_NARROW.join(cells[:2]).rstrip(), style=style)
                yield Indented(Line(line[2:], style or FAINT))

        if phases != self.phases:
            yield Text(f"--phase {self.phases[-1]}: its shapes", style=FAINT)

    def _lines(self, phases: Sequence[str]) -> Iterator[tuple[str, ...]]:
        yield "activation", "letters", *phases, "formula"
        place, entry = "", ""
        for number, row in enumerate(self.rows):
            here, name = _place(row.name)
            formula = row.memory if row.first.kind == "state" else row.formula
            if name == "resid_pre":
                after = next(iter(self.rows[number + 1 :]), row)
                if _place(after.name)[1] == name:  # the first layer has another entry
                    entry = formula
                    continue
                here = _place(after.name)[0] if entry else here
                formula = f"{entry}, then {formula.split(' = ')[1]}" if entry else formula
                entry = ""
            if here != place:
                layers = next(r.layers for r in self.rows if _place(r.name)[0] == here)
                many = f" × {len(layers)}, identical" if len(layers) > 1 else ""
                kind = next((kind for kind in self.kinds if {*layers} & {*kind.layers}), None)
                if here and kind is not None and kind.window is not None:
                    many += f", a token sees {kind.window} keys at most"
                yield (f"{here}{many}" if here else "",)
            place = here
            shapes = [listed(one.shape) for one in row.phases[: len(phases)]]
            yield one_line(name), listed(row.first.axes), *shapes, formula


def render_stored(tensors: Sequence[Stored], title: str) -> RenderableType:
    """The tensors of a file that nothing describes: their own names, shapes and formats."""
    columns: list[tuple[Column, Callable[[Stored], Text | str]]] = [
        (Column("name", right=False, cut=True), lambda one: one_line(one.source)),
        (Column("shape", right=False), lambda one: Text(listed(one.stored_shape), style=NUMBER)),
        (Column("stored", right=False), lambda one: one_line(one.stored_format)),
        (Column("bytes"), lambda one: size(one.stored_bytes)),
    ]
    held = size(sum(tensor.stored_bytes for tensor in tensors))
    total = f"{counted(len(tensors), 'tensor')} · {held}"
    return Group(Text(one_line(title), style=HEADING), table(tensors, columns), Text(total, FAINT))


def sizes_of_letters(letters: Sequence[LetterValue], example: bool) -> Iterator[RenderableType]:
    """The letters with their sizes."""
    lines = [axis_line(one.letter, one.documents, one.values, one.segments) for one in letters]
    yield Line(lines, FAINT)
    if example:
        yield Text("T is an example: --tokens sets it, and a prompt has its own", style=FAINT)


def _columns(
    kind: str, report: ShapesReport
) -> Iterator[tuple[Column, Callable[[ShapeRow], Text | str]]]:
    """The columns of a section, in order; the least important is the first to go below."""

    def shape(row: ShapeRow, phase: int) -> Text:
        return Text(listed(row.phases[phase].shape), style=NUMBER)

    def stored(row: ShapeRow) -> str:
        """`Q4_1 [192 576]`: the format and shape in the file."""
        one = row.first.stored
        return f"{one_line(one.stored_format)} {listed(one.stored_shape)}" if one else ""

    names = ("shape",) if kind == "parameter" else report.phases
    yield Column("name", right=False), lambda row: one_line(row.name)
    yield Column("letters", right=False, drop=1), lambda row: listed(row.first.axes)
    for at, name in enumerate(names):
        column = Column(name, right=False, drop=2 + at, labelled=kind != "parameter")
        yield column, partial(shape, phase=at)
    yield Column("papers", right=False, drop=7), lambda row: " × ".join(row.first.documents)
    yield Column("dtype", right=False, drop=8), lambda row: row.first.dtype
    yield Column("bytes", drop=5), lambda row: size(row.first.bytes)
    yield (
        Column("FLOPs", drop=5, labelled=True),
        lambda row: scaled(row.first.flops) if row.first.flops else "",
    )
    yield Column("memory", right=False, drop=6), lambda row: row.memory
    yield Column("stored", right=False, drop=9), stored
    yield Column("checkpoint", right=False, drop=10), lambda row: one_line(row.source)
    yield (
        Column("conversion", right=False, drop=11),
        lambda row: ", ".join(row.first.stored.operations) if row.first.stored else "",
    )
    yield Column("formula", right=False, drop=4), lambda row: row.formula


def _heading(
    words: str, rows: Sequence[ShapeRow], report: ShapesReport, dtypes: Collection[str]
) -> str:
    many = sum(max(1, len(row.layers)) for row in rows)
    heading = f"{words}: {counted(many, 'tensor')}"
    if many > len(rows):
        heading += f" in {counted(len(rows), 'row')}"
    if len(dtypes) == 1:
        heading += f", {next(iter(dtypes))}"
    if rows[0].first.kind == "parameter":
        return heading
    what = "bytes and FLOPs" if rows[0].first.kind == "activation" else "bytes"
    return f"{heading}, {what} of one in {report.phases[0]}"


def _below(
    kind: str, rows: Sequence[ShapeRow], report: ShapesReport, model: Mapping[str, Any]
) -> Iterator[RenderableType]:
    """Totals, and what the columns do not say."""
    if kind == "parameter":
        parts = [
            f"the whole model: {model['parameters']:,} numbers",
            f"{size(model['weight_bytes'])} in {model['weight_format']}",
        ]
        if report.stored_bytes is not None:
            parts.append(f"{size(report.stored_bytes)} of tensors in the file")
        yield Line(parts, FAINT)
    elif kind == "activation":
        flops = [
            f"FLOPs of the whole {call.phase}: {scaled(call.flops)}"
            + f", {scaled(call.flops_full)} as the full square" * (call.flops_full != call.flops)
            for call in report.flops
        ]
        yield Line([*flops, "logits of all positions", "Q Kᵀ is counted at attn.z"], FAINT)
        words = ["memory: own, or a view of another tensor's"]
        if any(row.memory == "derived" for row in rows):
            words.append("derived: no kernel writes it, it is computed from the others on request")
        yield Line(words, FAINT)
    else:
        yield from _growth(report)


def _growth(report: ShapesReport) -> Iterator[RenderableType]:
    growth = report.cache
    layers = Counter[int]()
    for kind, nbytes in zip(report.layers, growth.per_layer, strict=True):
        layers[nbytes] += len(kind.layers)
    each = [
        f"{size(nbytes) if nbytes else 'nothing'} in "
        + ("1 layer" if count == 1 else f"each of {count} layers")
        for nbytes, count in layers.items()
    ]
    many = "" if report.batch == 1 else f" in each of {report.batch} sequences"
    yield Line([f"grows by {size(growth.per_token)} a token{many}", *each], FAINT)
    prefill, decode = size(growth.prefill), size(growth.decode)
    yield Line([f"{prefill} after the prompt", f"{decode} after one token more"], FAINT)
    if growth.states is not None:
        yield Line(state_words(growth.states), FAINT)
    if windows := sorted({kind.window for kind in report.layers if kind.window is not None}):
        keys = "/".join(map(str, windows))
        words = f"a window of {keys} keys bounds what is seen, not the cache: all keys are kept"
        yield Line([words], FAINT)


def listed(items: Sequence[object]) -> str:
    """`[1 9 12 64]`."""
    return f"[{' '.join(map(str, items))}]"


# the table of names


def render_names(report: NamesReport, model: Mapping[str, Any]) -> RenderableType:
    """Each name with its axes and their sizes, those of the papers, what it is, its aliases."""
    parts: list[RenderableType] = [
        Text(one_line(model_line(model)), style=HEADING),
        *sizes_of_letters(report.letters, report.example),
        Text(),
        Text("name   [letters] = [sizes]   the papers' letters", style=HEADING),
        Indented(Line(_WHAT, HEADING)),
    ]
    for row in report.names:
        lines = [row.words, row.formula] if row.kind != "state" else [row.formula]
        sizes = f"{listed(row.axes)} = {listed(row.shape)}{GAP}{' × '.join(row.documents)}"
        named = Line([row.name, sizes], HEADING, GAP)
        parts += [Text(), named, Indented(Line(lines))]
        if row.aliases:
            parts.append(Indented(Line([one_line(alias) for alias in row.aliases], FAINT)))
    return Group(*parts)

"""Tables of all tensors, repeated layers folded: letters, sizes, memory, formulas, sources."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.text import Text

from llmcli.render.checks import render_checks
from llmcli.render.layout import Column, Dotted, Rows
from llmcli.render.letters import axis_line
from llmcli.render.memory import state_words
from llmcli.render.numbers import scaled
from llmcli.render.stats import size
from llmcli.render.theme import FAINT, HEADING, NUMBER, one_line, quoted
from llmcli.reports.numbers import counted, spans
from llmcli.reports.shapes import (
    LetterValue,
    ShapeRow,
    ShapesReport,
    ShapeTensor,
    Stored,
)

ENDS = 12  # tokens of a long prompt that are shown at each end
_SECTIONS = (
    ("parameter", "parameters"),
    ("activation", "activations"),
    ("state", "cache"),
)


def render_shapes(report: ShapesReport, title: str) -> RenderableType:
    """The letters with their sizes, a table for each kind of tensor, totals and checks."""
    parts: list[RenderableType] = [
        Text(one_line(title), style=HEADING),
        *sizes_of_letters(report.letters, report.example),
    ]
    if report.prompt:
        parts.append(_prompt(report.prompt))
    for kind, words in _SECTIONS:
        rows = [row for row in report.rows if row.first.kind == kind]
        if rows:
            parts += [Text(), Text(_heading(words, rows, report), style=HEADING)]
            parts.append(_table(kind, rows, report))
            parts += _below(kind, rows, report)
    parts += [Text(), *_folds(report), render_checks(report.checks)]
    if not report.ran:
        parts.append(Dotted(["from headers alone", "with a prompt the model is run, too"], FAINT))
    return Group(*parts)


def render_stored(tensors: Sequence[Stored], title: str) -> RenderableType:
    """The tensors of a file that nothing describes: their own names, shapes and formats."""
    columns = (
        Column("name", right=False, cut=True),
        Column("shape", right=False),
        Column("stored", right=False),
        Column("bytes"),
    )
    rows = [
        [
            Text(one_line(tensor.source)),
            Text(listed(tensor.shape), style=NUMBER),
            Text(one_line(tensor.format)),
            Text(size(tensor.bytes)),
        ]
        for tensor in tensors
    ]
    total = f"{counted(len(tensors), 'tensor')} · {size(sum(tensor.bytes for tensor in tensors))}"
    return Group(Text(one_line(title), style=HEADING), Rows(columns, rows), Text(total, FAINT))


@dataclass(frozen=True)
class Field:
    """A column, and what stands in it for a row."""

    column: Column
    cell: Callable[[ShapeRow], Text]


@dataclass(frozen=True)
class Indented:
    """Something four columns to the right."""

    inner: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        room = options.update_width(max(1, options.max_width - 4))
        for line in console.render_lines(self.inner, room, pad=False):
            yield Text("    ", end="")
            yield from line
            yield Text()


def sizes_of_letters(letters: Sequence[LetterValue], example: bool) -> Iterator[RenderableType]:
    """The letters with their sizes."""
    yield Dotted([axis_line(letter) for letter in letters], FAINT)
    if example:
        yield Text("T is an example: --tokens sets it, and a prompt has its own", style=FAINT)


def _prompt(tokens: Sequence[tuple[int, str]]) -> RenderableType:
    """The tokens of the prompt, of a long one the first and the last."""
    texts = [quoted(text) if text else f"id {id}" for id, text in tokens]
    if len(texts) > 2 * ENDS:
        left = f"… {len(texts) - 2 * ENDS} more …"
        texts = [*texts[:ENDS], left, *texts[-ENDS:]]
    return Dotted([f"prompt of {counted(len(tokens), 'token')}", *texts], FAINT)


def _table(kind: str, rows: Sequence[ShapeRow], report: ShapesReport) -> Rows:
    """The rows of one section; what all of them have alike is in its heading."""
    fields = [field for field in _fields(kind, report) if any(field.cell(row) for row in rows)]
    if len(_dtypes(rows)) == 1:
        fields = [field for field in fields if field.column.name != "dtype"]
    cells = [[field.cell(row) for field in fields] for row in rows]
    return Rows([field.column for field in fields], cells, spill=True)


def _fields(kind: str, report: ShapesReport) -> tuple[Field, ...]:
    """The columns of a section, in order; what is missed least is the first to go below."""

    def field(name: str, goes: int, cell: Callable[[ShapeRow], Text]) -> Field:
        labelled, right = name in (*report.phases, "FLOPs"), name in ("bytes", "FLOPs")
        return Field(Column(name, right=right, first_to_go=goes, labelled=labelled), cell)

    if kind == "parameter":
        shapes = [field("shape", 2, lambda row: _shape(row, 0))]
    else:
        shapes = [field(report.phases[0], 2, lambda row: _shape(row, 0))]
        if len(report.phases) > 1:
            shapes.append(field(report.phases[1], 3, lambda row: _shape(row, 1)))
    return (
        field("name", 0, lambda row: Text(one_line(row.name))),
        field("letters", 1, lambda row: Text(listed(row.first.axes))),
        *shapes,
        field("papers", 7, lambda row: Text(" × ".join(row.first.documents))),
        field("dtype", 8, lambda row: Text(row.first.dtype)),
        field("bytes", 5, lambda row: Text(size(row.first.bytes))),
        field("FLOPs", 5, lambda row: Text(scaled(row.first.flops) if row.first.flops else "")),
        field("memory", 6, lambda row: Text(row.memory)),
        field("stored", 9, lambda row: Text(_stored(row.first))),
        field("checkpoint", 10, lambda row: Text(one_line(row.source))),
        field("on the way", 11, lambda row: Text(_operations(row.first))),
        field("formula", 4, lambda row: Text(row.formula)),
    )


def _dtypes(rows: Sequence[ShapeRow]) -> set[str]:
    return {tensor.dtype for row in rows for tensor in row.tensors}


def _shape(row: ShapeRow, phase: int) -> Text:
    return Text(listed(row.tensors[phase].shape), style=NUMBER)


def _stored(tensor: ShapeTensor) -> str:
    """`Q4_1 [192 576]`: the format and shape in the file."""
    stored = tensor.stored
    return "" if stored is None else f"{one_line(stored.format)} {listed(stored.shape)}"


def _operations(tensor: ShapeTensor) -> str:
    """What is done to the stored tensor on its way into memory."""
    return "" if tensor.stored is None else ", ".join(tensor.stored.operations)


def _heading(words: str, rows: Sequence[ShapeRow], report: ShapesReport) -> str:
    many = sum(max(1, len(row.layers)) for row in rows)
    number = f"{words}: {counted(many, 'tensor')}"
    if many > len(rows):
        number += f" in {counted(len(rows), 'row')}"
    dtypes = _dtypes(rows)
    dtype = f", {dtypes.pop()}" if len(dtypes) == 1 else ""
    if rows[0].first.kind == "parameter":
        return f"{number}{dtype}"
    what = "bytes and FLOPs" if rows[0].first.kind == "activation" else "bytes"
    return f"{number}{dtype}, {what} of one in {report.phases[0]}"


def _below(kind: str, rows: Sequence[ShapeRow], report: ShapesReport) -> Iterator[RenderableType]:
    """Totals, and what the columns do not say."""
    if kind == "parameter":
        parts = [
            f"the whole model: {report.parameters:,} numbers",
            f"{size(report.weight_bytes)} in {report.weight_format}",
        ]
        if report.stored_bytes is not None:
            parts.append(f"{size(report.stored_bytes)} of tensors in the file")
        yield Dotted(parts, FAINT)
    elif kind == "activation":
        yield Dotted(list(_flops(report)), FAINT)
        words = [
            "memory: own, or a view of that of another",
            "derived: no kernel writes it, it is computed from the others where one looks",
        ]
        used = {row.memory.partition(" ")[0] for row in rows}
        yield Dotted(words if "derived" in used else words[:1], FAINT)
    else:
        yield from _growth(report)


def _flops(report: ShapesReport) -> Iterator[str]:
    """Products only; the square of queries and keys where it is not what has to be computed."""
    for call in report.flops:
        words = f"FLOPs of the whole {call.phase}: {scaled(call.flops)}"
        if call.flops_full != call.flops:
            words += f", {scaled(call.flops_full)} as the full square"
        yield words
    yield "logits of all positions"
    yield "Q Kᵀ is counted at attn.z"


def _growth(report: ShapesReport) -> Iterator[RenderableType]:
    growth = report.growth
    layers = Counter[int]()
    for kind, nbytes in zip(report.kinds, growth.per_layer, strict=True):
        layers[nbytes] += len(kind.layers)
    each = [
        f"{size(nbytes) if nbytes else 'nothing'} in each of {count} layers"
        for nbytes, count in layers.items()
    ]
    many = "" if report.batch == 1 else f" in each of {report.batch} sequences"
    yield Dotted([f"grows by {size(growth.per_token)} a token{many}", *each], FAINT)
    yield Dotted(
        [
            f"{size(growth.prefill)} after the prompt",
            f"{size(growth.decode)} after one token more",
        ],
        FAINT,
    )
    if growth.states is not None:
        yield Dotted(state_words(growth.states), FAINT)
    windows = {kind.window for kind in report.kinds} - {None}
    if windows:
        keys = "/".join(str(window) for window in sorted(w for w in windows if w is not None))
        words = f"a window of {keys} keys bounds what is seen, not the cache: all keys are kept"
        yield Dotted([words], FAINT)


def _folds(report: ShapesReport) -> Iterator[RenderableType]:
    """How many layers rows stand for, and that they are identical up to their number."""
    folded = {row.layers for row in report.rows if len(row.layers) > 1}
    # the first layer's input stands apart: the others' is in what is said of all
    whole = [layers for layers in folded if not any(set(layers) < set(more) for more in folded)]
    for layers in sorted(whole):
        words = [f"×{len(layers)}, layers {spans(layers)}, identical"]
        kind = next(kind for kind in report.kinds if layers[0] in kind.layers)
        if kind.window is not None:
            words.append(f"a token sees {kind.window} keys at most")
        yield Dotted(words, FAINT)


def listed(items: Sequence[object]) -> str:
    """`[1 9 12 64]`."""
    return f"[{' '.join(map(str, items))}]"

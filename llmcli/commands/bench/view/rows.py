"""Rows as llama-bench writes them, CSV, JSON, JSON lines, SQL and Markdown, byte for byte; and the
second table, below the Markdown one, of what llama-bench does not measure.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from os.path import commonprefix
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from llmcli.commands.bench.report.comparison import Against
from llmcli.commands.bench.report.plan import Plan
from llmcli.commands.bench.report.row import (
    KEYS,
    KINDS,
    OURS,
    THEIRS,
    BenchReport,
    BuildInfo,
    Row,
    count_words,
    size_words,
)
from llmcli.commands.bench.report.settings import SETTINGS, device_words
from llmcli.records.engines import EngineInfo
from llmcli.records.machine import Ceilings
from llmcli.records.numbers import counted
from llmcli.ui.facts import SURELY, beyond, ceiling_summary
from llmcli.ui.layout import Column, Line, render_checks, table
from llmcli.ui.numbers import duration, size, unit
from llmcli.ui.theme import FAINT, HEADING, csv_cell, encodable, markdown_cell, one_line


@dataclass(frozen=True, kw_only=True)
class Format:
    """The text before the first row, of each row, and after the last of so many rows.

    The output of an interrupted run is valid, too, once `foot` is written.
    """

    head: str
    row: Callable[[Row], str]
    foot: Callable[[int], str] = lambda rows: ""


def plain(row: Row, name: str) -> str:
    """A value as llama-bench writes it in text: flags 0 and 1, reals with 6 decimals.

    Texts are on one line, with control characters spelled out. Empty where there is none, which
    only a field of ours can be.
    """
    value = getattr(row, name)
    if value is None:
        return ""
    if KINDS[name] == "float":
        return f"{value:.6f}"
    return str(int(value)) if isinstance(value, bool) else one_line(str(value))


def _csv_row(row: Row) -> str:
    """A quote in a value is doubled."""
    cells = []
    for name in (*THEIRS, *OURS):
        value = getattr(row, name)
        cell = csv_cell(value) if isinstance(value, str) else plain(row, name)
        cells.append('"' + cell.replace('"', '""') + '"')
    return ",".join(cells) + "\n"


CSV = Format(head=",".join((*THEIRS, *OURS)) + "\n", row=_csv_row)


def row_object(row: Row, keys: Collection[str] = KEYS) -> dict[str, Any]:
    """These keys of a row; reals have 6 decimals, which is what llama-bench writes."""
    return {name: _jsonable(getattr(row, name)) for name in keys}


def _jsonable(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_jsonable(item) for item in value]
    if isinstance(value, str):
        return encodable(value)
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else None
    return value


def _json_row(row: Row) -> str:
    """One element, with the comma before it."""
    found = row_object(row).items()
    lines = ",\n".join(f"    {json.dumps(name)}: {json.dumps(value)}" for name, value in found)
    return ("\n" if row.number == 1 else ",\n") + "  {\n" + lines + "\n  }"


JSON = Format(head="[", row=_json_row, foot=lambda rows: "\n]\n" if rows else "]\n")
JSON_LINES = Format(head="", row=lambda row: json.dumps(row_object(row)) + "\n")

TABLE, BESIDE = "llama_bench", "llmcli_bench"
# which row of the other table it belongs to: that table has no key, but a number SQLite gives it
_NUMBER = "llama_bench_rowid"
_TYPES = {"str": "TEXT", "int": "INTEGER", "bool": "INTEGER", "float": "REAL"}


def _create(table: str, names: Sequence[str], *first: str) -> str:
    columns = [*first, *(f"  {name} {_TYPES[KINDS[name]]}" for name in names)]
    return f"CREATE TABLE IF NOT EXISTS {table} (\n" + ",\n".join(columns) + "\n);\n\n"


def _sql_row(row: Row) -> str:
    """One INSERT into each table."""
    theirs, ours = (", ".join(_quoted(row, name) for name in names) for names in (THEIRS, OURS))
    return (
        f"INSERT INTO {TABLE} ({', '.join(THEIRS)}) VALUES ({theirs});\n"
        f"INSERT INTO {BESIDE} ({_NUMBER}, {', '.join(OURS)}) "
        f"VALUES (last_insert_rowid(), {ours});\n"
    )


def _quoted(row: Row, name: str) -> str:
    """Every value in quotes, as llama-bench writes it; NULL where one of ours is missing."""
    if getattr(row, name) is None:
        return "NULL"
    return "'" + plain(row, name).replace("'", "''") + "'"


SQL = Format(
    head=_create(TABLE, THEIRS) + _create(BESIDE, OURS, f"  {_NUMBER} INTEGER"), row=_sql_row
)
NONE = Format(head="", row=lambda row: "")
FORMATS = {"csv": CSV, "json": JSON, "jsonl": JSON_LINES, "sql": SQL, "none": NONE}


def rate(row: Row) -> str:
    """`12.34 ± 0.56`, or why there is none."""
    if row.error is not None:
        return f"error: {row.error}"
    return f"{row.avg_ts:.2f} ± {row.stddev_ts:.2f}" if row.runs else "not run"


# columns of the Markdown table, settings by the field that shows them: the heading, the width of a
# cell, below 0 if aligned left, and its text
_COLUMNS: dict[str, tuple[str, int, Callable[[Row], str]]] = {
    "model": ("model", -30, partial(plain, name="model_type")),
    "size": ("size", 10, lambda row: size_words(row.model_size) if row.model_size else ""),
    "params": (
        "params",
        10,
        lambda row: count_words(row.model_n_params) if row.model_n_params else "",
    ),
    "backend": ("backend", -10, partial(plain, name="backends")),
    "engine": ("engine", -12, partial(plain, name="engine")),
    "test": ("test", 15, lambda row: row.test.name),
    "t/s": ("t/s", 20, rate),
}
_COLUMNS |= {
    one.column: (
        one.heading,
        one.width or max(len(one.column), 10) * (-1 if KINDS[one.column] == "str" else 1),
        partial(plain, name=one.column),
    )
    for one in SETTINGS.values()
}
_BOTH = -17  # `CUDA,transformers`
# settings whose columns are shown where they vary or were given, in llama-bench's order
_OPTIONAL = (
    "n_threads", "n_batch", "n_ubatch", "type_k", "type_v", "no_kv_offload", "flash_attn",
    "device", "embeddings", "dtype", "activations",
)  # fmt: skip
# Where llama-bench's table is wider than the terminal: narrower cells, and columns that go, in
# this order, before those that are the same in every row
_NARROW = {"model": -16, "test": 10, "t/s": 16}
_DROP = ("params", "size", "backend")


def markdown(plan: Plan, build: BuildInfo, kinds: Set[str], room: int | None = None) -> Format:
    """The table to the character, and `build: …` below it.

    `kinds` of devices that its configurations run on. `room`: the columns of the terminal, None
    where the table has llama-bench's width.
    """
    widths = _widths(plan, kinds, room)
    lines = ["-" * (abs(width) - 1) + (":" if width > 0 else "-") for width in widths.values()]
    return Format(
        head=_line([_cell(_COLUMNS[name][0], w) for name, w in widths.items()]) + _line(lines),
        row=lambda row: _line([_cell(_COLUMNS[name][2](row), w) for name, w in widths.items()]),
        foot=lambda rows: f"\nbuild: {build.build_commit} ({build.build_number})\n",
    )


def _widths(plan: Plan, kinds: Set[str], room: int | None) -> dict[str, int]:
    """The columns that there is room for, with the width of their cells."""

    def values(name: str) -> set[Any]:
        return {getattr(settings, name) for settings in plan.configurations}

    gpus, engines = kinds & {"cuda", "mps"}, plan.ours.against is not None
    names = ["model", "size", "params", "backend", *["n_gpu_layers"] * bool(gpus)]
    names += [
        SETTINGS[name].column
        for name in _OPTIONAL
        if values(name) != {getattr(plan.default, name)} or (name == "n_threads" and gpus != kinds)
    ]
    found = {name: _COLUMNS[name][1] for name in (*names, *["engine"] * engines, "test", "t/s")}
    if engines:
        found["backend"] = _BOTH  # named with a peer's engine
    if room is None or _total(found) <= room:
        return found
    found = {name: _NARROW.get(name, width) for name, width in found.items()}
    columns = {name: SETTINGS[name].column for name in (*_OPTIONAL, "n_gpu_layers")}
    columns["model"] = "model"
    alike = [column for name, column in columns.items() if len(values(name)) == 1]
    for name in (*_DROP, *alike):
        if _total(found) > room:
            found.pop(name, None)
    return found


def _cell(text: str, width: int) -> str:
    """A line break in it would begin the next row."""
    text = markdown_cell(one_line(text))
    return f"{text:<{-width}}" if width < 0 else f"{text:>{width}}"


def _total(widths: Mapping[str, int]) -> int:
    """Columns of a line with its bars."""
    return sum(abs(width) + 3 for width in widths.values()) + 1


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |\n"


_Cells = tuple[Column, Callable[[Row], str]]  # a column, and its cell of each row


def _ns(value: float) -> str:
    return duration(value / 1e9)


def _share(share: float) -> str:
    return "<1 %" if 0 < share < 0.005 else f"{100 * share:.0f} %"


def _known(words: Callable[[Any], str], name: str) -> Callable[[Row], str]:
    """The words for a value of a row; an empty cell where it has none."""
    return lambda row: "" if (value := getattr(row, name)) is None else words(value)


def _peak(row: Row, *, gpu: bool) -> str:
    known = row.peak_memory_bytes if row.device.startswith("cuda") is gpu else None
    return "" if known is None else size(known)


def _full(row: Row) -> str:
    """Products of the whole rectangle of queries and keys, where that reads as another number."""
    full = unit(row.flops_full or 0, "")
    return full if row.flops_full and full != unit(row.flops or 0, "") else ""


# columns, of which those without any value are left out
_MEASURED: tuple[_Cells, ...] = (
    (Column("first token"), _known(_ns, "ttft_ns")),
    (Column("token p50"), _known(_ns, "token_p50_ns")),
    (Column("p90", drop=2), _known(_ns, "token_p90_ns")),
    (Column("p99", drop=2), _known(_ns, "token_p99_ns")),
    (Column("FLOPs", drop=4), _known(partial(unit, name=""), "flops")),
    (Column("full square", drop=5), _full),
    (Column("peak RSS", drop=1), partial(_peak, gpu=False)),
    (Column("peak GPU", drop=1), partial(_peak, gpu=True)),
    (Column("needs", drop=1), _known(size, "estimated_memory_bytes")),
    (Column("roofline", drop=1), _known(_share, "roofline_share")),
    (Column("lower bound"), lambda row: _known(_ns, "roofline_ns")(row) if row.meta else ""),
)


def render_beside(
    report: BenchReport, machine: Sequence[str], *, weights: str = "", markdown: bool = False
) -> RenderableType:
    """Rows that ran: times to the first token and of every next one, FLOPs, memory, roofline.

    Of shapes alone: the lower bound of a run's time on this machine, and the memory that it
    needs. Columns without a value are left out. Below, the ratios, where the numbers come from
    (`weights`: that they are not the model's own), and the machine with its software in words.
    `markdown`: both tables are as Markdown has them.
    """
    rows = [row for row in report.rows if row.error is None]
    if not rows:
        return Group()
    measured = [(column, cell) for column, cell in _MEASURED if any(map(cell, rows))]
    test = Column("test", right=False), lambda row: row.test.name
    columns = [*_labels(rows), test, *measured]
    parts: list[RenderableType] = [Text(""), table(rows, columns, markdown=markdown)]
    if report.against:
        parts += [Text(""), *_ratios(report, markdown)]
    return Group(*parts, *_footer(report, rows, machine, weights))


def _labels(rows: Sequence[Row]) -> list[_Cells]:
    """A column for every setting that varies, and for the engine where there are two.

    Models are named without the directories that all of their names begin with.
    """
    models = [one_line(row.settings.model) for row in rows]
    shared = commonprefix(models).rpartition("/")  # noqa: RUF071 - up to its last slash
    begins = sum(map(len, shared[:2]))
    labels: list[_Cells] = [
        (Column("model", right=False, cut=True), lambda row: one_line(row.settings.model)[begins:])
    ]
    for name, setting in SETTINGS.items():
        heading = name if name == "activations" else setting.heading
        labels.append((Column(heading, right=False), partial(_setting, name=name)))
    labels.append((Column("engine", right=False), lambda row: row.engine))
    return [(column, cell) for column, cell in labels if len(set(map(cell, rows))) > 1]


def _setting(row: Row, name: str) -> str:
    value = getattr(row.settings, name)
    if name == "device":
        return device_words(value)
    return one_line(str(int(value) if isinstance(value, bool) else value))


def _ratios(report: BenchReport, markdown: bool) -> Iterator[RenderableType]:
    """One line a test: how many times as fast we are, pair by pair."""
    pairs = report.against
    title = f"llmcli ÷ {pairs[0].peer} in tokens/s: the median of pairwise ratios"
    if pairs[0].peer == "llama.cpp" and any(row.settings.activations == "8" for row in report.rows):
        title += "; its activations have 8 bits, too"
    yield Text(title + "\n" * markdown, style=HEADING)
    ours = {row.number: row for row in report.rows}

    def of_ours(cell: Callable[[Row], str]) -> Callable[[Against], str]:
        return lambda pair: cell(ours[pair.number])

    labels = _labels([ours[pair.number] for pair in pairs])
    columns = [(column, of_ours(cell)) for column, cell in labels]
    columns += [
        (Column("test", right=False), lambda pair: pair.test),
        (Column("median"), lambda pair: f"{pair.median:.2f}×"),
        (Column("95 % interval", drop=1), _interval),
        (Column("pairs", drop=3), lambda pair: str(len(pair.ratios))),
        (Column("of the means", drop=2), lambda pair: f"{pair.of_means:.2f}×"),
        (Column("", right=False), _verdict),
    ]
    yield table(pairs, columns, markdown=markdown)


def _interval(pair: Against) -> str:
    return "" if pair.interval is None else "{:.2f}× … {:.2f}×".format(*pair.interval)


def _verdict(pair: Against) -> str:
    """`faster`, `slower`, or `undecided` where the interval of the ratio leaves it open."""
    if pair.interval is None or pair.undecided:
        return "undecided"
    return "faster" if pair.interval[0] > 1 else "slower"


def _footer(
    report: BenchReport, rows: Sequence[Row], machine: Sequence[str], weights: str
) -> Iterator[RenderableType]:
    """Lines of words, after an empty one. `rows` are those that ran."""
    infos = list(dict.fromkeys(row.info for row in rows))
    ceilings = list(dict.fromkeys(_ceilings(report.ceilings)))
    lines = [[*filter(None, [weights]), *_loaded(infos)]]
    if len(ceilings) == 1:
        lines[0] += ceilings
    else:
        lines += [[words] for words in ceilings]
    if any(row.engine != "llmcli" for row in report.rows):  # also one that could not run
        lines += [[_engine(info) for info in infos]]
        lines += [["both engines are in this process: neither has a peak memory of its own"]]
    faster = [row for row in rows if (row.roofline_share or 0) > SURELY]
    lines += [[beyond(dict.fromkeys(row.test.name for row in faster))]]
    lines += [list(machine)]
    yield Text("")
    if report.checks:
        yield render_checks(report.checks)
    for words in lines:
        if any(words):
            yield Line([one_line(word) for word in words], style=FAINT)


def _loaded(infos: Sequence[EngineInfo]) -> Iterator[str]:
    """What this process held before the model, and how long each took to be there."""
    base = next((info.base_bytes for info in infos if info.base_bytes is not None), None)
    if base is not None:
        yield f"base {size(base)} (RSS before the model)"
    timed = [info for info in infos if info.load_s is not None]
    names = [f"{info.engine}, {info.model_type}, {info.device}" for info in timed]
    for name, info in zip(names, timed, strict=True):
        more = f", {info.product_format} products" if names.count(name) > 1 else ""
        of = f" ({name}{more})" if len(timed) > 1 else ""
        yield f"load {duration(info.load_s or 0.0)}{of}"


def _engine(info: EngineInfo) -> str:
    """An engine, its version, and the formats of its weights."""
    version = info.engine_version or ""
    version = version if version[:1].isdigit() else f"({version})"
    return f"{info.engine} {version}: {info.formats}, {info.bits_per_weight:.3g} bits a weight"


def _ceilings(measured: Sequence[Ceilings]) -> Iterator[str]:
    """The ceilings of the roofline, with device, threads and dtype if there are several."""
    for one in measured:
        of = f" ({one.device}, {counted(one.threads, 'thread')}, {one.dtype})"
        yield f"ceilings{of * (len(measured) > 1)}: {', '.join(ceiling_summary(one))}"


def against_notes(report: BenchReport) -> Iterator[str]:
    """The ratios and the check of the weights in words, for formats that have only rows."""
    for pair in report.against:
        yield (
            f"llmcli ÷ {pair.peer}, {pair.test}: {pair.median:.2f}×, the median of "
            f"{counted(len(pair.ratios), 'pair')} (95 % interval {_interval(pair) or 'unknown'}): "
            f"{_verdict(pair)}"
        )
    for check in report.checks:
        yield f"{'' if check.ok else 'check failed: '}{check.words}: {check.value:.2g}"

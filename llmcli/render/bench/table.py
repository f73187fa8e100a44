"""What llama-bench does not measure: a second table below its own, and how two engines compare."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from llmcli.render.checks import render_checks
from llmcli.render.layout import Column, Dotted, Rows
from llmcli.render.stats import duration, size
from llmcli.render.theme import FAINT, HEADING, one_line
from llmcli.render.timing.machine import ceiling_words
from llmcli.render.timing.numbers import unit
from llmcli.reports.bench import Against, BenchReport, BenchRow
from llmcli.reports.bench_fields import device_words, percentile

_Cell = Callable[[BenchRow], str]

# what tells configurations apart, in few columns: (heading, value)
_DISTINCT: tuple[tuple[str, _Cell], ...] = (
    ("model", lambda row: row.settings.model),
    ("dev", lambda row: device_words(row.settings.device)),
    ("dtype", lambda row: row.settings.dtype),
    ("threads", lambda row: str(row.settings.n_threads)),
    ("n_batch", lambda row: str(row.settings.n_batch)),
    ("n_ubatch", lambda row: str(row.settings.n_ubatch)),
    ("ngl", lambda row: str(row.settings.n_gpu_layers)),
    ("fa", lambda row: row.settings.flash_attn),
    ("engine", lambda row: row.engine),
)
_MEASURED: tuple[tuple[Column, _Cell], ...] = (
    (Column("first token"), lambda row: _ns(_mean(row.first_ns))),
    (Column("token p50"), lambda row: _ns(percentile(row.token_ns, 50))),
    (Column("p90", first_to_go=2), lambda row: _ns(percentile(row.token_ns, 90))),
    (Column("p99", first_to_go=2), lambda row: _ns(percentile(row.token_ns, 99))),
    (Column("FLOPs", first_to_go=4), lambda row: unit(row.work.flops, "") if row.work else ""),
    (Column("memory", first_to_go=1), lambda row: _bytes(row.peak_memory_bytes)),
    (Column("roofline", first_to_go=1), lambda row: _share(row.roofline_share)),
    (Column("at least"), lambda row: _ns(row.roofline_ns if row.meta else None)),
    (Column("load", first_to_go=3), lambda row: duration(row.ran.load_s) if row.ran else ""),
)


def render_beside(report: BenchReport, machine: Sequence[str]) -> RenderableType:
    """Rows that ran: times to the first token and of every next one, memory, roofline, load.

    Of shapes alone: the least time that a run would take on this machine.
    Columns without a value are left out. Below, the ratios, what the roofline is drawn from, and
    the machine with its software in words.
    """
    rows = [row for row in report.rows if row.error is None]
    parts: list[RenderableType] = []
    if rows:
        parts += [Text(""), _table(rows)]
    if report.against:
        parts += [Text(""), *_ratios(report)]
        parts += [Text(""), Dotted([*_engines(rows)], style=FAINT)]
    if report.checks:
        parts.append(render_checks(report.checks))
    if report.ceilings is not None:
        where = f"ceilings of this machine ({report.ceilings.device})"
        parts += [Text(""), Dotted([where, *ceiling_words(report.ceilings)], style=FAINT)]
    if rows:
        gap = [] if report.ceilings is not None else [Text("")]
        parts += [*gap, Dotted([one_line(word) for word in machine], style=FAINT)]
    return Group(*parts)


def _table(rows: Sequence[BenchRow]) -> RenderableType:
    columns, cells = [], []
    for heading, words in _DISTINCT:
        found = [one_line(words(row)) for row in rows]
        if len(set(found)) > 1:
            columns.append(Column(heading, right=False, cut=heading == "model"))
            cells.append(found)
    columns.append(Column("test", right=False))
    cells.append([row.test.name for row in rows])
    for column, words in _MEASURED:
        found = [words(row) for row in rows]
        if any(found):
            columns.append(column)
            cells.append(found)
    return Rows(columns, [[Text(cell) for cell in row] for row in zip(*cells, strict=True)])


def _ratios(report: BenchReport) -> Iterator[RenderableType]:
    """One line a test: how many times as fast we are, pair by pair."""
    yield Text(f"llmcli ÷ {report.against[0].peer}, tokens/s of runs in turns", style=HEADING)
    columns = [Column("test", right=False), Column("median"), Column("lowest", first_to_go=1)]
    columns += [Column("highest", first_to_go=1), Column("pairs", first_to_go=2)]
    yield Rows(columns, [[Text(cell) for cell in _ratio(pair)] for pair in report.against])


def _engines(rows: Sequence[BenchRow]) -> Iterator[str]:
    """What each engine is, and in what it holds the weights."""
    for ran in dict.fromkeys(row.ran for row in rows if row.ran is not None):
        version = ran.version if ran.version[:1].isdigit() else f"({ran.version})"
        yield f"{ran.engine} {version}: {ran.dtype}, {ran.bits_per_weight:.3g} bits a weight"


def _ratio(pair: Against) -> Iterator[str]:
    yield pair.test.name
    for value in (pair.median, pair.lowest, pair.highest):
        yield f"{value:.2f}×"
    yield str(len(pair.ratios))


def _mean(values: Sequence[int]) -> float | None:
    return sum(values) / len(values) if values else None


def _ns(value: float | None) -> str:
    return "" if value is None else duration(value / 1e9)


def _bytes(value: int | None) -> str:
    return "" if value is None else size(value)


def _share(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f} %"

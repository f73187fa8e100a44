"""What llama-bench does not measure: a second table below its own, and how engines compare."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from os.path import commonprefix
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from llmcli.commands.bench.report.row import Against, BenchReport, Row
from llmcli.commands.bench.report.settings import SETTINGS, Settings, device_words
from llmcli.records.ceilings import Ceilings
from llmcli.records.engines import EngineInfo
from llmcli.records.numbers import counted
from llmcli.ui.checks import render_checks
from llmcli.ui.facts import SURELY, beyond, ceiling_summary
from llmcli.ui.layout import Column, Line, Rows
from llmcli.ui.numbers import duration, size, unit
from llmcli.ui.theme import FAINT, HEADING, one_line

_Label = tuple[Column, list[str]]  # what tells rows apart: the column, and its cell for each row


def _ns(value: float) -> str:
    return duration(value / 1e9)


def _share(share: float) -> str:
    return f"{100 * share:.0f} %"


def _peak(row: Row, *, gpu: bool) -> int | None:
    return row.peak_memory_bytes if row.device.startswith("cuda") is gpu else None


def _full(row: Row) -> int | None:
    """Products of the whole rectangle of queries and keys, where that reads as another number."""
    full = row.flops_full or 0
    return full if full and unit(full, "") != unit(row.flops or 0, "") else None


# columns, the value of a row, and its words; a row without that value has an empty cell
_MEASURED: tuple[tuple[Column, Callable[[Row], Any], Callable[[Any], str]], ...] = (
    (Column("first token"), lambda row: row.ttft_ns, _ns),
    (Column("token p50"), lambda row: row.token_p50_ns, _ns),
    (Column("p90", drop=2), lambda row: row.token_p90_ns, _ns),
    (Column("p99", drop=2), lambda row: row.token_p99_ns, _ns),
    (Column("FLOPs", drop=4), lambda row: row.flops, partial(unit, name="")),
    (Column("full square", drop=5), _full, partial(unit, name="")),
    (Column("peak RSS", drop=1), partial(_peak, gpu=False), size),
    (Column("peak GPU", drop=1), partial(_peak, gpu=True), size),
    (Column("needs", drop=1), lambda row: row.estimated_memory_bytes, size),
    (Column("roofline", drop=1), lambda row: row.roofline_share, _share),
    (Column("lower bound"), lambda row: row.roofline_ns if row.meta else None, _ns),
)


def render_beside(
    report: BenchReport, machine: Sequence[str], *, weights: str = ""
) -> RenderableType:
    """Rows that ran: times to the first token and of every next one, FLOPs, memory, roofline.

    Of shapes alone: the lower bound of a run's time on this machine, and the memory that it
    needs. Columns without a value are left out. Below, the ratios, where the numbers come from
    (`weights`: that they are not the model's own), and the machine with its software in words.
    """
    rows = [row for row in report.rows if row.error is None]
    if not rows:
        return Group()
    parts: list[RenderableType] = [Text(""), _table(rows)]
    if report.against:
        parts += [Text(""), *_ratios(report)]
    return Group(*parts, *_footer(report, rows, machine, weights))


def _table(rows: Sequence[Row]) -> RenderableType:
    labels = _labels(rows)
    columns = [column for column, _ in labels]
    cells = [found for _, found in labels]
    columns.append(Column("test", right=False))
    cells.append([row.test.name for row in rows])
    for column, value, words in _MEASURED:
        found = ["" if (one := value(row)) is None else words(one) for row in rows]
        if any(found):
            columns.append(column)
            cells.append(found)
    return Rows(columns, [[Text(cell) for cell in row] for row in zip(*cells, strict=True)])


def _labels(rows: Sequence[Row]) -> list[_Label]:
    """A column for every setting that varies, and for the engine where there are two.

    Models are named without the directories that all of their names begin with.
    """
    labels: list[_Label] = []
    models = [one_line(row.settings.model) for row in rows]
    if len(set(models)) > 1:
        shared = commonprefix(models).rpartition("/")  # noqa: RUF071 - up to its last slash
        names = [name.removeprefix("".join(shared[:2])) for name in models]
        labels.append((Column("model", right=False, cut=True), names))
    for name, setting in SETTINGS.items():
        found = [_setting(row.settings, name) for row in rows]
        if len(set(found)) > 1:
            heading = name if name == "activations" else setting.heading
            labels.append((Column(heading, right=False), found))
    engines = [row.engine for row in rows]
    if len(set(engines)) > 1:
        labels.append((Column("engine", right=False), engines))
    return labels


def _setting(settings: Settings, name: str) -> str:
    value = getattr(settings, name)
    if name == "device":
        return device_words(value)
    return one_line(str(int(value) if isinstance(value, bool) else value))


def _ratios(report: BenchReport) -> Iterator[RenderableType]:
    """One line a test: how many times as fast we are, pair by pair."""
    pairs = report.against
    title = f"llmcli ÷ {pairs[0].peer} in tokens/s: the median of pairwise ratios"
    if pairs[0].peer == "llama.cpp" and any(row.settings.activations == "8" for row in report.rows):
        title += "; its activations have 8 bits, too"
    yield Text(title, style=HEADING)
    ours = {row.number: row for row in report.rows}
    labels = _labels([ours[pair.number] for pair in pairs if pair.number in ours])
    columns = [column for column, _ in labels]
    columns += [Column("test", right=False), Column("median")]
    columns += [Column("95 % interval", drop=1), Column("pairs", drop=3)]
    columns += [Column("of the means", drop=2), Column("", right=False)]
    rows = []
    for place, pair in enumerate(pairs):
        cells = [found[place] for _, found in labels]
        cells += [pair.test, f"{pair.median:.2f}×", _interval(pair), str(len(pair.ratios))]
        cells += [f"{pair.of_means:.2f}×", _verdict(pair)]
        rows.append([Text(cell) for cell in cells])
    yield Rows(columns, rows)


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
    lines = [[*filter(None, [weights]), *_loaded(infos), *_ceilings(report.ceilings)]]
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
    for info in timed:
        of = f" ({info.engine}, {info.model_type}, {info.device})" if len(timed) > 1 else ""
        yield f"load {duration(info.load_s or 0.0)}{of}"


def _engine(info: EngineInfo) -> str:
    """What it is, and in what it holds the weights."""
    version = info.engine_version or ""
    version = version if version[:1].isdigit() else f"({version})"
    return f"{info.engine} {version}: {info.formats}, {info.bits_per_weight:.3g} bits a weight"


def _ceilings(measured: Sequence[Ceilings]) -> Iterator[str]:
    """What the roofline is made of; which it is of where there are several. `-v` has all rates."""
    for one in measured:
        where = f" ({one.device}, {counted(one.threads, 'thread')})" if len(measured) > 1 else ""
        yield f"ceilings{where}: {', '.join(ceiling_summary(one))}"


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

"""Below the tables of a benchmark: what was loaded, the ceilings, and the machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.text import Text

from llmcli.commands.bench.report.results import Against, BenchReport, BenchRow, Ran
from llmcli.reports.ceilings import Ceilings
from llmcli.reports.numbers import counted
from llmcli.ui.checks import render_checks
from llmcli.ui.layout import Dotted
from llmcli.ui.machine import SURELY, beyond, ceiling_words
from llmcli.ui.stats import duration, size
from llmcli.ui.theme import FAINT, one_line

SHARED = "both engines are in this process: neither has a peak memory of its own"


def footer(
    report: BenchReport, rows: Sequence[BenchRow], machine: Sequence[str], weights: str
) -> Iterator[RenderableType]:
    """Lines of words, after an empty one. `rows` are those that ran."""
    rans = list(dict.fromkeys(row.ran for row in rows if row.ran is not None))
    lines = [[*([weights] if weights else []), *_loaded(rans)]]
    if any(row.engine != "llmcli" for row in report.rows):  # also one that could not run
        lines += [[*_engines(rans)], [SHARED]]
    lines += [[f"ceilings ({_where(found)})", *ceiling_words(found)] for found in report.ceilings]
    faster = [row for row in rows if (row.roofline_share or 0) > SURELY]
    lines += [[beyond(dict.fromkeys(row.test.name for row in faster))]]
    lines += [list(machine)]
    yield Text("")
    if report.checks:
        yield render_checks(report.checks)
    for words in lines:
        if any(words):
            yield Dotted([one_line(word) for word in words], style=FAINT)


def against_notes(report: BenchReport) -> Iterator[str]:
    """The ratios and the check of the weights in words, for formats that have only rows."""
    for pair in report.against:
        yield (
            f"llmcli ÷ {pair.peer}, {pair.test.name}: {pair.median:.2f}×, the median of "
            f"{counted(len(pair.ratios), 'pair')} ({pair.lowest:.2f}× … {pair.highest:.2f}×): "
            f"{verdict(pair)}"
        )
    for check in report.checks:
        yield f"{'' if check.ok else 'not so: '}{check.words}: {check.value:.2g}"


def verdict(pair: Against) -> str:
    """`faster`, `slower`, or `undecided` where the runs differ by more than the engines."""
    if pair.undecided:
        return "undecided"
    return "faster" if pair.median > 1 else "slower"


def _loaded(rans: Sequence[Ran]) -> Iterator[str]:
    """What this process held before the model, and how long each took to be there."""
    base = next((ran.base_bytes for ran in rans if ran.base_bytes is not None), None)
    if base is not None:
        yield f"base {size(base)} (RSS before the model)"
    timed = [ran for ran in rans if ran.load_s is not None]
    for ran in timed:
        of = f" ({ran.engine}, {ran.model_type}, {ran.device})" if len(timed) > 1 else ""
        yield f"load {duration(ran.load_s or 0.0)}{of}"


def _engines(rans: Sequence[Ran]) -> Iterator[str]:
    """What each engine is, and in what it holds the weights."""
    for ran in rans:
        version = ran.version if ran.version[:1].isdigit() else f"({ran.version})"
        yield f"{ran.engine} {version}: {ran.formats}, {ran.bits_per_weight:.3g} bits a weight"


def _where(ceilings: Ceilings) -> str:
    dtypes = [matrix.dtype for matrix in ceilings.matrices[:1]]
    return ", ".join([ceilings.device, counted(ceilings.threads, "thread"), *dtypes])

"""Where the rows of a benchmark go while it runs, and the line that says how far it is."""

from __future__ import annotations

import sys
from time import monotonic
from typing import TYPE_CHECKING

from llmcli.commands.bench.options import RunOptions
from llmcli.commands.bench.report.results import BenchRequest, BenchRow
from llmcli.shell.output import Output
from llmcli.shell.progress import PATIENCE_S
from llmcli.shell.streams import erase_line
from llmcli.ui.stats import duration
from llmcli.ui.theme import one_line

if TYPE_CHECKING:
    from llmcli.commands.bench.report.fields import BuildInfo
    from llmcli.commands.bench.view.formats import Writer
    from llmcli.commands.bench.view.markdown import TableColumns

_OFTEN_S = 0.1


def _columns(request: BenchRequest, room: int | None) -> TableColumns:
    """Those of the Markdown table: of a GPU, of a CPU, of what varies."""
    from llmcli.commands.bench.view.markdown import TableColumns
    from llmcli.devices import resolve_device

    def gpu(device: str, layers: int) -> bool:
        if device == "auto":
            return layers != 0 and resolve_device("auto").type != "cpu"
        return device.partition(":")[0] in ("cuda", "mps")

    found = {gpu(settings.device, settings.n_gpu_layers) for settings in request.configurations}
    return TableColumns(
        settings=request.configurations, default=request.default, gpu=True in found,
        cpu=False in found, engines=request.against is not None, room=room,
    )  # fmt: skip


class RowStream:
    """Rows on stdout as soon as they are there; `writer` is None where none are wanted."""

    def __init__(self, out: Output, writer: Writer | None) -> None:
        self._out = out
        self._writer = writer

    @classmethod
    def of(cls, out: Output, by: BuildInfo, request: BenchRequest, runs: RunOptions) -> RowStream:
        """The format that `-o` says, no rows with `--json`.

        Where no format was given the table is as narrow as the terminal, else it is llama-bench's.
        """
        from llmcli.commands.bench.view.formats import WRITERS
        from llmcli.commands.bench.view.markdown import MarkdownWriter

        format = "none" if out.json else runs.output or "md"
        if format == "md":
            room = out.out.width if runs.output is None else None
            return cls(out, MarkdownWriter(by=by, columns=_columns(request, room)))
        return cls(out, WRITERS[format](by) if format in WRITERS else None)

    def begin(self) -> None:
        """What comes before the rows."""
        if self._writer is not None:
            self._write(self._writer.header())

    def row(self, row: BenchRow) -> None:
        """One row. Raises BrokenPipeError or WriteFailed where stdout takes no more."""
        if self._writer is not None:
            self._write(self._writer.row(row))

    def end(self) -> None:
        """What closes them."""
        if self._writer is not None:
            self._write(self._writer.footer())

    def _write(self, text: str) -> None:
        if text:
            self._out.write(text)


def _aside(text: str) -> None:
    try:
        if sys.stderr is not None and text:
            sys.stderr.write(text)
            sys.stderr.flush()
    except (OSError, ValueError):
        pass


class Status:
    """One line on a terminal's stderr, written over again and again; nothing elsewhere.

    With `lines` every word of a benchmark's progress is a line of its own, as llama-bench prints
    it. Called with (what, done, total) it shows the progress of a load.
    """

    def __init__(self, out: Output, *, lines: bool) -> None:
        self._screen = out.err
        self._lines = lines
        self._wanted = out.err.animate and not out.quiet and not lines
        self._begin = self._last = monotonic()
        self._first: float | None = None
        self._there = False

    def said(self, words: str) -> None:
        """`benchmark 2/4: prompt run 1/5`, with the time that the others may take."""
        if self._lines:
            _aside(f"llama-bench: {words}\n")
            return
        now = monotonic()
        self._first = self._first or now
        self._show(words + self._left(words, now))

    def __call__(self, what: str, done: int, total: int | None) -> None:
        """Progress of anything else."""
        share = f" {100 * done / total:.0f} %" if total else ""
        self._show(f"{one_line(what)}{share}")

    def erase(self) -> None:
        """Takes the line back, before something else is written."""
        if self._there:
            erase_line()
        self._there = False

    def _left(self, words: str, now: float) -> str:
        """From the tests that are done, which took as long as those to come, or did not."""
        number, _, total = words.removeprefix("benchmark ").partition(":")[0].partition("/")
        if not (number.isdecimal() and total.isdecimal()) or self._first is None:
            return ""
        done = int(number) - 1
        left = (now - self._first) / done * (int(total) - done) if done else 0.0
        return f", about {duration(left)} left" if left >= 1 else ""

    def _show(self, words: str) -> None:
        now = monotonic()
        if not self._wanted or now - self._begin < PATIENCE_S or now - self._last < _OFTEN_S:
            return
        self._last = now
        self.erase()
        _aside(words[: self._screen.width - 1])
        self._there = True

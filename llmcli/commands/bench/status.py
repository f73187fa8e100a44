"""The line that says how far a benchmark is, and the notes of its engines."""

from __future__ import annotations

import re
import sys
from contextlib import suppress
from time import monotonic

from llmcli.records.ceilings import Ceilings
from llmcli.shell.exits import tell
from llmcli.shell.output import Output
from llmcli.shell.progress import BETWEEN_S, PATIENCE_S
from llmcli.shell.streams import erase_line
from llmcli.ui.numbers import duration
from llmcli.ui.theme import one_line


class Status:
    """One line on a terminal's stderr, written over again and again; nothing elsewhere.

    With `lines` every word of a benchmark's progress is a line of its own, as llama-bench prints
    it. Called with (what, done, total) it shows the progress of a load. Without `verbose` neither
    loads nor ceilings are noted.
    """

    def __init__(self, out: Output, *, lines: bool, verbose: bool) -> None:
        self._out = out
        self._lines = lines
        self._verbose = verbose
        self._animate = out.err.animate and not out.quiet and not lines
        self._begin = self._last = monotonic()
        self._first: float | None = None
        self._shown = False

    def on_status(self, words: str) -> None:
        """`benchmark 2/4: prompt run 1/5`, with the time that the others may take."""
        if self._lines:
            tell(f"llama-bench: {words}")
            return
        now = monotonic()
        self._first = self._first or now
        number, total = map(int, re.findall(r"\d+", words)[:2])
        done = number - 1
        left = (now - self._first) / done * (total - done) if done else 0.0
        self._show(words + (f", about {duration(left)} left" if left >= 1 else ""))

    def __call__(self, what: str, done: int, total: int | None) -> None:
        """Progress of anything else."""
        share = f" {100 * done / total:.0f} %" if total else ""
        self._show(f"{one_line(what)}{share}")

    def note(self, words: str) -> None:
        """A note on stderr, in place of the line."""
        self.erase()
        self._out.note(words)

    def loaded(self, words: str) -> None:
        """A note for `--verbose`."""
        if self._verbose:
            self.note(words)

    def measured(self, ceilings: Ceilings, products: str) -> None:
        """The ceilings with products in that format, for `--verbose`."""
        from llmcli.ui.facts import ceiling_words

        words = ", ".join(ceiling_words(ceilings))
        self.loaded(f"ceilings ({ceilings.device}, {products}): {words}")

    def erase(self) -> None:
        """Takes the line back, before something else is written."""
        if self._shown:
            erase_line()
        self._shown = False

    def _show(self, words: str) -> None:
        now = monotonic()
        if not self._animate or now - self._begin < PATIENCE_S or now - self._last < BETWEEN_S:
            return
        self._last = now
        self.erase()
        with suppress(OSError, ValueError):  # the terminal is gone
            sys.stderr.write(words[: self._out.err.width - 1])
            sys.stderr.flush()
        self._shown = True

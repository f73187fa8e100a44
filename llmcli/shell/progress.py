"""Progress of long work on stderr: only on a terminal, only once it has taken a moment.

It is drawn when the work tells of itself and by no thread of its own, which would take the
processor while something is timed.
"""

from __future__ import annotations

import sys
from time import monotonic
from typing import TYPE_CHECKING

from llmcli.shell.output import Output, make_console
from llmcli.shell.streams import erase_line
from llmcli.ui.theme import one_line

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

PATIENCE_S = 0.4  # what is over sooner needs no bar, and rich.progress costs 60 ms to import
BETWEEN_S = 0.1  # from one drawing of a bar to the next
_WIDE = 80  # columns in which a bar has room for bytes


class Progress:
    """Callable with (what, done, total or None), as loading and downloading report it.

    A context manager: at its end the bar is gone and stderr is as it was. `opening` is written
    at once, without rich, and stands until the bar comes or the end. `tokens`: what is counted
    are tokens, and the bar says how many; else it says the share, and of what is downloaded
    also the bytes and their speed where the terminal is wide enough.
    """

    def __init__(self, out: Output, opening: str = "", *, tokens: bool = False) -> None:
        self._opening = opening
        self._amount = (
            "{task.completed:.0f} / {task.total:.0f} tokens"
            if tokens
            else "{task.percentage:>3.0f} %{task.fields[bytes]}"
        )
        self._out, self._screen = out, out.err
        self._wanted = out.err.animate and not out.quiet
        self._begin = self._drawn = monotonic()
        self._bar: RichProgress | None = None
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Progress:
        if self._opening and self._wanted and sys.stderr is not None:
            sys.stderr.write(one_line(self._opening)[: self._screen.width - 1])
            sys.stderr.flush()
        else:
            self._opening = ""
        self._out.erase = self._erase
        return self

    def __exit__(self, *exception: object) -> None:
        self._erase()
        self._out.erase = None

    def __call__(self, what: str, done: int, total: int | None) -> None:
        """Shows `done` of `total` bytes or tokens; `what` names the work, one bar each."""
        if not self._wanted or monotonic() - self._begin < PATIENCE_S:
            return
        if self._bar is None:
            self._bar = self._started()
        task = self._tasks.get(what)
        fresh = task is None
        if task is None:
            for other in self._tasks.values():
                self._bar.update(other, visible=False)
            task = self._tasks[what] = self._bar.add_task(what, total=total, bytes="")
        now = monotonic()
        due = now - self._drawn >= BETWEEN_S or done == total or fresh
        if due:
            self._drawn = now
        self._bar.update(task, completed=done, total=total)
        if due:
            if what.startswith("downloading ") and total and self._screen.width >= _WIDE:
                from llmcli.ui.numbers import size

                speed = next(t.speed for t in self._bar.tasks if t.id == task)
                rate = f", {size(round(speed))}/s" if speed else ""
                self._bar.update(task, bytes=f", {size(done)} of {size(total)}{rate}")
            self._bar.refresh()

    def _erase(self) -> None:
        """Before something else is written, and at the end; the next call draws it anew."""
        if self._opening:
            erase_line()
        if self._bar is not None:
            self._bar.stop()
        self._opening, self._bar, self._tasks = "", None, {}

    def _started(self) -> RichProgress:
        from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        self._erase()
        console = make_console(self._screen, live=True)
        console.file = sys.stderr
        bar = RichProgress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TextColumn(self._amount),
            TimeRemainingColumn(compact=True),
            console=console,
            transient=True,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        bar.start()
        return bar

"""Models on this machine as a table, and what was fetched or removed."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.text import Text

from llmcli.records.models import (
    ModelsReport,
    PulledModel,
    Removal,
    RemovalReport,
    StoredModel,
    ago,
)
from llmcli.ui.layout import INDENT, Column, Dotted, Rows, filled
from llmcli.ui.stats import size
from llmcli.ui.theme import FAINT, one_line

_COLUMNS = (
    Column("name", right=False),
    *(
        Column(name, right=name in ("size", "files"), drop=1)
        for name in ("size", "state", "last used", "place", "files", "revision")
    ),
)
_FEW = len(_COLUMNS) - 2  # those without which the others may fit
_SHORT = 12  # digits of a commit, which no other begins with


def render_models(report: ModelsReport, *, now: float | None = None) -> RenderableType:
    """A line a model, what those to be fetched are good for, then what both caches take.

    `now` is in seconds since 1970.
    """
    models = Models(report.models, time.time() if now is None else now)
    offered: list[RenderableType] = [
        Dotted([f"{model.name}: {model.purpose}", model.license], FAINT)
        for model in report.models
        if model.place == "nowhere" and model.purpose
    ]
    if offered:
        commands = ["`llmcli models pull NAME` fetches", "`llmcli models rm NAME` deletes"]
        offered = [Dotted(commands, FAINT), *offered, Text("")]
    footer: list[RenderableType] = [
        Dotted([f"{cache.place} {size(cache.bytes)}", one_line(cache.path), *_others(cache.others)],
               FAINT)
        for cache in report.caches
    ]  # fmt: skip
    if report.left_over:
        words = f"stale downloads and replaced versions {size(report.left_over)}"
        footer.append(Dotted([words, "`llmcli models prune` removes them"], FAINT))
    return Group(models, Text(""), *offered, *footer)


@dataclass(frozen=True)
class Models:
    """A table; where names are too long for one, a line for each name and one for its facts."""

    models: Sequence[StoredModel]
    now: float

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        rows = [_row(model, self.now) for model in self.models]
        for columns in (len(_COLUMNS), _FEW):
            table = Rows(_COLUMNS[:columns], [row[:columns] for row in rows])
            if table.fit(options.max_width):
                yield table
                return
        for row in rows:
            yield Text(row[0].plain, style=row[0].style, overflow="fold")
            yield from _below(_facts(row), options.max_width)


def render_pulled(pulled: PulledModel) -> RenderableType:
    """The name, the size, whether it was here already, and the path: one line where it fits."""
    return Pulled(pulled)


def render_removal(report: RemovalReport) -> RenderableType:
    """What goes or is gone, why, and the bytes in all."""
    if not report.removed:
        return Text("nothing to remove" if not report.kept else "nothing was removed")
    words = "would free" if report.dry_run else "freed"
    last = Text(f"\n{words} {size(report.bytes)}")
    return Group(*(Removed(removal) for removal in report.removed), last)


@dataclass(frozen=True)
class Pulled:
    """A line for scripts; on a terminal that is too narrow for it, the path is on its own."""

    pulled: PulledModel

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        words = "fetched" if self.pulled.fetched else "already here"
        facts = f"{one_line(self.pulled.name)}  {size(self.pulled.bytes)}  {words}"
        path = one_line(self.pulled.path)
        if cell_len(facts) + len("  ") + cell_len(path) <= options.max_width:
            yield Text(f"{facts}  {path}")
        else:
            yield Text(facts, overflow="fold")
            yield from _below([path], options.max_width)


@dataclass(frozen=True)
class Removed:
    """The name and the bytes, and below them why, and where it is."""

    removal: Removal

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        paths = self.removal.paths
        more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
        yield Text(f"{one_line(self.removal.name)}  {size(self.removal.bytes)}", overflow="fold")
        facts = [one_line(self.removal.why), one_line(next(iter(paths), "")) + more]
        yield from _below(facts, options.max_width)


def _row(model: StoredModel, now: float) -> list[Text]:
    style = FAINT if model.place == "nowhere" else ""
    used = "" if model.last_used is None else ago(now - model.last_used)
    cells = [
        model.name,
        size(model.bytes) if model.bytes else "",
        model.state,
        used,
        "" if model.place == "nowhere" else model.place,
        str(model.files) if model.files else "",
        (model.revision or "")[:_SHORT],
    ]
    return [Text(one_line(cell), style=style) for cell in cells]


def _facts(row: Sequence[Text]) -> list[str]:
    """The cells behind the name, as words that need no head."""
    _, bytes_, state, used, place, files, revision = (cell.plain for cell in row)
    used = f"used {used}" if used else ""
    return [bytes_, state, used, place, f"{files} file{'s' * (files != '1')}" if files else "",
            revision]  # fmt: skip


def _below(parts: Sequence[str], width: int) -> Iterator[Text]:
    for line in filled([part for part in parts if part], max(1, width - len(INDENT))):
        yield Text(INDENT + line, style=FAINT, overflow="fold")


def _others(count: int) -> list[str]:
    if count == 1:
        return ["besides 1 repository that is no model"]
    return [f"besides {count} repositories that are no models"] if count else []

"""Models on this machine as a table, and what was fetched or removed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.text import Text

from llmcli.records.models import (
    ModelsReport,
    PulledModel,
    RemovalReport,
    StoredModel,
    ago,
)
from llmcli.ui.layout import Column, Indented, Line, Rows
from llmcli.ui.numbers import size
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


def render_models(report: ModelsReport) -> RenderableType:
    """A line a model, what those to be fetched are good for, then what both caches take."""
    offered: list[RenderableType] = [
        Line([f"{model.name}: {model.purpose}", model.license], FAINT)
        for model in report.models
        if model.place == "nowhere" and model.purpose
    ]
    if offered:
        commands = ["`llmcli models pull NAME` fetches", "`llmcli models rm NAME` deletes"]
        offered = [Line(commands, FAINT), *offered, Text("")]
    footer: list[RenderableType] = []
    for cache in report.caches:
        words = [f"{cache.place} {size(cache.bytes)}", one_line(cache.path)]
        if cache.others:
            words.append("besides 1 repository that is no model" if cache.others == 1
                         else f"besides {cache.others} repositories that are no models")
        footer.append(Line(words, FAINT))
    if report.left_over:
        stale = f"stale downloads and replaced versions {size(report.left_over)}"
        footer.append(Line([stale, "`llmcli models prune` removes them"], FAINT))
    return Group(Models(report.models), Text(""), *offered, *footer)


@dataclass(frozen=True)
class Models:
    """A table; where names are too long for one, a line for each name and one for its facts."""

    models: Sequence[StoredModel]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        rows = []
        for model in self.models:
            nowhere = model.place == "nowhere"
            used = "" if model.last_used is None else ago(time.time() - model.last_used)
            cells = [
                model.name,
                size(model.bytes) if model.bytes else "",
                model.state,
                used,
                "" if nowhere else model.place,
                str(model.files or ""),
                (model.revision or "")[:_SHORT],
            ]
            rows.append([Text(one_line(cell), style=FAINT if nowhere else "") for cell in cells])
        for columns in (len(_COLUMNS), _FEW):
            table = Rows(_COLUMNS[:columns], [row[:columns] for row in rows])
            if table.fit(options.max_width):
                yield table
                return
        for name, bytes_, state, last, place, files, revision in rows:
            held = files and f"{files} file{'s' * (str(files) != '1')}"
            facts = (bytes_, state, last and f"used {last}", place, held, revision)
            yield _entry(name, [str(fact) for fact in facts])


def render_pulled(model: PulledModel, width: int) -> RenderableType:
    """The name, the size, whether it was here already, and the path: one line where it fits."""
    words, path = "fetched" if model.fetched else "already here", one_line(model.path)
    line = f"{one_line(model.name)}  {size(model.bytes)}  {words}"
    whole = f"{line}  {path}"
    return Text(whole) if cell_len(whole) <= width else _entry(Text(line), [path])


def render_removal(report: RemovalReport) -> RenderableType:
    """What goes or is gone, why, and the bytes in all."""
    if not report.removed:
        return Text("nothing to remove" if not report.kept else "nothing was removed")
    entries = []
    for one in report.removed:
        more = f" and {len(one.paths) - 1} more" if len(one.paths) > 1 else ""
        path = one_line(next(iter(one.paths), "")) + more
        line = Text(f"{one_line(one.name)}  {size(one.bytes)}")
        entries.append(_entry(line, [one_line(one.why), path]))
    words = "would free" if report.dry_run else "freed"
    return Group(*entries, Text(f"\n{words} {size(report.bytes)}"))


def _entry(line: Text, facts: Sequence[str]) -> RenderableType:
    """A line, and faint facts below it."""
    line.overflow = "fold"
    return Group(line, Indented(Line(list(filter(None, facts)), FAINT)))

"""Models on this machine as a table, and what was fetched or removed."""

from __future__ import annotations

import time

from rich.console import Group, RenderableType
from rich.text import Text

from llmcli.render.layout import Column, Dotted, Rows
from llmcli.render.stats import size
from llmcli.render.theme import FAINT, one_line
from llmcli.reports.models import ModelsReport, PulledModel, Removal, RemovalReport, StoredModel
from llmcli.reports.numbers import counted

_COLUMNS = (
    Column("name", right=False),
    Column("size"),
    Column("state", right=False, first_to_go=1),
    Column("last used", right=False, first_to_go=2, labelled=True),
    Column("place", right=False, first_to_go=3),
    Column("files", first_to_go=4, labelled=True),
    Column("revision", right=False, first_to_go=5, labelled=True),
)
_SHORT = 12  # letters of a commit, which tell it from all others
_AGES = ((365 * 86400, "year"), (30 * 86400, "month"), (86400, "day"), (3600, "hour"),
         (60, "minute"))  # fmt: skip


def render_models(report: ModelsReport, *, now: float | None = None) -> RenderableType:
    """A line a model, then what both caches take. `now` is in seconds since 1970."""
    rows = [_row(model, time.time() if now is None else now) for model in report.models]
    footer: list[RenderableType] = [
        Dotted([f"{cache.place} {size(cache.bytes)}", one_line(cache.path), *_others(cache.others)],
               FAINT)
        for cache in report.caches
    ]  # fmt: skip
    if report.left_over:
        words = f"left over {size(report.left_over)}"
        footer.append(Dotted([words, "`llmcli models prune` removes it"], FAINT))
    return Group(Rows(_COLUMNS, rows, spill=True), Text(""), *footer)


def render_pulled(pulled: PulledModel) -> RenderableType:
    """One line: the name, the size, whether it was here already, and the path."""
    words = "fetched" if pulled.fetched else "already here"
    return Text(
        f"{one_line(pulled.name)}  {size(pulled.bytes)}  {words}  {one_line(pulled.path)}",
        no_wrap=True,
        overflow="ignore",
    )


def render_removal(report: RemovalReport) -> RenderableType:
    """What goes or is gone, why, and the bytes in all."""
    if not report.removed:
        return Text("nothing to remove" if not report.kept else "nothing was removed")
    columns = [Column("name", right=False), Column("size"), Column("why", right=False)]
    columns += [Column("path", right=False, first_to_go=1)]
    rows = [_removal(removal) for removal in report.removed]
    if not any(removal.why for removal in report.removed):
        del columns[2]
        rows = [[*row[:2], *row[3:]] for row in rows]
    words = "would free" if report.dry_run else "freed"
    return Group(Rows(columns, rows, spill=True), Text(f"\n{words} {size(report.bytes)}"))


def ago(seconds: float) -> str:
    """`3 days ago`, `just now` within a minute and for what lies in the future."""
    for unit, noun in _AGES:
        if seconds >= unit:
            return f"{counted(int(seconds // unit), noun)} ago"
    return "just now"


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


def _removal(removal: Removal) -> list[Text]:
    first = next(iter(removal.paths), "")
    more = f" and {len(removal.paths) - 1} more" if len(removal.paths) > 1 else ""
    cells = [removal.name, size(removal.bytes), removal.why, first + more]
    return [Text(one_line(cell)) for cell in cells]


def _others(count: int) -> list[str]:
    return [f"{count} of data sets and other kinds"] if count else []

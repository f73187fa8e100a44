"""The machine in a few lines, the settings that were made, and the defaults."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from llmcli.commands.env.report import EnvironmentReport
from llmcli.records.machine import Environment
from llmcli.records.numbers import counted
from llmcli.ui.layout import SEPARATOR, Line
from llmcli.ui.numbers import size
from llmcli.ui.theme import FAINT, HEADING, one_line

LONG = 200  # characters of a value of the configuration file
_ALWAYS = ("configuration", "model", "llmcli cache", "hub cache")  # in a row by default, too


def render_environment(report: EnvironmentReport) -> RenderableType:
    """The machine in two columns, each setting with its source, the other defaults in a list."""
    kinds = {"flag": "flag", "environment": "variable", "file": "config key"}
    rows, defaults = [], []
    for setting in report.settings:
        source = setting.source
        if source == "default" and setting.name not in _ALWAYS:
            defaults.append(one_line(f"{setting.name} {setting.words}"))
            continue
        origin = f"{kinds[source]} {setting.origin}" if setting.origin else source
        rows.append((setting.name, one_line(setting.words), origin))
    parts: list[RenderableType] = [
        Text("machine", style=HEADING),
        _machine(report.environment),
        Text("\nsettings", style=HEADING),
        Settings(rows),
        Text("\ndefaults", style=HEADING),
        Line(defaults),
    ]
    file, options = report.configuration, []
    if file.options or file.problems:
        parts.append(Text("\nconfiguration file", style=HEADING))
    for one in file.options:  # a long text is cut
        name = one.option if one.command is None else f"[{one.command}] {one.option}"
        value = json.dumps(one.value, ensure_ascii=False)
        options.append((name, value if len(value) <= LONG else f"{value[:LONG]}…"))
    if options:
        parts.append(_grid(options))
    for problem in file.problems:
        parts.append(Text(one_line(f"error: {problem.message}")))
        if problem.hint:
            parts.append(Text(one_line(f"hint: {problem.hint}")))
    return Group(*parts)


@dataclass(frozen=True)
class Settings:
    """Name, value and source in columns; in few columns a long value has a line of its own."""

    rows: Sequence[tuple[str, str, str]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        names, sources = (max(cell_len(row[i]) for row in self.rows) for i in (0, 2))
        room = options.max_width - names - sources - 4
        values = max((n for row in self.rows if (n := cell_len(row[1])) <= room), default=0)
        for name, value, source in self.rows:
            if cell_len(value) <= room:
                parts = [f"{name:{names}}  {set_cell_size(value, values)}  ", source]
            else:
                parts = [f"{name:{names}}  ", source, f"\n  {value}"]
            line = Text(no_wrap=True, overflow="ignore")
            for part in parts:
                line.append(part, style=FAINT if part is source else "")
            yield line


def _machine(environment: Environment) -> RenderableType:
    memory = environment.memory_bytes
    torch = environment.torch or "not installed"
    kernels = [environment.kernel_level]
    if environment.gpus:
        kernels.append(f"Triton {environment.triton}")
    rows = [
        ("processor", (environment.processor, counted(environment.cores, "core"))),
        ("features", (" ".join(environment.features) or "unknown",)),
        ("memory", ("unknown" if memory is None else size(memory),)),
        ("GPU", environment.gpus or ("none found",)),
        ("driver", (environment.driver or "none found",)),
        ("kernels", kernels),
        (
            "software",
            (f"llmcli {environment.llmcli}", f"PyTorch {torch}", f"Python {environment.python}"),
        ),
        ("platform", (environment.platform,)),
    ]
    return _grid((name, SEPARATOR.join(words)) for name, words in rows)


def _grid(rows: Iterable[tuple[str, str]]) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    for name, value in rows:
        table.add_row(Text(name), Text(one_line(value), overflow="fold"))
    return table

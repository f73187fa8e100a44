"""The environment header and the table of settings."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from llmcli.render.stats import size
from llmcli.render.theme import FAINT, HEADING, one_line
from llmcli.reports import Environment, EnvironmentReport


def render_environment(report: EnvironmentReport) -> RenderableType:
    """The machine in two columns, then each setting with its source."""
    settings = Table.grid(padding=(0, 2))
    for setting in report.settings:
        kind = "flag" if setting.source == "flag" else "variable"
        source = f"{kind} {setting.origin}" if setting.origin else setting.source
        settings.add_row(
            Text(setting.name), Text(one_line(setting.value), overflow="fold"),
            Text(source, style=FAINT),
        )  # fmt: skip
    heading = Text("\nsettings", style=HEADING)
    return Group(Text("machine", style=HEADING), _machine(report.environment), heading, settings)


def _machine(environment: Environment) -> RenderableType:
    memory = environment.memory_bytes
    rows = [
        ("processor", environment.processor),
        ("cores", str(environment.cores)),
        ("features", " ".join(environment.features) or "unknown"),
        ("memory", "unknown" if memory is None else size(memory)),
        ("GPU", ", ".join(environment.gpus) or "none found"),
        ("driver", environment.driver or "none found"),
        ("PyTorch", environment.torch or "not installed"),
        ("Python", environment.python),
        ("platform", environment.platform),
        ("llmcli", environment.llmcli),
    ]
    table = Table.grid(padding=(0, 2))
    for name, value in rows:
        table.add_row(Text(name), Text(one_line(value), overflow="fold"))
    return table

"""What `llmcli load` is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import ClassVar

from llmcli.cli.options import ModelOptions
from llmcli.cli.params import opt
from llmcli.commands.load.report import LedgerLine, LoadReport
from llmcli.errors import UsageError

LOAD = "Load"


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """How much is told."""

    panel: ClassVar[str] = LOAD
    check: bool = opt(
        False, "--check",
        "Verdicts only, of the numbers as the files have them: no model is built, and any file of "
        "tensors will do.",
    )  # fmt: skip
    all: bool = opt(False, "--all", "A line for every tensor of every layer.")
    filter: str | None = opt(
        None, "--filter", "GLOB",
        "The lines of these parameters or tensors alone, such as blocks.0.*.",
    )  # fmt: skip


def check_options(load: LoadOptions, model: ModelOptions) -> None:
    """Raises UsageError for options that say nothing of what is done."""
    if model.random_weights:
        raise UsageError("with `--random-weights` there is nothing to load", hint="leave it out")
    refused = {
        "--all": load.all,
        "--filter": load.filter is not None,
        "--dtype": model.dtype != "auto",
        "--device": model.device != "auto",
    }
    for flag, given in refused.items():
        if load.check and given:
            raise UsageError(
                f"`--check` gives verdicts of the numbers as they are stored, without `{flag}`",
                hint="leave one of them out",
            )


def chosen(report: LoadReport, load: LoadOptions) -> Sequence[LedgerLine]:
    """The lines that are asked for; raises UsageError for a pattern that none has."""
    if load.filter is None:
        return report.lines if load.all else report.rows
    pattern = load.filter
    found = [
        line
        for line in report.lines
        if any(fnmatchcase(name, pattern) for name in (line.parameter, line.source) if name)
    ]
    if not found:
        names = [name for line in report.lines for name in (line.parameter, line.source) if name]
        near = get_close_matches(pattern, names, n=1)
        raise UsageError(
            f"no parameter and no tensor is called `{pattern}`",
            hint=f"did you mean `{near[0]}`?" if near else f"for example `{names[0]}`",
        )
    return found

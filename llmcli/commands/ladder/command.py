"""`llmcli ladder`: the same model at every step from nested loops to fused kernels."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, ClassVar

from llmcli.commands.ladder.report import NAMES, LadderReport
from llmcli.errors import CheckFailed, PromptTooLong, UsageError
from llmcli.records.document import members
from llmcli.shell.encoding import ChatOptions, encode
from llmcli.shell.exits import Stopped
from llmcli.shell.files import check_target, kind_of_file
from llmcli.shell.options import GivenPromptOptions, ModelOptions, PagedOutputOptions
from llmcli.shell.output import Output, dumps, write_file
from llmcli.shell.params import Without, opt
from llmcli.shell.progress import Progress
from llmcli.shell.prompts import BUILTIN, prompt_or_default
from llmcli.shell.running import header, load_model

if TYPE_CHECKING:
    from llmcli.config.model import ModelConfig
    from llmcli.model import Model

EPILOG = """
Examples:

  llmcli ladder "In the beginning" -m tiny
  llmcli ladder "In the beginning" -m tiny --rung 1,3
  llmcli ladder "In the beginning" -m tiny --rung 3 --explain
  llmcli ladder -m tiny --rung cache
"""


@dataclass(frozen=True, kw_only=True)
class LadderOptions:
    """Which rungs, how far, and where the result goes."""

    panel: ClassVar[str] = "Ladder"
    rung: str | None = opt(
        None,
        "--rung N",
        "Run only these rungs and show what each changes: 3, or 2,5-7, or cache. [default: 1-8]",
    )
    explain: bool = opt(
        False,
        "--explain",
        "Print the source of one --rung with the shape and the numbers of every name.",
        needs=("--rung",),
        excludes=("--json",),
    )
    tokens: int = opt(
        2,
        "-n --tokens N",
        "Tokens that are read one by one after the prompt.",
        at_least=1,
        at_most=32,
    )
    batch: int = opt(
        4,
        "--batch B",
        "Batch size of the rungs that take a batch: the prompt and rotations of it.",
        at_least=1,
        at_most=256,
    )
    budget: float = opt(
        20.0,
        "--budget SECONDS",
        "A rung that would take longer is estimated from a part of it.",
        at_least=0,
    )
    save: str | None = opt(None, "-o --output FILE", "Write the result to FILE.json.")


def command(
    prompt: GivenPromptOptions,
    ladder: LadderOptions,
    model: Annotated[ModelOptions, Without(("edit",))],
    output: PagedOutputOptions,
) -> None:
    """The same model with the same weights, from nested loops to fused kernels.

    Every rung changes one formula of the rung before and must give the same logits within rounding,
    or the command exits 1. A table shows the time of each for the prompt and for every token after
    it; `--rung` also shows the formulas, which tensors are views or copies, and the matrix
    products.
    """
    out = Output("ladder", output)
    rungs = _rungs(ladder)
    if ladder.save is not None:
        kind_of_file(ladder.save, ("json",))

    def check(config: ModelConfig) -> None:
        from llmcli.commands.ladder.measure.weights import require_supported  # imports torch

        require_supported(config)

    given = prompt_or_default(prompt, out.note, BUILTIN)
    text = not given.ids
    model.require_exact()
    exact = replace(model, dtype="float32") if model.dtype == "auto" else model
    loaded = load_model(exact, out, text=text, check=check).model
    from torch import get_num_threads  # loaded with the model

    from llmcli.measure.machine import CpuContention

    if ladder.save is not None:
        check_target(ladder.save)
    ids = encode(given, ChatOptions(raw=True), loaded).ids
    room = loaded.config.room(model.context_length)
    _check_tokens(len(ids) + ladder.tokens, loaded, room)
    busy = CpuContention()
    report, interruption = _measured(loaded, ids, rungs, ladder, out)
    load = busy.load(get_num_threads() if loaded.device.type == "cpu" else 1)
    _show(report, loaded, ladder, out)
    if load.slowed and not ladder.explain:  # which shows no times
        out.note(load.words)
    if interruption is not None:
        where = f" after rung {report.rungs[-1].number}"
        raise Stopped(interruption, reported=out.json, where=where)
    if not report.ok:
        wrong = ", ".join(str(rung.number) for rung in report.rungs if not rung.ok)
        raise CheckFailed(f"rung {wrong} differs from the rung before by more than rounding")


def _show(report: LadderReport, model: Model, options: LadderOptions, out: Output) -> None:
    """Writes the report to the screen or as JSON, and to the file where one is named."""
    from llmcli.commands.ladder.view import render_ladder, render_rung
    from llmcli.ui.facts import model_line

    head = header(model.describe())
    title = model_line(head["model"])
    body = members(report)
    if options.explain:  # excludes --json
        out.show(*render_rung(report.rungs[-1], report, title), paged=out.pager)
    elif not out.json:
        table = render_ladder(report, title, details=options.rung is not None)
        out.show(*table, paged=out.pager)
    if options.save is not None:
        document = out.envelope(body, **head)
        write_file(options.save, (dumps(document, indent=2) + "\n").encode())
    if out.json:
        out.document(body, **head)


def _rungs(options: LadderOptions) -> tuple[int, ...]:
    """The numbers of the rungs to run; for `--explain` the one below too, to compare with."""
    numbers: set[int] = set()
    text = f"1-{len(NAMES)}" if options.rung is None else options.rung
    for part in map(str.strip, text.split(",")):
        match = re.fullmatch(r"([0-9]{1,3})(?:\s*-\s*([0-9]{1,3}))?", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if part in NAMES:
            first = last = NAMES.index(part) + 1
        if not 1 <= first <= last <= len(NAMES):
            raise UsageError(
                f"`--rung {text}` names no rungs of the ladder",
                hint=f"they are {', '.join(f'{i} {name}' for i, name in enumerate(NAMES, 1))}",
            )
        numbers.update(range(first, last + 1))
    if options.explain:
        if len(numbers) > 1:
            raise UsageError("`--explain` explains one rung at a time")
        numbers.add(max(1, min(numbers) - 1))
    return tuple(sorted(numbers))


def _measured(
    model: Model, ids: tuple[int, ...], rungs: tuple[int, ...], options: LadderOptions, out: Output
) -> tuple[LadderReport, BaseException | None]:
    """The report of a prompt, and what interrupted it, if anything did."""
    from llmcli.commands.ladder.measure.runner import LadderInterrupted, plan_workload, run_ladder
    from llmcli.commands.ladder.measure.texts import axis_sizes
    from llmcli.commands.ladder.measure.weights import Weights

    weights = Weights.of(model.decoder)
    workload = plan_workload(
        weights,
        ids,
        more=options.tokens,
        sequences=options.batch,
        budget=options.budget,
        rounds=0 if options.explain else 5,
    )
    record = options.rung is not None or options.save is not None or out.json
    interruption = None
    with Progress(out) as progress:
        try:
            reports = run_ladder(weights, workload, numbers=rungs, progress=progress, record=record)
        except LadderInterrupted as stop:
            if len(stop.rungs) < (len(rungs) if options.explain else 1):  # nothing to show
                raise
            reports, interruption = stop.rungs, stop.__cause__
    report = LadderReport(
        tokens=tuple(map(model.token_text, ids)),
        ids=ids,
        more=tuple(map(model.token_text, workload.more.tolist())),
        letters=axis_sizes(weights.config, tokens=len(ids), sequences=options.batch),
        dtype=str(model.describe()["weight_format"]),
        rungs=reports,
        interrupted=interruption is not None,
    )
    return report, interruption


def _check_tokens(count: int, model: Model, room: int) -> None:
    """Raises PromptTooLong for more tokens than the context holds or all rungs rotate alike."""
    from llmcli.commands.ladder.measure.weights import steady_tokens

    if count > room:
        raise PromptTooLong(
            f"the prompt and the tokens after it, {count} in all, do not fit the context of {room}",
            hint="shorten the prompt, or take fewer tokens with `-n`",
        )
    steady = steady_tokens(model.config)
    if steady is not None and count > steady:
        raise PromptTooLong(
            f"beyond {steady} tokens this model rotates by the length of the sequence, so that a "
            "cache holds other numbers and the rungs cannot agree",
            hint=f"use at most {steady} tokens in all; these are {count}",
        )

"""`llmcli bench`: how fast a model runs, in llama-bench's tests, options and formats."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import llmcli
from llmcli.commands.bench.report.plan import (
    BenchOutput,
    OurOptions,
    Plan,
    RunOptions,
    TestOptions,
)
from llmcli.commands.bench.report.settings import SweptOptions
from llmcli.errors import LlmcliError, UsageError
from llmcli.kernels import native
from llmcli.records.document import checks_document, members
from llmcli.records.numbers import counted
from llmcli.shell.exits import SIGNALS, tell
from llmcli.shell.output import Output
from llmcli.shell.progress import BETWEEN_S, PATIENCE_S, Progress
from llmcli.shell.running import header, require_cwd
from llmcli.shell.streams import erase_line
from llmcli.ui.theme import one_line

if TYPE_CHECKING:
    from llmcli.commands.bench.report.row import BenchReport, BuildInfo, Row
    from llmcli.commands.bench.view.rows import Format
    from llmcli.records.machine import Ceilings

CONTEXT = {"token_normalize_func": lambda name: name.replace("_", "-")}  # as llama-bench does
# the module of an engine, and the package that pip installs it from
PACKAGES = {
    "transformers": ("transformers", "transformers"),
    "llama.cpp": ("llama_cpp", "llama-cpp-python"),
}
# options of our other commands: what takes their place here
ELSEWHERE = {
    "--max-tokens": "did you mean `-n`, new tokens of a test?",
    "--pairs": "did you mean `-r`, runs of each test?",
    "--q": "it is `--quiet` here: short options are llama-bench's",
    **dict.fromkeys(("--oe", "--output-err"), "rows go to stdout alone: see `-o`"),
    "--compare": "did you mean `llmcli bench compare A B`?",
    "--list-devices": "`llmcli env` lists the devices",
    "--context-length": "the cache is as long as each test needs: see `-d`, `-p` and `-n`",
}
EPILOG = """
Columns: test: pp512 is a prompt of 512 tokens, tg128 128 new tokens; t/s: tokens a second, mean ±
standard deviation of the runs; first token: the time until a prompt is read; token p50, p90, p99:
percentiles of the times between tokens; FLOPs: of the pairs that the causal mask leaves; full
square: of all pairs; peak RSS: the process's peak memory; roofline: the speed as a share of what
the machine's ceilings allow.

How to compare two settings: `llmcli bench compare --help`.

Examples:

  llmcli bench
  llmcli bench -m tiny -p 64,128 -n 16 -t 1-4*2
  llmcli bench -m model.gguf -pg 512,128 -d 0,1024 -o json
  llmcli bench -m ./config --random-weights --device meta
  llmcli bench --against transformers
  llmcli bench compare before.json after.json --fail-if-slower 5%
"""
_GIT_SECONDS = 5


def command(
    tests: TestOptions,
    swept: SweptOptions,
    runs: RunOptions,
    ours: OurOptions,
    output: BenchOutput,
) -> None:
    """How fast a model reads prompts and writes text: llama-bench's tests, options and formats.

    Every test runs `-r` times on random tokens; the output has the mean of the rates and their
    standard deviation, as llama-bench computes them. Also shown: time to the first token,
    percentiles of the times between tokens, peak memory, load time, and the share of what the
    machine's measured ceilings allow. A configuration that cannot run is a row with its error.
    Options of llama-bench that change nothing here are accepted and ignored. `llmcli bench
    compare A B` compares two results.
    """

    out = Output("bench", output)
    if output.json and runs.output is not None:
        raise UsageError(
            f"`--json` and `-o {runs.output}` are two formats for one stdout",
            hint="`-o json` is llama-bench's array, `--json` one document with everything",
        )
    native.check()
    if ours.against is not None:
        module, package = PACKAGES[ours.against]
        if find_spec(module) is None:
            raise UsageError(
                f"`--against {ours.against}` needs a package that is not installed",
                hint=f"run `pip install {package}`, then this command again",
            )
    if tests.hf_token:
        os.environ["HF_TOKEN"] = tests.hf_token
    models = tests.models()
    plan = partial(Plan.of, tests=tests, swept=swept, runs=runs, ours=ours)
    plan(models or ("",), threads=1)  # refused before anything is imported
    require_cwd()
    with Progress(out, "starting …"), SIGNALS.abrupt():
        import torch
    models = models or (_default_model(ours, runs, out),)
    _run(plan(models, threads=torch.get_num_threads()), out)


def _default_model(ours: OurOptions, runs: RunOptions, out: Output) -> str:
    """The name of the model where none is named; fetched if it has to be, `tiny` if it cannot.

    `-o json` is an array of rows, an empty one, even where this is interrupted.
    """
    from llmcli.checkpoints.locate import find

    try:
        with Progress(out) as progress:
            return find(
                None,
                revision=ours.revision,
                offline=ours.offline,
                progress=progress,
                note=out.note,
            )[0]
    except KeyboardInterrupt:
        if runs.output == "json":
            out.write("[]\n")
        raise


def _run(plan: Plan, out: Output) -> None:
    """Measures, writes each row when it is complete, and ends with what the rows have in common."""
    from llmcli.commands.bench.measure.loader import EngineLoader
    from llmcli.commands.bench.measure.sweep import Sweep
    from llmcli.ui.facts import ceiling_words

    build = build_info()
    status = Status(out, lines=plan.runs.progress)
    format = _format(plan, out, build)
    if plan.runs.verbose:
        out.note(", ".join(_machine_words()))

    def write(text: str) -> None:
        if text:
            out.write(text)

    def on_row(row: Row) -> None:
        status.erase()
        SIGNALS.check()
        write(format.row(row))

    def on_ceilings(ceilings: Ceilings) -> None:
        if plan.runs.verbose:
            words = ", ".join(ceiling_words(ceilings))
            out.note(f"ceilings ({ceilings.device}, {ceilings.dtype}): {words}")

    with EngineLoader(plan, out, status, on_ceilings) as loader:
        write(format.head)
        report = Sweep(plan, loader, build, on_row=on_row, on_status=status.on_status).run()
        status.erase()
        write(format.foot(len(report.rows)))
        _finish(report, plan, out)


def _format(plan: Plan, out: Output, build: BuildInfo) -> Format:
    """The format of the rows that `-o` names; none with `--json`.

    Where no format was given the table is as narrow as the terminal, else it is llama-bench's.
    """
    from llmcli.commands.bench.view.rows import FORMATS, markdown
    from llmcli.devices import resolve_device

    if out.json or plan.runs.output not in (None, "md"):
        return FORMATS["none" if out.json else str(plan.runs.output)]
    kinds = {
        resolve_device("auto").type if device == "auto" else device.partition(":")[0]
        for device in {settings.placed for settings in plan.configurations}
    }
    return markdown(plan, build, kinds, out.out.width if plan.runs.output is None else None)


class Status:
    """One line on a terminal's stderr, written over again and again; nothing elsewhere.

    With `lines` every word of a benchmark's progress is a line of its own, as llama-bench prints
    it. Called with (what, done, total) it shows the progress of a load.
    """

    def __init__(self, out: Output, *, lines: bool) -> None:
        self._out = out
        self._lines = lines
        self._animate = out.err.animate and not out.quiet and not lines
        self._begin = self._last = monotonic()
        self._first: float | None = None
        self._shown = False

    def on_status(self, words: str) -> None:
        """`benchmark 2/4: prompt run 1/5`, with the time that the others may take."""
        from llmcli.ui.numbers import duration

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
        self._shown, self._out.erase = True, self.erase  # before a note


class NothingRan(LlmcliError):
    """No test of a sweep could run: the error of the first. `reported`: the rows show it."""

    reported = True

    def __init__(self, row: Row) -> None:
        super().__init__(row.error or "", hint=row.hint)
        self.code, self.kind = row.error_code or LlmcliError.code, row.error_kind or ""


def _finish(report: BenchReport, plan: Plan, out: Output) -> None:
    """The second table or the document, the notes, and the exit code."""
    from llmcli.commands.bench.view.rows import against_notes, render_beside, row_object

    if out.json:
        # its rows have the keys of `-o json`, and the time of every token
        body = members(report) | {
            "rows": [row_object(row, members(row)) for row in report.rows],
            "checks": checks_document(report.checks),
        }
        out.document(body, **header(*report.models))
    elif plan.runs.output in (None, "md"):
        weights = f"random weights (seed {plan.ours.seed})" if plan.ours.random_weights else ""
        markdown = plan.runs.output == "md" or not out.out.terminal
        words = _machine_words(*report.models)
        out.show(render_beside(report, words, weights=weights, markdown=markdown))
    else:
        for words in against_notes(report):
            out.note(words)
    if report.machine_load is not None and report.machine_load.slowed:
        out.note(report.machine_load.words)
    if report.interrupted:
        after = f" after {counted(len(report.rows), 'test')}" if report.rows else ""
        raise SIGNALS.stopped(reported=out.json, where=after)
    failed = [row for row in report.rows if row.error is not None]
    if failed and len(failed) == len(report.rows):
        raise NothingRan(failed[0])
    if failed:
        out.note(f"{len(failed)} of {len(report.rows)} tests could not run")


def _machine_words(*models: Mapping[str, Any]) -> Sequence[str]:
    """What a result of these models depends on, for a line: `environment_words`."""
    from llmcli.ui.facts import environment_words

    return environment_words(header(*models)["environment"])


def build_info() -> BuildInfo:
    """The program and the machine; a number of 0 stands for an installed version.

    llama-bench's number counts the commits, and so does ours in a checkout.
    """
    from llmcli.commands.bench.report.row import BuildInfo
    from llmcli.measure.machine import environment

    machine = environment()
    root = Path(llmcli.__file__).resolve().parents[1]
    commit, number = llmcli.__version__, 0
    if (root / ".git").exists():  # not that of a project which has us in its own environment
        revision = _git(root, "rev-parse", "--short=8", "HEAD")
        count = _git(root, "rev-list", "--count", "HEAD")
        if revision and count.isdecimal():
            commit, number = revision, int(count)
    return BuildInfo(
        build_commit=commit,
        build_number=number,
        cpu_info=machine.processor,
        gpu_info=", ".join(machine.gpus),
    )


@cache
def _git(root: Path, *words: str) -> str:
    """What git prints, nothing where it is not installed or refuses."""
    from llmcli.measure.machine import program_output

    return (program_output("git", "-C", str(root), *words, seconds=_GIT_SECONDS) or "").strip()

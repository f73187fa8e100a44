"""`llmcli bench compare`: two results of a benchmark, and how much faster the second one is."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from llmcli.errors import CheckFailed, UsageError
from llmcli.records.document import members
from llmcli.shell.documents import read_bytes, refuse_wide
from llmcli.shell.options import OutputOptions
from llmcli.shell.output import Output
from llmcli.shell.params import arg, opt
from llmcli.shell.prompts import stdin_bytes

if TYPE_CHECKING:
    from llmcli.commands.bench.report.comparison import ComparisonReport, Source

EPILOG = """
Examples:

  llmcli bench compare before.json after.json
  llmcli bench compare llama-bench.csv ours.jsonl
  llmcli bench -m tiny -o jsonl |
    llmcli bench compare before.jsonl - --fail-if-slower 5%
  llmcli bench compare A.csv B.csv --json

  for run in 1 2 3; do
    llmcli bench --activations 16 -o jsonl >> 16.jsonl
    llmcli bench --activations 8 -o jsonl >> 8.jsonl
  done; llmcli bench compare 16.jsonl 8.jsonl

The last one takes turns between two settings, so that what changes on the machine affects both:
runs of the same test in one file are pooled. The format of a file is detected: JSON, JSONL or CSV,
of llama-bench or of `llmcli bench`.
"""
MOST = 32 << 20  # bytes of a file, some ten thousand rows
HINT = "give a file that llama-bench or `llmcli bench` has written, or `-` for stdin"


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """The two sides, and what is too slow."""

    panel: ClassVar[str] = "Comparison"
    first: str = arg(..., "A", "The result to compare with; `-` reads stdin.")
    second: str = arg(..., "B", "The result that is judged.")
    fail_if_slower: str | None = opt(
        None,
        "--fail-if-slower PERCENT",
        "Exit 1 where a test of B is slower than A's by more than that (such as 5%), within noise "
        "or not, or has failed.",
    )


def command(sides: CompareOptions, output: OutputOptions) -> None:
    """How much faster result B of a benchmark is than result A, test by test.

    Tests match where all settings that vary within a file are equal; settings that are fixed in
    each file may differ and are listed. The ratio of B to A comes with its 95 % interval: where 1
    is in it, the difference is noise, or inconclusive where only independent runs would exclude 1.
    `llmcli bench --against` compares two engines more sharply. Exit 1 where the two results have
    no test in common.
    """
    bound = None if sides.fail_if_slower is None else _share(sides.fail_if_slower)
    if sides.first == sides.second == "-":
        raise UsageError("`-` can be one side only", hint="write one of them to a file")
    out = Output("bench-compare", output)
    from llmcli.commands.bench.measure.compare import compare_results
    from llmcli.commands.bench.view.comparison import render_comparison

    read = [_read(path, out) for path in (sides.first, sides.second)]
    report = compare_results(*read, slower_than=bound)
    out.present(lambda: render_comparison(report), members(report))
    _require(report)


def _share(text: str) -> float:
    """0.05 for `5%` or `5`. A fraction without the sign could be meant either way."""
    number = re.fullmatch(r"(\d{1,3}(?:\.\d{1,6})?)(\s*%)?", text.strip(), re.ASCII)
    value = float(number[1]) if number else -1.0
    if not 0 <= value < 100:
        raise UsageError(
            f"`--fail-if-slower` takes percent from 0 to less than 100, not `{text}`",
            hint="such as `--fail-if-slower 5%`",
        )
    if 0 < value < 1 and number and not number[2]:
        raise UsageError(
            f"`--fail-if-slower {text}` may be {text} % or {100 * value:g} %",
            hint=f"write `--fail-if-slower {100 * value:g}%` or `{text}%`",
        )
    return value / 100


def _read(path: str, out: Output) -> Source:
    from llmcli.commands.bench.measure.compare import read_results

    name = "stdin" if path == "-" else path
    if path != "-":
        data = read_bytes(path, HINT, MOST + 1)
    elif sys.stdin is None or sys.stdin.isatty():
        raise UsageError("nothing is piped into `-`", hint=HINT)
    else:
        data = stdin_bytes(sys.stdin, MOST)
    if len(data) > MOST:
        raise UsageError(f"`{name}` is too large for results of a benchmark", hint=HINT)
    refuse_wide(data, f"`{name}`")
    source = read_results(data, name)
    first, *others = [row.inconsistency for row in source.results if row.inconsistency] or [""]
    if first:
        more = f" (and {len(others)} more)" if others else ""
        out.note(f"{first}: the runs are compared{more}")
    return source


def _require(report: ComparisonReport) -> None:
    """Raise CheckFailed where no test is in both, or tests of B have failed or are too slow."""
    from llmcli.commands.bench.view.comparison import NOTHING_IN_COMMON, failures

    if not report.tests:
        for side, source in (("a", report.a), ("b", report.b)):
            if source.rows == sum(test.side == side and bool(test.error) for test in report.lone):
                raise CheckFailed(
                    f"no row of `{source.name}` has a rate: all of them have failed",
                    hint="the errors are in its rows; run that benchmark again",
                )
        raise CheckFailed(
            f"{NOTHING_IN_COMMON} in `{report.a.name}` and in `{report.b.name}`",
            hint="the tests have to be the same, and so has every setting that varies in a file",
        )
    if report.ok:
        return
    hint = "the result says why, at `no rate in B`"
    if report.slow_tests:
        hint = "that is beyond noise; measure both again on a machine at rest to be sure"
    if any(test.verdict != "slower" for test in report.slow_tests):
        hint = "more repetitions (`-r`) make the noise smaller"
    raise CheckFailed(failures(report), hint=hint)

"""Two results of a benchmark side by side: each test with its ratio, and whether it is noise."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from llmcli.commands.bench.report.comparison import (
    ComparedTest,
    ComparisonReport,
    Rate,
    Source,
    UnmatchedTest,
    Verdict,
)
from llmcli.records.numbers import counted
from llmcli.ui.checks import BAD, GOOD, WRONG, Marked
from llmcli.ui.layout import SEPARATOR, Column, Line, Rows
from llmcli.ui.theme import FAINT, HEADING, one_line

_STYLES: dict[Verdict, str] = {
    "faster": "green", "slower": "red", "noise": FAINT,
    "inconclusive": FAINT, "unknown": FAINT,
}  # fmt: skip
_DOUBTS: dict[Verdict, str] = {
    "noise": "within noise",
    "inconclusive": "inconclusive",
    "unknown": "noise unknown",
}
_NAMED = 5  # settings that a side does not say, tests that are too slow
_LONGEST = 100  # characters of what a file says in words
NOTHING_IN_COMMON = "no test has a rate"
NOISE = (
    "noise: the ratio's 95 % interval from the spread of the runs (Welch, wider where they "
    "resemble their neighbours); what changes from one session to the next is not in it"
)
INCONCLUSIVE = (
    "inconclusive: beyond noise only if no run resembled the one before, which these runs do not "
    "show; more repetitions (`-r`) do, and `bench --against` compares engines in turns, in one run"
)


def render_comparison(report: ComparisonReport) -> RenderableType:
    """Where both sides come from, what differs, the tests, and what has no counterpart."""
    return Group(*_parts(report))


def percent(share: float) -> str:
    """`5 %`, `12.5 %` for a share of 1."""
    return f"{100 * share:.3g} %"


def words(test: ComparedTest) -> str:
    """`5.9 % faster`, `within noise`; where there is a single run, that noise is not known."""
    if test.verdict in ("noise", "inconclusive"):
        return _DOUBTS[test.verdict]
    return _doubted(change(test), test)


def _doubted(text: str, test: ComparedTest) -> str:
    """`0.785, within noise`, or the text alone where the test is faster or slower for sure."""
    doubt = _DOUBTS.get(test.verdict)
    return f"{text}, {doubt}" if doubt else text


def change(test: ComparedTest) -> str:
    """`5.9 % faster`, `2.4× as fast`, `70 % slower`, whatever the noise."""
    if test.ratio >= 2:
        return f"{test.ratio:.3g}× as fast"
    if test.ratio == 1:
        return "equal"
    return f"{percent(abs(test.ratio - 1))} {'faster' if test.ratio > 1 else 'slower'}"


def failures(report: ComparisonReport) -> str:
    """`1 test is more than 5 % slower: pp16 (0.785, within noise) · 1 test has failed: tg9`."""
    found = []
    if report.slow_tests:
        count, bound = len(report.slow_tests), percent(report.slower_than or 0)
        named = _first(
            f"{test.test} ({_doubted(f'{test.ratio:.3f}', test)})" for test in report.slow_tests
        )
        are = "is" if count == 1 else "are"
        found.append(f"{counted(count, 'test')} {are} more than {bound} slower: {', '.join(named)}")
    if report.broken:
        count = len(report.broken)
        have = "has" if count == 1 else "have"
        named = _first(test.test for test in report.broken)
        found.append(f"{counted(count, 'test')} {have} failed: {', '.join(named)}")
    return SEPARATOR.join(found)


def _first(names: Iterable[str]) -> list[str]:
    """The first few, and how many more there are."""
    listed = list(names)
    more = len(listed) - _NAMED
    return [*listed[:_NAMED], f"{more} more"] if more > 0 else listed


def _parts(report: ComparisonReport) -> Iterator[RenderableType]:
    for side, source in (("A", report.a), ("B", report.b)):
        yield Line([f"{side}  {_clipped(source.name)}", *_about(source)], HEADING)
    differing = [
        f"{d.field} {_clipped(d.a) or 'none'} → {_clipped(d.b) or 'none'}"
        for d in report.differences
    ]
    if differing:
        yield Line([f"A → B: {differing[0]}", *differing[1:]])
    for side in ("a", "b"):
        fields = _first(missing.field for missing in report.unsaid if missing.side == side)
        if fields:
            yield Line([f"{side.upper()} does not say: {fields[0]}", *fields[1:]], FAINT)
    busy = [side for side, source in (("A", report.a), ("B", report.b)) if source.slowed]
    if busy:
        yield Line([f"slowed down by other programs while measured: {' and '.join(busy)}"])
    yield Text()
    if report.tests:
        yield _table(report.tests)
        yield Text()
    for test in report.lone:
        yield Text(_lone(test), style="red" if test.error else "")
    if report.lone:
        yield Text()
    yield from _footer(report)


def _about(source: Source) -> list[str]:
    builds = [f"build {_clipped(build)}" for build in source.builds]
    if len(builds) > 1:
        builds = [f"{counted(len(builds), 'build')}, pooled: {', '.join(source.builds)[:_LONGEST]}"]
    return [source.format, counted(source.rows, "row"), *map(one_line, builds)]


def _table(tests: Iterable[ComparedTest]) -> Rows:
    tests = list(tests)
    columns = [
        Column("test", right=False),
        *(
            Column(field, right=False, cut=True, drop=2, labelled=True)
            for field in tests[0].settings
        ),
        Column("A t/s", drop=1, labelled=True),
        Column("B t/s", drop=1, labelled=True),
        Column("B/A"),
        Column("95 % interval", drop=3, labelled=True),
        Column("", right=False),
    ]
    return Rows(columns, [_row(test) for test in tests], below=True)


def _row(test: ComparedTest) -> list[Text]:
    interval = ""
    if test.low is not None and test.high is not None:
        interval = f"{test.low:.3f} … {test.high:.3f}"
        if test.high > 1e6:  # so wide that it says nothing
            interval = f"{test.low:.1e} … {test.high:.1e}"
    style = _STYLES[test.verdict]
    return [
        Text(test.test),
        *(Text(_clipped(value)) for value in test.settings.values()),
        Text(_rate(test.a)),
        Text(_rate(test.b)),
        Text(f"{test.ratio:.3f}" if test.ratio < 1e6 else f"{test.ratio:.2e}", style=style),
        Text(interval),
        Text(words(test), style=style),
    ]


def _rate(rate: Rate) -> str:
    """As llama-bench writes it."""
    return f"{rate.mean:.2f} ± {rate.std:.2f}"


def _lone(test: UnmatchedTest) -> str:
    known = [f"{field} {_clipped(value)}" for field, value in test.settings.items() if value]
    settings = SEPARATOR.join(known)
    name = f"{test.test} ({settings})" if known else test.test
    side = test.side.upper()
    if not test.error:
        rate = "" if test.rate is None else f": {_rate(test.rate)} t/s"
        return f"only in {side}: {name}{rate}"
    there = "A" if test.side == "b" else "B"
    other = "" if test.other is None else f" ({there}: {_rate(test.other)} t/s)"
    return f"no rate in {side}: {name}: {_clipped(test.error)}{other}"


def _footer(report: ComparisonReport) -> Iterator[RenderableType]:
    if report.tests:
        yield Line([NOISE], FAINT)
    if any(test.verdict == "inconclusive" for test in report.tests):
        yield Line([INCONCLUSIVE], FAINT)
    assumed = any(rate.runs is None for test in report.tests for rate in (test.a, test.b))
    if assumed:
        text = f"where a file does not say how many runs there were, {report.assumed_runs} are "
        yield Line([f"{text}assumed, llama-bench's default"], FAINT)
    if not report.tests:
        yield Marked(BAD, f"{NOTHING_IN_COMMON} in A and in B", WRONG)
    if report.slower_than is None:
        return
    if report.slow_tests or report.broken:
        yield Marked(BAD, failures(report), WRONG)
    elif report.tests:
        bound = percent(report.slower_than)
        yield Marked(GOOD, f"no test of B is more than {bound} slower, and none has failed", FAINT)


def _clipped(text: str) -> str:
    """What a file says, on one line and of bounded length."""
    shown = one_line(text)
    return shown if len(shown) <= _LONGEST else shown[: _LONGEST - 1] + "…"

"""Two results of a benchmark side by side: each test with its ratio, and whether it is noise."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from llmcli.commands.bench.report.comparison import (
    ComparedTest,
    ComparisonReport,
    Rate,
    UnmatchedTest,
    Verdict,
)
from llmcli.records.numbers import counted
from llmcli.ui.layout import BAD, GOOD, SEPARATOR, WRONG, Column, Line, Marked, Rows
from llmcli.ui.theme import FAINT, HEADING, one_line

_STYLES: dict[Verdict, str] = {"faster": "green", "slower": "red"}
_DOUBTS: dict[Verdict, str] = {
    "noise": "within noise",
    "inconclusive": "inconclusive",
    "unknown": "noise unknown",
}
_NAMED = 5  # settings that a side does not record, tests that are too slow
_WIDE = 1.2  # upper ÷ lower end of an interval that more runs should narrow
_WIDEST = 4.0  # … and of one that says nothing until they do
_LONGEST = 100  # characters of what a file says in words
NOTHING_IN_COMMON = "no test has a rate"
NOISE = (
    "noise: the ratio's 95 % interval from the spread of the runs (Welch, wider where they "
    "resemble their neighbours); what changes from one session to the next is not in it: "
    "run several in turns (`bench compare --help`)"
)
NARROWER = "an interval is wider than 20 %: more repetitions (`-r`) narrow it"
INCONCLUSIVE = (
    "inconclusive: beyond noise only if no run resembled the one before, which these runs do not "
    "show; more repetitions (`-r`) do, and `bench --against` compares engines in turns, in one run"
)


def render_comparison(report: ComparisonReport) -> RenderableType:
    """Where both sides come from, what differs, the tests, and what has no counterpart."""
    parts: list[RenderableType] = [*_sources(report), Text()]
    if report.tests:
        parts += [_table(report.tests), Text()]
    if report.lone:
        parts += [*(Text(_lone(test), style="red" if test.error else "") for test in report.lone)]
        parts.append(Text())
    return Group(*parts, *_footer(report))


def failures(report: ComparisonReport) -> str:
    """`1 test is more than 5 % slower: pp16 (0.785, within noise) · 1 test has failed: tg9`."""
    found = []
    if slow := report.slow_tests:
        count, are = counted(len(slow), "test"), "is" if len(slow) == 1 else "are"
        named = _first(f"{test.test} ({_doubted(f'{test.ratio:.3f}', test)})" for test in slow)
        bound = _percent(report.slower_than or 0)
        found.append(f"{count} {are} more than {bound} slower: {', '.join(named)}")
    if broken := report.broken:
        count, have = counted(len(broken), "test"), "has" if len(broken) == 1 else "have"
        found.append(f"{count} {have} failed: {', '.join(_first(test.test for test in broken))}")
    return SEPARATOR.join(found)


def _percent(share: float) -> str:
    """`5 %`, `12.5 %` for a share of 1."""
    return f"{100 * share:.3g} %"


def _doubt(test: ComparedTest) -> str:
    """`within noise`, or `too few runs` to say so; empty where it is faster or slower for sure."""
    low, high = test.low or 0.0, test.high or 0.0
    if test.verdict == "noise" and high > _WIDEST * low:
        return "too few runs"
    return _DOUBTS.get(test.verdict, "")


def _doubted(text: str, test: ComparedTest) -> str:
    """`0.785, within noise`, or the text alone where the test is faster or slower for sure."""
    return ", ".join(filter(None, (text, _doubt(test))))


def _words(test: ComparedTest) -> str:
    """`5.9 % faster`, `2.4× as fast`, `70 % slower`, or `within noise`; of a single run both."""
    if test.verdict in ("noise", "inconclusive"):
        return _doubt(test)
    change = f"{_percent(abs(test.ratio - 1))} {'faster' if test.ratio > 1 else 'slower'}"
    if test.ratio >= 2:
        change = f"{test.ratio:.3g}× as fast"
    return _doubted("equal" if test.ratio == 1 else change, test)


def _first(names: Iterable[str]) -> list[str]:
    """The first few, and how many more there are."""
    listed = list(names)
    more = len(listed) - _NAMED
    return [*listed[:_NAMED], f"{more} more"] if more > 0 else listed


def _sources(report: ComparisonReport) -> Iterator[Line]:
    """Each side's file and builds, then what is not the same on both."""
    for side, source in (("A", report.a), ("B", report.b)):
        builds = [f"build {_clipped(build)}" for build in source.builds]
        if len(builds) > 1:
            listed = one_line(", ".join(source.builds)[:_LONGEST])
            builds = [f"{counted(len(builds), 'build')}, pooled: {listed}"]
        about = [f"{side}  {_clipped(source.name)}", source.format, counted(source.rows, "row")]
        yield Line([*about, *builds], HEADING)
    differing = [
        f"{d.field} {_clipped(d.a) or 'none'} → {_clipped(d.b) or 'none'}"
        for d in report.differences
    ]
    if differing:
        yield Line([f"A → B: {differing[0]}", *differing[1:]])
    for side in ("a", "b"):
        fields = _first(missing.field for missing in report.unsaid if missing.side == side)
        if fields:
            yield Line([f"{side.upper()} does not record: {fields[0]}", *fields[1:]], FAINT)
    busy = [side for side, source in (("A", report.a), ("B", report.b)) if source.slowed]
    if busy:
        yield Line([f"slowed down by other programs while measured: {' and '.join(busy)}"])


def _table(tests: Sequence[ComparedTest]) -> Rows:
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
        form = "{:.1e} … {:.1e}" if test.high > 1e6 else "{:.3f} … {:.3f}"  # so wide: says nothing
        interval = form.format(test.low, test.high)
    style = _STYLES.get(test.verdict, FAINT)
    return [
        *map(Text, (test.test, *map(_clipped, test.settings.values()))),
        *map(Text, (_rate(test.a), _rate(test.b))),
        Text(f"{test.ratio:.3f}" if test.ratio < 1e6 else f"{test.ratio:.2e}", style=style),
        Text(interval),
        Text(_words(test), style=style),
    ]


def _rate(rate: Rate) -> str:
    """As llama-bench writes it."""
    return f"{rate.mean:.2f} ± {rate.std:.2f}"


def _lone(test: UnmatchedTest) -> str:
    known = [f"{field} {_clipped(value)}" for field, value in test.settings.items() if value]
    name = f"{test.test} ({SEPARATOR.join(known)})" if known else test.test
    side, there = ("A", "B") if test.side == "a" else ("B", "A")
    if not test.error:
        rate = "" if test.rate is None else f": {_rate(test.rate)} t/s"
        return f"only in {side}: {name}{rate}"
    other = "" if test.other is None else f" ({there}: {_rate(test.other)} t/s)"
    return f"no rate in {side}: {name}: {_clipped(test.error)}{other}"


def _footer(report: ComparisonReport) -> Iterator[RenderableType]:
    if not report.tests:
        yield Marked(BAD, f"{NOTHING_IN_COMMON} in A and in B", WRONG)
    else:
        yield Line([NOISE], FAINT)
    if any(test.verdict == "inconclusive" for test in report.tests):
        yield Line([INCONCLUSIVE], FAINT)
    elif any(test.low and test.high and test.high > _WIDE * test.low for test in report.tests):
        yield Line([NARROWER], FAINT)
    if any(rate.runs is None for test in report.tests for rate in (test.a, test.b)):
        text = f"where a file does not record the number of runs, {report.assumed_runs} are "
        yield Line([f"{text}assumed, llama-bench's default"], FAINT)
    if report.slower_than is None:
        return
    if words := failures(report):
        yield Marked(BAD, words, WRONG)
    elif report.tests:
        bound = _percent(report.slower_than)
        yield Marked(GOOD, f"no test of B is more than {bound} slower, and none has failed", FAINT)


def _clipped(text: str) -> str:
    """What a file says, on one line and of bounded length."""
    shown = one_line(text)
    return shown if len(shown) <= _LONGEST else shown[: _LONGEST - 1] + "…"

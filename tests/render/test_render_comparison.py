"""`bench compare` as text at fixed widths, and what a file may have written into its names."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from drawn import changes, shown

from llmcli.commands.bench.report.comparison import (
    ComparedTest,
    ComparisonReport,
    Difference,
    MissingSetting,
    Rate,
    Source,
    UnmatchedTest,
)
from llmcli.commands.bench.view.comparison import change, render_comparison, words

FAST = ComparedTest(
    test="pp512", settings={"n_threads": "4"}, a=Rate(mean=100.0, std=1.0, runs=5),
    b=Rate(mean=150.0, std=2.0, runs=5), ratio=1.5, low=1.45, high=1.55,
)  # fmt: skip
SLOW = replace(FAST, test="tg128", b=Rate(mean=50.0, std=1, runs=5), ratio=0.5, low=0.4, high=0.6)
NOISY = replace(FAST, test="tg128 @ d1024", b=FAST.a, ratio=0.99, low=0.9, high=1.1)
ONCE = replace(FAST, test="pp8", b=Rate(mean=120.0, std=0, runs=1), ratio=1.2, low=None, high=None)
LUCKLESS = replace(NOISY, test="pp16", ratio=0.785, low=0.7)
ONLY = replace(ONCE, ratio=0.5)
LOST = UnmatchedTest(
    side="b", test="tg9", settings={}, rate=None, error="it does not fit", other=FAST.a
)
ALONE = UnmatchedTest(side="a", test="pp9", settings={"n_threads": "8"}, rate=FAST.a)
REPORT = ComparisonReport(
    a=Source(name="old.json", format="JSON", builds=("abc (1)",), rows=4),
    b=Source(name="new.csv", format="CSV", builds=("d (2)", "e (3)"), rows=1),
    tests=(FAST, SLOW, NOISY, ONCE), lone=(ALONE, LOST),
    differences=(Difference(field="dtype", a="float32", b="bfloat16"),),
    unsaid=tuple(MissingSetting(side="b", field=name) for name in ("n_batch", "poll")),
    assumed_runs=5,
)  # fmt: skip


def test_screens(golden: Any) -> None:
    """The footer turns red where a bound is given; without one there is none."""
    evil = "\x1b[2J[red]a\nb" + "x" * 5000
    hostile = replace(
        REPORT, a=Source(name=evil, format="JSON", builds=(evil,), rows=1),
        tests=(replace(FAST, settings={"n_threads": evil}),),
        lone=(replace(LOST, error=evil, settings={"model_type": evil}),),
        differences=(Difference(field="dtype", a=evil, b=evil),),
    )  # fmt: skip
    footers = [
        ((FAST, NOISY), (ALONE,)), ((FAST, SLOW), ()), ((LUCKLESS, SLOW, ONLY), ()),
        ((FAST,), (LOST,)), ((SLOW,), (LOST, LOST)), ((SLOW,) * 7, ()), ((), (ALONE,)),
    ]  # fmt: skip
    close = [
        replace(FAST, ratio=ratio, low=ratio / 1.0001, high=ratio * 1.0001)
        for ratio in (1.0, 1.059, 1.9999, 2.0, 31.4159, 0.95, 0.001)
    ]
    unsaid = tuple(MissingSetting(side="a", field=f"field{number}") for number in range(20))

    def text(report: ComparisonReport, width: int = 200) -> str:
        return shown(render_comparison(report), width=width)

    golden("comparison", {
        "the whole": text(REPORT, 110),
        "a mean whose runs nobody knows is told": changes(
            text(replace(REPORT, tests=(FAST,))),
            text(replace(REPORT, tests=(replace(FAST, a=replace(FAST.a, runs=None)),))),
        ),
        "the footer turns red": [
            line for tests, lone in footers
            for line in text(replace(REPORT, tests=tests, lone=lone, slower_than=0.05)).split("\n")
            if line[:1] in ("✓", "✗")
        ],
        "what a file says stays on its line, and is cut": text(hostile, 100_000),
        "ratios in words": [f"{test.ratio}: {change(test)}" for test in close],
        "many settings that a side does not say are counted":
            changes(text(REPORT), text(replace(REPORT, unsaid=unsaid))),
    })  # fmt: skip
    for test in close:
        assert words(replace(test, low=0.0001, high=40.0)) == "within noise"

"""`bench compare` as text at fixed widths, and what a file may have written into its names."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.cells import cell_len
from rich.console import Console

from llmcli.commands.bench.report.comparison import (
    ComparedTest,
    ComparisonReport,
    Difference,
    LoneTest,
    Rate,
    Source,
)
from llmcli.commands.bench.view.comparison import change, render_comparison, words

FAST = ComparedTest(
    test="pp512", settings=(("n_threads", "4"),), a=Rate(mean=100.0, std=1.0, runs=5),
    b=Rate(mean=150.0, std=2.0, runs=5), ratio=1.5, low=1.45, high=1.55,
)  # fmt: skip
SLOW = replace(FAST, test="tg128", b=Rate(mean=50.0, std=1, runs=5), ratio=0.5, low=0.4, high=0.6)
NOISY = replace(FAST, test="tg128 @ d1024", b=FAST.a, ratio=0.99, low=0.9, high=1.1)
ONCE = replace(FAST, test="pp8", b=Rate(mean=120.0, std=0, runs=1), ratio=1.2, low=None, high=None)
LUCKLESS = replace(NOISY, test="pp16", ratio=0.785, low=0.7)
ONLY = replace(ONCE, ratio=0.5)
LOST = LoneTest(side="b", test="tg9", settings=(), rate=None, error="it does not fit", other=FAST.a)
ALONE = LoneTest(side="a", test="pp9", settings=(("n_threads", "8"),), rate=FAST.a)
REPORT = ComparisonReport(
    a=Source(name="old.json", format="JSON", builds=("abc (1)",), rows=4),
    b=Source(name="new.md", format="Markdown", builds=("d (2)", "e (3)"), rows=1),
    tests=(FAST, SLOW, NOISY, ONCE), lone=(ALONE, LOST),
    differences=(Difference(field="dtype", a="float32", b="bfloat16"),),
    unsaid=(("b", "n_batch"), ("b", "poll")), assumed_runs=5,
)  # fmt: skip


def text(report: ComparisonReport, width: int = 200) -> str:
    file = io.StringIO()
    Console(file=file, width=width, highlight=False).print(render_comparison(report))
    return file.getvalue()


def test_the_whole_at_a_width() -> None:
    assert [line.rstrip() for line in text(REPORT, 110).splitlines()] == [
        "A  old.json · JSON · 4 rows · build abc (1)",
        "B  new.md · Markdown · 1 row · 2 builds, pooled: d (2), e (3)",
        "A → B: dtype float32 → bfloat16",
        "B does not say: n_batch · poll",
        "",
        "test            n_threads           A t/s           B t/s     B/A   95 % interval",
        "─" * 110,
        "pp512           4           100.00 ± 1.00   150.00 ± 2.00   1.500   1.450 … 1.550   "
        "50 % faster",
        "tg128           4           100.00 ± 1.00    50.00 ± 1.00   0.500   0.400 … 0.600   "
        "50 % slower",
        "tg128 @ d1024   4           100.00 ± 1.00   100.00 ± 1.00   0.990   0.900 … 1.100   "
        "within noise",
        "pp8             4           100.00 ± 1.00   120.00 ± 0.00   1.200                   "
        "20 % faster, noise unknown",
        "",
        "only in A: pp9 (n_threads 8): 100.00 ± 1.00 t/s",
        "no rate in B: tg9: it does not fit (A: 100.00 ± 1.00 t/s)",
        "",
        "noise: the ratio's 95 % interval from the spread of the runs (Welch, wider where they "
        "resemble their",
        "neighbours); what changes from one session to the next is not in it",
    ]


@pytest.mark.parametrize("width", [40, 60, 80, 100, 200])
def test_numbers_are_whole_at_every_width(width: int) -> None:
    shown = text(REPORT, width)
    for part in ("1.500", "0.500", "150.00 ± 2.00", "1.450 … 1.550", "within noise"):
        assert part in shown
    if width >= 60:
        assert max(map(cell_len, shown.splitlines())) <= width


@pytest.mark.parametrize(
    ("ratio", "said"),
    [(1.0, "equal"), (1.059, "5.9 % faster"), (1.9999, "100 % faster"), (2.0, "2× as fast"),
     (31.4159, "31.4× as fast"), (0.95, "5 % slower"), (0.001, "99.9 % slower")],
)  # fmt: skip
def test_a_ratio_in_words(ratio: float, said: str) -> None:
    test = replace(FAST, ratio=ratio, low=ratio / 1.0001, high=ratio * 1.0001)
    assert change(test) == said
    assert words(replace(test, low=0.0001, high=40.0)) == "within noise"


def test_a_mean_whose_runs_nobody_knows_is_told() -> None:
    assert "5 are assumed" not in text(REPORT)
    unknown = replace(FAST, a=replace(FAST.a, runs=None))
    assert "5 are assumed, llama-bench's default" in text(replace(REPORT, tests=(unknown,)))


@pytest.mark.parametrize(
    ("tests", "lone", "mark"),
    [
        ((FAST, NOISY), (ALONE,), "✓ no test of B is more than 5 % slower"),
        ((FAST, SLOW), (), "✗ 1 test is more than 5 % slower: tg128 (0.500)\n"),
        ((LUCKLESS, SLOW, ONLY), (), "✗ 3 tests are more than 5 % slower: pp16 (0.785, within "
         "noise), tg128 (0.500), pp8 (0.500, noise unknown)\n"),
        ((FAST,), (LOST,), "✗ 1 test has failed: tg9\n"),
        ((SLOW,), (LOST, LOST), "slower: tg128 (0.500) · 2 tests have failed: tg9, tg9\n"),
        ((SLOW,) * 7, (), "✗ 7 tests are more than 5 % slower: " + "tg128 (0.500), " * 5
         + "2 more\n"),
        ((), (ALONE,), "✗ no test has a rate in A and in B"),
    ],
)  # fmt: skip
def test_the_footer_turns_red(
    tests: tuple[ComparedTest, ...], lone: tuple[LoneTest, ...], mark: str
) -> None:
    shown = text(replace(REPORT, tests=tests, lone=lone, slower_than=0.05))
    assert mark in shown
    assert ("✓" in shown) is mark.startswith("✓")


def test_without_a_bound_there_is_no_footer() -> None:
    assert not {"✓", "✗"} & set(text(REPORT))


def test_what_a_file_says_stays_on_its_line() -> None:
    evil = "\x1b[2J[red]a\nb" + "x" * 5000
    tests = (replace(FAST, settings=(("n_threads", evil),)),)
    lone = (replace(LOST, error=evil, settings=(("model_type", evil),)),)
    report = replace(
        REPORT, a=Source(name=evil, format="JSON", builds=(evil,), rows=1), tests=tests, lone=lone,
        differences=(Difference(field="dtype", a=evil, b=evil),),
    )  # fmt: skip
    shown = text(report, 100_000)
    assert "\x1b" not in shown
    assert "\\x1b[2J[red]a\\nb" in shown
    assert "x" * 200 not in shown
    assert len(shown.splitlines()) == len(
        text(replace(REPORT, tests=tests, lone=lone), 100_000).splitlines()
    )


def test_many_settings_that_a_side_does_not_say_are_counted() -> None:
    fields = tuple(("a", f"field{number}") for number in range(20))
    assert "A does not say: field0 · field1 · field2 · field3 · field4 · 15 more" in text(
        replace(REPORT, unsaid=fields)  # type: ignore[arg-type]
    )

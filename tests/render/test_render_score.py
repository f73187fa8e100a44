"""How well a model predicts a text, as text."""

from __future__ import annotations

import io
import math
import re
from dataclasses import replace

import pytest
from rich.cells import cell_len
from rich.console import Console

from llmcli.commands.score.report import Comparison, Score, ScoredToken
from llmcli.commands.score.view import render_comparison, render_score, render_versus
from llmcli.ui.token_text import percent


def shown(renderable, width=80):
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(renderable, crop=False)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


SCORE = Score(
    tokens=(
        ScoredToken(id=4, text="[red]", logprob=None, rank=None),
        ScoredToken(id=5, text=" é internationalis", logprob=math.log(0.5), rank=2),
    ),
    tokens_scored=1, bytes_scored=3, mean_logprob=math.log(0.5), perplexity=2.0,
    bits_per_byte=1 / 3, window=64, stride=32, seconds=0.1,
)  # fmt: skip


def test_score():
    assert shown(render_score(SCORE, "m (float32 on cpu)")).splitlines() == [
        "m (float32 on cpu)",
        "perplexity 2.0000 · bits per byte 0.3333 · mean logprob -0.6931 · 1 scored",
        "#   id   token                  logprob     prob   rank",
        "───────────────────────────────────────────────────────",
        '0    4   "[red]"                      –        –      –',
        '1    5   " é internationalis"   -0.6931   50.00%      2',
    ]


@pytest.mark.parametrize(
    ("width", "last"),
    [
        (50, '1    5   " é internatio…   -0.6931   50.00%      2'),
        (38, '1    5   " é interna…   -0.6931      2'), (20, '1    5   " é int…   -0.6931      2'),
    ],
)  # fmt: skip
def test_a_narrow_score_cuts_tokens_and_never_numbers(width, last):
    lines = shown(render_score(SCORE, "m"), width).splitlines()
    assert lines[-1] == last
    assert max(map(len, lines[-4:])) <= max(width, 34)


def test_a_score_without_a_tokenizer_has_no_column_of_tokens():
    bare = tuple(replace(token, text="") for token in SCORE.tokens)
    score = replace(SCORE, tokens=bare, bytes_scored=0, bits_per_byte=math.nan)
    text = shown(render_score(score, "m"), 200)
    assert "bits per byte undefined: no tokenizer, so no bytes" in text
    assert text.splitlines()[2:] == [
        "#   id   logprob     prob   rank",
        "────────────────────────────────",
        "0    4         –        –      –",
        "1    5   -0.6931   50.00%      2",
    ]


def long(*, count=300, text=" word"):
    tokens = [
        ScoredToken(id=n, text=f"{text}{n}", logprob=-n * 7 % 100 / 10, rank=n)
        for n in range(count)
    ]
    return replace(SCORE, tokens=tuple(tokens), tokens_scored=count - 1, window=1000)


def test_of_a_long_text_the_most_surprising_tokens_stand_in_their_context():
    score = long()
    lines = shown(render_score(score, "m")).splitlines()
    assert len(lines) == 1 + 1 + 1 + 20, "the screen of 24 lines has room for the prompt below it"
    assert lines[2].split("  ")[-1] == "most surprising 20 of 300: --all or --json"
    found = [line.split()[:3] for line in lines[3:]]
    order = sorted(range(300), key=lambda n: score.tokens[n].logprob)[:20]
    assert [int(at) for at, *_ in found] == order
    assert all(float(logprob) == score.tokens[int(at)].logprob for at, logprob, _ in found)
    at = order[3]
    assert f" word{at - 1}[ word{at}] word{at + 1}" in lines[6]


@pytest.mark.parametrize("width", [40, 60, 80, 120, 10_000])
def test_the_context_fits_any_width(width):
    for score in (long(), long(text="日本\n\x1b[0m"), long(text="x" * 100)):
        lines = shown(render_score(score, "m"), width).splitlines()[-21:]
        assert max(map(cell_len, lines)) <= min(width, 100)
        assert all("[" in line and "\x1b" not in line for line in lines[1:])


def test_all_tokens_stand_in_order_where_they_are_few_or_asked_for():
    lines = shown(render_score(long(), "m", every=True)).splitlines()
    assert "300 scored" not in lines[1]
    assert [line.split()[0] for line in lines[-300:]] == [str(n) for n in range(300)]
    assert "bytes" in "".join(lines[:3])
    few = long(count=18)
    lines = shown(render_score(few, "m")).splitlines()
    assert len(lines) == 3 + 2 + 18
    assert "most surprising" in lines[2]


def test_score_of_nothing_and_of_windows():
    nothing = replace(SCORE, tokens_scored=0, perplexity=math.nan)
    assert "perplexity undefined: nothing was scored" in shown(render_score(nothing, "m"))
    windows = shown(render_score(replace(SCORE, window=1), "name"))
    assert windows.startswith("name · windows of 1 token, 32 apart\n")


def test_two_models_are_compared_before_the_tokens():
    one = Comparison(
        bits_per_byte=-0.5, mean_logprob=None, largest_difference=None, same_tokens=False
    )
    pair = (long(), "a line"), (SCORE, "b line")
    lines = shown(render_versus(*pair, one, ("a", "b"))).splitlines()
    assert len(lines) <= 23
    assert [lines[0], lines[2]] == ["A  a line", "B  b line"]
    assert lines[4] == "B, b, is better by 0.5000 bits per byte"
    assert "most surprising 15 of 300" in lines[6]


def test_of_the_same_tokens_both_models_are_shown():
    moved = tuple(
        one if one.logprob is None else replace(one, logprob=one.logprob - 1, rank=one.rank + 3)
        for one in long().tokens
    )
    apart = Comparison(
        bits_per_byte=0.5, mean_logprob=-1.0, largest_difference=1.0, same_tokens=True
    )
    other = replace(long(), tokens=moved)
    lines = shown(render_versus((long(), "m"), (other, "n"), apart, ("m", "n"))).splitlines()
    heading = re.split("  +", lines[6].strip())
    assert heading[:4] == ["#", "logprob A", "logprob B", "rank A"]
    for line in lines[7:]:
        at, first, second, rank = line.split()[:4]
        assert float(first) == long().tokens[int(at)].logprob == pytest.approx(float(second) + 1)
        assert int(rank) == long().tokens[int(at)].rank
    moved = (SCORE.tokens[0], replace(SCORE.tokens[1], logprob=-1.7, rank=4))
    pair = (SCORE, "m"), (replace(SCORE, tokens=moved), "n")
    assert shown(render_versus(*pair, apart, ("m", "n")), 100).splitlines()[6:] == [
        "#   id   token                  logprob A   logprob B     B − A   rank A   rank B",
        "─────────────────────────────────────────────────────────────────────────────────",
        '0    4   "[red]"                        –           –         –        –        –',
        '1    5   " é internationalis"     -0.6931     -1.7000   -1.0069        2        4',
    ]


@pytest.mark.parametrize(
    ("value", "text"),
    [(2.0, "2.0000"), (33.31931, "33.3193"), (42042.156, "42042.2"), (7654321.9, "7654322"),
     (1e300, "1e+300"), (math.inf, "infinite")],
)  # fmt: skip
def test_perplexities_have_the_digits_that_mean_something(value, text):
    line = shown(render_score(replace(SCORE, perplexity=value), "m"), 200).splitlines()[1]
    assert line.startswith(f"perplexity {text} ·")


@pytest.mark.parametrize(
    ("probability", "text"),
    [(1.0, "100.00%"), (0.0034, "0.34%"), (0.000082, "0.0082%"), (1.6e-7, "1.6e-05%"), (0, "0%")],
)
def test_small_probabilities_keep_two_digits(probability, text):
    assert percent(probability) == text


@pytest.mark.parametrize(
    ("values", "first", "second"),
    [
        ((0.25, -0.5, 0.7, True), "A, a, is better by 0.2500 bits per byte", "logprob differs by"),
        ((-0.25, None, None, False), "B, b, is better by 0.2500 bits per byte", "different tokens"),
        ((0.0, 0.0, 0.1, True), "A and B are equally good", "at most 0.100000"),
        ((math.nan, 0.5, 0.7, True), "B, b, is better: its mean logprob", "differs by +0.500000"),
        ((math.nan, None, None, False), "nothing was scored", "different tokens"),
    ],
)
def test_comparison(values, first, second):
    bits, mean, largest, same = values
    comparison = Comparison(
        bits_per_byte=bits, mean_logprob=mean, largest_difference=largest, same_tokens=same
    )
    lines = shown(render_comparison(comparison, "a", "b")).splitlines()
    assert first in lines[0]
    assert second in lines[1]


def test_comparison_with_itself():
    same = Comparison(bits_per_byte=0.0, mean_logprob=0.0, largest_difference=0.0, same_tokens=True)
    assert shown(render_comparison(same, "a", "b")).startswith("identical")

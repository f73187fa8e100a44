"""How well a model predicts a text, as text."""

from __future__ import annotations

import math
from dataclasses import replace

from drawn import lines_of, shown
from rich.cells import cell_len

from llmcli.commands.score.report import Comparison, Score, ScoredToken
from llmcli.commands.score.view import render_comparison, render_score, render_versus

SCORE = Score(
    tokens=(
        ScoredToken(id=4, text="[red]", logprob=None, rank=None),
        ScoredToken(id=5, text=" é internationalis", logprob=math.log(0.5), rank=2),
    ),
    tokens_scored=1, bytes_scored=3, mean_logprob=math.log(0.5), perplexity=2.0,
    bits_per_byte=1 / 3, window=64, stride=32, timings={"score_s": 0.1},
)  # fmt: skip


def long(*, count=300, text=" word"):
    tokens = [
        ScoredToken(id=n, text=f"{text}{n}", logprob=-n * 7 % 100 / 10, rank=n)
        for n in range(count)
    ]
    return replace(SCORE, tokens=tuple(tokens), tokens_scored=count - 1, window=1000)


def score(one, width=80, title="m", **how):
    return shown(render_score(one, title, **how), width=width)


def versus(first, second, comparison, width=80):
    view = render_versus((first, "a line"), (second, "b line"), comparison, ("a", "b"))
    return shown(view, width=width)


def compared(bits, mean, largest, same):
    return Comparison(
        bits_per_byte=bits, mean_logprob=mean, largest_difference=largest, same_tokens=same
    )


def test_screens(golden):
    """What transcripts/score-shown.txt has not: widths, undefined values, two long texts."""
    moved = replace(long(), tokens=tuple(
        one if one.logprob is None else replace(one, logprob=one.logprob - 1, rank=one.rank + 3)
        for one in long().tokens
    ))  # fmt: skip
    apart = compared(0.5, -1.0, 1.0, True)
    golden("score", {
        **{f"in {width} columns": score(SCORE, width).split("\n")[-4:] for width in (50, 38, 20)},
        "of a long text the most surprising tokens": score(long()),
        "of nothing": score(replace(SCORE, tokens_scored=0, perplexity=math.nan)),
        "in windows": score(replace(SCORE, window=1)).split("\n")[0],
        "two models are compared before the tokens":
            versus(long(), SCORE, compared(-0.5, None, None, False)),
        "of the same tokens both are shown": versus(long(), moved, apart),
        "perplexities have the digits that mean something": [
            score(replace(SCORE, perplexity=value), 200).split("\n")[1].split(" ·")[0]
            for value in (2.0, 33.31931, 42042.156, 7654321.9, 1e300, math.inf)
        ],
        "comparisons": [
            shown(render_comparison(compared(*values), "a", "b"))
            for values in (
                (0.25, -0.5, 0.7, True), (-0.25, None, None, False), (0.0, 0.0, 0.1, True),
                (math.nan, 0.5, 0.7, True), (math.nan, None, None, False), (0.0, 0.0, 0.0, True),
            )
        ],
    })  # fmt: skip
    context = lines_of(render_score(long(text="x" * 100), "m"), width=10_000)[-21:]
    assert max(map(cell_len, context)) <= 100

"""The ladder and the derivations of its rungs as text, and its chart as an image."""

import io
from dataclasses import replace

import pytest
from drawn import changes, shown

from llmcli.commands.ladder import report as made
from llmcli.commands.ladder.view import chart
from llmcli.commands.ladder.view.chart import ladder_png
from llmcli.commands.ladder.view.derivation import render_rung
from llmcli.commands.ladder.view.table import bar_lengths, render_ladder


def spread(seconds):
    return made.Spread(median=seconds, lowest=seconds, highest=seconds, runs=3)


def rung(number, name, seconds, **more):
    below = more.pop("below", None)
    fields = {
        "number": number, "name": name, "title": f"what {name} is", "idea": "Because.",
        "change": ("before it", "with it"), "sequences": 1, "prompt_s": spread(seconds),
        "token_s": spread(seconds * 2), "prompt_work": made.Work(gemv=0, gemm=0, flops=0, bytes=0),
        "token_work": made.Work(gemv=25, gemm=0, flops=36.8e6, bytes=15.1e6), "steps": (),
        "prompt_speedup": None if below is None else below / seconds,
        "token_speedup": None if below is None else below / seconds,
        "compared": None if below is None else "logits",
        "difference": None if below is None else 3e-6, "allowed": None if below is None else 1e-4,
    }  # fmt: skip
    return made.RungReport(**(fields | more))


def reshaped(formula, moved=False):
    return made.Shown(
        formula=formula, shape=(8, 4, 32), strides=(32, 256, 1),
        source=((4, 8, 32), (256, 32, 1)), moved=moved, values=((1.0, -0.5), (0.25, 2.0)),
    )  # fmt: skip


SCORES = made.Shown(
    formula="scores + M", shape=(8, 2, 2), strides=(4, 2, 1), source=None, moved=None,
    values=((0.5, float("-inf")), (0.25, 12345.678)),
)  # fmt: skip
WIDE = made.Shown(
    formula="Q = T W_q", shape=(100, 256), strides=(256, 1), source=None, moved=None,
    values=((0.5, 1.0), (2.0, 3.0)),
)  # fmt: skip
SPLIT = tuple(reshaped(f"{letter} as h × n × d/h") for letter in "QKV")
RUNGS = (
    rung(1, "loops", 1.5, token_work=made.Work(gemv=0, gemm=0, flops=1e9, bytes=1e10),
         estimated="block 0 alone, 2 of the 4 tokens"),
    rung(2, "heads", 0.015, below=1.5,
         steps=(*SPLIT, reshaped("merged", moved=True), SCORES, WIDE)),
    rung(3, "fused", 0.003, below=0.015, steps=(SPLIT[0], reshaped("new one")), sequences=4),
)
REPORT = made.LadderReport(
    tokens=("In", " the\x1b[2J"), ids=(1, 2), more=(" beginning",),
    letters=(("n", 2), ("d", 256), ("d/h", 32)), dtype="float32", rungs=RUNGS,
)


def rendered(report, width=80, details=True, colour=None):
    parts = render_ladder(report, "tiny", whole=True, details=details)
    return shown(*parts, width=width, colour=colour)


def test_ladders(golden):
    """The table alone fits a screen: eight rungs of which some are estimated or apart."""
    slow = {"estimated": "block 0 alone, all 4 tokens", "compared": "rows of 4 of 4 tokens"}
    eight = [rung(i, "combined", 123.4 / i, below=1e5, sequences=4) for i in range(3, 9)]
    eight = (rung(1, "loops", 1234.0, **slow), rung(2, "rows", 5.0, below=9.0, **slow), *eight)
    wrong = replace(REPORT, rungs=(RUNGS[0], replace(RUNGS[1], difference=0.5)))
    golden("ladder", {
        "the whole, at 100 columns": rendered(REPORT, 100),
        "the table alone, which fits a screen":
            rendered(replace(REPORT, rungs=eight), details=False),
        "a wrong rung is named": rendered(wrong, 100, details=False),
        "and red": [line for line in rendered(wrong, 100, colour="truecolor").split("\n")
                    if "[1;31m" in line],
    })  # fmt: skip
    assert not replace(RUNGS[1], difference=float("nan")).ok


def test_bars_are_logarithms():
    assert bar_lengths([1.0, 10.0, 100.0]) == pytest.approx([1 / 3, 2 / 3, 1.0])
    assert bar_lengths([5.0]) == [1.0]
    lengths = bar_lengths([0.03, 300.0])
    assert 0 < lengths[0] < lengths[1] == 1


def test_the_chart_is_an_image_with_a_bar_for_each_rung():
    from PIL import Image

    wrong = replace(RUNGS[2], difference=1.0)
    report = replace(REPORT, rungs=(*RUNGS[:2], wrong))
    image = Image.open(io.BytesIO(ladder_png(report, "tiny → x")))
    assert image.format == "PNG"
    colours = {colour: count for count, colour in image.convert("RGB").getcolors(1 << 20)}
    estimated, plain, red = (colours.get(c, 0) for c in (chart.ESTIMATED, chart.FILL, chart.WRONG))
    assert 0 < estimated < plain < red  # the faster the longer, and the last one is wrong


# derivations


def step(formula, *rows, axes="", shape=None, **more):
    """A step of those rows; of a matrix, unless `shape` says otherwise."""
    fields = {"strides": (), "source": None, "moved": None, "section": "block 0 of 2"}
    size = (len(rows), len(rows[0])) if shape is None else shape
    return made.Shown(formula=formula, values=rows, axes=axes, shape=size, **(fields | more))


X = step("X = W_E[ids]", (0.5, 1.0, 2.0, 3.0), (4.0, 5.0, 6.0, 7.0), (8.0, 9.0, 10.0, 12345.678),
         axes="n × d", shape=(3, 256), section="the input")  # fmt: skip
MEAN = step("μ = mean(X)", (0.25,), (0.5,), (-1.0,), axes="n × 1")
MASKED = step("S + M", (0.5, float("-inf"), float("-inf")), (0.25, 1.0, float("-inf")),
              (1.0, 2.0, 3.0), axes="h × n × n", shape=(8, 3, 3), note="said")  # fmt: skip
K_T = step("Kᵀ", (1.0, 2.0, 3.0), (4.0, 5.0, 6.0), axes="d/h × n", shape=(32, 3),
           strides=(1, 32), source=((3, 32), (32, 1)), moved=False, note="why")  # fmt: skip
SEEN = step("Q as h × n × d/h", (1.0, 2.0), axes="h × n × d/h", shape=(8, 3, 32),
            strides=(32, 256, 1), source=((3, 8, 32), (256, 32, 1)), moved=False)  # fmt: skip
KEY = step("k = t_k × W_k", (1.0, 2.0), axes="(d)(d × d/h) = d/h", shape=(2,), token=0)
LAST = step("H of block 1", (1.0, 2.0), axes="d", shape=(2,), section="after the last block")


def derivation(*steps, below=(), width=80, whole=False, **changed):
    """The steps as a rung above one of the steps `below` shows them, without what is above them."""
    under = rung(2, "below", 0.015, steps=below)
    here = replace(rung(3, "here", 0.003, below=0.015, steps=steps), **changed)
    report = made.LadderReport(
        tokens=("In", " the\x1b[2J", " beginning"), ids=(1, 2, 3), more=(" of",),
        letters=(("n", 3), ("d", 256), ("d/h", 32)), dtype="float32", rungs=(under, here),
    )  # fmt: skip
    text = shown(*render_rung(here, report, "tiny"), width=width)
    return text if whole else text.partition("shown: ")[2].partition("\n\nrung 3: ")[0]


def test_derivations(golden):
    below = (X, MEAN, replace(MASKED, formula="S", note="said"))
    block = replace(X, section="block 0 of 2")
    raised = [replace(one, shape=(4, *one.shape), axes=f"b × {one.axes}")
              for one in (X, MEAN, MASKED)]  # fmt: skip
    row = step("X_n = W_E[ids]", (1.0, 2.0), axes="1 × d", section=f"{made.NEXT}: block 0 of 2",
               note="a")  # fmt: skip
    golden("ladder-derivations", {
        "one rung with its numbers": derivation(
            X, K_T, SEEN, MASKED, KEY, LAST, below=below, whole=True
        ),
        "rows of tokens are the first and the last": derivation(X),
        "of more, the first rows were kept": derivation(replace(X, shape=(100, 256))),
        "a number for each row stands beside its formula": derivation(MEAN),
        "as of more rows": derivation(replace(MEAN, shape=(9, 1))),
        "and a single number": derivation(step("σ² = mean(x²)", (0.5,), shape=())),
        "what is the same is folded": derivation(block, MEAN, below=(block, MEAN)),
        "also where more was said there":
            derivation(X, below=(replace(X, note="said there"),)),
        "steps with an axis more are shapes": derivation(*raised, below=(X, MEAN, MASKED)),
        "the next token is named and has the newest token's row; nothing is said of it again":
            derivation(replace(MEAN, note="a"), row),
        "what was not computed is said": changes(
            derivation(X, whole=True), derivation(X, whole=True, estimated="block 0 alone")
        ),
        "a formula and its shape are two lines where one is too narrow":
            derivation(replace(MASKED, note=""), width=30).split("\n")[:6],
    })  # fmt: skip


@pytest.mark.parametrize(
    ("here", "below", "changed"),
    [
        (X, replace(X, shape=(4, 256)), {}), (X, replace(X, formula="X = W_E"), {}),
        (X, replace(X, section="elsewhere"), {}), (replace(X, note="new"), X, {}),
        (X, X, {"difference": 0.5}),
    ],
    ids=["shape", "formula", "section", "note", "the rungs disagree"],
)  # fmt: skip
def test_only_what_is_the_same_is_folded(here, below, changed):
    text = derivation(here, below=(below,), **changed)
    assert "as on rung" not in text
    assert '  0 "In"                0.5          1          2          3 …' in text

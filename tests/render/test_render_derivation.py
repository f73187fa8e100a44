"""One rung's derivation as text at a fixed width."""

import io
from dataclasses import replace

from rich.console import Console

from llmcli.commands.ladder.report import NEXT, LadderReport, RungReport, Shown, Spread, Work
from llmcli.commands.ladder.view.derivation import render_rung


def spread(seconds):
    return Spread(median=seconds, lowest=seconds, highest=seconds, runs=3)


def rung(number, name, seconds, **more):
    below = more.pop("below", None)
    fields = {
        "number": number, "name": name, "title": f"what {name} is", "idea": "Because.",
        "change": ("before it", "with it"), "sequences": 1, "prompt_s": spread(seconds),
        "token_s": spread(seconds * 2), "prompt_work": Work(gemv=0, gemm=0, flops=0, bytes=0),
        "token_work": Work(gemv=25, gemm=0, flops=36.8e6, bytes=15.1e6), "steps": (),
        "prompt_speedup": None if below is None else below / seconds,
        "token_speedup": None if below is None else below / seconds,
        "compared": None if below is None else "logits",
        "difference": None if below is None else 3e-6, "allowed": None if below is None else 1e-4,
    }  # fmt: skip
    return RungReport(**(fields | more))


def step(formula, *rows, axes="", shape=None, **more):
    """A step of those rows; of a matrix, unless `shape` says otherwise."""
    fields = {"strides": (), "source": None, "moved": None, "section": "block 0 of 2"}
    size = (len(rows), len(rows[0])) if shape is None else shape
    return Shown(formula=formula, values=rows, axes=axes, shape=size, **(fields | more))


X = step("X = W_E[ids]", (0.5, 1.0, 2.0, 3.0), (4.0, 5.0, 6.0, 7.0), (8.0, 9.0, 10.0, 12345.678),
         axes="n × d", shape=(3, 256), section="the input")  # fmt: skip
MEAN = step("μ = mean(X)", (0.25,), (0.5,), (-1.0,), axes="n × 1")
SCORES = step("S + M", (0.5, float("-inf"), float("-inf")), (0.25, 1.0, float("-inf")),
              (1.0, 2.0, 3.0), axes="h × n × n", shape=(8, 3, 3), note="said")  # fmt: skip
K_T = step("Kᵀ", (1.0, 2.0, 3.0), (4.0, 5.0, 6.0), axes="d/h × n", shape=(32, 3),
           strides=(1, 32), source=((3, 32), (32, 1)), moved=False, note="why")  # fmt: skip
SEEN = step("Q as h × n × d/h", (1.0, 2.0), axes="h × n × d/h", shape=(8, 3, 32),
            strides=(32, 256, 1), source=((3, 8, 32), (256, 32, 1)), moved=False)  # fmt: skip
KEY = step("k = t_k × W_k", (1.0, 2.0), axes="(d)(d × d/h) = d/h", shape=(2,), token=0)
LAST = step("H of block 1", (1.0, 2.0), axes="d", shape=(2,), section="after the last block")
BELOW = rung(2, "below", 0.015, steps=(X, MEAN, replace(SCORES, formula="S", note="said")))
RUNG = rung(3, "here", 0.003, below=0.015, steps=(X, K_T, SEEN, SCORES, KEY, LAST))
REPORT = LadderReport(
    tokens=("In", " the\x1b[2J", " beginning"), ids=(1, 2, 3), more=(" of",),
    letters=(("n", 3), ("d", 256), ("d/h", 32)), dtype="float32", rungs=(BELOW, RUNG),
)  # fmt: skip


def shown(parts, width, colour=False):
    console = Console(
        file=io.StringIO(), width=width, force_terminal=colour,
        color_system="truecolor" if colour else None,
    )  # fmt: skip
    for part in parts:
        console.print(part, crop=False, markup=False, highlight=False)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


def derivation(*steps, below=(), width=80):
    """The steps as a rung above one of the steps `below` shows them, without what is above them."""
    under = rung(2, "below", 0.015, steps=below)
    here = replace(RUNG, steps=steps)
    text = shown(render_rung(here, replace(REPORT, rungs=(under, here)), "tiny"), width)
    return text.partition("shown: ")[2]


def test_one_rung_with_its_numbers():
    text = shown(render_rung(RUNG, REPORT, "tiny"), 80)
    assert "Because.\n\nshown: block 0; head 0; key token 0 \"In\"\n" in text
    assert """
the input
X: as on rung 2

block 0 of 2
view  Kᵀ   d/h × n = 32 × 3   strides [32,1] → [1,32]
  why
       0 "In" 1 " the\\x… 2 " begin…
            1          2          3
            4          5          6
            ⋮
view  Q as h × n × d/h   8 × 3 × 32   strides [256,32,1] → [32,256,1]
S + M   h × n × n = 8 × 3 × 3 · head 0
  said
                      0 "In" 1 " the\\x… 2 " begin…
  0 "In"                 0.5         -∞         -∞
  1 " the\\x1b[2J"       0.25          1         -∞
  2 " beginning"           1          2          3
k = t_k × W_k   (d)(d × d/h) = d/h = 2 · token 0 "In"
            1          2

after the last block
H of block 1   d = 2
            1          2

rung 3: """ in text


def test_rows_of_tokens_are_the_first_and_the_last():
    assert """
X = W_E[ids]   n × d = 3 × 256
  0 "In"                0.5          1          2          3 …
  2 " beginning"          8          9         10  1.235e+04 …
""" in derivation(X)
    many = replace(X, shape=(100, 256))  # of these, the trace has kept the first rows only
    assert """
  0 "In"                 0.5          1          2          3 …
  1 " the\\x1b[2J"          4          5          6          7 …
                           ⋮
""" in derivation(many)


def test_a_number_for_each_row_stands_beside_its_formula():
    assert "\nμ = mean(X)   n × 1 = 3 × 1   0.25  0.5  -1\n" in derivation(MEAN)
    many = replace(MEAN, shape=(9, 1))
    assert "\nμ = mean(X)   n × 1 = 9 × 1   0.25  0.5  -1 …\n" in derivation(many)
    number = step("σ² = mean(x²)", (0.5,), shape=())
    assert "\nσ² = mean(x²)   0.5\n" in derivation(number)


def test_only_what_is_the_same_is_folded():
    assert "\nX … μ: as on rung 2\n" in derivation(replace(X, section="block 0 of 2"), MEAN,
                                                  below=(replace(X, section="block 0 of 2"), MEAN))
    for other in (replace(X, shape=(4, 256)), replace(X, formula="X = W_E"),
                  replace(X, section="elsewhere")):  # fmt: skip
        assert "as on rung" not in derivation(X, below=(other,))
    assert "as on rung" not in derivation(replace(X, note="new"), below=(X,))
    assert "X: as on rung 2" in derivation(X, below=(replace(X, note="said there"),))


def test_nothing_is_folded_where_the_rungs_disagree():
    wrong = replace(RUNG, difference=0.5)
    text = shown(render_rung(wrong, replace(REPORT, rungs=(BELOW, wrong)), "tiny"), 80)
    assert "as on rung" not in text
    assert '  0 "In"                0.5          1          2          3 …' in text


def test_steps_with_an_axis_more_are_shapes():
    raised = tuple(
        replace(one, shape=(4, *one.shape), axes=f"b × {one.axes}") for one in (X, MEAN, SCORES)
    )
    text = derivation(*raised, below=(X, MEAN, SCORES))
    assert "sequence 0\nwithout numbers: steps of rung 2 that have more axes here\n" in text
    assert """
the input
X   b × n × d = 4 × 3 × 256

block 0 of 2
μ   b × n × 1 = 4 × 3 × 1
S + M   b × h × n × n = 4 × 8 × 3 × 3
""" in text


def test_the_next_token_is_named_and_has_the_newest_tokens_row():
    row = step("X_n = W_E[ids]", (1.0, 2.0), axes="1 × d", section=f"{NEXT}: block 0 of 2",
               note="a")  # fmt: skip
    text = derivation(replace(MEAN, note="a"), row)
    assert "\nthe prompt: block 0 of 2\n" in text
    assert """
the next token, 3 " of": block 0 of 2
X_n = W_E[ids]   1 × d = 1 × 2
  3 " of"          1          2
""" in text  # and what was said of the prompt is not said again


def test_what_was_not_computed_is_said():
    part = replace(RUNG, estimated="block 0 alone")
    text = shown(render_rung(part, replace(REPORT, rungs=(BELOW, part)), "tiny"), 80)
    assert "\nonly a part was computed: block 0 alone\n" in text


def test_a_formula_and_its_shape_are_two_lines_where_one_is_too_narrow():
    text = derivation(SCORES, width=30)
    assert "\nS + M\n  h × n × n = 8 × 3 × 3 · head\n  0\n" in text

"""One rung's derivation as text at a fixed width."""

import io

from rich.console import Console

from llmcli.render.derivation import render_rung
from llmcli.reports.ladder import LadderReport, RungReport, Shown, Spread, Work


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
        "difference": None if below is None else 3e-6,
        "allowed": None if below is None else 1e-4,
    }  # fmt: skip
    return RungReport(**(fields | more))


def reshaped(formula, moved=False):
    return Shown(
        formula=formula, shape=(8, 4, 32), strides=(32, 256, 1),
        source=((4, 8, 32), (256, 32, 1)), moved=moved, values=((1.0, -0.5), (0.25, 2.0)),
    )  # fmt: skip


SCORES = Shown(
    formula="scores + M", shape=(8, 2, 2), strides=(4, 2, 1), source=None, moved=None,
    values=((0.5, float("-inf")), (0.25, 12345.678)),
)  # fmt: skip
WIDE = Shown(
    formula="Q = T W_q", shape=(100, 256), strides=(256, 1), source=None, moved=None,
    values=((0.5, 1.0), (2.0, 3.0)),
)  # fmt: skip
SPLIT = tuple(reshaped(f"{letter} as h × n × d/h") for letter in "QKV")
RUNGS = (
    rung(1, "loops", 1.5, token_work=Work(gemv=0, gemm=0, flops=1e9, bytes=1e10),
         estimated="layer 0 of 2 of 4 tokens"),
    rung(2, "heads", 0.015, below=1.5,
         steps=(*SPLIT, reshaped("merged", moved=True), SCORES, WIDE)),
    rung(3, "fused", 0.003, below=0.015, steps=(SPLIT[0], reshaped("new one")), sequences=4),
)
REPORT = LadderReport(
    tokens=("In", " the\x1b[2J"), ids=(1, 2), more=(" beginning",),
    letters=(("n", 2), ("d", 256), ("d/h", 32)), dtype="float32", rungs=RUNGS,
)


def shown(parts, width, colour=False):
    console = Console(
        file=io.StringIO(), width=width, force_terminal=colour,
        color_system="truecolor" if colour else None,
    )  # fmt: skip
    for part in parts:
        console.print(part, crop=False, markup=False, highlight=False)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


def test_one_rung_with_its_numbers():
    text = shown(render_rung(RUNGS[1], REPORT, "tiny"), 80)
    assert """\
Because.

view  Q as h × n × d/h  [4 8 32] → [8 4 32]  strides (256 32 1) → (32 256 1)
          1       -0.5 …
       0.25          2 …
          ⋮
""" in text
    assert """\
scores + M  [8 2 2]
        0.5         -∞
       0.25  1.235e+04

Q = T W_q  [100 256]
        0.5          1 …
          2          3 …
          ⋮
""" in text
    assert text.endswith("by 3.0e-06, rounding explains 1.0e-04")

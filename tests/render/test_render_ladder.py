"""The ladder and the derivations of its rungs as text, and its chart as an image."""

from dataclasses import replace

import pytest
from drawn import shown
from small_models import weights
from zoo import CONFIGS

from llmcli.commands.ladder import report as made
from llmcli.commands.ladder.measure.runner import plan_workload, run_ladder
from llmcli.commands.ladder.view.screen import render_ladder, render_rung


def spread(seconds):
    return made.Spread(median=seconds, lowest=seconds, highest=seconds, runs=3)


def rung(number, name, seconds, **more):
    below = more.pop("below", None)
    fields = {
        "number": number, "name": name, "title": f"what {name} is", "idea": "Because.",
        "change": ("before it", "with it"), "sequences": 1, "prompt_s": spread(seconds),
        "token_s": spread(seconds * 2), "prompt_work": made.Work(gemv=0, gemm=0, flops=0, bytes=0),
        "token_work": made.Work(gemv=25, gemm=0, flops=36.8e6, bytes=15.1e6),
        "prompt_speedup": None if below is None else below / seconds,
        "token_speedup": None if below is None else below / seconds,
        "compared": None if below is None else "logits",
        "difference": None if below is None else 3e-6, "allowed": None if below is None else 1e-4,
    }  # fmt: skip
    return made.RungReport(**(fields | more))


def step(name, *rows, axes="n × d", shape=None, **more):
    """A name of those rows; of a matrix, unless `shape` says otherwise."""
    fields = {
        "formula": f"{name} = 0", "strides": (), "source": None, "moved": None, "section": "block",
        "note": "", "token": None,
    }  # fmt: skip
    size = (len(rows), len(rows[0])) if shape is None else shape
    return made.Step(name=name, values=rows, axes=axes, shape=size, **(fields | more))


def listing(*lines, title="block", later=False):
    """A function of those lines: a text and what it assigns."""
    return made.Listing(
        title=title, words="What it does,\nin two lines.\n\nAnd more.", later=later,
        lines=tuple(made.Line(text=text, steps=steps) for text, *steps in lines),
    )  # fmt: skip


def reshaped(name, moved=False):
    return step(
        name, (1.0, -0.5), (0.25, 2.0), axes="h × n × d/h", shape=(8, 4, 32),
        strides=(32, 256, 1), source=((4, 8, 32), (256, 32, 1)), moved=moved,
    )  # fmt: skip


SPLIT = listing(("  x_hnk = x_nhk.transpose(-3, -2)", reshaped("x_hnk")), title="split")
RUNGS = (
    rung(1, "loops", 1.5, token_work=made.Work(gemv=0, gemm=0, flops=1e9, bytes=1e10),
         estimated="block 0 alone, 2 of the 4 tokens"),
    rung(2, "heads", 0.015, below=1.5, listings=(
        SPLIT, listing(("c_nc = c_nhe.flatten(-2)", reshaped("c_nc", True)), title="merge"))),
    rung(3, "fused", 0.003, below=0.015, sequences=4, listings=(
        SPLIT, listing(("q_hnk = q", reshaped("q_hnk")), title="new"))),
)
REPORT = made.LadderReport(
    tokens=("In", " the\x1b[2J"), ids=(1, 2), more=(" beginning",),
    letters=(("n", 2), ("d", 256), ("d/h", 32)), dtype="float32", rungs=RUNGS,
)


def rendered(report, width=80, details=True, colour=None):
    parts = render_ladder(report, "tiny", details=details)
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


SCORES = step("s_nm", (0.5, float("-inf"), float("-inf")), (0.25, 1.0, float("-inf")),
              (1.0, 2.0, 12345.678), axes="… × n × m", shape=(8, 3, 3))  # fmt: skip
X = step("x_nd", (0.5, 1.0, 2.0, 3.0), (4.0, 5.0, 6.0, 7.0), (8.0, 9.0, 10.0, 12345.678),
         shape=(3, 256))  # fmt: skip
BLOCK = listing(
    ("x_nd = self.embed(ids)  # X", X),
    ("for block in self.blocks:",),
    ("    s_nm = q_nk @ k_km * mixer.scale  # S = Q Kᵀ / √(d/h), a long comment", SCORES),
    ("    q_nc, k_nc = self.queries_and_keys_of_a_very_long_name(x_nd, layer)", X, X),
    ("    q_k = self.query(t_nd[i], i)", step("q_k", (1.0, 2.0), axes="d/h", shape=(2,), token=1)),
    ("    mean = sum(x_i) / len(x_i)", step("mean", (0.25,), axes="", shape=())),
)  # fmt: skip


def explained(*listings, below=(), width=80, **changed):
    """The functions as a rung above one of the functions `below` shows them."""
    under = rung(2, "below", 0.015, listings=below)
    here = replace(rung(3, "here", 0.003, below=0.015, listings=listings), **changed)
    report = made.LadderReport(
        tokens=("In", " the\x1b[2J", " beginning"), ids=(1, 2, 3), more=(" of",),
        letters=(("n", 3), ("d", 256), ("d/h", 32)), dtype="float32", rungs=(under, here),
    )  # fmt: skip
    return shown(*render_rung(here, report, "tiny"), width=width)


def test_a_rung_by_its_source(golden):
    """At two widths; what is as below is named; with other shapes it is shown without numbers."""
    raised = replace(X, shape=(4, 3, 256))
    later = listing(("x_nd = self.embed(id)", step("x_nd", (1.0, 2.0), shape=(1, 256))), later=True)
    golden("ladder-source", {
        "one rung": explained(SPLIT, BLOCK, later, below=(SPLIT,)),
        "at 44 columns": explained(BLOCK, width=44),
        "with other shapes than below": explained(
            listing(("x_nd = self.embed(ids)", raised)),
            below=(listing(("x_nd = self.embed(ids)", X)),), estimated="block 0 alone",
        ),
    })  # fmt: skip


def test_where_the_rungs_disagree_nothing_is_as_below():
    assert "as on rung 2: split" in explained(SPLIT, below=(SPLIT,))
    assert "as on rung" not in explained(SPLIT, below=(SPLIT,), difference=0.5)


@pytest.mark.parametrize("name", ["window", "gpt2"])
@pytest.mark.parametrize("budget", [0.0, 20.0])
def test_every_rung_is_drawn_with_the_tokens_that_it_read(name, budget):
    """Also of a window, of one more token and of a rung that read a part: positions are known."""
    of = weights(CONFIGS[name])
    run = plan_workload(of, [5, 9, 2, 7, 3, 1], more=1, sequences=2, rounds=0, budget=budget)
    rungs = run_ladder(of, run, record=True)
    report = made.LadderReport(
        tokens=tuple("abcdef"), ids=(0,) * 6, more=("g",), letters=(), dtype="", rungs=rungs
    )
    screens = [shown(*render_rung(rung, report, "m")) for rung in rungs]
    assert ('0 "a"' if budget == 0 else '5 "f"') in screens[0]
    assert '5 "f"' in screens[1]
    assert '6 "g"' in screens[5]
    assert all("0 × " not in screen for screen in screens)

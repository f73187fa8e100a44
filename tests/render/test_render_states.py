"""States over time, and maps whose weights have signs, at every width."""

import numpy as np
import pytest
from drawn import lines_of

from llmcli.commands.attention.report.states import HeadStates, LayerStates, StatesReport
from llmcli.commands.attention.view.states import render_states
from llmcli.records.checks import ViewCheck
from llmcli.records.matrix import Matrix
from llmcli.ui.grid import pooled


def report(heads=2, points=24):
    norms = tuple(1.0 + at for at in range(points))
    ranks = tuple(1 + at / 2 for at in range(points))
    layer = LayerStates(
        layer=3, kind="gated DeltaNet", rows=128, columns=64, bytes=1 << 20,
        heads=tuple(HeadStates(head=h, norms=norms, effective_ranks=ranks) for h in range(heads)),
    )  # fmt: skip
    check = ViewCheck(name="state", words="it holds", value=0.1, tolerance=1.0)
    return StatesReport(
        dtype="float32", tokens=tuple((i, f" t{i},") for i in range(points)),
        prompt_tokens=points - 1, positions=tuple(range(points)), layers=(layer,), checks=(check,),
    )  # fmt: skip


def test_screens(golden):
    """Curves rise as what they show; ranks do to 12.5 of 64 that are possible."""
    golden("states", {
        "in 40 columns": lines_of(render_states(report(), "a model"), width=40),
        "in 120 columns": lines_of(render_states(report(), "a model"), width=120),
    })  # fmt: skip


def test_a_cell_stands_for_the_largest_of_either_sign():
    values = np.full((4, 4), np.nan, np.float32)
    values[0, 0], values[1, :2], values[2, :3] = 0.1, (-0.5, 0.2), (0.3, -0.2, 0.0)
    values[3] = (0.1, -0.4, -0.1, 0.0)
    made = {"layer": 0, "head": 0, "kv_head": 0, "queries": (0, 4), "keys": (0, 4), "pool": 1}
    found = pooled(Matrix(values=values, signed=True, **made), 2)
    assert found.values == pytest.approx(
        np.array([[-0.5, np.nan], [-0.4, -0.1]], np.float32), nan_ok=True
    )
    assert found.signed
    assert pooled(Matrix(values=values, **made), 2).values[1, 0] == pytest.approx(0.3)

"""SmolLM2 on a CPU: the time adds up, little of it is in gaps, and a token takes 121 GEMVs."""

from __future__ import annotations

import pytest
import torch
from timed_models import red, timed, tries

pytestmark = pytest.mark.real

PROMPT = tuple(range(100, 140))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_whole_of_it(models, dtype):
    torch.set_num_threads(1)
    model = models(dtype)
    reports = []

    def quiet():
        reports.append(timed(model, PROMPT, new_tokens=4, pairs=3))
        assert not red(reports[-1]) - {"adds_up"}
        small = all(phase.gaps_s <= 0.05 * phase.seconds for phase in reports[-1].phases)
        return small and not red(reports[-1])

    assert tries(quiet)
    report = reports[-1]
    assert report.working_set < report.weight_bytes * 1.01  # the table is the head's, read whole
    for phase in report.phases:
        assert phase.peak is None or phase.peak > model.weight_bytes
        layers = [p for p in phase.parts if p.part == "ffn_down"]
        assert [p.layer for p in layers] == list(range(30))
        assert all(p.calls == phase.calls for p in layers)
    prefill, decode = report.phases
    assert (decode.work.gemv, decode.work.gemm) == (4 * 121, 0)
    assert (prefill.work.gemv, prefill.work.gemm) == (1, 120)
    products = [p for p in decode.totals if p.work.gemv]
    assert sum(p.seconds for p in products) == pytest.approx(decode.gemv_s)
    assert decode.gemv_s > 0.5 * decode.seconds
    assert decode.gemm_s == 0
    assert prefill.gemm_s > prefill.gemv_s > 0
    assert {p.part: p.bound for p in decode.totals if p.bound is None} == {
        "sample": None, "gaps": None,
    }  # fmt: skip
    # a token's step reads every weight; its prompt reads them once for all
    weights = decode.work.weights / decode.calls
    assert weights == pytest.approx(model.weight_bytes, rel=1e-4)
    assert prefill.work.weights == pytest.approx(weights, rel=1e-3)

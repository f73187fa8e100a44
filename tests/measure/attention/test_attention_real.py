"""SmolLM2: one pass, no second copy of the weights, and heads that are known to be there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from llmcli.checkpoints import open_checkpoint
from llmcli.commands.attention.measure.run import measure_attention
from llmcli.commands.attention.prompt import synthetic
from llmcli.commands.attention.report.request import AttentionRequest
from llmcli.loading.load import Model, load_checkpoint

pytestmark = pytest.mark.real

STATUS = Path("/proc/self/status")


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Model:
    return load_checkpoint(open_checkpoint(smollm2_path), device="cpu", dtype="float32")


def resident(mark: str) -> int:
    """Bytes of memory: `VmRSS` now, `VmHWM` the most since it was last reset."""
    found = re.search(rf"{mark}:\s*(\d+) kB", STATUS.read_text())
    assert found
    return int(found[1]) * 1024


def test_heads_of_every_kind_are_found_and_all_is_proven(smollm2: Model) -> None:
    report = measure_attention(smollm2, synthetic(smollm2, 40, 0))
    assert report.ok, report.checks
    kinds = {label for layer in report.layers for head in layer.heads for label in head.labels}
    assert {"previous-token", "induction", "sink"} <= kinds
    assert report.rows["induction"] == 40
    assert [len(layer.heads) for layer in report.layers] == [9] * 30
    assert {head.kv_head for head in report.layers[0].heads} == {0, 1, 2}


@pytest.mark.skipif(not STATUS.exists(), reason="memory is read from /proc")
def test_no_second_copy_of_the_weights(smollm2: Model) -> None:
    ids = synthetic(smollm2, 60, 0)
    measure_attention(smollm2, ids[:10], AttentionRequest(generate=1))  # what is allocated once
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before = resident("VmRSS")
    report = measure_attention(smollm2, ids, AttentionRequest(generate=4, weighted=True, pairs=5))
    assert report.ok, report.checks
    assert resident("VmHWM") - before < smollm2.weight_bytes / 4

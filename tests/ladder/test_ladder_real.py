"""The ladder on the two real models: what the README shows."""

import pytest

from llmcli.commands.ladder.measure.runner import run_ladder
from llmcli.commands.ladder.measure.weights import Weights
from llmcli.commands.ladder.measure.workload import plan_workload
from llmcli.loading.load import load

TEXT = "In the beginning"


def measured(model, dtype, **options):
    loaded = load(str(model), dtype=dtype)
    weights = Weights.of(loaded.decoder)
    ids = loaded.tokenizer.encode(TEXT)
    run = plan_workload(
        weights, ids, more=1, sequences=2, rounds=0, budget=options.pop("budget", 60)
    )
    return run_ladder(weights, run, **options)


@pytest.mark.parametrize(("dtype", "allowed"), [("float32", 1e-4), ("float64", 1e-9)])
def test_every_rung_of_tiny(dtype, allowed):
    rungs = measured("tiny", dtype)
    assert len(rungs) == 8
    for rung in rungs[1:]:
        assert rung.compared == "logits"
        assert rung.difference <= allowed


@pytest.mark.parametrize(("dtype", "allowed"), [("float32", 1e-4), ("float64", 1e-9)])
def test_every_rung_of_smollm2_with_the_loops_estimated(smollm2_path, dtype, allowed):
    rungs = measured(smollm2_path, dtype, budget=10)
    assert rungs[0].estimated.startswith("block 0 alone")
    assert rungs[1].compared.endswith("after block 0")
    assert all(rung.ok for rung in rungs)
    for rung in rungs[3:]:
        assert rung.compared == "logits"
        assert rung.difference <= allowed

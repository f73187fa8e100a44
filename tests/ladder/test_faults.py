"""Faults planted in the walk, in every rung and in the decoder: the ladder must see each of them.

A fault in rung k shows between k - 1 and k (of rung 1 between 1 and 2), one in what rungs 1 to 7
share, or in the decoder, between 7 and 8.
"""

import math
import sys
import tomllib
from functools import cache
from importlib import import_module
from importlib.util import find_spec, module_from_spec
from pathlib import Path

import decoder_faults
import pytest
import torch
from ladder_models import DENSE
from small_models import ids, random_decoder, weights

import llmcli.commands.ladder
from llmcli.commands.ladder.measure.runner import Workload, run_ladder
from llmcli.nn import step

TEXTS = tomllib.loads(Path(__file__).with_name("faults.toml").read_text("utf-8"))["fault"]
LADDER = "llmcli.commands.ladder"


def differences(of, *numbers, run=run_ladder):
    """What the ladder reports for the rungs `numbers`, after the first of them."""
    tokens = ids(3, 8)
    workload = Workload(prompts=tokens[:, :6], more=tokens[0, 6:], rounds=0)
    return run(of, workload, numbers=numbers)[1:]


@pytest.fixture
def planted(monkeypatch):
    """`planted(fault, config, dtype, *rungs)`: the reports of a ladder with a fault in its source.

    Its modules are imported anew.
    """

    def reports(fault, config, dtype, *numbers):
        file, old, new = (fault[key].removeprefix("\n") for key in ("file", "old", "new"))
        monkeypatch.setattr(llmcli.commands, "ladder", llmcli.commands.ladder)  # put back after it
        for name in [name for name in sys.modules if name.startswith(LADDER)]:
            monkeypatch.delitem(sys.modules, name)
        spec = find_spec(f"{LADDER}.measure.{file.removesuffix('.py')}")
        module = sys.modules[spec.name] = module_from_spec(spec)
        source = Path(spec.origin).read_text("utf-8")
        assert source.count(old) == 1, "a fault is at its place"
        exec(compile(source.replace(old, new), spec.origin, "exec"), vars(module))
        weights = import_module(f"{LADDER}.measure.weights").Weights
        run = import_module(f"{LADDER}.measure.runner").run_ladder
        return differences(weights.of(random_decoder(config, dtype, 3)), *numbers, run=run)

    return reports


@cache
def is_sound(make, config, dtype, *numbers):
    """Whether rungs agree where nothing is planted: asked once for all faults of a model."""
    return all(found.ok for found in differences(make(config, dtype), *numbers))


def check_seen(found):
    assert not found.ok
    assert math.isfinite(found.difference)  # another number, not a crash or NaN
    assert found.difference > 3 * found.allowed


@pytest.mark.exhaustive
@pytest.mark.parametrize("fault", TEXTS, ids=lambda fault: fault["name"])
def test_a_fault_of_the_ladder_is_seen(fault, planted):
    """Where nothing is planted the other rungs agree, too: see `test_all_rungs_agree`."""
    config, numbers = DENSE[fault["model"]], (max(fault["rung"] - 1, 1), max(fault["rung"], 2))
    assert is_sound(weights, config, torch.float32, 3, 8)
    (found,) = planted(fault, config, torch.float32, *numbers)
    check_seen(found)


@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, marks=pytest.mark.exhaustive), torch.float64]
)
@pytest.mark.parametrize("name", decoder_faults.FAULTS)
def test_a_fault_of_the_decoder_is_seen(name, dtype, monkeypatch):
    config, plant = decoder_faults.FAULTS[name]
    assert is_sound(decoder_faults.model, config, dtype, 7, 8)
    of = decoder_faults.model(config, dtype)
    plant(monkeypatch, of)
    (found,) = differences(of, 7, 8)
    check_seen(found)


def test_a_fault_in_the_loops_is_one_between_two_rungs_only(planted):
    """The rungs above agree among themselves: the report names the place."""
    rungs = planted(TEXTS[0], DENSE["llama"], torch.float64, *range(1, 9))
    assert [rung.ok for rung in rungs] == [False] + [True] * 6


def test_all_positions_rotated_by_one_more_are_no_fault(monkeypatch):
    """A rotation is relative: q and k both turned on leave every product as it is."""
    of = weights(DENSE["llama"])
    tables = step.rope.tables
    monkeypatch.setattr(
        step.rope, "tables", lambda f, positions, factor: tables(f, positions + 1, factor)
    )
    (found,) = differences(of, 7, 8)
    assert found.ok

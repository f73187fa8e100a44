"""Configurations and tensor names of published checkpoints, from their own files.

`published.json` has their config.json without what no reader of weights looks at, and the names
of their index: `*` stands for the numbers of layers below the count. `bytes` is the index's own
sum, of 16-bit numbers.
"""

import json
from math import prod
from pathlib import Path
from types import SimpleNamespace

import pytest

from llmcli.anatomy import parameters
from llmcli.families import plan, translate

BESIDE = ("vision", "visual", "multi_modal_projector")  # a text model
PUBLISHED = json.loads((Path(__file__).parents[1] / "data" / "published.json").read_text())


@pytest.mark.parametrize("one", PUBLISHED, ids=lambda one: one["name"])
def test_every_tensor_is_read_or_dropped_for_a_reason(one):
    names = [
        name.replace("*", str(number))
        for name, count in one["tensors"].items()
        for number in range(count or 1)
    ]
    config, rules = translate(SimpleNamespace(
        kind="safetensors", model_type=one["config"]["model_type"], config=one["config"],
        tensors=dict.fromkeys(names),
    ))  # fmt: skip
    found = plan(names, rules, config)
    specs = parameters(config)
    assert not found.unexpected
    assert sorted(load.target for load in found.loads) == sorted(spec.name for spec in specs)
    dropped = {name for name, _ in found.dropped}
    assert {load.source for load in found.loads} | dropped == {*names}
    assert dropped == {name for name in names if any(part in name for part in BESIDE)}
    if one["bytes"] and not dropped:
        assert sum(2 * prod(spec.shape) for spec in specs) == one["bytes"]

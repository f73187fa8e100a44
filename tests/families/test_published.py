"""Configurations and tensor names of published checkpoints, from their own files.

`published.json` has their config.json without what no reader of weights looks at, and the names
of their index: `*` stands for the numbers of layers below the count, or of layers and of experts.
`bytes` is the index's own sum, of 16-bit numbers.
"""

import json
import re
from itertools import product
from math import prod
from pathlib import Path
from types import SimpleNamespace

import pytest

from llmcli.anatomy import parameters
from llmcli.families import parts_to_fill, plan, translate

BESIDE = ("vision", "visual", "multi_modal_projector")  # a text model
PUBLISHED = json.loads((Path(__file__).parents[1] / "data" / "published.json").read_text())


@pytest.mark.parametrize("one", PUBLISHED, ids=lambda one: one["name"])
def test_every_tensor_is_read_or_dropped_for_a_reason(one):
    names = []
    for name, counts in one["tensors"].items():
        ranges = map(range, counts if isinstance(counts, list) else [counts or 1])
        for numbers in product(*ranges):
            parts = iter(numbers)
            names.append(re.sub(r"\*", lambda _, parts=parts: str(next(parts)), name))
    config, rules = translate(SimpleNamespace(
        kind="safetensors", model_type=one["config"]["model_type"], config=one["config"],
        tensors=dict.fromkeys(names),
    ))  # fmt: skip
    found = plan(names, rules, config)
    specs = parameters(config)
    assert not found.unexpected
    parts = parts_to_fill(found.loads, {spec.name: spec.stored_shape for spec in specs})
    assert sorted(load.part for load in found.loads) == sorted(parts)
    dropped = {name for name, _ in found.dropped}
    assert {load.source for load in found.loads} | dropped == {*names}
    assert dropped == {name for name in names if any(part in name for part in BESIDE)}
    if one["bytes"] and not dropped:
        assert sum(2 * prod(spec.shape) for spec in specs) == one["bytes"]

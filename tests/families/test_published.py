"""Configurations, tensor names and shapes of published checkpoints, from their own files.

`published.json` has their config.json without what no reader of weights looks at, and the names
of their index: `*` stands for the numbers of layers below the count, or of layers and of experts.
`bytes` is the index's own sum, of 16-bit numbers.

`published_shapes.json.gz` has what lists of whole files tell: names with ranges of numbers, each
with its shape in PyTorch's order, and the format where the file is of safetensors. `count` and
`numbers` are the lists' own sums (or these in billions, as llama.cpp prints it); names that
have `later`, or one of these, in them belong to what is not run. Metadata, names and counts of GGUF
files are those that llama.cpp logged; a shape that no log tells is the one that its loader asks
for, and of Qwen 3.5's towers the one that transformers' model has.
"""

import gzip
import json
import re
from itertools import product
from math import prod
from pathlib import Path
from types import SimpleNamespace

import pytest

from llmcli.checkpoints import mxfp4
from llmcli.checkpoints.tensors import TensorInfo
from llmcli.families import rules as ops_of
from llmcli.families import translate
from llmcli.families.rules import parts_to_fill, plan
from llmcli.families.scales import scale_problem
from llmcli.graph.plan import parameters

BESIDE = ("vision", "visual", "multi_modal_projector")  # a text model
DATA = Path(__file__).parents[1] / "data"
PUBLISHED = json.loads((DATA / "published.json").read_text())
SHAPES = json.loads(gzip.decompress((DATA / "published_shapes.json.gz").read_bytes()))
NUMBERS = re.compile(r"(?<=\.)[\d,-]+(?=\.)")


@pytest.mark.parametrize("one", PUBLISHED, ids=lambda one: one["name"])
def test_every_tensor_is_read_or_dropped_for_a_reason(one):
    names = []
    for name, counts in one["tensors"].items():
        ranges = map(range, counts if isinstance(counts, list) else [counts or 1])
        for numbers in product(*ranges):
            parts = iter(numbers)
            names.append(re.sub(r"\*", lambda _, parts=parts: str(next(parts)), name))
    config, found, _ = planned(one["config"], dict.fromkeys(names))
    dropped = {name for name, _ in found.dropped}
    assert {load.source for load in found.loads} | dropped == {*names}
    assert dropped == {name for name in names if any(part in name for part in BESIDE)}
    if one["bytes"] and not dropped:
        assert sum(2 * prod(spec.shape) for spec in parameters(config)) == one["bytes"]


def planned(config, tensors):
    """The configuration and the plan of a file, and the stored shape of each part to fill."""
    arch = config.get("general.architecture")
    model, rules = translate(SimpleNamespace(
        kind="gguf" if arch else "safetensors", model_type=arch or config["model_type"],
        config=config, tensors=tensors,
    ))  # fmt: skip
    found = plan(tensors, rules, model)
    assert not found.unexpected
    parts = parts_to_fill(found.loads, {spec.name: spec.stored_shape for spec in parameters(model)})
    assert sorted(load.part for load in found.loads) == sorted(parts)
    return model, found, parts


@pytest.mark.parametrize("one", SHAPES, ids=lambda one: one["name"])
def test_every_shape_is_the_one_that_its_parameter_has(one):
    config, stored = one["config"], listed(one["tensors"])
    assert len(stored) == one["count"]
    numbers = sum(prod(tensor.shape) for tensor in stored.values())
    if "numbers" in one:
        assert one["numbers"] in (numbers, round(numbers / 1e9, 3), round(numbers / 1e9, 2))
    tensors = stored if "general.architecture" in config else mxfp4.paired(stored, config)
    _, found, parts = planned(config, tensors)
    for load in found.loads:
        assert after(tensors[load.source].shape, load.ops) == parts[load.part], load.source
        assert scale_problem(load.source, load.scale, tensors, found.scales) is None
    dropped = {name for name, _ in found.dropped}
    used = {load.source for load in found.loads}
    used |= {load.scale.source for load in found.loads if load.scale}
    assert used | dropped == {*tensors}
    later = one.get("later", [])
    later = [later] if isinstance(later, str) else later
    assert dropped == {name for name in tensors if any(part in name for part in later)}


def listed(tensors):
    """Each tensor of a list: `a.0-2,5.b` stands for four of them."""
    found = {}
    for pattern, words in tensors.items():
        kind, *shape = words.split() if words[0].isalpha() else ("F32", *words.split())
        ranges = [
            [number for part in one.split(",") for number in _range(*part.split("-"))]
            for one in NUMBERS.findall(pattern)
        ]
        for numbers in product(*ranges):
            parts = iter(numbers)
            name = NUMBERS.sub(lambda _, parts=parts: str(next(parts)), pattern)
            found[name] = TensorInfo(
                name=name, shape=tuple(map(int, shape)), format=kind, file=Path(), offset=0,
                nbytes=0,
            )  # fmt: skip
    return found


def _range(first, last=None):
    return range(int(first), int(last or first) + 1)


def after(shape, ops):
    """The shape that the operations, from left to right, make of a stored shape."""
    shape = tuple(shape)
    for op in ops:
        match op:
            case ops_of.Rows(start=start, stop=stop, groups=groups):
                assert shape[0] % groups == 0
                assert 0 <= start < stop <= shape[0] // groups
                shape = (groups * (stop - start), *shape[1:])
            case ops_of.PerExpert(op=inner):
                shape = (shape[0], *after(shape[1:], [inner]))
            case ops_of.Reshape():
                assert prod(op.shape) == prod(shape)
                shape = op.shape
            case ops_of.Transpose():
                shape = shape[::-1]
            case ops_of.UnpairRows(heads=heads, dims=dims):
                assert shape[0] % heads == 0
                assert dims % 2 == 0
                assert dims <= shape[0] // heads
    return shape

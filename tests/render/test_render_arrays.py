"""Array files: what other people's readers make of them, their size, and parts of arrays."""

import contextlib
import gc
import io
import json
import sys
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load as load_safetensors
from safetensors.torch import load as load_torch

from llmcli.shell.files import whole_file
from llmcli.ui.arrays import ArrayPlan, array_file_size, array_writer

METADATA = {"schema": "llmcli.attention/1", "tokens": '["é", "\\n", "😀"]'}
ARRAYS = {
    "blocks.0.attn.pattern": np.arange(24, dtype=np.float32).reshape(2, 3, 4) / 7,
    "blocks.1.mlp.post": np.array([[np.nan, np.inf, -0.0]], dtype=np.float64),
    "ids": np.array([1, 2**40], dtype=np.int64), "empty": np.zeros((0, 5), np.float16),
    "one": np.array(3.5, np.float32),
}  # fmt: skip


def plan_of(arrays):
    return [ArrayPlan(name, array.dtype.name, array.shape) for name, array in arrays.items()]


def written(kind, arrays, metadata=METADATA, plan=None):
    file = io.BytesIO()
    writer = array_writer(kind, file, plan_of(arrays) if plan is None else plan, METADATA)
    for name, array in arrays.items():
        writer.write(name, array)
    writer.finish(metadata)
    return file.getvalue()


def read(kind, data):
    if kind == "safetensors":
        return load_safetensors(data)
    with np.load(io.BytesIO(data)) as loaded:
        return {name: loaded[name] for name in loaded if name != "metadata"}


def metadata_of(kind, data, tmp_path):
    if kind == "safetensors":
        path = tmp_path / "x.safetensors"
        path.write_bytes(data)
        with safe_open(path, "np") as opened:
            return opened.metadata()
    return json.loads(str(np.load(io.BytesIO(data))["metadata"]))


def assert_same_bits(found, expected):
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape), name
        assert found[name].tobytes() == array.tobytes(), name


@pytest.mark.parametrize("kind", ["safetensors", "npz"])
def test_other_readers_find_the_same_bits_and_the_metadata(kind, tmp_path):
    """The size is known before."""
    data = written(kind, ARRAYS)
    assert_same_bits(read(kind, data), ARRAYS)
    assert metadata_of(kind, data, tmp_path) == METADATA
    arrays = {f"blocks.{i}.attn.pattern": np.ones((9, 40, 40), np.float32) for i in range(4)}
    estimate = array_file_size(kind, plan_of(arrays), METADATA)
    assert len(written(kind, arrays)) == pytest.approx(estimate, rel=0.01)


@pytest.mark.parametrize("kind", ["safetensors", "npz"])
def test_bfloat16_stays_in_safetensors_and_is_widened_in_npz(kind):
    numbers = torch.tensor([[1.5, -2.0, 3e38, float("nan")]], dtype=torch.bfloat16)
    bits = numbers.view(torch.uint16).numpy()
    plan = [ArrayPlan("k", "bfloat16", bits.shape)]
    file = io.BytesIO()
    writer = array_writer(kind, file, plan, {})
    writer.write("k", bits, "bfloat16")
    writer.finish({})
    if kind == "safetensors":
        back = load_torch(file.getvalue())["k"]
        assert back.dtype == torch.bfloat16
        assert torch.equal(back.view(torch.uint16), numbers.view(torch.uint16))
    else:
        assert_same_bits(read(kind, file.getvalue()), {"k": numbers.float().numpy()})
    assert len(file.getvalue()) == pytest.approx(array_file_size(kind, plan, {}), abs=600)


@pytest.mark.parametrize("kind", ["safetensors", "npz"])
@given(cuts=st.lists(st.integers(0, 12), max_size=5))
def test_an_array_may_come_in_parts(kind, cuts):
    array = np.random.default_rng(0).standard_normal((12, 3)).astype(np.float32)
    file = io.BytesIO()
    writer = array_writer(kind, file, plan_of({"a": array}), {})
    edges = [0, *sorted(cuts), 12]
    parts = (array[low:high] for low, high in pairwise(edges))
    writer.write_parts("a", array.shape, "float32", parts)
    writer.write("b", array.T)  # not in C order
    writer.finish({})
    assert_same_bits(read(kind, file.getvalue()), {"a": array, "b": array.T})


@pytest.mark.parametrize("kind", ["safetensors", "npz"])
@pytest.mark.parametrize("rows", [1, 3])
def test_parts_that_are_too_few_or_too_many_are_no_file(kind, rows):
    writer = array_writer(kind, io.BytesIO(), [ArrayPlan("a", "float32", (2, 4))], {})
    with pytest.raises(ValueError, match="a: "):
        writer.write_parts("a", (2, 4), "float32", [np.zeros((rows, 4), np.float32)])


@pytest.mark.parametrize("planned", [400, 4])
@pytest.mark.parametrize("copied", [16, 1 << 24])
def test_what_was_planned_may_turn_out_otherwise(planned, copied, monkeypatch, tmp_path):
    """Fewer tokens are generated, and their texts are known at the end only."""
    monkeypatch.setattr("llmcli.ui.arrays._COPIED", copied)
    plan = [ArrayPlan("blocks.0.attn.pattern", "float32", (2, planned, planned))]
    longer = METADATA | {"generated": "x" * 9000}
    arrays = {f"blocks.{i}.attn.pattern": ARRAYS["blocks.0.attn.pattern"] + i for i in range(9)}
    data = written("safetensors", arrays, longer, plan)
    assert_same_bits(read("safetensors", data), arrays)
    assert metadata_of("safetensors", data, tmp_path) == longer


def test_one_array_at_a_time_is_in_memory():
    """A generator that would fail if the writer asked for a part before writing the last one."""

    class Counting(io.BytesIO):
        written = 0

        def write(self, data):
            Counting.written += len(data)
            return super().write(data)

    def parts():
        for done in range(8):
            assert Counting.written == done * 4 * 64
            yield np.zeros((1, 64), np.float32)

    writer = array_writer("safetensors", Counting(), [ArrayPlan("a", "float32", (8, 64))], {})
    writer.write_parts("a", (8, 64), "float32", parts())
    assert Counting.written == 8 * 4 * 64


@pytest.mark.parametrize("kind", ["safetensors", "npz"])
@pytest.mark.parametrize("where", ["inside", "between"])
def test_a_file_that_is_given_up_says_nothing(kind, where, tmp_path, monkeypatch):
    """Nor does Python, of what is forgotten with it."""

    def parts():
        yield np.zeros(1 << 16, np.float32)
        raise KeyboardInterrupt

    def given_up():
        with contextlib.suppress(KeyboardInterrupt), whole_file(tmp_path / f"a.{kind}") as file:
            writer = array_writer(kind, file, [ArrayPlan("a", "float32", (1 << 17,))], {})
            writer.write("b", np.zeros(3))
            if where == "inside":
                writer.write_parts("a", (1 << 17,), "float32", parts())
            raise KeyboardInterrupt

    said = []
    monkeypatch.setattr(sys, "unraisablehook", said.append)
    given_up()
    gc.collect()
    assert said == []
    assert list(tmp_path.iterdir()) == []

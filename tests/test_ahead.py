"""Weights that are read and packed while PyTorch is imported: the same bits."""

import shutil
import sys

import children
import pytest
import torch
from gguf_model import metadata, shapes, write_file
from needs import needs_kernels

import llmcli.prepare.ahead as ahead_module
from llmcli import devices
from llmcli.checkpoints import open_checkpoint
from llmcli.errors import CheckpointError
from llmcli.loading.load import load_checkpoint
from llmcli.ops.quant import quantize
from llmcli.prepare.ahead import start
from llmcli.prepare.prepared import prepare
from llmcli.weights.packed import Packed

pytestmark = needs_kernels


def started(checkpoint, *, dtype="auto", quantize="auto", free=1 << 40):
    return start(prepare(checkpoint), dtype=dtype, quantize=quantize, bfloat16=False, free=free)


@pytest.fixture
def path(tmp_path, smollm2_path):
    """The model's one file, in a folder of its own."""
    return shutil.copy(smollm2_path, tmp_path / "model.gguf")


def test_every_weight_is_the_same(path):
    checkpoint = open_checkpoint(path)
    ahead = started(checkpoint)
    model = load_checkpoint(checkpoint, device="cpu", text=False, ahead=ahead)
    right = load_checkpoint(open_checkpoint(path), device="cpu", text=False)
    names = list(right.decoder.weight_names)
    packed = [name for name in names if isinstance(right.decoder.weight(name), Packed)]
    assert len(packed) > 200
    for name in names:
        ours, theirs = model.decoder.weight(name), right.decoder.weight(name)
        if name in packed:
            assert torch.equal(ours.data, theirs.data), name
        else:
            assert torch.equal(ours.dense(), theirs.dense()), name
    assert model.ledger == right.ledger
    assert set(packed) <= set(ahead.finish(1))


def test_large_matrices_are_read_in_lots_whose_rows_are_moved(tmp_path, monkeypatch):
    """Those of queries and keys of a Llama file lie in another order than ours."""
    monkeypatch.setattr(ahead_module, "_AT_ONCE", 5 * 34)
    draw, tensors = torch.Generator().manual_seed(0), {}
    for name, shape in shapes(32, 64).items():
        numbers = torch.randn(*shape, generator=draw)
        kind = 8 if len(shape) == 2 else 0
        raw = quantize(numbers, "Q8_0") if kind else numbers
        tensors[name] = (kind, raw.numpy().tobytes(), shape)
    path = tmp_path / "m.gguf"
    write_file(path, metadata(feed_forward_length=64), tensors)
    checkpoint = open_checkpoint(path)
    model = load_checkpoint(checkpoint, device="cpu", text=False, ahead=started(checkpoint))
    right = load_checkpoint(open_checkpoint(path), device="cpu", text=False)
    for part in "qkv":
        name = f"blocks.0.attn.W_{part}"
        ours, theirs = model.decoder.weight(name), right.decoder.weight(name)
        assert torch.equal(ours.dense(), theirs.dense()), name


def test_what_has_been_read_is_told(path):
    ahead = started(open_checkpoint(path))
    ahead.finish(2)
    held = ahead.nbytes({name: format for name, (format, *_) in ahead._spans.items()})
    if sys.platform == "linux":
        assert held <= ahead.resident <= held + (4 << 20)


def test_what_has_memory_already_does_not_have_to_fit_again(path, monkeypatch):
    checkpoint = open_checkpoint(path)
    ahead = started(checkpoint)
    monkeypatch.setattr(devices, "available_bytes", lambda device: 40 << 20)
    model = load_checkpoint(checkpoint, device="cpu", text=False, ahead=ahead)
    assert model.weight_bytes > 40 << 20
    assert not model.mapped_bytes


def test_threads_keep_what_they_read_and_write(path):
    """Loading that fails lets go of it while they are at work: this process ended with a crash."""
    program = (
        "import gc, pathlib, sys, time\n"
        "from llmcli.prepare.ahead import start\nfrom llmcli.prepare.prepared import prepare\n"
        "from llmcli.checkpoints import open_checkpoint\n"
        "for _ in range(5):\n"
        "    checkpoint = open_checkpoint(pathlib.Path(sys.argv[1]))\n"
        "    options = {'dtype': 'auto', 'quantize': 'auto', 'bfloat16': False, 'free': 1 << 40}\n"
        "    ahead = start(prepare(checkpoint), **options)\n"
        "    assert ahead is not None\n"
        "    del ahead, checkpoint\n"
        "    gc.collect()\n"
        "time.sleep(0.5)\n"
    )
    children.run([sys.executable, "-c", program, str(path)], check=True)


def test_what_is_loaded_otherwise_is_read_again(path):
    checkpoint = open_checkpoint(path)
    ahead = started(checkpoint)
    model = load_checkpoint(checkpoint, device="cpu", text=False, dtype="float32", ahead=ahead)
    right = load_checkpoint(open_checkpoint(path), device="cpu", text=False, dtype="float32")
    for name in right.decoder.weight_names:
        assert torch.equal(model.decoder.weight(name).dense(), right.decoder.weight(name).dense())
    assert not ahead.finish(1)


def test_nothing_is_started_where_nothing_is_packed_or_memory_is_short(path):
    checkpoint = open_checkpoint(path)
    assert started(checkpoint, dtype="float32") is None
    assert started(checkpoint, quantize="none") is None
    assert started(checkpoint, dtype="float33") is None
    assert started(checkpoint, free=100 << 20) is None


def test_a_file_that_ends_early(path):
    checkpoint = open_checkpoint(path)
    matrices = (one for one in checkpoint.tensors.values() if len(one.shape) == 2)
    last = max(matrices, key=lambda one: one.offset)
    checkpoint.descriptor(last.name)  # it is open when it becomes shorter
    with path.open("r+b") as file:
        file.truncate(last.offset + last.nbytes - 1)
    ahead = started(checkpoint)
    with pytest.raises(CheckpointError, match=f"`{last.name}` cannot be read"):
        load_checkpoint(checkpoint, device="cpu", text=False, ahead=ahead)

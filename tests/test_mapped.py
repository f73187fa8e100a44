"""Weights read while PyTorch is imported, and those left in the mapped file: the same bits."""

import mmap
import sys

import children
import pytest
import torch
from gguf_model import metadata, shapes, write_file
from needs import needs_kernels
from tiny_checkpoints import llama_tensors, write_llama

import llmcli.prepare.ahead as ahead_module
from llmcli import devices
from llmcli.checkpoints import open_checkpoint
from llmcli.errors import CheckpointError, OutOfMemory
from llmcli.loading.load import load_checkpoint
from llmcli.ops.quant import quantize
from llmcli.prepare.ahead import start
from llmcli.prepare.prepared import prepare
from llmcli.weights.dense import writable
from llmcli.weights.packed import MappedWeight, Packed

pytestmark = needs_kernels


@pytest.fixture
def path(tmp_path):
    """A small Llama in blocks, whose queries and keys lie in another order than ours.

    Packed rows of this width have no gaps between them, which nobody fills or reads.
    """
    draw, tensors = torch.Generator().manual_seed(0), {}
    for name, shape in shapes(64, 128).items():
        numbers = torch.randn(*shape, generator=draw)
        kind = 8 if len(shape) == 2 else 0
        raw = quantize(numbers, "Q8_0") if kind else numbers
        tensors[name] = (kind, raw.numpy().tobytes(), shape)
    sizes = {"embedding_length": 64, "feed_forward_length": 128}
    write_file(tmp_path / "model.gguf", metadata(**sizes), tensors)
    return tmp_path / "model.gguf"


def started(checkpoint, *, dtype="auto", quantize="auto", free=1 << 40):
    return start(prepare(checkpoint), dtype=dtype, quantize=quantize, bfloat16=False, free=free)


def loaded(checkpoint, **options):
    return load_checkpoint(checkpoint, device="cpu", text=False, **options)


def loaded_ahead(path, **options):
    """The model, what was read ahead for it, and the model without that."""
    checkpoint = open_checkpoint(path)
    ahead = started(checkpoint)
    model = loaded(checkpoint, ahead=ahead, **options)
    return model, ahead, loaded(open_checkpoint(path), **options)


def packed_as(model, right):
    """Which weights are packed; all of them are those of `right`, to the bit."""
    names = list(right.decoder.weight_names)
    packed = [name for name in names if isinstance(right.decoder.weight(name), Packed)]
    for name in names:
        ours, theirs = model.decoder.weight(name), right.decoder.weight(name)
        assert torch.equal(ours.dense(), theirs.dense()), name
        assert name not in packed or ours.in_file or torch.equal(ours.data, theirs.data), name
    return packed


@pytest.mark.parametrize("at_once", [1 << 20, 5 * 68], ids=["whole", "in lots"])
def test_every_weight_read_ahead_is_the_same(path, monkeypatch, at_once):
    """Large matrices are read in lots, whose rows are moved."""
    monkeypatch.setattr(ahead_module, "_AT_ONCE", at_once)
    model, ahead, right = loaded_ahead(path)
    packed = packed_as(model, right)
    assert len(packed) == 8
    assert model.ledger == right.ledger
    assert set(packed) <= set(ahead.finish(1))


def test_every_weight_of_a_real_model_is_the_same(smollm2_path):
    model, _, right = loaded_ahead(smollm2_path)
    assert len(packed_as(model, right)) > 200


def test_what_has_been_read_is_told(path):
    ahead = started(open_checkpoint(path))
    ahead.finish(2)
    held = ahead.nbytes({name: format for name, (format, *_) in ahead._spans.items()})
    if sys.platform == "linux":
        assert 8 * 64 * 64 < held <= ahead.resident < held + mmap.PAGESIZE


def test_what_has_memory_already_does_not_have_to_fit_again(path, monkeypatch):
    checkpoint = open_checkpoint(path)
    ahead = started(checkpoint)
    monkeypatch.setattr(devices, "available_bytes", lambda device: 2000)
    model = loaded(checkpoint, ahead=ahead)
    assert model.weight_bytes > 10_000
    assert not model.mapped_bytes
    assert loaded(open_checkpoint(path)).mapped_bytes


def test_threads_keep_what_they_read_and_write(smollm2_path, tmp_path):
    """Loading that fails lets go of it while they are at work: this process ended with a crash."""
    program = tmp_path / "scripted.py"
    program.write_text(
        "import gc, pathlib, sys, threading\n"
        "from llmcli.prepare.ahead import start\nfrom llmcli.prepare.prepared import prepare\n"
        "from llmcli.checkpoints import open_checkpoint\n"
        "for _ in range(5):\n"
        "    checkpoint = open_checkpoint(pathlib.Path(sys.argv[1]))\n"
        "    options = {'dtype': 'auto', 'quantize': 'auto', 'bfloat16': False, 'free': 1 << 40}\n"
        "    ahead = start(prepare(checkpoint), **options)\n"
        "    assert ahead is not None\n"
        "    del ahead, checkpoint\n"
        "    gc.collect()\n"
        "for thread in threading.enumerate():\n"
        "    thread is threading.main_thread() or thread.join()\n"
    )
    children.run([sys.executable, str(program), str(smollm2_path)], check=True)


def test_what_is_loaded_otherwise_is_read_again(path):
    model, ahead, right = loaded_ahead(path, dtype="float32")
    assert packed_as(model, right) == []
    assert not ahead.finish(1)


def test_nothing_is_started_where_nothing_is_packed_or_memory_is_short(path):
    checkpoint = open_checkpoint(path)
    assert started(checkpoint, dtype="float32") is None
    assert started(checkpoint, quantize="none") is None
    assert started(checkpoint, dtype="float33") is None
    assert started(checkpoint, free=checkpoint.nbytes) is None
    assert started(checkpoint, free=3 * checkpoint.nbytes) is not None


def test_a_file_that_ends_early(path):
    checkpoint = open_checkpoint(path)
    matrices = (one for one in checkpoint.tensors.values() if len(one.shape) == 2)
    last = max(matrices, key=lambda one: one.offset)
    checkpoint.descriptor(last.name)  # it is open when it becomes shorter
    with path.open("r+b") as file:
        file.truncate(last.offset + last.nbytes - 1)
    ahead = started(checkpoint)
    with pytest.raises(CheckpointError, match=f"`{last.name}` cannot be read"):
        loaded(checkpoint, ahead=ahead)


# what stays in the file


def both(monkeypatch, path):
    """The model, and the one whose weights do not fit: the same ones."""
    whole = loaded(open_checkpoint(path))
    with monkeypatch.context() as patched:
        patched.setattr(devices, "available_bytes", lambda device: 1)
        patched.setattr(devices, "require_memory", lambda *args: None)
        mapped = loaded(open_checkpoint(path))
    assert not whole.mapped_bytes
    assert mapped.mapped_bytes > 0.9 * mapped.weight_bytes
    packed_as(mapped, whole)
    return whole, mapped


def test_weights_prompts_and_steps_have_the_same_bits(path, monkeypatch):
    whole, mapped = both(monkeypatch, path)
    rotated = mapped.decoder.weight("blocks.0.attn.W_q")  # its rows are unpaired
    assert isinstance(rotated, MappedWeight)
    with pytest.raises(TypeError):
        rotated.write(torch.arange(1), rotated.data[:1])
    ids = torch.randint(0, 256, (2, 37), generator=torch.Generator().manual_seed(0))
    states = [model.decoder.new_state(2, 64) for model in (whole, mapped)]

    def logits(ids):
        pairs = zip((whole, mapped), states, strict=True)
        return [model.decoder(ids, state) for model, state in pairs]

    assert torch.equal(*logits(ids))
    for _ in range(4):
        assert torch.equal(*logits(ids[:, :1]))
    assert all(state.recorded for state in states)


def test_rows_of_a_large_matrix_are_packed_again_in_chunks():
    """A few groups at a time: for one row of inputs one chunk each, for many several."""
    draw, (rows, columns) = torch.Generator().manual_seed(0), (797, 1024)
    raw = quantize(torch.randn(rows, columns, generator=draw), "Q8_0")
    order = torch.randperm(rows, generator=draw)
    packed = Packed("Q8_0", (rows, columns), torch.device("cpu"))
    packed.write(torch.arange(rows), raw[order])
    mapped = MappedWeight("Q8_0", columns, raw, order)
    experts = MappedWeight("Q8_0", columns, raw, order[:796], experts=4)
    for many in (1, 64):
        x = torch.randn(many, columns, generator=draw)
        assert torch.equal(mapped.matmul(x), packed.matmul(x))
        assert torch.equal(experts.expert(2).matmul(x), packed.matmul(x)[:, 398:597])
    assert torch.equal(mapped.rows(order), packed.rows(order))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sixteen_bits_at_odd_addresses(tmp_path, monkeypatch, dtype):
    write_llama(tmp_path, llama_tensors(dtype=dtype))
    path = tmp_path / "model.safetensors"
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    path.write_bytes((size + 1).to_bytes(8, "little") + raw[8 : 8 + size] + b" " + raw[8 + size :])
    whole, mapped = both(monkeypatch, tmp_path)
    names = [name for name in mapped.decoder.weight_names if mapped.decoder.weight(name).in_file]
    assert len(names) > 10
    with pytest.raises(TypeError):
        writable(mapped.decoder.weight(names[0]))
    ids = torch.arange(20)[None]
    assert torch.equal(mapped.decoder(ids), whole.decoder(ids))


def test_what_is_in_no_16_bits_has_to_fit(path, monkeypatch):
    monkeypatch.setattr(devices, "available_bytes", lambda device: 2000)
    with pytest.raises(OutOfMemory, match="the weights need"):
        loaded(open_checkpoint(path), dtype="float32")


def test_a_note_says_so(path, tmp_path):
    (tmp_path / "scripted.py").write_text(
        "import sys\nfrom llmcli import devices\nfree = devices.available_bytes\n"
        "def little(device):\n"
        "    loading = sys._getframe(1).f_code.co_name == '_exceeds'\n"
        "    return 1 if loading else free(device)\n"
        "devices.available_bytes = little\n"
        "from llmcli.cli.app import main\nsys.exit(main())\n"
    )
    options = ["generate", "Hi", "--raw", "-n", "3", "-m", str(path), "--greedy", "--ignore-eos"]
    run = children.run(
        [sys.executable, str(tmp_path / "scripted.py"), *options], capture_output=True, text=True
    )
    assert (run.returncode, run.stdout[:1] != "") == (0, True)
    assert "do not fit into the free memory: they stay in the mapped file" in run.stderr


def test_a_file_that_becomes_shorter_ends_the_program_with_one_line(tmp_path):
    """Not by a signal, of which nobody would know what it means."""
    folder = write_llama(tmp_path, llama_tensors(dtype=torch.bfloat16))
    (tmp_path / "scripted.py").write_text(f"""
import os, torch
from pathlib import Path
from llmcli import devices
from llmcli.checkpoints import open_checkpoint
from llmcli.loading.load import load_checkpoint
devices.available_bytes = lambda device: 0
devices.require_memory = lambda *args: None
model = load_checkpoint(open_checkpoint(Path({str(folder)!r})), device="cpu", text=False)
assert model.mapped_bytes
os.truncate({str(folder / "model.safetensors")!r}, 60)
model.decoder(torch.arange(4)[None])
""")
    ended = children.run(
        [sys.executable, str(tmp_path / "scripted.py")], capture_output=True, text=True
    )
    assert ended.returncode == 4
    assert ended.stderr.startswith("error: a weight file that stays mapped became shorter")
    assert ended.stderr.count("\n") == 2

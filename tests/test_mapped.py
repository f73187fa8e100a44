"""Weights in blocks or 16 bits that do not fit stay in the mapped file: the same bits."""

import sys

import children
import pytest
import torch
from needs import needs_kernels
from tiny_checkpoints import llama_tensors, write_llama

from llmcli import devices
from llmcli.checkpoints import open_checkpoint, open_model
from llmcli.errors import OutOfMemory
from llmcli.loading.load import load, load_checkpoint
from llmcli.weights.dense import writable
from llmcli.weights.packed import MappedWeight

pytestmark = needs_kernels


def both(monkeypatch, model=None, *, little=40 << 20):
    def made():
        checkpoint = open_checkpoint(model) if model else open_model("smollm2")
        return load_checkpoint(checkpoint, device="cpu", text=not model)

    whole = made()
    with monkeypatch.context() as patched:
        patched.setattr(devices, "available_bytes", lambda device: little)
        patched.setattr(devices, "require_memory", lambda *args: None)
        return whole, made()


def check_weights(whole, mapped):
    assert not whole.mapped_bytes
    assert mapped.mapped_bytes > 0.9 * mapped.weight_bytes
    for name in whole.decoder.weight_names:
        assert torch.equal(whole.decoder.weight(name).dense(), mapped.decoder.weight(name).dense())


@pytest.mark.real
def test_weights_prompts_and_steps_have_the_same_bits(monkeypatch):
    whole, mapped = both(monkeypatch)
    check_weights(whole, mapped)
    rotated = mapped.decoder.weight("blocks.3.attn.W_q")  # its rows are unpaired
    assert isinstance(rotated, MappedWeight)
    with pytest.raises(TypeError):
        rotated.write(torch.arange(1), rotated.data[:1])
    ids = torch.randint(0, 40_000, (2, 37), generator=torch.Generator().manual_seed(0))
    states = [model.decoder.new_state(2, 64) for model in (whole, mapped)]

    def logits(ids):
        pairs = zip((whole, mapped), states, strict=True)
        return [model.decoder(ids, state) for model, state in pairs]

    assert torch.equal(*logits(ids))
    for _ in range(4):
        assert torch.equal(*logits(ids[:, :1]))
    assert all(state.recorded for state in states)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sixteen_bits_at_odd_addresses(tmp_path, monkeypatch, dtype):
    write_llama(tmp_path, llama_tensors(dtype=dtype))
    path = tmp_path / "model.safetensors"
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    path.write_bytes((size + 1).to_bytes(8, "little") + raw[8 : 8 + size] + b" " + raw[8 + size :])
    whole, mapped = both(monkeypatch, tmp_path, little=1)
    names = [name for name in mapped.decoder.weight_names if mapped.decoder.weight(name).in_file]
    assert len(names) > 10
    check_weights(whole, mapped)
    with pytest.raises(TypeError):
        writable(mapped.decoder.weight(names[0]))
    ids = torch.arange(20)[None]
    assert torch.equal(mapped.decoder(ids), whole.decoder(ids))


@pytest.mark.real
def test_what_is_in_no_16_bits_has_to_fit(monkeypatch):
    monkeypatch.setattr(devices, "available_bytes", lambda device: 40 << 20)
    with pytest.raises(OutOfMemory, match="the weights need"):
        load("smollm2", device="cpu", dtype="float32")


@pytest.mark.real
def test_a_note_says_so():
    program = (
        "import sys\nfrom llmcli import devices\nfree = devices.available_bytes\n"
        "def little(device):\n"
        "    loading = sys._getframe(1).f_code.co_name == '_exceeds'\n"
        "    return 1 << 10 if loading else free(device)\n"
        "devices.available_bytes = little\n"
        "from llmcli.cli.app import main\nsys.exit(main())\n"
    )
    path = str(open_model("smollm2").path)
    options = ["--raw", "-n", "3", "-m", path, "--greedy"]
    run = children.run(
        [sys.executable, "-c", program, "generate", "Hi", *options],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert run.stdout.strip()
    assert "do not fit into the free memory: they stay in the mapped file" in run.stderr


def test_a_file_that_becomes_shorter_ends_the_program_with_one_line(tmp_path):
    """Not by a signal, of which nobody would know what it means."""
    folder = write_llama(tmp_path, llama_tensors(dtype=torch.bfloat16))
    script = f"""
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
"""
    ended = children.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ended.returncode == 4
    assert ended.stderr.startswith("error: a weight file that stays mapped became shorter")
    assert ended.stderr.count("\n") == 2

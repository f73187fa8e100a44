"""Weights in blocks that do not fit into memory stay in the mapped file: the same bits."""

import sys

import children
import pytest
import torch

from llmcli import devices
from llmcli.checkpoints import open_model
from llmcli.errors import OutOfMemory
from llmcli.formats.packed import Mapped
from llmcli.kernels import native
from llmcli.loading.load import load

pytestmark = pytest.mark.skipif(native.level() is None, reason="there are no kernels here")


@pytest.fixture
def little_memory(monkeypatch):
    monkeypatch.setattr(devices, "available_bytes", lambda device: 40 << 20)


def both(monkeypatch):
    whole = load("smollm2", device="cpu")
    with monkeypatch.context() as patched:
        patched.setattr(devices, "available_bytes", lambda device: 40 << 20)
        return whole, load("smollm2", device="cpu")


def test_prompts_and_steps_have_the_same_bits(monkeypatch):
    whole, mapped = both(monkeypatch)
    assert not whole.mapped_bytes
    assert mapped.mapped_bytes > 0.9 * mapped.weight_bytes
    ids = torch.randint(0, 40_000, (2, 37), generator=torch.Generator().manual_seed(0))
    states = [model.decoder.new_state(2, 64) for model in (whole, mapped)]
    ours, theirs = (
        model.decoder(ids, state) for model, state in zip((mapped, whole), states, strict=True)
    )
    assert torch.equal(ours, theirs)
    for _ in range(4):
        step = [
            model.decoder(ids[:, :1], state)
            for model, state in zip((mapped, whole), states, strict=True)
        ]
        assert torch.equal(*step)
    assert all(state.replays for state in states)


def test_every_weight_is_the_same(monkeypatch):
    whole, mapped = both(monkeypatch)
    for name in whole.decoder.weight_names:
        assert torch.equal(whole.decoder.weight(name).dense(), mapped.decoder.weight(name).dense())
    rotated = mapped.decoder.weight("blocks.3.attn.W_q")  # its rows are unpaired
    assert isinstance(rotated, Mapped)
    with pytest.raises(TypeError):
        rotated.write(torch.arange(1), rotated.data[:1])


def test_what_is_no_block_has_to_fit(little_memory):
    with pytest.raises(OutOfMemory, match="the weights need"):
        load("smollm2", device="cpu", dtype="float32")


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

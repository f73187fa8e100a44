"""On a CUDA device: the same numbers as on the CPU, loaded, prefilled, stepped and batched."""

import pytest
import torch
from tiny_checkpoints import write_llama

from llmcli.checkpoints import open_checkpoint
from llmcli.loading import load_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]


@pytest.fixture
def models(tmp_path):
    checkpoint = open_checkpoint(write_llama(tmp_path))
    return [load_checkpoint(checkpoint, device=d, dtype="float64") for d in ("cpu", "cuda")]


def test_whole_prompt_and_steps(models):
    ids = torch.arange(20)[None] % 97
    outs = []
    for model in models:
        decoder = model.decoder
        here = ids.to(decoder.device)
        whole = decoder(here)
        state = decoder.new_state(1, 24)
        parts = [decoder(part, state) for part in here.split([9, 1, 10], 1)]
        torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-9, atol=1e-9)
        outs.append(whole.log_softmax(-1).cpu())
    torch.testing.assert_close(*outs, rtol=1e-9, atol=1e-9)


def test_unequal_batch(models):
    ids = torch.arange(24).view(2, 12) % 97
    outs = []
    for model in models:
        decoder = model.decoder
        state = decoder.new_state(2, 16)
        decoder(ids.to(decoder.device), state, lengths=[12, 5], logits="last")
        step = torch.tensor([[3], [4]], device=decoder.device)
        outs.append(decoder(step, state).log_softmax(-1).cpu())
    torch.testing.assert_close(*outs, rtol=1e-9, atol=1e-9)


def test_auto_picks_the_card_and_the_checkpoints_dtype(tmp_path):
    model = load_checkpoint(open_checkpoint(write_llama(tmp_path)))
    assert model.device.type == "cuda"
    assert model.dtype == torch.float32
    assert model.decoder(torch.tensor([[1, 2]], device="cuda")).isfinite().all()

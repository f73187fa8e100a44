"""Reading a long prompt in chunks gives what one forward call gives; caches must fit memory."""

from types import SimpleNamespace

import pytest
import torch
from fake_model import FakeDecoder
from tiny_checkpoints import write_llama

from llmcli import devices
from llmcli.checkpoints import open_checkpoint
from llmcli.errors import OutOfMemory
from llmcli.generation import Sampling, stream
from llmcli.generation.prefill import prefill
from llmcli.loading import load_checkpoint
from llmcli.measure import score

SCALINGS = {
    "none": None,
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "longrope": {
        "rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0, 1.5, 2.0, 4.0],
        "original_max_position_embeddings": 16, "factor": 4.0,
    },
}  # fmt: skip


@pytest.fixture(params=SCALINGS)
def model(request, tmp_path):
    folder = write_llama(
        tmp_path, rope_scaling=SCALINGS[request.param], max_position_embeddings=16
    )
    return load_checkpoint(open_checkpoint(folder), device="cpu", dtype="float64")


def test_chunks_of_a_prompt_beyond_the_trained_length(model):
    prompts = [list(range(30)), list(range(40, 49))]
    state = model.decoder.new_state(2, 40)
    last = prefill(model.decoder, prompts, state, chunk=7)
    for row, prompt in enumerate(prompts):
        whole = model.decoder(torch.tensor([prompt]), logits="last")[0, 0]
        torch.testing.assert_close(last[row], whole, rtol=1e-9, atol=1e-9)


def test_scores_do_not_depend_on_the_chunks(model, monkeypatch):
    ids = list(range(30))
    found = []
    for chunk in (256, 7):
        monkeypatch.setattr(score, "CHUNK", chunk)
        report = score.measure_score(model, ids, [""] * 30, [1] * 30, window=30, stride=15)
        found.append([token.logprob for token in report.tokens[1:]])
    assert found[0] == pytest.approx(found[1], abs=1e-9)


def test_caches_that_do_not_fit_are_refused_before_they_are_made(monkeypatch):
    decoder = FakeDecoder(lambda ids: [0.0] * 8)
    config = SimpleNamespace(
        vocab=8, context=4096, embedding=SimpleNamespace(positions=None)
    )
    model = SimpleNamespace(
        decoder=decoder, config=config, tokenizer=None, eos_ids=frozenset(),
        device=torch.device("cpu"),
    )  # fmt: skip
    monkeypatch.setattr(devices, "available_bytes", lambda device: 100_000)
    with pytest.raises(OutOfMemory, match=r"caches of 64 × 128 tokens") as caught:
        list(stream(model, [[1]], Sampling(temperature=0), limit=100, samples=64))
    assert caught.value.code == 5
    assert decoder.capacities == []

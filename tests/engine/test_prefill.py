"""Reading a long prompt in chunks gives what one forward call gives; caches must fit memory."""

from types import SimpleNamespace

import pytest
import torch
from continued import stream
from fake_model import FakeDecoder, fake_config
from tiny_checkpoints import write_llama

from llmcli import devices
from llmcli.checkpoints import open_checkpoint
from llmcli.commands.score import measure as score
from llmcli.decoder.decoder import Decoder
from llmcli.engine.sampling import Sampling
from llmcli.engine.session import Session
from llmcli.errors import OutOfMemory
from llmcli.loading.load import load_checkpoint

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
    folder = write_llama(tmp_path, rope_scaling=SCALINGS[request.param], max_position_embeddings=16)
    return load_checkpoint(open_checkpoint(folder), device="cpu", dtype="float64")


new_state = Decoder.new_state


def chunk_by_chunk(decoder, prompts, state, chunk):
    """Logits of every call, those of the call in which a prompt ends being its own."""
    found = torch.full((len(prompts), decoder.config.vocab), float("nan"), dtype=decoder.dtype)
    totals = list(map(len, prompts))
    for start in range(0, max(totals), chunk):
        parts = [prompt[start : start + chunk] for prompt in prompts]
        width = max(map(len, parts))
        ids = torch.tensor([part + [0] * (width - len(part)) for part in parts])
        lengths = list(map(len, parts))
        logits = decoder(ids, state, lengths=lengths, totals=totals, logits="last")
        for row, length in enumerate(lengths):
            if length:
                found[row] = logits[row, 0]
    return found


@pytest.mark.parametrize("lengths", [(30,), (7,), (14,), (3, 30, 8), (14, 9), (7, 7, 21)])
def test_logits_are_those_of_calls_that_all_have_some_bit_for_bit(model, lengths):
    prompts = [[(3 * row + 5 * i) % 50 for i in range(n)] for row, n in enumerate(lengths)]
    session, state = (make(model.decoder, len(prompts), 40) for make in (Session, new_state))
    last = session.prefill(prompts, chunk=7)
    assert torch.equal(last, chunk_by_chunk(model.decoder, prompts, state, 7))
    kept = state.tensors()
    assert all(torch.equal(one, kept[name]) for name, one in session.state.tensors().items())
    assert session.lengths == state.lengths == list(lengths)
    assert session.ids == prompts


@pytest.mark.parametrize(
    ("lengths", "heads"), [((30,), [4]), ((7,), [0]), ((14,), [1]), ((3, 30, 8), [0, 1, 4])]
)
def test_norm_and_head_are_computed_where_a_prompt_ends_and_nowhere_else(model, lengths, heads):
    prompts = [[1] * n for n in lengths]
    heard = []
    Session(model.decoder, len(prompts), 40).prefill(prompts, chunk=7, clock=heard.append)
    calls = [[]]
    for name in heard:
        if name == "step":
            calls.append([])
        calls[-1].append(name)
    calls = calls[1:]
    assert len(calls) == -(-max(lengths) // 7)
    for number, names in enumerate(calls):
        ends = ["ln_final.out", "logits_raw", "logits"] if number in heads else []
        assert [name for name in names if name.startswith(("ln_final", "logits"))] == ends


@pytest.mark.parametrize("count", [16, 17, 18, 2 * score.CHUNK + 9])  # the trained length is 16
def test_scores_are_those_of_one_pass(model, count):
    """About the trained length: the last token is not read, but it chooses LongRoPE's factors."""
    ids = [at % 97 for at in range(count)]
    report = score.measure_score(model, ids, [""] * count, [(0, 0)] * count, window=count, stride=1)
    logprobs = model.decoder(torch.tensor([ids]))[0].log_softmax(-1)
    expected = [logprobs[at, id].item() for at, id in enumerate(ids[1:])]
    assert [token.logprob for token in report.tokens[1:]] == pytest.approx(expected, abs=1e-9)


def test_caches_that_do_not_fit_are_refused_before_they_are_made(monkeypatch):
    decoder = FakeDecoder(lambda ids: [0.0] * 8)
    model = SimpleNamespace(
        decoder=decoder, config=fake_config(8), tokenizer=None, eos_ids=frozenset(),
        device=torch.device("cpu"),
    )  # fmt: skip
    monkeypatch.setattr(devices, "available_bytes", lambda device: 100_000)
    with pytest.raises(OutOfMemory, match=r"caches of 64 × 128 tokens") as caught:
        list(stream(model, [[1]], Sampling(temperature=0), limit=100, samples=64))
    assert caught.value.code == 5
    assert decoder.capacities == []

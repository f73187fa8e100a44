"""One observed run: which calls are made, what the watcher is shown, and when it ends."""

from __future__ import annotations

import gc

import pytest
import torch
from decoder_parameters import parameters_of
from small_models import as_model, weights
from zoo import CONFIGS, VOCAB

from llmcli import anatomy, devices
from llmcli.engine.sampling import Sampling
from llmcli.errors import NotFinite, OutOfMemory
from llmcli.graph.spec import Call
from llmcli.inspect.observe import observe
from llmcli.measure.runs import gc_disabled

GREEDY = Sampling(temperature=0.0)
IDS = [(5 * i + 1) % VOCAB for i in range(9)]


@pytest.fixture
def model():
    return as_model(weights(CONFIGS["llama"]).decoder)


def watched(model, **options):
    seen = []
    found = observe(model, IDS, lambda first, *named: seen.append((first, *named)), **options)
    return found, seen


def test_one_pass_shows_every_activation_in_order(model):
    found, seen = watched(model)
    call = Call(batch=1, tokens=len(IDS), past=0, phase="prefill")
    specs = anatomy.plan(model.config, call, logits="last").written
    assert [(first, name) for first, name, _ in seen] == [(0, spec.name) for spec in specs]
    assert (found.ids, found.prompt_tokens, found.state) == (tuple(IDS), len(IDS), None)
    plain = model.decoder(torch.tensor([IDS]), logits="last")
    assert torch.equal(seen[-1][2], plain)


@pytest.mark.parametrize("generate", [0, 2])
def test_logits_of_every_token_where_they_are_asked_for(model, generate):
    sampling = GREEDY if generate else None
    found, seen = watched(model, generate=generate, sampling=sampling, logits="all")
    rows = [tensor.shape[1] for _, name, tensor in seen if name == "logits"]
    assert rows == [len(IDS)] + [1] * generate
    assert found.ids == watched(model, generate=generate, sampling=sampling)[0].ids


def test_nothing_is_computed_after_the_layer_that_is_asked_for(model):
    _, seen = watched(model, until=0)
    assert seen[-1][1] == "blocks.0.resid_post"
    for options in ({"until": 0, "sampling": GREEDY}, {}):  # what makes no sense together
        with pytest.raises(ValueError, match="needs every layer, and a sampling"):
            watched(model, generate=1, **options)


def test_logits_that_are_not_finite(model):
    parameters_of(model.decoder)["ln_final.w"].fill_(float("nan"))
    with pytest.raises(NotFinite):
        watched(model, generate=1, sampling=GREEDY)


def test_every_new_token_is_the_likeliest_and_a_query_itself(model):
    found, seen = watched(model, generate=4, sampling=GREEDY)
    assert len(found.ids) == len(IDS) + 4
    ids = list(IDS)
    for _ in range(4):
        ids.append(int(model.decoder(torch.tensor([ids]))[0, -1].argmax()))
    assert list(found.ids) == ids
    firsts = [first for first, name, _ in seen if name == "blocks.1.attn.q_rot"]
    assert firsts == [0, 9, 10, 11, 12]
    rows = [tensor.shape[2] for _, name, tensor in seen if name == "blocks.1.attn.q_rot"]
    assert rows == [9, 1, 1, 1, 1]
    assert found.state.lengths == [13]
    whole = model.decoder(torch.tensor([ids]))[0, -1]
    assert torch.allclose(seen[-1][2][0, -1], whole, atol=1e-12)


def test_an_end_of_text_token_is_the_last(model):
    whole, _ = watched(model, generate=4, sampling=GREEDY)
    model.eos_ids = frozenset({whole.ids[10]})
    found, seen = watched(model, generate=4, sampling=GREEDY)
    assert found.ids == whole.ids[: whole.ids.index(whole.ids[10], 9) + 1]
    assert seen[-1][0] == len(found.ids) - 1


def test_a_cache_that_does_not_fit_is_refused(model, monkeypatch):
    needed = model.decoder.state_bytes(1, 13)
    monkeypatch.setattr(devices, "available_bytes", lambda device: needed)
    watched(model, generate=4, sampling=GREEDY)
    monkeypatch.setattr(devices, "available_bytes", lambda device: needed - 1)
    with pytest.raises(OutOfMemory, match="the cache of 13 tokens"):
        watched(model, generate=4, sampling=GREEDY)


def test_the_collector_is_off_within_and_as_it_was_afterwards():
    assert gc.isenabled()
    with gc_disabled(), gc_disabled():
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with pytest.raises(ZeroDivisionError), gc_disabled():
            1 / 0  # noqa: B018
        assert not gc.isenabled()
    finally:
        gc.enable()

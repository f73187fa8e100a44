"""New tokens: the likeliest ones, up to the end of the text, read from a cache that fits."""

import gc

import pytest
import torch
from decoder_parameters import parameters_of
from small_models import as_model, weights
from zoo import CONFIGS, VOCAB

from llmcli import devices
from llmcli.errors import NotFinite, OutOfMemory
from llmcli.inspect.passes import Passes
from llmcli.measure.runs import gc_disabled

IDS = [(5 * i + 1) % VOCAB for i in range(9)]


@pytest.fixture
def model():
    return as_model(weights(CONFIGS["llama"]).decoder)


def generated(model, ids, limit, **options):
    passes = Passes(model, ids, limit)
    passes.write(**options)
    return passes


def test_logits_that_are_not_finite(model):
    parameters_of(model.decoder)["ln_final.w"].fill_(float("nan"))
    with pytest.raises(NotFinite):
        generated(model, IDS, 1)


@pytest.mark.parametrize("prove", [False, True])
def test_every_new_token_is_the_likeliest(model, prove):
    found = generated(model, IDS, 4, prove=prove)
    ids = list(IDS)
    for _ in range(4):
        ids.append(int(model.decoder(torch.tensor([ids]))[0, -1].argmax()))
    assert list(found.ids) == ids
    assert [check.name for check in found.checks] == ["steps"] * prove
    assert (generated(model, IDS, 0).ids, generated(model, IDS, 0).checks) == (tuple(IDS), ())


def test_an_end_of_text_token_is_the_last_and_is_read(model):
    whole = generated(model, IDS, 4).ids
    model.eos_ids = frozenset({whole[10]})
    found = generated(model, IDS, 4)
    assert found.ids == whole[: whole.index(whole[10], 9) + 1]
    assert [check.ok for check in found.checks] == [True]


def test_a_cache_that_does_not_fit_is_refused(model, monkeypatch):
    needed = model.decoder.state_bytes(1, 13)
    monkeypatch.setattr(devices, "available_bytes", lambda device: needed)
    generated(model, IDS, 4)
    monkeypatch.setattr(devices, "available_bytes", lambda device: needed - 1)
    with pytest.raises(OutOfMemory, match="the cache of 13 tokens"):
        generated(model, IDS, 4)


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

"""The rungs' weights are the decoder's own, and all of them."""

import pytest
import torch
from decoder_parameters import parameters_of
from ladder_models import random_weights

from llmcli.commands.ladder.measure.weights import Weights
from llmcli.errors import UnsupportedModel


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_nothing_is_copied(kind):
    weights = random_weights(kind)
    slots = parameters_of(weights.decoder)
    assert weights.W_E.data_ptr() == slots["embed.W"].data_ptr()
    _, mlp = weights.blocks[0].parts
    assert torch.equal(mlp.down.W, slots["blocks.0.mlp.W_down"].t())
    assert mlp.down.W.data_ptr() == slots["blocks.0.mlp.W_down"].data_ptr()


def test_a_parameter_without_a_formula_is_refused(monkeypatch):
    decoder = random_weights("gpt2").decoder
    named = [*decoder.weight_names, "blocks.0.attn.temperature"]
    monkeypatch.setattr(decoder, "weight_names", named)
    with pytest.raises(UnsupportedModel, match=r"no formula for `blocks\.0\.attn\.temperature`"):
        Weights.of(decoder)

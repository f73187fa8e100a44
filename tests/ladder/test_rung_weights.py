"""The rungs' weights are the decoder's own, and all of them."""

from dataclasses import replace

import pytest
import torch
from decoder_parameters import parameters_of
from ladder_models import random_weights

from llmcli.errors import UnsupportedModel
from llmcli.ladder.weights import Weights
from llmcli.nn.decoder import Decoder


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_nothing_is_copied(kind):
    weights = random_weights(kind)
    slots = parameters_of(weights.decoder)
    assert weights.W_E.data_ptr() == slots["embed.W"].data_ptr()
    first = weights.layers[0]
    assert torch.equal(first.W_down, slots["blocks.0.mlp.W_down"].t())
    assert first.W_down.data_ptr() == slots["blocks.0.mlp.W_down"].data_ptr()


def test_a_parameter_without_a_formula_is_refused():
    config = random_weights("gpt2").config
    odd = replace(config, head=replace(config.head, tied=False))
    Weights.of(Decoder(odd, device="meta", dtype=torch.float32))
    first = config.layers[0]
    normed = replace(
        first.attention, qk_norm=next(first.branches).pre_norm
    )  # LayerNorm, whose bias no rung adds
    odd = replace(config, layers=(first.with_attention(normed),))
    with pytest.raises(UnsupportedModel, match=r"no formula for `blocks\.0\.attn\.q_norm\.b`"):
        Weights.of(Decoder(odd, device="meta", dtype=torch.float32))

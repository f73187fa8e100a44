"""The parameters of a decoder as tensors, for tests that fill, read and break them."""

import torch
from small_models import random_model
from zoo import IN_BLOCKS

from llmcli.decoder.decoder import Decoder
from llmcli.graph.precision import Precision, in_no_blocks, matrices
from llmcli.kernels import native
from llmcli.loading.weights import randomize
from llmcli.weights.dense import Dense, writable


def packed_model(name):
    """One of `IN_BLOCKS` as loading gives it."""
    config, formats = IN_BLOCKS[name]
    return random_model(config, formats=formats)


def packed_in(config, format="Q4_1"):
    """The arithmetic of a model whose matrices are all in those blocks."""
    formats = dict.fromkeys(matrices(config).keys() - in_no_blocks(config), format)
    portable = native.level() == "portable"
    return Precision(dtype="float32", cache="float16", formats=formats, portable=portable)


def decoder_in(config, precision, device="cpu"):
    """A decoder in that arithmetic with random weights."""
    decoder = Decoder(config, precision, device=device)
    if torch.device(device).type != "meta":
        randomize(decoder, 0)
    return decoder


def parameters_of(decoder):
    """Every parameter by name: the memory that the decoder computes with, not a copy."""
    return {name: writable(decoder.weight(name)) for name in decoder.weight_names}


class Times:
    """A weight whose products are those of another one times a factor, as its numbers are."""

    def __init__(self, weight, by):
        self._weight, self._by = weight, by

    def __getattr__(self, name):
        return getattr(self._weight, name)

    def dense(self, *args, **kwargs):
        return self._weight.dense(*args, **kwargs) * self._by

    def matmul(self, x, bias_N=None):
        y = self._weight.matmul(x) * self._by
        return y if bias_N is None else y + bias_N

    def matmul_fp32_out(self, x, bias_N=None):
        y = self._weight.matmul_fp32_out(x) * self._by
        return y if bias_N is None else y + bias_N


def replace_weight(decoder, name, tensor):
    """Who asks the decoder for that parameter gets `tensor`; the decoder computes as before."""
    plain = decoder.weight
    decoder.weight = lambda asked: Dense(tensor) if asked == name else plain(asked)

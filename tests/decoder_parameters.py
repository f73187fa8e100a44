"""The parameters of a decoder as tensors, for tests that fill, read and break them."""

from llmcli.formats.dense import Dense, writable


def parameters_of(decoder):
    """Every parameter by name: the memory that the decoder computes with, not a copy."""
    return {name: writable(decoder.weight(name)) for name in decoder.weight_names}


def replace_weight(decoder, name, tensor):
    """Who asks the decoder for that parameter gets `tensor`; the decoder computes as before."""
    plain = decoder.weight
    decoder.weight = lambda asked: Dense(tensor) if asked == name else plain(asked)

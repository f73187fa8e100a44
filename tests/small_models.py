"""Decoders and ladders of the zoo's small models, with weights of a trained size."""

import torch
from decoder_parameters import parameters_of
from zoo import VOCAB

from llmcli.ladder.weights import Weights
from llmcli.nn.decoder import Decoder


def random_decoder(config, dtype=torch.float64, seed=3):
    """Matrices that keep the size of a row, norm weights about 1, biases about 0.3."""
    decoder = Decoder(config, device="cpu", dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    for name, slot in parameters_of(decoder).items():
        values = torch.randn(slot.shape, generator=generator, dtype=torch.float64)
        last = name.rpartition(".")[2]
        if last == "w":
            values = 1 + 0.3 * values
        elif last.startswith("b"):
            values = 0.3 * values
        elif "embed" not in name:
            values = 1.5 * values / slot.shape[1] ** 0.5
        slot.copy_(values)
    return decoder


def weights(config, dtype=torch.float64, seed=3):
    """The same as the ladder has it."""
    return Weights.of(random_decoder(config, dtype, seed))


def ids(rows, tokens, seed=0):
    """Random prompts `[rows, tokens]`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (rows, tokens), generator=generator)


def read(rung, tokens, prompt):
    """Logits `[b, n, V]` of `[b, n]` tokens, those after the prompt read one by one."""
    if not rung.batched:
        return torch.stack([_read(rung, row, prompt) for row in tokens])
    return _read(rung, tokens, prompt)


def _read(rung, tokens, prompt):
    first = rung.start(tokens[..., :prompt])
    rest = [rung.extend(id).unsqueeze(-2) for id in tokens[..., prompt:].unbind(-1)]
    return torch.cat([first, *rest], -2)

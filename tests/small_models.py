"""Decoders and ladders of the zoo's small models, with weights of a trained size."""

import torch
from zoo import VOCAB

from llmcli.commands.ladder.measure.weights import Weights
from llmcli.commands.selftest.measure.arithmetic import (  # noqa: F401
    as_model,
    random_blocks,
    random_decoder,
)


def random_model(config, dtype=torch.float64, formats=None):
    """The same as loading gives it; `dtype`: one of PyTorch's, or its name."""
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    return as_model(random_decoder(config, dtype, formats=formats))


def weights(config, dtype=torch.float64):
    """The same as the ladder has it."""
    return Weights.of(random_decoder(config, dtype))


def ids(rows, tokens, seed=0):
    """Random prompts `[rows, tokens]`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (rows, tokens), generator=generator)


def walked(session, **rest):
    """Logits of steps before and after the session grows, is restored, selects rows and is rewound;
    and how many steps were recorded after it grew.
    """

    def steps(count, seed):
        tokens = ids(session.state.batch, count, seed).to(session.decoder.device)
        return [session.extend(one, **rest).cpu() for one in tokens.split(1, 1)]

    found = steps(4, 0)
    session.grow(20)
    assert not session.state.recorded
    found += steps(2, 1)
    recorded, saved = len(session.state.recorded), session.snapshot()
    found += steps(2, 2)
    before = session.state.recorded.copy()
    session.restore(saved)
    found += steps(2, 3)
    assert session.state.recorded == before, "the memory is the same"
    session.select([1, 0, 1])
    assert not session.state.recorded
    found += steps(3, 4)
    if session.state.rewinds:
        session.rewind(3)
        found += steps(3, 5)
    return found, recorded


def read(rung, tokens, prompt):
    """Logits `[b, n, V]` of `[b, n]` tokens, those after the prompt read one by one."""
    if not rung.batched:
        return torch.stack([_read(rung, row, prompt) for row in tokens])
    return _read(rung, tokens, prompt)


def _read(rung, tokens, prompt):
    first = rung.start(tokens[..., :prompt])
    rest = [rung.extend(id).unsqueeze(-2) for id in tokens[..., prompt:].unbind(-1)]
    return torch.cat([first, *rest], -2)

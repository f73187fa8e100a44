"""Random tensors and choices of experts, and what is equal bit for bit."""

import itertools

import torch

from llmcli.weights.routes import ExpertAssignment


def drawn(*shape, seed=0, dtype=torch.float32):
    """Normal numbers, rounded to that dtype."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def routes(experts, batch, count, tokens, *, static=True):
    """Random choices, and of each pair the row that it reads and its expert."""
    generator = torch.Generator().manual_seed(5)
    chosen = torch.stack([
        torch.randperm(experts, generator=generator)[:count] for _ in range(batch * tokens)
    ]).view(batch, tokens, count)  # fmt: skip
    pairs = itertools.product(range(batch), range(count), range(tokens))
    listed = [(b * tokens + t, int(chosen[b, t, k])) for b, k, t in pairs]
    return ExpertAssignment.of(chosen, static=static), listed


def same(a, b):
    """Equal bit for bit, but that one NaN is as good as another: tensors, arrays, rows of them."""
    if isinstance(a, list | tuple):
        for one, other in zip(a, b, strict=True):
            same(one, other)
        return
    a, b = torch.as_tensor(a), torch.as_tensor(b)
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    nan = a.isnan()
    assert torch.equal(nan, b.isnan())
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.dtype.itemsize]
    assert torch.equal(a.view(bits)[~nan], b.view(bits)[~nan])

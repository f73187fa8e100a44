"""Random tensors and choices of experts, and what is equal bit for bit."""

import itertools

import torch

from llmcli.weights.routes import ExpertAssignment

# byte offsets of the half-precision numbers in a block; that of `IQ1_M` is in four nibbles
HALVES = {"Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,),
          "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
          "TQ1_0": (52,), "TQ2_0": (64,), "IQ2_XXS": (0,), "IQ2_XS": (0,), "IQ2_S": (0,),
          "IQ3_XXS": (0,), "IQ3_S": (0,), "IQ1_S": (0,), "IQ4_NL": (0,), "IQ4_XS": (0,),
          "IQ1_M": (), "MXFP4": (), "NVFP4": ()}  # fmt: skip


def drawn(*shape, seed=0, dtype=torch.float32):
    """Normally distributed numbers: drawn in float64 for that dtype, in float32 for others."""
    generator, wide = torch.Generator().manual_seed(seed), torch.promote_types(dtype, torch.float32)
    return torch.randn(shape, generator=generator, dtype=wide).to(dtype)


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

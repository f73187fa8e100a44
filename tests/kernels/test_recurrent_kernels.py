"""The kernels of recurrent mixers: what float64 gives, the same bits at every level."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from covers import half
from tensors import drawn, same
from torch.nn.functional import silu

from llmcli.ops import conv, recurrence
from llmcli.ops.activations import activation
from llmcli.ops.recurrence import Inputs


def near(found, expected, close):
    """As close as so many roundings of its largest number, and NaN where that is."""
    size = expected.nan_to_num(0, 0, 0).abs().max().item() + 1e-30
    torch.testing.assert_close(
        found.double(), expected, rtol=close * 2**-23, atol=close * 2**-23 * size, equal_nan=True
    )


# ---- the convolution --------------------------------------------------------------------------

# B, C, L, tokens that the sequences have already
CONVOLUTIONS = ((1, 1, 2, [0]), (2, 7, 3, [5, 0]), (1, 512, 4, [3]), (3, 1301, 4, [0, 1, 700]),
                (2, 520, 1, [2]), (1, 33, 8, [9]))  # fmt: skip


def stepped(x_BTC, w_CL, b_C, ring_BLC, starts, **rest):
    """The kernel token by token; every second one by rows with gaps between them."""
    outs, acts = [], []
    for t in range(x_BTC.shape[1]):
        x_B1C = x_BTC[:, t : t + 1]
        x_B1C = x_B1C if t % 2 else x_B1C.contiguous()
        assert conv.has_kernel(x_B1C, w_CL, ring_BLC)
        out, act = conv.by_kernel(
            x_B1C, w_CL, b_C, ring_BLC, starts + t, silu=rest.get("silu", True)
        )
        outs.append(out)
        acts.append(act)
    return torch.cat(outs, 1), None if acts[0] is None else torch.cat(acts, 1)


@pytest.mark.parametrize(
    ("case", "biased", "dtype"), half(CONVOLUTIONS, [False, True], [torch.float32, torch.bfloat16])
)
@pytest.mark.usefixtures("threads")
def test_the_convolution_goes_on_from_any_position(every_level, case, biased, dtype):
    batch, channels, length, before = case
    tokens = 2 * length + 1
    x = drawn(batch, tokens, channels + 3).to(dtype)[..., 1:-2]
    w, b = drawn(channels, length, seed=1), drawn(channels, seed=2) if biased else None
    wide = [None if one is None else one.double() for one in (x, w, b)]
    exact, starts = conv.causal_conv(*wide), torch.tensor(before)

    def compute():
        ring = torch.zeros(batch, length, channels, dtype=dtype)
        out, act = stepped(x, w, b, ring, starts)
        plain, none = stepped(x, w, b, torch.zeros_like(ring), starts, silu=False)
        assert none is None
        assert torch.equal(plain, out)
        assert torch.equal(activation("silu")(out), act)
        for cuts in ((0, tokens), (0, 1, 3, tokens), (0, tokens - 1, tokens)):  # in any chunks
            other, parts = torch.zeros_like(ring), []
            for first, last in itertools.pairwise(cuts):
                parts.append(torch.stack(conv.by_kernel(
                    x[:, first:last], w, b, other, starts + first, silu=True
                )))  # fmt: skip
            assert torch.equal(torch.cat(parts, 2), torch.stack((out, act)))
            assert torch.equal(other, ring)
        one = slice(batch - 1, batch)  # alone it has the same bits
        alone = stepped(x[one], w, b, torch.zeros_like(ring[one]), starts[-1:])
        same(alone, (out[one], act[one]))
        return out, act, ring

    out, act, ring = every_level(compute)
    near(out, exact, 8)
    near(act, silu(exact), 12)
    for row, start in enumerate(before):
        for t in range(tokens - length, tokens):
            assert torch.equal(ring[row, (start + t) % length], x[row, t])


def test_a_convolution_of_tokens_that_follow_each_other(levels):
    """Lanes, which share a ring, give what single steps do."""
    x, w, b, starts = drawn(1, 9, 600), drawn(600, 4, seed=1), drawn(600, seed=2), torch.tensor([2])
    for _ in levels():
        ring, shared = torch.zeros(1, 4, 600), torch.zeros(1, 4, 600)
        expected = stepped(x, w, b, ring, starts)
        first = stepped(x[:, :4], w, b, shared, starts)
        lanes = conv.by_kernel(
            x[0, 4:, None], w, b, shared.expand(5, -1, -1), torch.arange(6, 11), silu=True
        )
        found = [torch.cat((one, lane.transpose(0, 1)), 1)
                 for one, lane in zip(first, lanes, strict=True)]  # fmt: skip
        same((*found, shared), (*expected, ring))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_ring_never_sees_padding(levels, dtype):
    x, w, starts = drawn(3, 6, 300).to(dtype), drawn(300, 4, seed=1), torch.tensor([7, 0, 2])
    lengths = [0, 2, 6]
    for _ in levels():
        ring = drawn(3, 4, 300, seed=3).to(dtype)
        before = ring.clone()
        conv.by_kernel(x, w, None, ring, starts, silu=True, lengths_B=torch.tensor(lengths))
        for b, length in enumerate(lengths):
            for t in range(length):
                before[b, (starts[b] + t) % 4] = x[b, t]
        assert torch.equal(ring, before)


def test_a_number_that_is_none_stays_in_its_channel(every_level):
    x, w = drawn(1, 5, 40), drawn(40, 3)
    x[0, 1, 7], x[0, 1, 9] = math.nan, math.inf
    out, act = every_level(lambda: stepped(x, w, None, torch.zeros(1, 3, 40), torch.tensor([0])))
    bad = ~out.isfinite()
    assert bad[0].nonzero().tolist() == [[t, c] for t in (1, 2, 3) for c in (7, 9)]
    assert (act.isfinite() | bad).all()


# ---- the recurrence ---------------------------------------------------------------------------


def inputs(batch, heads, key_heads, tokens, size, values, **rest):
    """Keys and queries of length 1 in rows with gaps between sequences, as they are cut."""
    rows = drawn(batch, tokens, 2 * key_heads * size + heads * values, seed=size)
    cut = rows.split_with_sizes([key_heads * size, key_heads * size, heads * values], -1)
    q, k, v = (
        one.unflatten(2, (n, -1)).transpose(1, 2)
        for one, n in zip(cut, (key_heads, key_heads, heads), strict=True)
    )
    q /= q.norm(dim=-1, keepdim=True) * size**0.5
    k /= k.norm(dim=-1, keepdim=True)
    beta, decay = drawn(batch, heads, tokens, seed=2).sigmoid(), -drawn(batch, heads, tokens).abs()
    return Inputs(
        q_BKTd=q, k_BKTd=k, v_BHTe=v, beta_BHT=beta, log_decay_BHT=decay, **rest
    )  # fmt: skip


def exactly(x, state_BHde):
    """PyTorch's twin in float64, token by token: z, and the state."""
    state = state_BHde.double()
    return recurrence.recur_steps(x.each(torch.Tensor.double), state), state


def steps(x, before_BHde):
    """Token by token from a copy of a state: z, and the state."""
    state, out = before_BHde.clone(), []
    for t in range(x.tokens):
        one = x.part(t, t + 1)
        assert recurrence.has_kernel(one, state)
        out.append(recurrence.by_kernel(one, state))
    return torch.cat(out, 2), state


# B, H, K, d, e
RECURRENCES = ((1, 1, 1, 1, 1), (2, 4, 2, 16, 16), (1, 6, 2, 7, 5), (3, 8, 2, 33, 70),
               (1, 4, 4, 128, 128), (2, 3, 1, 20, 97))  # fmt: skip


@pytest.mark.parametrize(
    ("case", "plain", "tiled"), half(RECURRENCES, [False, True], [False, True])
)
@pytest.mark.usefixtures("threads")
def test_the_recurrence(every_level, case, plain, tiled):
    batch, heads, key_heads, size, values = case
    x = inputs(batch, heads, key_heads, 5, size, values, plain=plain, tiled=tiled)
    before = drawn(batch, heads, size, values, seed=3)

    def together():
        state = before.clone()
        return recurrence.by_kernel(x, state), state

    found = every_level(lambda: steps(x, before))
    for one, exact in zip(found, exactly(x, before), strict=True):
        near(one, exact, 16)
    same(every_level(together), found)
    one = slice(batch - 1, batch)  # alone it has the same bits
    alone = every_level(lambda: steps(x.each(lambda tensor: tensor[one]), before[one]))
    same(alone, [each[one] for each in found])


@pytest.mark.parametrize("plain", [False, True], ids=["delta", "plain"])
def test_tokens_that_follow_each_other(levels, plain):
    """Lanes, which share a state, give what single steps do."""
    x = inputs(1, 4, 2, 5, 40, 36, plain=plain)
    turned = x.each(lambda tensor: tensor.transpose(0, 2))
    for _ in levels():
        shared = torch.zeros(1, 4, 40, 36)
        expected = steps(x, shared)
        assert recurrence.has_kernel(turned, shared.expand(5, -1, -1, -1))
        found = recurrence.by_kernel(turned, shared.expand(5, -1, -1, -1))
        same((found.transpose(0, 2), shared), expected)


@pytest.mark.parametrize("log_decay", [0.0, -1e-6, -50.0, -1e4, -math.inf])
@pytest.mark.parametrize("beta", [0.0, 1.0, 2.0])
def test_decays_and_strengths_at_their_ends(every_level, log_decay, beta):
    x = inputs(2, 2, 1, 1, 24, 18)
    x.beta_BHT[...], x.log_decay_BHT[...] = beta, log_decay
    before = drawn(2, 2, 24, 18, seed=3)
    found = every_level(lambda: steps(x, before))
    for one, exact in zip(found, exactly(x, before), strict=True):
        near(one, exact, 16)
    if log_decay == 0.0 and beta == 0.0:  # padding
        assert torch.equal(found[1], before)
    if log_decay < -100 and beta == 0.0:
        assert not found[1].any()


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("plain", [False, True], ids=["delta", "plain"])
def test_a_value_that_is_no_number_stays_in_its_column(every_level, bad, plain):
    x = inputs(2, 4, 2, 1, 24, 35, plain=plain)
    before = drawn(2, 4, 24, 35, seed=3)
    expected = every_level(lambda: steps(x, before))
    x.v_BHTe[1, 2, 0, 33] = bad
    for one, was in zip(every_level(lambda: steps(x, before)), expected, strict=True):
        wrong = torch.zeros_like(one, dtype=torch.bool)
        wrong[1, 2, :, 33] = True
        assert not one[wrong].isfinite().any()
        assert torch.equal(one[~wrong], was[~wrong])

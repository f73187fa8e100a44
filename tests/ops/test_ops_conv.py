"""The causal convolution: formula, order of the weights, chunks, ring buffer, devices, dtypes."""

import pytest
import torch
from evaluated import derive, evaluate
from hypothesis import given, settings
from hypothesis import strategies as st

from llmcli.graph import ops
from llmcli.ops import conv

F64 = torch.float64
DOCUMENT = [0.5, 0.3, 0.2]  # the document counts from the current token …
STORED = [0.2, 0.3, 0.5]  # … a checkpoint from the oldest


def inputs(batch, tokens, channels, taps, dtype=F64, seed=0):
    g = torch.Generator().manual_seed(seed)
    return (
        torch.randn(batch, tokens, channels, dtype=F64, generator=g).to(dtype),
        torch.randn(channels, taps, dtype=F64, generator=g).to(dtype),
        torch.randn(channels, dtype=F64, generator=g).to(dtype),
    )


def ring_for(x, w):
    return x.new_zeros(x.shape[0], w.shape[1], x.shape[2])


def convolve(x_TC, w_Ck, b_C=None):
    """The op, what it reads, and its weights."""
    bias = None if b_C is None else "b"
    op = ops.Convolve(source="x", weight="w", bias=bias, length=w_Ck.shape[1])
    return op, {"x": x_TC}, {"w": w_Ck, "b": b_C}


def chunks(parts, w, b, ring, first):
    """Chunk after chunk, of sequences that have `first` tokens."""
    out = []
    for part in parts:
        out.append(conv.causal_conv_chunk(part, w, b, ring, first))
        first = first + part.shape[1]
    return torch.cat(out, 1)


def test_rows_of_the_document():
    # five unit impulses a … e as channels: y[t] lists the weights that a … e have in it
    expected = torch.tensor(
        [[0.5, 0, 0, 0, 0], [0.3, 0.5, 0, 0, 0], [0.2, 0.3, 0.5, 0, 0], [0, 0.2, 0.3, 0.5, 0],
         [0, 0, 0.2, 0.3, 0.5]], dtype=F64
    )  # fmt: skip
    impulses = torch.eye(5, dtype=F64)[None]
    w = torch.tensor([STORED] * 5, dtype=F64)
    assert torch.equal(conv.causal_conv(impulses, w)[0], expected)
    ring, first = ring_for(impulses, w), torch.zeros(1, dtype=torch.long)
    assert torch.equal(chunks(impulses.split(1, 1), w, None, ring, first)[0], expected)
    a, b, c = 1.0, 10.0, 100.0
    numbers = torch.tensor([[a], [b], [c]], dtype=F64)
    reverse = torch.tensor([DOCUMENT[::-1]], dtype=F64)
    for slow in (evaluate, derive):
        assert torch.equal(slow(*convolve(impulses[0], w)), expected)
        out = slow(*convolve(numbers, reverse)).flatten().tolist()
        assert out == pytest.approx([0.5 * a, 0.5 * b + 0.3 * a, 0.5 * c + 0.3 * b + 0.2 * a])


def test_the_weights_are_in_conv1ds_order():
    x, w, b = inputs(2, 9, 3, 4)
    layer = torch.nn.Conv1d(3, 3, 4, groups=3, padding=3, dtype=F64)  # as checkpoints are trained
    with torch.no_grad():
        layer.weight.copy_(w[:, None])
        layer.bias.copy_(b)
        expected = layer(x.transpose(1, 2))[..., :9].transpose(1, 2)
    torch.testing.assert_close(conv.causal_conv(x, w, b), expected, rtol=0, atol=1e-13)
    assert not torch.allclose(conv.causal_conv(x, w.flip(1), b), expected)


@settings(max_examples=40, deadline=None)
@given(
    taps=st.integers(1, 5), sizes=st.lists(st.integers(1, 7), min_size=1, max_size=9),
    bias=st.booleans(),
)  # fmt: skip
def test_twin_whole_chunks_and_steps_agree(taps, sizes, bias):
    tokens = sum(sizes)
    x, w, b = inputs(2, tokens, 3, taps, seed=tokens)
    b = b if bias else None
    whole = conv.causal_conv(x, w, b)
    for i in range(2):
        slow = derive(*convolve(x[i], w, b))
        torch.testing.assert_close(evaluate(*convolve(x[i], w, b)), slow, rtol=0, atol=1e-13)
        torch.testing.assert_close(whole[i], slow, rtol=1e-6, atol=1e-13)
    ring, first = ring_for(x, w), torch.zeros(2, dtype=torch.long)
    address = ring.data_ptr()
    for parts in (x.split(sizes, 1), x.split(1, 1)):
        found = chunks(parts, w, b, ring, first)
        torch.testing.assert_close(found, whole, rtol=0, atol=1e-13)
        assert ring.data_ptr() == address
        ring.zero_()


def test_sequences_of_unequal_length_never_see_padding():
    x, w, b = inputs(4, 12, 3, 4)
    lengths = torch.tensor([12, 5, 1, 0])
    padded = x.masked_fill(torch.arange(12)[None, :, None] >= lengths[:, None, None], torch.nan)
    ring, start = ring_for(x, w), torch.zeros(4, dtype=torch.long)
    for first in (0, 7):  # two chunks: the second is padding only for all but the longest
        here = (lengths - first).clamp(0, 7 if first == 0 else 5)
        part = padded[:, first : first + 7]
        out = conv.causal_conv_chunk(part, w, b, ring, start, here)
        for i in range(4):
            expected = conv.causal_conv(x[i : i + 1, : lengths[i]], w, b)[0, first : first + 7]
            torch.testing.assert_close(out[i, : here[i]], expected, rtol=0, atol=1e-13)
        start = start + here
    assert ring.isfinite().all()
    more, _, _ = inputs(4, 6, 3, 4, seed=1)
    steps = chunks(more.split(1, 1), w, b, ring, lengths)
    for i in range(4):
        alone = conv.causal_conv(torch.cat((x[i, : lengths[i]], more[i]))[None], w, b)
        torch.testing.assert_close(steps[i], alone[0, lengths[i] :], rtol=0, atol=1e-13)


def test_narrow_inputs_are_summed_in_float32_and_rounded_once():
    x, w, b = inputs(2, 40, 16, 4, dtype=torch.bfloat16)
    exact = conv.causal_conv(x.double(), w.double(), b.double())
    first = torch.zeros(2, dtype=torch.long)
    for size in (None, 40, 1):
        out = conv.causal_conv(x, w, b)
        if size is not None:
            out = chunks(x.split(size, 1), w, b, ring_for(x, w), first)
        assert out.dtype == torch.bfloat16
        error = (out.double() - exact).abs()
        assert (error <= exact.abs() * 2**-8 + 1e-6).all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_equals_cpu_and_a_step_can_be_captured():
    x, w, b = inputs(3, 9, 8, 4)
    first = torch.tensor([0, 1, 5])
    on = [t.cuda() for t in (x, w, b)]
    rings = ring_for(x, w), ring_for(on[0], w)
    out = conv.causal_conv_chunk(x, w, b, rings[0], first)
    cuda = conv.causal_conv_chunk(*on, rings[1], first.cuda())
    torch.testing.assert_close(cuda.cpu(), out, rtol=0, atol=1e-12)
    torch.testing.assert_close(rings[1].cpu(), rings[0], rtol=0, atol=0)
    token, at = on[0][:, :1].clone(), (first + 9).cuda()
    kept = rings[1].clone()
    conv.causal_conv_chunk(token, *on[1:], rings[1], at)
    rings[1].copy_(kept)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = conv.causal_conv_chunk(token, *on[1:], rings[1], at)
    rings[1].copy_(kept)
    for t in range(6):
        token.copy_(on[0][:, t : t + 1])
        graph.replay()
        expected = conv.causal_conv_chunk(x[:, t : t + 1], w, b, rings[0], first + 9 + t)
        torch.testing.assert_close(captured.cpu(), expected, rtol=0, atol=1e-12)
        at += 1

"""Triton's kernels in its interpreter, against the operations that they are twins of.

Run by `test_triton`, in a process that has TRITON_INTERPRET=1 from its start. The interpreter cuts
bfloat16 off where a card rounds, and has no products of it: 16 bits are float16 here.
"""

import pytest
import torch
import torch.nn.functional as F
from tensors import HALVES, drawn

from llmcli.config.attention import Chunk
from llmcli.config.formats import ON_CARD
from llmcli.config.mlp import CARD_ACTIVATIONS
from llmcli.kernels.triton.attention import attend_one
from llmcli.kernels.triton.packed import PACKED, packed_product, routed_product
from llmcli.kernels.triton.products import normalize, product
from llmcli.ops.activations import activation
from llmcli.ops.attention import attend, visible_keys
from llmcli.ops.norm import layer_norm, rms_norm
from llmcli.ops.quant import FORMATS, dequantize

DTYPES = {torch.float32: 3e-6, torch.float16: 3e-3}
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def near(got, want, dtype):
    assert (got.double() - want.double()).abs().max() <= DTYPES[dtype] * max(1, want.abs().max())


@dtypes
@pytest.mark.parametrize(("heads", "kv_heads", "size", "values", "slots", "starts", "rest"), [
    (6, 2, 24, 20, 300, (299, 3), {}),
    (7, 1, 64, 64, 64, (40,), {}),
    (3, 3, 80, 80, 70, (0,), {}),
    (4, 4, 16, 16, 520, (510, 0, 256), {"window": 100}),
    (8, 2, 128, 64, 90, (89,), {"window": 7, "sinks": True}),
    (40, 2, 16, 16, 33, (32, 5), {"cap": 5.0}),
    (4, 2, 32, 32, 600, (511, 512), {"window": 256, "cap": 2.0, "sinks": True}),
    (4, 2, 32, 32, 600, (511, 512, 599), {"window": Chunk(size=256)}),
    (3, 1, 16, 16, 90, (37, 38), {"window": Chunk(size=19)}),
])  # fmt: skip
def test_attention_of_one_query(heads, kv_heads, size, values, slots, starts, rest, dtype):
    """Slots behind the last token have garbage; the cache is a bucket of a larger one."""
    batch = len(starts)
    q = drawn(batch, heads, 1, size, dtype=dtype)
    k, v = (
        drawn(batch, kv_heads, slots + 20, width, dtype=dtype, seed=width)[:, :, :slots]
        for width in (size, values)
    )
    starts_B = torch.tensor(starts)
    for b, start in enumerate(starts):
        k[b, :, start + 1 :], v[b, :, start + 1 :] = torch.nan, torch.nan
    sinks_H = drawn(heads, seed=9) if rest.get("sinks") else None
    window, cap = rest.get("window"), rest.get("cap")
    got = attend_one(q, k, v, starts_B, scale=0.3, window=window, cap=cap, sinks_H=sinks_H)
    mask = visible_keys(starts_B.unsqueeze(1), slots, window).unsqueeze(1)
    want = attend(
        q.double(), k.nan_to_num().double(), v.nan_to_num().double(), scale=0.3, mask=mask,
        cap=cap, sinks_H=sinks_H,
    )  # fmt: skip
    assert got.dtype == dtype
    near(got, want, dtype)


SHAPES = pytest.mark.parametrize(
    ("rows", "outputs", "columns"), [(1, 40, 96), (3, 7, 600), (1, 33, 1024), (2, 1, 1)]
)


@dtypes
@SHAPES
@pytest.mark.parametrize("kind", ["none", "rms", "rms without weights", "layer"])
def test_a_norm_and_the_product_of_its_rows(rows, outputs, columns, kind, dtype):
    x, w = drawn(rows, columns), drawn(outputs, columns, dtype=dtype, seed=1) / columns**0.5
    norm_w, norm_b, b = drawn(columns, seed=2), drawn(columns, seed=3), drawn(outputs, seed=4)
    norm, normed = {
        "none": (None, x.to(dtype)),
        "rms": ((norm_w, None, 1e-5, 1, 1.0), rms_norm(x, norm_w, 1e-5, dtype, offset=1.0)),
        "rms without weights": ((None, None, 1e-5, 1, 0.0), rms_norm(x, None, 1e-5, dtype)),
        "layer": ((norm_w, norm_b, 1e-5, 2, 0.0), layer_norm(x, norm_w, norm_b, 1e-5, dtype)),
    }[kind]
    got = product(x if norm else x.to(dtype), w, b, out=torch.float32, norm=norm)
    near(got, F.linear(normed.double(), w.double(), b.double()), torch.float32)
    if norm is not None:
        gaps = torch.cat((x, x), 1)[:, :columns]
        for one in (x, gaps):
            near(normalize(one, norm, dtype), normed, dtype)
        assert normalize(x, norm, dtype).dtype == dtype


@dtypes
@SHAPES
@pytest.mark.parametrize("name", CARD_ACTIVATIONS)
def test_gates_neurons_and_the_product_behind_them(rows, outputs, columns, name, dtype):
    x = drawn(rows, columns, dtype=dtype)
    w, b = drawn(2 * outputs, columns, dtype=dtype, seed=1) / columns**0.5, drawn(2 * outputs)
    b = b.to(dtype)
    gate, up = F.linear(x.float(), w.float(), b.float()).to(dtype).split(outputs, -1)
    want = activation(name)(gate.float()).to(dtype) * up
    got = product(x, w, b, out=dtype, activation=name)
    near(got, want, dtype)
    down, residual = drawn(5, outputs, dtype=dtype, seed=5), drawn(rows, 5, seed=6)
    behind = product(got, down, out=torch.float32, residual_MN=residual)
    near(behind, F.linear(got.double(), down.double()) + residual, torch.float32)


def blocks(format, rows, columns):
    """Any bytes, but for factors that are such as a model has."""
    elements, size = FORMATS[format]
    picked = torch.Generator().manual_seed(rows + columns)
    shape = rows, columns // elements, size
    raw = torch.randint(0, 256, shape, generator=picked, dtype=torch.uint8)
    for at in HALVES[format]:
        factors = torch.randn(*shape[:2], 1, generator=picked) / 64
        raw[:, :, at : at + 2] = factors.half().view(torch.uint8)
    return raw.view(rows, -1)


def test_the_formats_of_blocks_are_those_of_the_decoders():
    assert PACKED.keys() == {*ON_CARD}


@dtypes
@pytest.mark.parametrize("format", PACKED)
@pytest.mark.parametrize(("rows", "outputs", "count"), [(1, 37, 9), (3, 8, 1), (2, 1, 9)])
def test_products_with_blocks(rows, outputs, count, format, dtype):
    """A single block in a row, and more units than a program reads at once."""
    columns = FORMATS[format][0] * count
    raw = blocks(format, outputs, columns)
    x, b = drawn(rows, columns, dtype=dtype, seed=1), drawn(outputs, seed=2)
    dense = dequantize(raw, format, dtype=torch.float32).double()
    bound = x.double().abs() @ dense.abs().T
    for bias in (None, b):
        got = packed_product(x, raw, format, bias, out=torch.float32)
        want = F.linear(x.double(), dense, None if bias is None else b.double())
        assert ((got - want).abs() <= 1e-6 * bound + 2e-7 * want.abs()).all()
    narrow = packed_product(x, raw, format, b, out=dtype)
    assert narrow.dtype == dtype
    torch.testing.assert_close(narrow, got.to(dtype), rtol=0, atol=0)


@pytest.mark.parametrize("format", PACKED)
def test_the_numbers_of_blocks_are_the_decoders(format):
    """Bit for bit: a row of the identity gives a column of the matrix; rows of blocks with gaps."""
    columns, size = FORMATS[format]
    raw = blocks(format, 8, 2 * columns)[:, :size]
    assert not raw.is_contiguous()
    got = packed_product(torch.eye(columns), raw, format, out=torch.float32)
    assert torch.equal(got.T, dequantize(raw, format, dtype=torch.float32))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("format", ["Q8_0", "Q4_K", "Q6_K"])
def test_products_with_blocks_of_experts(format, biased):
    """Two experts of each row, by the order of pairs and by rows that are named.

    Biases may be a part of wider ones.
    """
    columns = FORMATS[format][0]
    raw = blocks(format, 3 * 11, columns)
    x, b = drawn(3, columns, seed=1), drawn(3, 20, seed=2)[:, 9:] if biased else None
    expert = torch.tensor([2, 0, 1, 1, 0, 2])
    dense = dequantize(raw, format, dtype=torch.float32).double().view(3, 11, columns)
    for row in (None, torch.tensor([1, 1, 0, 2, 2, 0])):
        read = x[torch.arange(6) // 2 if row is None else row].double()
        want = torch.einsum("pk,pnk->pn", read, dense[expert]) + (b[expert] if biased else 0)
        got = routed_product(x, raw.view(3, 11, -1), format, (expert, row, 2), b, out=torch.float32)
        near(got, want, torch.float32)

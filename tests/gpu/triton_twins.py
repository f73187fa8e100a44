"""Triton's kernels in its interpreter, against the operations that they are twins of.

Run by `test_triton`, in a process that has TRITON_INTERPRET=1 from its start. The interpreter cuts
bfloat16 off where a card rounds, and has no products of it: 16 bits are float16 here.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from tensors import HALVES, drawn

from llmcli.config.attention import Chunk, QueryGrowth
from llmcli.config.experts import ExpertGroups, RoutingConfig
from llmcli.config.formats import ON_CARD
from llmcli.config.mlp import ACTIVATIONS, GateClamp, MlpConfig
from llmcli.engine.sampling import _REALS, Sampling
from llmcli.engine.sampling import choose as choose_on_cpu
from llmcli.kernels.triton import products, sampling
from llmcli.kernels.triton.attention import attend_one
from llmcli.kernels.triton.experts import expert_product, sum_experts
from llmcli.kernels.triton.heads import enter
from llmcli.kernels.triton.packed import PACKED, packed_product, routed_product
from llmcli.kernels.triton.products import normalize, product
from llmcli.kernels.triton.routing import route
from llmcli.kernels.triton.sampling import BLOCK, choose
from llmcli.ops.activations import activation
from llmcli.ops.attention import attend, visible_keys
from llmcli.ops.elements import gate
from llmcli.ops.norm import layer_norm, rms_norm
from llmcli.ops.quant import FORMATS, dequantize
from llmcli.ops.rope import rotate
from llmcli.ops.routing import choose as choose_experts
from llmcli.ops.routing import share, summed, weigh

DTYPES = {torch.float32: 3e-6, torch.float16: 3e-3}
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(autouse=True)
def several_blocks(monkeypatch):
    """Norms read their rows in several parts, as very long ones."""
    monkeypatch.setattr(products, "_WIDE", 32)


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
    (2, 1, 16, 16, 8300, (8290, 60), {"sinks": True}),
    (3, 1, 64, 64, 150, (149,), {"cache": torch.float16, "cap": 5.0}),
    (18, 1, 288, 256, 150, (140, 3), {"latents": True}),
    (2, 1, 272, 250, 290, (280,), {"latents": True}),
])  # fmt: skip
def test_attention_of_one_query(heads, kv_heads, size, values, slots, starts, rest, dtype):
    """Slots behind the last token have garbage; the cache is a bucket of a larger one."""
    batch, cache = len(starts), rest.get("cache", dtype)
    q = drawn(batch, heads, 1, size, dtype=dtype)
    k, v = (
        drawn(batch, kv_heads, slots + 20, width, dtype=cache, seed=width)[:, :, :slots]
        for width in (size, values)
    )
    if rest.get("latents"):
        v = k[..., :values]
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
    kept = torch.empty(rows, columns, dtype=dtype)
    for rest in ({}, {"kept_MK": kept}):
        got = product(x if norm else x.to(dtype), w, b, out=torch.float32, norm=norm, **rest)
        near(got, F.linear(normed.double(), w.double(), b.double()), torch.float32)
    near(kept, normed, dtype)
    if norm is not None:
        gaps = torch.cat((x, x), 1)[:, :columns]
        for one in (x, gaps):
            near(normalize(one, norm, dtype), normed, dtype)
        assert normalize(x, norm, dtype).dtype == dtype


CLAMP = GateClamp(limit=0.4, offset=1.0)


def hidden_layer(name, y, gated, clamp=None):
    """The configuration of a layer, and what becomes of `y` there."""
    config = MlpConfig(hidden=0, activation=name, gated=gated, clamp=clamp)
    one, *up = y.split(y.shape[-1] // (1 + gated), -1)
    one = activation(name, None if clamp is None else clamp.limit)(one)
    return config, gate(one, *up, clamp) if gated else one


@dtypes
@SHAPES
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gates_neurons_and_the_product_behind_them(rows, outputs, columns, name, dtype):
    x = drawn(rows, columns, dtype=dtype)
    w, b = drawn(2 * outputs, columns, dtype=dtype, seed=1) / columns**0.5, drawn(2 * outputs)
    b = b.to(dtype)
    y = F.linear(x.float(), w.float(), b.float()).to(dtype)
    for clamp in (CLAMP, None):
        hidden, want = hidden_layer(name, y, True, clamp)
        got = product(x, w, b, out=dtype, hidden=hidden)
        near(got, want, dtype)
        assert product(x * torch.nan, w, b, out=dtype, hidden=hidden).isnan().all()
    hidden, want = hidden_layer(name, y[:, :outputs], False)
    near(product(x, w[:outputs], b[:outputs], out=dtype, hidden=hidden), want, dtype)
    down, stream = drawn(5, outputs, dtype=dtype, seed=5), drawn(rows, 5, seed=6)
    behind = product(got, down, out=torch.float32, onto=(stream, None, 0.5))
    near(behind, F.linear(got.double(), down.double()) * 0.5 + stream, torch.float32)


def test_gates_and_neurons_are_rounded_like_those_of_separate_operations():
    """Bits of sums that are exact in float32."""
    x, w = (drawn(rows, 20, seed=rows).mul(64).round().div(64).half() for rows in (3, 14))
    for clamp in (None, CLAMP):
        hidden, want = hidden_layer("relu2", F.linear(x.float(), w.float()).half(), True, clamp)
        assert torch.equal(product(x, w, out=want.dtype, hidden=hidden), want)


@dtypes
@SHAPES
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_a_product_whose_row_is_normalized_and_added(rows, outputs, columns, kind, dtype):
    """Twice, since programs count themselves; rows of the stream have gaps."""
    x, w = drawn(rows, columns, dtype=dtype), drawn(outputs, columns, dtype=dtype, seed=1)
    norm_w, norm_b, stream = drawn(outputs), drawn(outputs, seed=2), drawn(rows, 3, outputs, seed=3)
    stream = stream[:, -1:]
    y = F.linear(x.double(), w.double()).float()
    norm, normed = {
        "rms": ((norm_w, None, 1e-5, 1, 1.0), rms_norm(y, norm_w, 1e-5, offset=1.0)),
        "layer": ((norm_w, norm_b, 1e-5, 2, 0.0), layer_norm(y, norm_w, norm_b, 1e-5)),
    }[kind]
    for _ in range(2):
        got = product(x, w, out=torch.float32, onto=(stream, norm, -3.0))
        near(got, stream[:, 0] - 3 * normed, torch.float32)


@dtypes
@pytest.mark.parametrize(("rotated", "growth", "wide"), [
    (0, None, True), (6, QueryGrowth(beta=0.5, original=3, first=1), False), (12, None, True),
])  # fmt: skip
@pytest.mark.parametrize(("norms", "kind"), [
    (None, "plain"), ("offset", "plain"), ("joined", "plain"), ("weightless", "values with a norm"),
    ("joined", "queries"), (None, "values that are keys"), ("layer", "values that are keys"),
])
def test_heads_enter_the_scores_and_the_cache(norms, rotated, growth, wide, kind, dtype):
    """Of 5, 2 and 2 heads; caches of 16 bits or wide, parts of larger ones; gates are behind."""
    heads, kv_heads, size, slots, batch = 5, 2 * (kind != "queries"), 12, 9, 3
    values = 12 if kind == "values that are keys" else 7
    own_values = 0 if kind == "values that are keys" else kv_heads
    x = drawn(batch, (heads + kv_heads) * size + own_values * values + 4, seed=1)
    x = x if norms else x.to(dtype)
    k, v = (
        torch.zeros(batch, 2, slots + 3, one, dtype=None if wide else torch.float16)
        for one in (size, values)
    )
    starts = torch.tensor([0, 8, 3])
    tables = drawn(2, slots, rotated, seed=2).unbind() if rotated else None
    w, offset = [None, None], float(norms == "offset")
    if norms in ("offset", "joined", "layer"):
        joined = norms == "joined"
        w = [drawn(size * (one if joined else 1), seed=3) for one in (heads, max(kv_heads, 1))]
    given = [(one, None, 1e-5, 1 + (norms == "layer"), offset) if norms else None for one in w]
    given += {
        "plain": [None], "queries": [None], "values that are keys": [(None, None, 1e-3, 1, 0.0)],
        "values with a norm": [(drawn(values, seed=5), None, 1e-3, 1, 0.5)],
    }[kind]  # fmt: skip

    def normed(one, norm):
        if norm is None or not one.numel():
            return one
        own, _, eps, kind, offset = norm
        rows = one.flatten(2) if own is not None and len(own) > one.shape[3] else one
        if kind == 2:
            return layer_norm(rows, own, None, eps, dtype).view(one.shape)
        return rms_norm(rows, own, eps, dtype, offset=offset).view(one.shape)

    q = enter(
        x, (heads, kv_heads, own_values), (k[:, :, :slots], v[:, :, :slots]), starts, dtype=dtype,
        norms=given, tables_CR=tables, growth=growth,
    )  # fmt: skip
    split = x.split([heads * size, kv_heads * size, own_values * values, 4], 1)
    every = [one.unflatten(1, (1, -1, size)) for one in split[:2]]
    every.append(split[2].unflatten(1, (1, -1, values)) if own_values else every[1])
    every = [normed(*one) for one in zip(every, given, strict=True)]
    if rotated:
        at_starts = [table[starts, None, None] for table in tables]
        every[:2] = [rotate(one, *at_starts) for one in every[:2]]
    if growth is not None:
        grown = torch.tensor([growth.at(start) for start in starts.tolist()])
        every[0] = (every[0].float() * grown[:, None, None, None]).to(dtype)
    want = every[0].transpose(1, 2)
    at = torch.arange(batch)
    stored = dtype if wide else torch.float16
    near(q, want, dtype)
    assert dtype == torch.float32 or (q == want).float().mean() > 0.9  # rounded where they are
    assert q.shape == (batch, heads, 1, size)
    assert q.dtype == dtype
    if kv_heads:
        near(k[at, :, starts], every[1][:, 0], stored)
        near(v[at, :, starts], every[2][:, 0], stored)
        k[at, :, starts], v[at, :, starts] = 0, 0
    assert not k.any()
    assert not v.any()


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


PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": -0.25}


def next_tokens(logits, u, counts=(None, None), **options):
    """Ids and best scores, once those of the twin are the same."""
    request = Sampling(**options)
    kept = request.top_k or (logits.shape[1] if request.top_p < 1 else 0)
    kept = 1 if request.greedy else min(kept, logits.shape[1])
    reals = torch.tensor([getattr(request, name) for name in _REALS], dtype=torch.float64)
    got, best = choose(logits, kept, reals, None if request.greedy else u, *counts)
    ids, scores = choose_on_cpu(logits, request, u, *counts)
    if scores.isfinite().all():
        assert got.tolist() == ids.tolist()
        torch.testing.assert_close(best, scores.double(), rtol=1e-7, atol=0)
    return got.tolist(), best.tolist()


@pytest.mark.parametrize(("vocab", "options"), [
    (BLOCK + 900, {"top_k": 5}), (BLOCK, {"temperature": 0}), (3, {}), (70, {"top_k": 33}),
    (70, {"temperature": 3, "top_k": 9, "top_p": 1, "min_p": 0}), (70, {"top_k": 1}),
    (BLOCK + 1, {"temperature": 2, "top_k": 17, "top_p": 0.7, "min_p": 0}),
    (70, {"top_k": 9, "top_p": 1e-9}), (70, {"temperature": 1e-300, "top_k": 9, "min_p": 1}),
    (70, {"temperature": 4, "top_k": 9, "top_p": 1, "min_p": 0.4}),
    (70, {"temperature": 0.02, "top_k": 9, "top_p": 1, "min_p": 0}),
    (70, {"top_k": 4, "top_p": 0.5}), (BLOCK + 9, {"top_k": 0, "top_p": 0.8, "temperature": 2}),
    (270, {"top_k": 0, "top_p": 0.7, "min_p": 0, "temperature": 3}), (256, {"top_k": 65}),
    (270, {"top_k": 200, "top_p": 0.9, "min_p": 0, "temperature": 9}), (96, {"top_k": 96}),
    (270, {"top_k": 0, "top_p": 1, "min_p": 0}), (270, {"top_k": 0, "top_p": 1, "min_p": 0.3}),
    (270, {"top_k": 0, "top_p": 1, "min_p": 1}),
    (270, {"top_k": 130, "top_p": 1, "min_p": 0, "temperature": 5}),
    (256, {"top_k": 0, "top_p": 0.5}), (270, {"top_k": 0, "top_p": 1e-9, "temperature": 1e-300}),
], ids=str)  # fmt: skip
def test_the_next_token(vocab, options, monkeypatch):
    """Ties, some of them on the border of top-k; rows with gaps; a number for each."""
    if 70 < vocab < BLOCK:
        monkeypatch.setattr(sampling, "BLOCK", 64)
    some = (drawn(3, vocab + 3, seed=vocab) * 3)[:, :vocab]
    ties = (some * 2).round() / 2  # with 0.0 and -0.0
    some[:, ::5] = -math.inf
    u = torch.linspace(0, 0.999, 3, dtype=torch.float64)[:, None].repeat(1, 2)[:, 1]
    output, prompt = drawn(2, 3, vocab + 3).abs().round().long()[..., :vocab]
    next_tokens(some, u, **options)
    next_tokens(ties.half(), u, **options)
    next_tokens(0 * ties, u, **options)
    next_tokens(ties, u, (prompt, output), **options, **PENALTIES)
    next_tokens(some, u, (None, output), **options, presence_penalty=0.5)


def test_logits_that_are_not_finite():
    u = torch.tensor([0.9], dtype=torch.float64)
    for bad in (math.nan, -math.nan, math.inf):
        logits = torch.zeros(1, BLOCK + 9)
        logits[0, BLOCK + 4] = bad
        for options in ({"top_k": 2}, {"temperature": 0}):
            assert next_tokens(logits, u, **options) == ([BLOCK + 4], [math.inf])
        for top_p in (0.5, 1):
            (id,), best = next_tokens(logits, u, top_k=0, top_p=top_p)
            assert 0 <= id < BLOCK + 9  # can be looked up
            assert best == [math.inf]
    for options in ({}, {"top_k": 0}, {"top_k": 0, "top_p": 1}):
        (id,), best = next_tokens(torch.full((1, 70), -math.inf), u, **options)
        assert 0 <= id < 70
        assert best == [-math.inf]


@dtypes
@pytest.mark.parametrize(("outputs", "columns", "biased", "name", "gated", "clamp"), [
    (11, 40, False, None, False, None), (20, 600, True, None, False, None),
    (11, 40, True, "silu", True, None), (9, 530, False, "relu", True, CLAMP),
    (11, 40, True, "quick_gelu", True, CLAMP), (20, 40, True, "relu2", False, None),
])  # fmt: skip
def test_products_with_dense_experts(outputs, columns, biased, name, gated, clamp, dtype):
    """Two experts of each row, by the order of pairs and by rows that are named, or weighed."""
    count, hidden = outputs * (1 + gated), None
    w = drawn(3, count + 5, columns, dtype=dtype, seed=3)[:, :count] / columns**0.5
    x = drawn(3, columns, dtype=dtype, seed=1)
    b = drawn(3, count, dtype=dtype, seed=2) if biased else None
    expert = torch.tensor([2, 0, 1, 1, 0, 2])
    for row in (None, torch.tensor([1, 1, 0, 2, 2, 0])):
        read = x[torch.arange(6) // 2 if row is None else row].double()
        weight = None if row is None else drawn(6, seed=4)
        if weight is not None:
            read = (read * weight[:, None]).to(dtype).double()
        want = torch.einsum("pk,pnk->pn", read, w[expert].double()) + (b[expert] if biased else 0)
        if name is not None:
            hidden, want = hidden_layer(name, want.to(dtype), gated, clamp)
        for out in (dtype,) if name else (dtype, torch.float32):
            got = expert_product(x, w, (expert, row, 2), b, out=out, hidden=hidden, weight_P=weight)
            assert got.dtype == out
            near(got, want, out)


@pytest.mark.parametrize("weighed", [True, False])
@pytest.mark.parametrize("adds", [True, False])
def test_the_sum_of_experts(weighed, adds):
    """A shared expert may be weighed; a stream with gaps."""
    y, rest = drawn(2, 4, 3, 700), drawn(2, 3, 700, seed=1) if adds else None
    weight = drawn(2, 4, 3, seed=2).mT if weighed else None
    want = summed(y, weight, rest)
    near(sum_experts(y, weight, rest), want, torch.float32)
    stream = drawn(2, 3, 701, seed=3)[..., 1:]
    near(sum_experts(y, weight, rest, onto=(stream, None, -0.5)), stream - want / 2, torch.float32)
    if adds:
        x, w = drawn(2, 3, 700, dtype=torch.float16, seed=4), drawn(1, 700, seed=5) / 9
        want = summed(y, weight, rest * F.linear(x.float(), w).sigmoid())
        near(sum_experts(y, weight, rest, (x, w)), want, torch.float32)


ROUTINGS = [  # experts, and their choice: of most models, and with fewer or more of everything
    (128, {"chosen": 8, "renormalized": True}), (5, {"chosen": 2}),
    (3, {"chosen": 3, "scale": 0.5}),
    (1, {"chosen": 1, "renormalized": True}), (60, {"chosen": 17}),
    (16, {"chosen": 1, "scores": "sigmoid", "by_logits": True}),
    (40, {"chosen": 4, "scores": "softmax of the chosen"}),
    (9, {"chosen": 9, "scores": "softmax of the chosen", "scale": 2.0}),
    (64, {"chosen": 6, "scores": "sigmoid", "renormalized": True, "least": 0.25, "scale": 2.5}),
    (24, {"chosen": 5, "groups": ExpertGroups(count=3, kept=2, best=1)}),
    (24, {"chosen": 16, "scores": "sigmoid", "groups": ExpertGroups(count=3, kept=2)}),
    (36, {"chosen": 7, "by_logits": True, "groups": ExpertGroups(count=18, kept=5)}),
    (14, {"chosen": 7, "scores": "softmax of the chosen", "groups": ExpertGroups(count=2)}),
]  # fmt: skip


@pytest.mark.parametrize(("experts", "options"), ROUTINGS, ids=str)
def test_the_choice_of_experts(experts, options):
    """Ties, equal zeros, numbers that are not finite, exponentials that are not normal numbers.

    Corrections of both signs, factors.
    """
    routing = RoutingConfig(**options)
    some = drawn(3, 4, experts, seed=experts) * 3
    some[1] = (some[1] / 3).round()
    some[1, 1:3] *= torch.tensor([[0.0], [200.0]])
    for number, one in enumerate((math.nan, -math.nan, math.inf, -math.inf)):
        some[2, number, number % experts] = one
    some[0, 2], some[0, 3] = 5.0 * (torch.arange(experts) % 24) - 115, -math.inf
    scores = some
    if routing.scores != "softmax of the chosen":
        scores = share(some, sigmoid=routing.scores == "sigmoid")
    by = some if routing.by_logits else scores
    correction, factors = (drawn(experts, seed=2) * 4).round(), drawn(experts, seed=3)
    for added, own in ((None, None), (correction.half(), factors), (correction / 64, None)):
        chosen = choose_experts(by, added if added is None else added.float(), routing)
        got, weight = route(some.mT.contiguous().mT, added, own, routing)
        assert torch.equal(got, chosen)
        want = weigh(scores, chosen, routing, own)
        torch.testing.assert_close(weight, want, rtol=2e-6, atol=1e-20, equal_nan=True)

"""Operations that have a Triton kernel, each alone: its error against float64, then its time.

Beside PyTorch's operations for the same, and as a share of the read rate; matrices and caches are
read from memory. Two lines each, until $VISIT_SECONDS have passed; exit 1 where a kernel fails, or
has more than twice PyTorch's error. Without a card both are PyTorch's, and everything is small.

    python tests/gpu/visit/kernels.py
"""

import sys
from copy import deepcopy
from functools import partial
from time import perf_counter

import torch
import torch.nn.functional as F
from rates import BEGIN, CARD, DEVICE, LIMIT, say

from llmcli.commands.selftest.measure.arithmetic import random_blocks
from llmcli.config.experts import RoutingConfig
from llmcli.config.formats import ON_CARD
from llmcli.config.mlp import MlpConfig
from llmcli.engine.sampling import Sampling, choose
from llmcli.kernels import native
from llmcli.measure.ceilings import best_seconds, read_rate
from llmcli.ops import on_card
from llmcli.ops.attention import attend, visible_keys
from llmcli.ops.linear import linear, linear_fp32_out
from llmcli.ops.norm import rms_norm
from llmcli.ops.rope import rotate
from llmcli.ops.routing import choose as choose_experts
from llmcli.ops.routing import share, summed, weigh
from llmcli.weights.blocks import FileLayoutWeight
from llmcli.weights.dense import Dense
from llmcli.weights.routes import ExpertAssignment

SILU = MlpConfig(hidden=0, activation="silu", gated=True)
ROUTING = RoutingConfig(chosen=8, renormalized=True)
B16, F32, SMALL = torch.bfloat16, torch.float32, 1 if CARD else 32
COLD = 200 << 20 if CARD else 0  # bytes that are read in turns
wrong = []


def drawn(*shape, dtype=B16, by=1.0):
    """What makes such a tensor again and again."""
    return lambda: (by * torch.randn(shape, device=DEVICE)).to(dtype)


def flat(found):
    return torch.cat([x.flatten() for x in (found if isinstance(found, tuple) else (found,))])


def graph(calls):
    """What runs all of them as one CUDA graph; without a card one by one."""
    if not CARD:
        return lambda: [call() for call in calls]
    made = torch.cuda.CUDAGraph()
    with torch.cuda.graph(made):
        [call() for call in calls]
    return made.replay


def compared(name, call, nbytes, *makes, exact=None):
    """`call`, which reads `nbytes`, of what each of `makes` gives, with kernels and without."""
    if perf_counter() - BEGIN > LIMIT:
        return
    times, errors = max(2, min(64, COLD // nbytes)), []
    copies = [[make() for make in makes] for _ in range(times)]
    if exact is None:
        exact = call(*(x.double() if x.is_floating_point() else x for x in copies[0]))
    exact = flat(exact).double()
    for by, off in (("triton", ""), ("pytorch", "PyTorch is measured")):
        native.TRITON_STATE.off = off
        try:
            error = float((flat(call(*copies[0])).double() - exact).norm() / exact.norm())
            replay = graph([partial(call, *one) for one in copies])
            seconds = best_seconds([replay], DEVICE, 0.05 * CARD) / times
        except RuntimeError as error:
            wrong.append(name)
            say(name, by=by, failed=str(error).partition("\n")[0])
            continue
        say(name, by=by, error=f"{error:.1e}", us=round(seconds * 1e6, 1),
            gbs=round(nbytes / seconds / 1e9), share=round(nbytes / seconds / READ, 3))  # fmt: skip
        errors.append(error)
    if len(errors) == 2 and not errors[0] <= 2 * errors[1] + 1e-7:
        wrong.append(name)


def gated(x, w):
    if on_card.multiplies(x, w):
        return on_card.product(x, w, None, x.dtype, hidden=SILU)
    gate, up = F.linear(x, w).chunk(2, -1)
    return F.silu(gate) * up


def attention(slots, window=None):
    at, how = torch.tensor([slots - 2], device=DEVICE), {"scale": 0.1, "cap": None, "sinks_H": None}

    def call(q, k, v):
        if on_card.attends(q, k, v):
            return on_card.attend(q, k, v, at, window=window, **how)
        mask = visible_keys(at.unsqueeze(1), slots, window).unsqueeze(1)
        return attend(q, k, v, mask=mask, **how)

    read = 2 * 2 * 8 * 128 * min(slots - 1, window or slots)
    caches = [drawn(1, 8, slots, 128)] * 2
    compared(f"attention {slots}, window {window}", call, read, drawn(1, 32, 1, 128), *caches)


def heads(x, w, cos, sin, k, v):
    """Norms of heads, rotation, keys and values in the cache."""
    at = torch.zeros(1, dtype=torch.long, device=DEVICE)
    if on_card.enters(x, k, v):
        how = {"norms": [(w, None, 1e-6, 1, 0.0)] * 2 + [None], "tables_CR": (cos, sin)}
        q = on_card.enter(x, (32, 8, 8), (k, v), at, dtype=x.dtype, growth=None, **how)
        return q, k, v
    qk, values = x.view(1, 1, 48, 128).split((40, 8), 2)
    q, keys = rotate(rms_norm(qk, w, 1e-6, x.dtype), cos[:, None], sin[:, None]).split((32, 8), 2)
    k.copy_(keys.transpose(1, 2))
    v.copy_(values.transpose(1, 2))
    return q, k, v


def routed(logits):
    if on_card.routes(logits):
        return on_card.route(logits, None, None, ROUTING)
    scores = share(logits, sigmoid=False)
    chosen = choose_experts(scores, None, ROUTING)
    return chosen, weigh(scores, chosen, ROUTING)


torch.manual_seed(0)
with torch.inference_mode():
    buffer = torch.randn(1 << 28 if CARD else 1 << 20, device=DEVICE)
    READ = read_rate(buffer, buffer.nbytes, 0.1 * CARD, cached=False)
    say("ceilings", read_gbs=round(READ / 1e9), triton=native.triton_status())
    plain, wide = partial(linear, b_N=None), partial(linear_fp32_out, b_N=None)
    for name, call, n, k in (
        ("8B qkv", plain, 6144, 4096), ("8B o", plain, 4096, 4096),
        ("8B gate, up", gated, 28672, 4096), ("8B down", plain, 4096, 14336),
        ("8B head", wide, 128256, 4096), ("1B qkv", plain, 3072, 2048),
        ("1B gate, up", gated, 16384, 2048), ("1B down", plain, 2048, 8192),
    ):  # fmt: skip
        n, k = n // SMALL, k // SMALL
        compared(name, call, 2 * n * k, drawn(1, k), drawn(n, k, by=k**-0.5))
    for slots, window in ((256, None), (2048, None), (8192, None), (32768, None), (8192, 1024)):
        attention(slots // SMALL, window and window // SMALL)
    compared("norm", lambda x, w: rms_norm(x, w, 1e-5, w.dtype), 4 * 4096,
             drawn(1, 4096, dtype=F32), drawn(4096))  # fmt: skip
    tables, caches = [drawn(1, 128, dtype=F32)] * 2, [drawn(1, 8, 1, 128)] * 2
    compared("heads into the cache", heads, 12288, drawn(1, 1, 6144), drawn(128), *tables, *caches)
    count, chosen, n, k = (128, 8, 1536, 2048) if CARD else (4, 2, 48, 64)
    w_ENK = drawn(count, n, k, by=k**-0.5)()
    ids = lambda: torch.randperm(count, device=DEVICE)[:chosen].view(1, 1, -1)  # noqa: E731
    routes = partial(ExpertAssignment.of, static=True)
    compared("experts", lambda x, w, ids: Dense(w).matmul_routed(x, routes(ids), None, wide=True),
             2 * chosen * n * k, drawn(1, k), lambda: w_ENK, ids)  # fmt: skip
    compared("routing", routed, 4 * 128, drawn(1, 1, 128, dtype=F32, by=3))
    compared("sum of experts", lambda y, g: summed(y, g, None), 65536,
             drawn(1, 8, 1, 2048, dtype=F32), drawn(1, 1, 8, dtype=F32))  # fmt: skip
    for format in ON_CARD:
        n, k, x = 14336 // SMALL, 4096 // min(SMALL, 8), drawn(1, 4096 // min(SMALL, 8))()
        weight = FileLayoutWeight(format, (n, k), device=DEVICE, inputs=B16)
        weight.data.copy_(random_blocks(format, 64, k, torch.Generator()).repeat(n // 64, 1))
        exact = F.linear(x.double(), weight.dense(torch.float64))
        compared(format, partial(lambda x, w: w.matmul(x), x), weight.data.nbytes,
                 partial(deepcopy, weight), exact=exact)  # fmt: skip
    u = torch.full((1,), 0.4, device=DEVICE, dtype=torch.float64)
    for name, how in (("sampling", Sampling()), ("top-p alone", Sampling(top_k=0, min_p=0))):
        compared(name, lambda logits, how=how: choose(logits, how, u)[0], 4 * 128_256 // SMALL,
                 drawn(1, 128_256 // SMALL, dtype=F32, by=4))  # fmt: skip
sys.exit(f"wrong: {', '.join(wrong)}" if wrong else 0)

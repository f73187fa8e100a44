"""The experts of a token and their weights, equivalent to `ops.routing`.

Axes: B batch, T tokens, E experts, K chosen ones, P places: a power of two, at least K and as many
as there are groups.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmcli.config.experts import RoutingConfig
from llmcli.kernels.triton.sampling import NONE, key_of, score_of

_SCORES = "softmax", "sigmoid", "softmax of the chosen"


@triton.jit
def softmax(x):
    """Of a row, with -inf where nothing is."""
    x = tl.exp(x - tl.max(x, 0))
    return x / tl.sum(x, 0)


@triton.jit
def route_kernel(
    logits, correction, factors, chosen, weight, least, scale,
    SCORES: tl.constexpr, BY_LOGITS: tl.constexpr, RENORMALIZED: tl.constexpr,
    CORRECTED: tl.constexpr, FACTORS: tl.constexpr, COUNT: tl.constexpr, KEPT: tl.constexpr,
    BEST: tl.constexpr, K: tl.constexpr, E: tl.constexpr, EXPERTS: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Route one token; SCORES is a number of `_SCORES`, COUNT that of groups."""
    token = tl.program_id(0).to(tl.int64)
    e, p = tl.arange(0, EXPERTS), tl.arange(0, P)
    there = e < E
    score = tl.load(logits + token * E + e, there, float("-inf"))
    by = score
    if SCORES == 0:
        score = softmax(score)
    elif SCORES == 1:
        score = 1 / (1 + tl.exp(-score))
    if not BY_LOGITS:
        by = score
    if CORRECTED:
        by += tl.load(correction + e, there, 0.0).to(tl.float32)
    if COUNT > 1:
        group = e // (E // COUNT)
        key = tl.where(there, key_of(by, e), NONE)
        key_P = tl.full([P], NONE, tl.int64)
        for number in range(COUNT):
            own = tl.where(group == number, key, NONE)
            first = tl.max(own, 0)
            best = score_of(first)
            if BEST == 2:
                best += score_of(tl.max(tl.where(own == first, NONE, own), 0))
            key_P = tl.where(p == number, key_of(best, p), key_P)
        eligible = e < 0
        for _ in range(KEPT):
            first = tl.max(key_P, 0)
            eligible |= group == 0x7FFFFFFF - (first & 0x7FFFFFFF)
            key_P = tl.where(key_P == first, NONE, key_P)
        by = tl.where(eligible, by, float("-inf"))
    key = tl.where(there, key_of(by, e), NONE)
    id_P, w_P = tl.zeros([P], tl.int64), tl.full([P], float("-inf"), tl.float32)
    for k in range(K):
        first = tl.max(key, 0)
        id_P = tl.where(p == k, 0x7FFFFFFF - (first & 0x7FFFFFFF), id_P)
        w_P = tl.where(p == k, tl.sum(tl.where(key == first, score, 0.0), 0), w_P)
        key = tl.where(key == first, NONE, key)
    if SCORES == 2:
        w_P = softmax(w_P)
    elif RENORMALIZED:
        w_P /= tl.sum(tl.where(p < K, w_P, 0.0), 0) + least
    w_P *= scale
    if FACTORS:
        w_P *= tl.load(factors + id_P, p < K, 0.0).to(tl.float32)
    tl.store(chosen + token * K + p, id_P, p < K)
    tl.store(weight + token * K + p, w_P, p < K)


def route(
    logits_BTE: Tensor, correction_E: Tensor | None, factors_E: Tensor | None,
    routing: RoutingConfig,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The chosen experts, int64, and their weights, float32, of float32 logits: `[B, T, K]`."""
    *shape, experts = logits_BTE.shape
    chosen_BTK = torch.empty(*shape, routing.chosen, device=logits_BTE.device, dtype=torch.int64)
    weight_BTK = torch.empty_like(chosen_BTK, dtype=torch.float32)
    groups, logits = routing.groups, logits_BTE.contiguous()
    vectors = [logits if one is None else one for one in (correction_E, factors_E)]
    route_kernel[(logits.numel() // experts,)](
        logits, *vectors, chosen_BTK, weight_BTK, routing.least, routing.scale,
        SCORES=_SCORES.index(routing.scores), BY_LOGITS=routing.by_logits,
        RENORMALIZED=routing.renormalized, CORRECTED=correction_E is not None,
        FACTORS=factors_E is not None, COUNT=groups.count, KEPT=groups.kept, BEST=groups.best,
        K=routing.chosen, E=experts, EXPERTS=triton.next_power_of_2(experts),
        P=max(16, triton.next_power_of_2(max(routing.chosen, groups.count))), num_warps=1,
    )  # fmt: skip
    return chosen_BTK, weight_BTK

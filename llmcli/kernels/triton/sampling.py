"""The next token with a top-k; see `engine.sampling.choose`.

A token's *key* is an int64, larger the earlier the token comes in the order of top-k: in its high
half is the float32 score as an integer that sorts like it, in the low half one that falls with the
id. NaN counts as +inf.

Axes: B sequences, V vocabulary, K at least as many as top-k keeps.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # tokens of a program: 32 programs for a vocabulary of 128k
WARPS = 8  # of it: 16 keys for each thread
NONE = tl.constexpr(-(1 << 63))  # below every key


@triton.jit
def key_of(score, id):
    """The keys of float32 scores; NaN comes first."""
    score = tl.where(score == 0, 0.0, score)  # -0.0 equals 0.0
    bits = score.to(tl.int32, bitcast=True)
    bits = tl.where(score == score, bits, 0x7FFFFFFF)
    rank = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # negative floats sort backwards as integers
    return (rank.to(tl.int64) << 32) | (0x7FFFFFFF - id)


@triton.jit
def score_of(key):
    """The score of a key."""
    rank = (key >> 32).to(tl.int32)
    return (rank ^ ((rank >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def best_kernel(
    logits, prompt, output, numbers, keys, vocab, logits_row, kept,
    PROMPT: tl.constexpr, OUTPUT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The `kept` best keys of a block of a row, best first; with penalties if there are counts."""
    row = tl.program_id(1).to(tl.int64)
    id = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = id < vocab
    score = tl.load(logits + row * logits_row + id, there, 0.0)
    if PROMPT or OUTPUT:
        score = score.to(tl.float64)
        times = tl.zeros([BLOCK], tl.int64)
        if OUTPUT:
            times = tl.load(output + row * vocab + id, there, 0)
        seen = times
        if PROMPT:
            seen += tl.load(prompt + row * vocab + id, there, 0)
        repetition = tl.load(numbers + 3)
        again = tl.where(score > 0, score / repetition, score * repetition)
        score = tl.where(seen > 0, again, score)
        score -= tl.load(numbers + 4) * tl.minimum(times, 1).to(tl.float64)
        score -= tl.load(numbers + 5) * times.to(tl.float64)
    score = score.to(tl.float32)
    score = tl.where(score == score, score, float("inf"))
    key = tl.where(there, key_of(score, id), NONE)
    keys += (row * tl.num_programs(0) + tl.program_id(0)) * kept
    for place in range(kept):
        best = tl.max(key, 0)
        tl.store(keys + place, best)
        key = tl.where(key == best, NONE, key)


@triton.jit(do_not_specialize_on_alignment=["u"])  # it changes with every step
def draw_kernel(
    keys, numbers, u, ids, scores, count, kept, u_row,
    COUNT: tl.constexpr, K: tl.constexpr, DRAWS: tl.constexpr,
):  # fmt: skip
    """The token of a row with `count` keys, and its best score; COUNT and K are powers of two."""
    row = tl.program_id(0).to(tl.int64)
    i, place = tl.arange(0, COUNT), tl.arange(0, K)
    key = tl.load(keys + row * count + i, i < count, NONE)
    key_K = tl.full([K], NONE, tl.int64)
    for at in range(kept):  # best first
        best = tl.max(key, 0)
        key_K = tl.where(place == at, best, key_K)
        key = tl.where(key == best, NONE, key)
    score_K = score_of(key_K).to(tl.float64)
    id_K = 0x7FFFFFFF - (key_K & 0x7FFFFFFF)
    score = tl.sum(tl.where(place == 0, score_K, 0.0), 0)
    id = tl.sum(tl.where(place == 0, id_K, 0), 0)
    if DRAWS:
        w_K = tl.exp((score_K - score) / tl.load(numbers))
        w_K = tl.where(key_K == NONE, 0.0, w_K)
        top_p = tl.load(numbers + 1)
        enough = tl.where(top_p < 1, top_p * tl.sum(w_K, 0), float("inf"))
        before_K = tl.sum(tl.where(place[None, :] < place[:, None], w_K[None, :], 0.0), 1)
        kept_K = (before_K < enough) & (w_K >= tl.load(numbers + 2))
        w_K = tl.where(kept_K, w_K, 0.0)
        # the weight up to each token in the order of ids
        upto_K = tl.sum(tl.where(id_K[None, :] <= id_K[:, None], w_K[None, :], 0.0), 1)
        reached_K = upto_K > tl.load(u + row * u_row) * tl.max(upto_K, 0)
        # never a weight of 0: the token before it has reached as much
        first = tl.min(tl.where(reached_K, id_K, 1 << 31), 0)
        id = tl.where(first < 1 << 31, first, id)  # none is reached where scores are not finite
    tl.store(ids + row, id)
    tl.store(scores + row, score)


def choose(
    logits_BV: Tensor, k: int, numbers: Tensor, u_B: Tensor | None, prompt_BV: Tensor | None,
    output_BV: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The next ids `[B]` int64 and best scores `[B]` float64 of contiguous rows, in two launches.

    Top-k keeps `k` tokens, at most V. `numbers`, float64, are temperature, top-p, min-p,
    and the repetition, presence and frequency penalties. Without `u_B` the best token is chosen.
    Scores are float64 until they have penalties and float32 from then on, weights are float64.
    """
    (batch, vocab), device = logits_BV.shape, logits_BV.device
    blocks = triton.cdiv(vocab, BLOCK)
    keys = torch.empty(batch, blocks * k, device=device, dtype=torch.int64)
    counts = [keys if one is None else one.contiguous() for one in (prompt_BV, output_BV)]
    best_kernel[(blocks, batch)](
        logits_BV, *counts, numbers, keys, vocab, logits_BV.stride(0), k,
        PROMPT=prompt_BV is not None, OUTPUT=output_BV is not None, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
    ids_B = torch.empty(batch, device=device, dtype=torch.int64)
    scores_B = torch.empty(batch, device=device, dtype=torch.float64)
    u_B = numbers if u_B is None else u_B
    draw_kernel[(batch,)](
        keys, numbers, u_B, ids_B, scores_B, keys.shape[1], k, u_B.stride(0),
        COUNT=triton.next_power_of_2(keys.shape[1]), K=max(16, triton.next_power_of_2(k)),
        DRAWS=u_B is not numbers, num_warps=WARPS,
    )  # fmt: skip
    return ids_B, scores_B

"""The next token; see `engine.sampling.choose`.

With a small top-k the best tokens of every block are candidates. Otherwise all tokens are, up to a
last one in the order of scores, which PyTorch sorts.

A token's *key* is an int64, larger the earlier the token comes in the order of top-k: in its high
half is the float32 score as an integer that sorts like it, in the low half one that falls with the
id. NaN counts as +inf.

Axes: B sequences, V vocabulary, K at least as many as top-k keeps, N at least as many as blocks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmcli.kernels.triton.products import done

MOST = 64  # tokens of a small top-k: each takes a pass over the keys
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
def penalized(
    logits, prompt, output, numbers, vocab, logits_row,
    PROMPT: tl.constexpr, OUTPUT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """This program's row, its block of ids, which of them there are, and their scores.

    With penalties if there are counts.
    """
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
    return row, id, there, tl.where(score == score, score, float("inf"))


@triton.jit
def best_kernel(
    logits, prompt, output, numbers, keys, vocab, logits_row, kept,
    PROMPT: tl.constexpr, OUTPUT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The `kept` best keys of a block of a row, best first."""
    row, id, there, score = penalized(
        logits, prompt, output, numbers, vocab, logits_row, PROMPT, OUTPUT, BLOCK
    )
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


@triton.jit
def score_kernel(
    logits, prompt, output, numbers, scores, most, vocab, logits_row,
    PROMPT: tl.constexpr, OUTPUT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The scores of a block of a row, and the largest."""
    row, id, there, score = penalized(
        logits, prompt, output, numbers, vocab, logits_row, PROMPT, OUTPUT, BLOCK
    )
    tl.store(scores + row * vocab + id, score, there)
    best = tl.max(tl.where(there, score, float("-inf")), 0)
    tl.store(most + row * tl.num_programs(0) + tl.program_id(0), best)


@triton.jit
def weighed(scores, at, count, best, numbers):
    """Scores, and their weights, at places of which those below `count` are there."""
    score = tl.load(scores + at, at < count, float("-inf"))
    w = tl.exp((score.to(tl.float64) - best) / tl.load(numbers))
    return score, tl.where(at < count, w, 0.0)


@triton.jit
def weight_kernel(ordered, numbers, sums, vocab, kept, BLOCK: tl.constexpr):
    """The sum of the weights in a block of the `kept` best scores of a row, best first."""
    row = tl.program_id(1).to(tl.int64)
    ordered += row * vocab
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    _, w = weighed(ordered, at, kept, tl.load(ordered).to(tl.float64), numbers)
    tl.store(sums + row * tl.num_programs(0) + tl.program_id(0), tl.sum(w, 0))


@triton.jit
def filtered(scores, id, vocab, best, last, last_id, numbers):
    """The weights of tokens up to a last one in the order of scores, and from min-p on."""
    score, w = weighed(scores, id, vocab, best, numbers)
    kept = (score > last) | ((score == last) & (id <= last_id))
    return tl.where(kept & (w >= tl.load(numbers + 2)), w, 0.0)


@triton.jit(do_not_specialize_on_alignment=["u"])
def pick_kernel(
    scores, most, ordered, order, sums, numbers, u, parts, done, ids, bests, vocab, kept, u_row,
    ORDERED: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sum of the weights in a block of a row, in the order of ids, after all filters.

    The last program of the row picks the token: `done` counts them and is 0 before and after.
    ORDERED: the `kept` best scores are in their order with `sums` of blocks, for top-k and top-p.
    N is a power of two.
    """
    row, blocks = tl.program_id(1).to(tl.int64), tl.num_programs(0)
    n, i = tl.arange(0, N), tl.arange(0, BLOCK)
    scores += row * vocab
    parts += row * blocks
    best = tl.max(tl.load(most + row * blocks + n, n < blocks, float("-inf")), 0).to(tl.float64)
    last, last_id = float("-inf"), vocab
    if ORDERED:
        ordered += row * vocab
        count = (kept + BLOCK - 1) // BLOCK
        sum_N = tl.load(sums + row * count + n, n < count, 0.0)
        top_p = tl.load(numbers + 1)
        enough = tl.where(top_p < 1, top_p * tl.sum(sum_N, 0), float("inf"))
        less_N = tl.cumsum(sum_N, 0) < enough
        block = tl.minimum(tl.sum(less_N.to(tl.int32), 0), count - 1)
        _, w = weighed(ordered, block * BLOCK + i, kept, best, numbers)
        upto = tl.sum(tl.where(n < block, sum_N, 0.0), 0) + tl.cumsum(w, 0)
        # a token stays if those before it have not enough weight: the first always does
        more = tl.minimum(tl.sum((upto < enough).to(tl.int32), 0), BLOCK - 1)
        at = tl.minimum(block * BLOCK + more, kept - 1)
        last, last_id = tl.load(ordered + at), tl.load(order + row * vocab + at).to(tl.int32)
    id = tl.program_id(0) * BLOCK + i
    w = filtered(scores, id, vocab, best, last, last_id, numbers)
    tl.store(parts + tl.program_id(0), tl.sum(w, 0))
    tl.debug_barrier()  # all threads have stored their numbers when the program is counted
    if tl.atomic_add(done + row, 1) == blocks - 1:
        tl.store(done + row, 0)
        part_N = tl.load(parts + n, n < blocks, 0.0)
        upto_N = tl.cumsum(part_N, 0)
        target = tl.load(u + row * u_row) * tl.max(upto_N, 0)
        reached_N = (upto_N > target) & (part_N > 0)
        block = tl.minimum(tl.min(tl.where(reached_N, n, N), 0), blocks - 1)
        before = tl.sum(tl.where(n < block, part_N, 0.0), 0)
        id = block * BLOCK + i
        w = filtered(scores, id, vocab, best, last, last_id, numbers)
        first = tl.min(tl.where((before + tl.cumsum(w, 0) > target) & (w > 0), id, vocab), 0)
        # sums in another order may not reach it: the last one then
        first = tl.where(first < vocab, first, tl.max(tl.where(w > 0, id, 0), 0))
        tl.store(ids + row, first.to(tl.int64))
        tl.store(bests + row, best)


def choose(
    logits_BV: Tensor, k: int, numbers: Tensor, u_B: Tensor | None, prompt_BV: Tensor | None,
    output_BV: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The next ids `[B]` int64 and best scores `[B]` float64 of contiguous rows.

    Top-k keeps `k` tokens, at most V; 0: neither top-k nor top-p drops any. `numbers`, float64, are
    temperature, top-p, min-p, and the repetition, presence and frequency penalties. Without `u_B`
    the best token is chosen. Scores are float64 until they have penalties and float32 from then on,
    weights are float64. Two launches; with more than `MOST` tokens three and PyTorch's sort, which
    is itself several on a card.
    """
    (batch, vocab), device = logits_BV.shape, logits_BV.device
    blocks, few = triton.cdiv(vocab, BLOCK), 0 < k <= MOST
    keys = torch.empty(batch, blocks * (k if few else 1), device=device, dtype=torch.int64)
    counts = [keys if one is None else one.contiguous() for one in (prompt_BV, output_BV)]
    given = logits_BV, *counts, numbers
    how = {"PROMPT": prompt_BV is not None, "OUTPUT": output_BV is not None, "BLOCK": BLOCK}
    ids_B = torch.empty(batch, device=device, dtype=torch.int64)
    bests_B = torch.empty(batch, device=device, dtype=torch.float64)
    if few:
        best_kernel[(blocks, batch)](
            *given, keys, vocab, logits_BV.stride(0), k, num_warps=WARPS, **how
        )
        u_B = numbers if u_B is None else u_B
        draw_kernel[(batch,)](
            keys, numbers, u_B, ids_B, bests_B, keys.shape[1], k, u_B.stride(0),
            COUNT=triton.next_power_of_2(keys.shape[1]), K=max(16, triton.next_power_of_2(k)),
            DRAWS=u_B is not numbers, num_warps=WARPS,
        )  # fmt: skip
        return ids_B, bests_B
    assert u_B is not None
    scores_BV = torch.empty(batch, vocab, device=device)
    most_BN, parts_BN = scores_BV.new_empty(batch, blocks), bests_B.new_empty(batch, blocks)
    score_kernel[(blocks, batch)](
        *given, scores_BV, most_BN, vocab, logits_BV.stride(0), num_warps=WARPS, **how
    )
    ordered_BV, order_BV, sums_BN = scores_BV, keys, parts_BN
    if k:
        ordered_BV, order_BV = scores_BV.sort(dim=-1, descending=True, stable=True)
        sums_BN = bests_B.new_empty(batch, triton.cdiv(k, BLOCK))
        weight_kernel[sums_BN.shape[::-1]](
            ordered_BV, numbers, sums_BN, vocab, k, BLOCK=BLOCK, num_warps=WARPS
        )
    pick_kernel[(blocks, batch)](
        scores_BV, most_BN, ordered_BV, order_BV, sums_BN, numbers, u_B, parts_BN,
        done(device, batch), ids_B, bests_B, vocab, k, u_B.stride(0), ORDERED=k > 0,
        N=triton.next_power_of_2(blocks), BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
    return ids_B, bests_B

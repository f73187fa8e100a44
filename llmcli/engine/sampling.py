"""From logits to the next token: penalties, temperature, top-k, top-p, min-p, inverse CDF.

The arithmetic is in float64 on the logits' device (ensured by `Sampler`).

Axes: B sequences, V vocabulary, K candidates. No random state: callers pass a number `u` in [0, 1)
per sequence (`seeds.uniforms`).
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from llmcli.errors import UsageError
from llmcli.kernels import native
from llmcli.ops import compiled, on_card
from llmcli.records.ranges import SAMPLING, Range


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling settings with the command line's defaults. UsageError outside `SAMPLING`'s ranges.

    A `temperature` of 0 is greedy, a `top_k` of 0 off. `repetition_penalty` is over prompt and
    output, `presence_penalty` and `frequency_penalty` over the output.
    `suppress_tokens` are never chosen, `begin_suppress_tokens` not as the first token.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    suppress_tokens: tuple[int, ...] = ()
    begin_suppress_tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, range in {**SAMPLING, "seed": Range(0)}.items():
            if (value := getattr(self, name)) not in range:
                given = f"--{name.replace('_', '-')} {value}"
                raise UsageError(f"`{given}` is out of range", hint=f"it must be {range}")

    @property
    def greedy(self) -> bool:
        """Whether the best token is always chosen, without random numbers."""
        return self.temperature == 0

    def suppressed(self, logits: Tensor, step: int) -> Tensor:
        """`logits` `[B, V]` for output token `step`, with -inf for suppressed tokens."""
        ids = self.suppress_tokens + (self.begin_suppress_tokens if step == 0 else ())
        known = tuple(id for id in ids if 0 <= id < logits.shape[-1])
        if not known:
            return logits
        return logits.index_fill(1, _copied(known, torch.int64, logits.device), -math.inf)


def choose(
    logits: Tensor,
    sampling: Sampling,
    u: Tensor | None,
    prompt_counts: Tensor | None = None,
    output_counts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the next token of every sequence, `[B]` int64, and its row's best score `[B]`.

    `logits`, `prompt_counts` and `output_counts` are `[B, V]`, the latter counts of each token in
    the prompt and in the output so far (None: zero); `u` `[B]` float64 in [0, 1) may be None for a
    greedy choice. The token is the `sample` of this distribution:

    1. penalties (`penalized`);
    2. temperature: w = exp((x - max x) / temperature); 0: all weight on the largest logit, the
    lowest id of equals;
    3. top-k: exactly k tokens stay, in the order of `top` (lowest ids of equals);
    4. top-p: tokens in this order stay while the preceding ones have less than top-p of the weight
    left by top-k, so the token that crosses the threshold stays;
    5. min-p: tokens with w ≥ min-p · max w stay.

    The best token survives every filter. A best score that is not finite means that the row's
    logits have NaN, +inf, or only -inf, and its token is invalid. Float32 logits on a CPU use our
    kernel, and on a GPU Triton kernels if they are on: they round scores with penalties to float32.
    """
    if sampling.greedy:
        u = None
    elif u is None:
        raise ValueError("sampling needs a random number for every sequence")
    if compiled.takes(logits):
        return _by_kernel(logits, sampling, u, prompt_counts, output_counts)
    counts = prompt_counts, output_counts
    if on_card.chooses(logits):
        kept = sampling.top_k or (logits.shape[-1] if sampling.top_p < 1 else 0)
        k = 1 if u is None else min(kept, logits.shape[-1])
        reals = tuple(getattr(sampling, name) for name in _REALS)
        numbers = _copied(reals, torch.float64, logits.device)
        return on_card.choose(logits, k, numbers, u, *counts)
    scores = penalized(logits, sampling, *counts)
    if u is None:
        best, ids = scores.max(-1)  # first of equals; NaN counts as the largest
        return ids, best
    best = scores.amax(-1)
    weights, candidates = _candidates(scores, best[:, None], sampling)
    chosen = sample(weights, u)
    if candidates is not None:
        chosen = candidates.gather(1, chosen[:, None])[:, 0]
    return chosen, best


# By which kernels are checked: each path with many tokens that remain to be drawn
_CHECKED = (
    Sampling(temperature=0),
    Sampling(temperature=4, top_k=0, top_p=0.5, min_p=0),
    Sampling(temperature=4, top_k=0, top_p=1, min_p=0.3),
    Sampling(temperature=4, top_k=65, min_p=0),
)
_EVERY_FILTER = Sampling(
    temperature=4, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2
)


def check_kernel(vocab: int, device: torch.device) -> None:
    """`on_card.check_choices` of random logits: greedily, and draws with few or many tokens."""
    if not on_card.checks_choices(device):
        return
    generator = torch.Generator().manual_seed(0)
    logits = (4 * torch.randn(4, vocab, generator=generator)).to(device)
    counts = torch.randint(3, (4, vocab), generator=generator).to(device)
    u = torch.rand(4, generator=generator, dtype=torch.float64).to(device)

    def choices() -> Tensor:
        found = [choose(logits, one, u) for one in _CHECKED]
        found.append(choose(logits, _EVERY_FILTER, u, counts, counts))
        return torch.cat([ids for ids, _ in found])

    on_card.check_choices(choices)


_INTEGERS = ("greedy", "top_k")
_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
_REALS = ("temperature", "top_p", "min_p", *_PENALTIES)


class _Numbers(ctypes.Structure):
    """`struct sampling` of sampling.c; `penalties`: whether there are counts."""

    _fields_: ClassVar = [
        *((name, ctypes.c_int64) for name in ("penalties", *_INTEGERS)),
        *((name, ctypes.c_double) for name in _REALS),
    ]


def _by_kernel(
    logits: Tensor,
    sampling: Sampling,
    u: Tensor | None,
    prompt_counts: Tensor | None,
    output_counts: Tensor | None,
) -> tuple[Tensor, Tensor]:
    vocab = logits.shape[-1]
    counts = [one if one is None else one.contiguous() for one in (prompt_counts, output_counts)]
    numbers = _numbers(sampling, any(one is not None for one in counts))
    logits = logits.contiguous()
    first, stride = logits.data_ptr(), 4 * vocab
    room = torch.empty(4 * vocab, dtype=torch.float64)
    ids, scores, best = [], [], ctypes.c_double()
    kernel = native.function("llmcli_choose", "pnpppdppn", returns=True)
    for row, draw in enumerate([0.0] * len(logits) if u is None else u.tolist()):
        beside = (None if one is None else one[row].data_ptr() for one in counts)
        given = (first + row * stride, vocab, ctypes.byref(numbers), *beside, draw)
        ids.append(kernel(*given, ctypes.byref(best), room.data_ptr(), native.level_number()))
        scores.append(best.value)
    return torch.tensor(ids), torch.tensor(scores, dtype=torch.float64)


@cache
def _numbers(sampling: Sampling, penalties: bool) -> _Numbers:
    return _Numbers(penalties, *(getattr(sampling, name) for name in (*_INTEGERS, *_REALS)))


@lru_cache(16)
def _copied(numbers: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """`numbers` on a device, for all tokens of a text: copied once, without waiting."""
    return torch.tensor(numbers, dtype=dtype).to(device, non_blocking=True)


def sample(probs: Tensor, u: Tensor) -> Tensor:
    """Return ids `[B]`: the first whose cumulative probability exceeds u times the total.

    `probs` `[B, V]` need not be normalized; `u` `[B]` is in [0, 1). The order is by id, not by
    descending probability: there, two nearly equal tokens that swap ranks by rounding (in another
    batch size) would exchange their whole shares; here a rounding error of ε changes one draw in
    1/ε. A token of probability 0 is never drawn.
    """
    cumulative = probs.double().cumsum(-1)
    reached = cumulative > u[:, None] * cumulative[:, -1:]
    return (reached & (probs > 0)).view(torch.uint8).argmax(-1)  # the first


def penalized(
    logits: Tensor,
    sampling: Sampling,
    prompt_counts: Tensor | None = None,
    output_counts: Tensor | None = None,
) -> Tensor:
    """Return the logits `[B, V]` with the penalties applied, in float64 if there are any.

    Repetition (Keskar et al. 2019, section 4.1, as in transformers and llama.cpp): the logit of a
    token in the prompt or the output is divided by the penalty if positive, otherwise multiplied.
    Then presence · (in the output) and frequency · (count in the output) are subtracted, as in
    OpenAI's API.
    """
    if prompt_counts is None and output_counts is None:
        return logits
    scores = logits.double()
    if sampling.repetition_penalty != 1:
        counts = [one for one in (prompt_counts, output_counts) if one is not None]
        seen = sum(counts[1:], counts[0]) > 0
        penalty = sampling.repetition_penalty
        scores = torch.where(
            seen, torch.where(scores > 0, scores / penalty, scores * penalty), scores
        )
    if output_counts is not None:
        times = output_counts.double()
        scores = scores - sampling.presence_penalty * times.clamp(max=1)
        scores = scores - sampling.frequency_penalty * times
    return scores


def top(scores: Tensor, k: int) -> Tensor:
    """Return the ids `[B, k]` of the k largest of `scores` `[B, V]`, best first.

    Of equal scores the lowest ids come first and are kept first, which `torch.topk` does not
    guarantee. Scores are compared in their dtype.
    """
    if scores.is_cuda:  # a check of ties would synchronize, and integers take more launches
        order: Tensor = torch.sort(scores + 0.0, dim=-1, descending=True, stable=True).indices
        return order[:, :k]
    if scores.dtype == torch.float64:
        return _top_float64(scores, k)
    # one pass over integers that sort like (score, -id)
    bits = (scores.float() + 0.0).view(torch.int32)  # + 0.0: -0.0 equals 0.0
    rank = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # negative floats sort backwards as integers
    last = scores.shape[-1] - 1
    key = (rank.to(torch.int64) << 32) | torch.arange(last, -1, -1, device=scores.device)
    return last - (key.topk(k).values & 0xFFFFFFFF)


def _top_float64(scores: Tensor, k: int) -> Tensor:
    """`top` of float64, which leaves no bits of an integer for the id: ties are checked."""
    values, ids = scores.topk(min(k + 1, scores.shape[-1]))
    if bool((values[:, 1:] < values[:, :-1]).all()):  # false for NaN, too
        return ids[:, :k]
    scores = torch.where(scores.isnan(), math.inf, scores)
    least = scores.topk(k).values[:, -1:]
    above, equal = scores > least, scores == least
    kept = above | (equal & (equal.cumsum(-1) <= k - above.sum(-1, keepdim=True)))
    ids = kept.nonzero()[:, 1].view(-1, k)  # ascending, equally many in every row
    order = scores.gather(1, ids).sort(dim=-1, descending=True, stable=True).indices
    return ids.gather(1, order)


def _candidates(
    scores: Tensor, best: Tensor, sampling: Sampling
) -> tuple[Tensor, Tensor | None]:
    """Weights `[B, K]` of candidate tokens (0 if excluded) and their ids, ascending.

    None for the ids: the whole vocabulary. The weight of the `best` score `[B, 1]` is 1.
    """
    ids, vocab = None, scores.shape[-1]
    if 0 < sampling.top_k < vocab:
        ids = top(scores, sampling.top_k)
        scores = scores.gather(1, ids)
    # subtract before dividing: a tiny temperature then gives -inf, never inf - inf
    weights = ((scores.double() - best) / sampling.temperature).exp()
    if sampling.top_p < 1:
        enough = sampling.top_p * weights.sum(-1, keepdim=True)
        if ids is None:
            ids, weights = _heaviest(scores, weights, enough)
        before = weights.cumsum(-1)[:, :-1]
        weights[:, 1:].masked_fill_(before >= enough, 0.0)
    if sampling.min_p > 0:
        weights = weights.masked_fill(weights < sampling.min_p, 0.0)
    if ids is None:
        return weights, None
    if ids.shape[-1] == vocab:
        return torch.zeros_like(weights).scatter_(1, ids, weights), None
    ids, order = ids.sort(-1)
    return weights.gather(1, order), ids


def _heaviest(scores: Tensor, weights: Tensor, enough: Tensor) -> tuple[Tensor, Tensor]:
    """Ids and weights, best first, of enough tokens for a total weight of `enough` `[B, 1]`.

    Sorting the whole vocabulary takes longer than a decode step; the best thousand nearly always
    suffice. On a GPU sorting is faster than synchronizing to check.
    """
    for size in (1024, 8192):
        if size < scores.shape[-1] and not scores.is_cuda:
            ids = top(scores, size)
            best = weights.gather(1, ids)
            if bool((best.sum(-1, keepdim=True) > enough).all()):
                return ids, best
    ids = top(scores, scores.shape[-1])
    return ids, weights.gather(1, ids)

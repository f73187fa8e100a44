"""From rows of the residual stream to logits: by the formula, and as the model does it.

The formula is written a second time here, after the papers and not after `nn`, so that a wrong
weight or ε in the model's own final norm or head shows. What a family does to its logits after the
product (a scale, a soft cap) belongs into `unembed`, and nowhere else in what looks inside.

Axes: N rows, D width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from llmcli.formats.packed import Packed
from llmcli.graph.evaluation.rule import settled
from llmcli.model import Model
from llmcli.ops.norm import at_least_float32
from llmcli.parts.norm.config import NormConfig
from llmcli.records.document import ViewCheck

# How many roundings (eps) of its largest logit the logits of a row may be off. Measured on a CPU,
# the worst token of all positions, half the difference of log-probabilities in such roundings: in
# float32 5.9, in 16 bits 0.65, where products are summed in float32 (1500 positions of smollm2;
# less in tiny and in small random models of every family). A GPU may add parts of a product in 16
# bits; how far that goes is not measured, and its number here is a guess.
ROUNDINGS = 16.0
HALF_ROUNDINGS, HALF_ROUNDINGS_GPU = 1.0, 4.0

# what is compared of both distributions
WORDS = {
    "output": "in probability", "output_logprob": "in log-probability of every token",
    "output_kl": "KL in nats",
}  # fmt: skip

_BLOCK = 1 << 22  # numbers of the head's matrix that are converted at a time


def unembed(model: Model, h_ND: Tensor) -> Tensor:
    """`Norm_f(h) W_Uᵀ + b_U`, `[N, V]` in at least float32, with every row's own statistics.

    A matrix in blocks rounds its input (`Packed.seen`). Where a number of the formula's norm and
    of the model's differ by rounding only, it is rounded as the model's is.
    """
    weight, config = model.decoder.weight, model.config
    bias = weight("ln_final.b").dense() if config.final_norm.bias else None
    norm_D = weight("ln_final.w").dense()
    x_ND = normalized(at_least_float32(h_ND), config.final_norm, norm_D, bias)
    head = weight("head.W")
    if isinstance(head, Packed):
        own_ND = model.decoder.ln_final(h_ND)
        off_N1 = ROUNDINGS * torch.finfo(own_ND.dtype).eps * x_ND.abs().amax(-1, keepdim=True)
        x_ND = settled(x_ND, head.seen(x_ND), head.seen(own_ND), off_N1)
    rows, columns = head.shape
    logits_NV = x_ND.new_empty(len(x_ND), rows)
    step = max(1, _BLOCK // columns)
    for start in range(0, rows, step):
        part = slice(start, start + step)
        logits_NV[:, part] = x_ND @ head.dense(x_ND.dtype, rows=part).t()
    if config.head.bias:
        logits_NV.add_(weight("head.b").dense())
    cap = config.head.cap
    return logits_NV * config.head.scale if cap is None else cap * (logits_NV / cap).tanh()


def normalized(x_ND: Tensor, config: NormConfig, w_D: Tensor, b_D: Tensor | None) -> Tensor:
    """`x / √(mean(x²) + ε) · w` (RMSNorm), `(x − μ) / √(mean((x − μ)²) + ε) · w + b` (LayerNorm).

    With an offset `offset + w` in place of w. Computed in the dtype of `x`.
    """
    if config.kind == "layer":
        x_ND = x_ND - x_ND.mean(-1, keepdim=True)
    x_ND = x_ND / ((x_ND * x_ND).mean(-1, keepdim=True) + config.eps).sqrt()
    x_ND = x_ND * (config.offset + w_D.to(x_ND.dtype))
    return x_ND if b_D is None else x_ND + b_D.to(x_ND.dtype)


def own_logits(model: Model, h_ND: Tensor) -> Tensor:
    """What the model's own final norm and head make of rows that left its last block, `[N, V]`."""
    return model.decoder.logits(model.decoder.ln_final(h_ND))


class Agreement:
    """Whether logits by the formula are the model's own, compared as distributions.

    Where every logit is off by at most e, the divergence is at most e²/2 (Hoeffding's lemma: the
    difference has a range of 2e), a probability is off by at most e/2 (Pinsker's inequality) and
    a log-probability by at most 2e (the logarithm of the sum is off by at most e, too). The last
    is what sees a token that is unlikely in both. e is a number of roundings of the row's largest
    logit. The comparison itself is done in float64, whose own roundings are allowed as well.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        half = HALF_ROUNDINGS if device.type == "cpu" else HALF_ROUNDINGS_GPU
        roundings = half if dtype.itemsize == 2 else ROUNDINGS
        self._off = roundings * torch.finfo(dtype).eps
        self._shares = dict.fromkeys(WORDS, -1.0)  # of what is allowed, the largest
        self._worst: dict[str, ViewCheck] = {}

    def add(self, positions: Sequence[int], formula_NV: Tensor, own_NV: Tensor) -> None:
        """Row n of both is read at `positions[n]`."""
        ours_NV, theirs_NV = (
            t.to("cpu", torch.float64).log_softmax(-1) for t in (formula_NV, own_NV)
        )
        largest_N = own_NV.abs().amax(-1).to("cpu", torch.float64)
        off_N = self._off * largest_N
        itself_N = 32 * torch.finfo(torch.float64).eps * largest_N.clamp_min(1)
        kl_N1 = (theirs_NV.exp() * (theirs_NV - ours_NV)).sum(-1, keepdim=True)
        for name, apart_NV, allowed_N in (
            ("output", ours_NV.exp() - theirs_NV.exp(), off_N / 2),
            ("output_logprob", ours_NV - theirs_NV, 2 * off_N),
            ("output_kl", kl_N1, off_N * off_N / 2),
        ):
            value_N, token_N = apart_NV.abs().max(-1)  # NaN if there is one
            allowed_N = allowed_N + itself_N
            shares = (value_N / allowed_N).nan_to_num(math.inf).tolist()
            n = max(range(len(shares)), key=shares.__getitem__)
            if shares[n] <= self._shares[name]:
                continue
            value, place = float(value_N[n]), f"position {positions[n]}"
            place += "" if name == "output_kl" else f", id {int(token_N[n])}"
            self._shares[name] = shares[n]
            self._worst[name] = ViewCheck(
                name=name, words=f"the last row is the model's output, {WORDS[name]}", value=value,
                tolerance=float(allowed_N[n]), where=place if value else "",
            )  # fmt: skip

    def checks(self) -> tuple[ViewCheck, ...]:
        """The position that uses most of what it is allowed, by each of the three."""
        return tuple(self._worst[name] for name in WORDS)

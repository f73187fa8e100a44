"""The choice of experts, and their weights.

Axes: B batch, T tokens, E experts, K chosen ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

from llmcli.config.experts import RoutingConfig
from llmcli.kernels import program
from llmcli.kernels.program import bits, call
from llmcli.ops import compiled, on_card
from llmcli.ops.norm import ones
from llmcli.ops.product import product_float32


def logits(x_BTD: Tensor, w_ED: Tensor, bias_E: Tensor | None) -> Tensor:
    """`X Wᵀ + b` in at least float32, a router's logits: `[B, T, E]`.

    Float32 uses our kernel, whose results do not depend on the number of rows.
    """
    if w_ED.stride(1) != 1 or not compiled.takes(x_BTD, w_ED, bias_E):
        return product_float32(x_BTD, w_ED, bias_E)
    rows, out = compiled.in_rows(x_BTD), torch.empty(*x_BTD.shape[:-1], len(w_ED))
    both = rows, rows.stride(0), w_ED, w_ED.stride(0)
    return call(program.MULTIPLY_FLOAT, *both, out, len(rows), *w_ED.shape, bias_E, out=out)


def share(logits_BTE: Tensor, *, sigmoid: bool) -> Tensor:
    """The softmax of each row, or the sigmoid of each number."""
    if not compiled.takes(logits_BTE):
        return logits_BTE.sigmoid() if sigmoid else logits_BTE.softmax(-1)
    x, experts = logits_BTE.contiguous(), logits_BTE.shape[-1]
    out = torch.empty_like(x)
    return call(program.SHARE, x, out, x.numel() // experts, experts, sigmoid, out=out)


def choose(scores_BTE: Tensor, correction_E: Tensor | None, routing: RoutingConfig) -> Tensor:
    """Indices of the experts with the largest scores, descending, int64 `[B, T, K]`.

    Of equal scores the first counts. See `RoutingConfig` for the correction and the groups.
    """
    groups = routing.groups
    if compiled.takes(scores_BTE):
        x, experts = scores_BTE.contiguous(), scores_BTE.shape[-1]
        out = torch.empty(*x.shape[:-1], routing.chosen, dtype=torch.int64)
        room = torch.empty(3 * x.numel())
        shape = x.numel() // experts, experts, routing.chosen, correction_E
        of = groups.count, groups.kept, room, groups.best
        return call(program.CHOOSE, x, out, *shape, *of, out=out, writes=(room,))
    if correction_E is not None:
        scores_BTE = scores_BTE + correction_E
    if groups.count > 1:
        grouped_BTGe = scores_BTE.view(*scores_BTE.shape[:-1], groups.count, -1)
        best_BTG = grouped_BTGe.topk(groups.best, -1).values.sum(-1)
        kept_BTG = torch.zeros_like(best_BTG, dtype=torch.bool)
        kept_BTG.scatter_(-1, _largest(best_BTG, groups.kept), True)
        scores_BTE = grouped_BTGe.masked_fill(~kept_BTG.unsqueeze(-1), -torch.inf).flatten(-2)
    return _largest(scores_BTE, routing.chosen)


def weigh(
    scores_BTE: Tensor, chosen_BTK: Tensor, routing: RoutingConfig, factor_E: Tensor | None = None
) -> Tensor:
    """Weights of the chosen experts, `[B, T, K]`, finally multiplied by their factors.

    `scores_BTE` are logits for `softmax of the chosen`.
    """
    softmax = routing.scores == "softmax of the chosen"
    if compiled.takes(scores_BTE, factor_E):
        x, chosen = scores_BTE.contiguous(), chosen_BTK.contiguous()
        experts, out = x.shape[-1], torch.empty(chosen.shape)
        shape = x.numel() // experts, experts, chosen.shape[-1]
        kind = softmax, routing.renormalized and not softmax
        factors = bits(routing.least), bits(routing.scale), factor_E
        return call(program.WEIGH, x, chosen, out, *shape, *kind, *factors, out=out)
    weight_BTK = scores_BTE.gather(-1, chosen_BTK)
    if softmax:
        weight_BTK = weight_BTK.softmax(-1)
    elif routing.renormalized:
        weight_BTK = weight_BTK / (weight_BTK.sum(-1, keepdim=True) + routing.least)
    if routing.scale != 1:
        weight_BTK = weight_BTK * routing.scale
    return weight_BTK if factor_E is None else weight_BTK * factor_E[chosen_BTK]


def summed(y_BKTD: Tensor, weight_BTK: Tensor | None, z_BTD: Tensor | None) -> Tensor:
    """`Σ_k g[k] · Y[k] + Z`, in the order of the choice, g = 1 without weights: `[B, T, D]`."""
    batch, chosen, tokens, columns = y_BKTD.shape
    if compiled.takes(y_BKTD, z_BTD):
        y, z = y_BKTD.contiguous(), None if z_BTD is None else z_BTD.contiguous()
        weight: Tensor | int
        if weight_BTK is None:
            count = batch * tokens * chosen  # rounded up, so that few lengths are cached
            weight = ones(1 << (count - 1).bit_length()).data_ptr()
        else:
            weight = weight_BTK.contiguous()
        out = torch.empty(batch, tokens, columns)
        shape = batch * tokens, columns, chosen, tokens
        return call(program.SUM_EXPERTS, y, weight, z, out, *shape, out=out)
    if on_card.sums_experts(y_BKTD):
        return on_card.sum_experts(y_BKTD, weight_BTK, z_BTD)
    if weight_BTK is None:
        weight_BTK = y_BKTD.new_ones(batch, tokens, chosen)
    out_BTD = y_BKTD[:, 0] * weight_BTK[..., :1]
    for k in range(1, chosen):
        out_BTD = out_BTD + y_BKTD[:, k] * weight_BTK[..., k : k + 1]
    return out_BTD if z_BTD is None else out_BTD + z_BTD


def _largest(x: Tensor, count: int) -> Tensor:
    """Indices of the largest numbers; of equal ones the first, which `topk` does not guarantee."""
    return x.sort(dim=-1, descending=True, stable=True).indices[..., :count]

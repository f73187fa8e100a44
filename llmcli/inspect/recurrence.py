"""A linear mixer's recurrence once more: its state over time, and what that says of a head.

    S ← e^g S;  r = kᵀS;  S ← S + β k (v − r);  z = Sᵀq        `plain`: without − r

In float64 and chunk by chunk, independent of the kernel and of its map: in a chunk with c the sums
of its log-decays and G_ij = e^(c_i − c_j), what the tokens write are the rows of U,
(I + tril₋₁(diag β (G ∘ K Kᵀ))) U = diag β (V − e^c ∘ K S).

Axes: H heads, T tokens, C tokens of a chunk, d size of a query and key, e of a value.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from llmcli.devices import float64_device
from llmcli.ops.recurrence import Inputs
from llmcli.records.checks import ViewCheck

CHUNK = 64

# How many roundings (eps) of what `walk` says that roundings add up to a number may be off: those
# of a kernel and those of a map. Measured, random keys that are alike or not, β near 1 or not,
# decays from e^-30 to e^-0.0001 a token: 1.9 and 1.1 with 6 numbers of a key, 0.3 each with 64 and
# 128; of a state 1.1. It was 200 where chunks were solved by powers and keys are alike.
ROUNDINGS = 6


@dataclass(frozen=True, kw_only=True)
class End:
    """Where a walk ended: the state, and how large what was rounded in it is."""

    state_Hde: Tensor
    sizes_H: Tensor


@dataclass(frozen=True, kw_only=True)
class Walk:
    """What a recurrence over T tokens goes through, float64.

    `norms_HT`: ‖S‖, the root of the sum of squares, after each token. `sizes_HT`: how large the
    numbers are whose roundings end up in a token's z, see `walk`. `z_HTe`: what the queries read,
    if requested. `read_HT` and `written_HT`: β ‖r‖ and β ‖v‖ (`read_HT` is 0 where
    nothing is read). `states`: the states `[H, d, e]` after the tokens at some positions.
    """

    norms_HT: Tensor
    sizes_HT: Tensor
    read_HT: Tensor
    written_HT: Tensor
    log_decay_HT: Tensor
    plain: bool
    states: dict[int, Tensor]
    z_HTe: Tensor | None
    end: End

    def overwritten(self) -> list[float]:
        """The overwritten share of each head: Σ β ‖r‖ / Σ β (‖v‖ + ‖r‖) over all tokens.

        r = kᵀS is what the state, decayed, holds under a token's key, and what the delta rule takes
        off before v is put there: 0 where nothing was there, 1/2 where each write replaces as much
        as it brings. NaN where nothing is taken off, by construction or because β is always 0.
        """
        if self.plain:
            return [math.nan] * len(self.read_HT)
        read_H, written_H = self.read_HT.sum(-1), self.written_HT.sum(-1)
        shares: list[float] = (read_H / (read_H + written_H)).tolist()
        return shares

    def check(self, cached: Tensor, name: str) -> ViewCheck:
        """That the state of a cache, called `name`, is the one after the last token.

        `cached` `[H, d, e]` or `[H, d·e]`. What is allowed has the size of what is rounded on the
        way, as `walk` has it.
        """
        ours = self.end.state_Hde.flatten(1)
        off_H = (cached.to(ours).view_as(ours) - ours).norm(dim=-1)
        allowed_H = ROUNDINGS * torch.finfo(cached.dtype).eps * self.end.sizes_H
        share_H = share_of(off_H, allowed_H).nan_to_num(math.inf)
        worst = int(share_H.argmax())
        return ViewCheck(
            name="state",
            words="the state in the cache is what the tokens make of an empty one",
            value=float(share_H[worst]),
            tolerance=1.0,
            where=f"{name}[{worst}]",
        )

    def check_results(self, z_HTe: Tensor, wide_eps: float, name: str) -> ViewCheck:
        """That `z_HTe`, which a kernel computed and called `name`, is what the queries read here.

        `wide_eps`: of the arithmetic; in 16 bits z is rounded once more.
        """
        assert self.z_HTe is not None
        off_HT = (z_HTe.to(self.z_HTe) - self.z_HTe).abs()
        allowed_HT = (ROUNDINGS * wide_eps * self.sizes_HT)[..., None]
        if z_HTe.dtype.itemsize == 2:
            allowed_HT = allowed_HT + torch.finfo(z_HTe.dtype).eps / 2 * self.z_HTe.abs()
        share_HT = share_of(off_HT, allowed_HT).nan_to_num(math.inf).amax(-1)
        head, token = divmod(int(share_HT.argmax()), share_HT.shape[-1])
        return ViewCheck(
            name="values",
            words="what every query reads of the state is the kernel's own z",
            value=float(share_HT[head, token]),
            tolerance=1.0,
            where=f"{name}[{head},{token}]",
        )

    def half_lives(self) -> list[float]:
        """The half-life of each head: tokens after which the decays have taken half of a write.

        The median over all tokens j of the least n with g_{j+1} + … + g_{j+n} ≤ −ln 2. What the
        delta rule overwrites does not count. A write that is more than half there at the end of the
        tokens counts as infinite, so that the median is infinite where most of them are.
        """
        sums_HT = self.log_decay_HT.cumsum(-1).neg()  # ascending
        tokens = sums_HT.shape[-1]
        at_HT = torch.searchsorted(sums_HT, sums_HT + math.log(2))
        lives_HT = (at_HT - torch.arange(tokens, device=at_HT.device)).double()
        lives_HT = torch.where(at_HT < tokens, lives_HT, math.inf)
        middle: list[float] = lives_HT.sort(-1).values[:, (tokens - 1) // 2].tolist()
        return middle


def share_of(off: Tensor, allowed: Tensor) -> Tensor:
    """Differences as shares of what is allowed; 0 where there is none, however little that is."""
    return torch.where(off == 0, 0.0, off / allowed)


def walk(
    x: Inputs, at: Sequence[int] = (), *, before: End | None = None, results: bool = False
) -> Walk:
    """Through all tokens of one sequence, keeping the states after those `at`.

    From an empty state, or from where the walk `before` ended. `results`: `z_HTe`, too, where a
    state is kept read from that state.

    `sizes_HT` bounds what a kernel's z may be off in eps, as a standard deviation is bounded. A
    step rounds the state by eps of what it adds up, δ² = ‖S‖² + β² ‖k‖² (‖v‖ + ‖r‖)², and later
    steps multiply that by no more than ρ = e^g · max(1, |1 − β ‖k‖²|) each. Roundings are as often
    up as down, so that their squares add up: E² ← ρ² E² + δ², and z is off by ‖q‖ E. A worst case
    would add up E itself, and allow more by the root of the number of tokens that are remembered.
    The map goes the same way backwards: its roundings are those of qᵀΦ…, which meet the same
    states.
    """
    device = float64_device(x.v_BHTe.device)
    tokens = x.tokens
    beta_HT, g_HT = (one[0].to(device).double() for one in (x.beta_BHT, x.log_decay_BHT))
    size = (len(g_HT), x.k_BKTd.shape[-1], x.v_BHTe.shape[-1])
    state_Hde, error_H = g_HT.new_zeros(size), g_HT.new_zeros(len(g_HT))
    if before is not None:
        state_Hde, error_H = before.state_Hde, before.sizes_H.square()
    z = []
    norms_HT, errors_HT, read_HT, values_HT, q_HT = (torch.empty_like(g_HT) for _ in range(5))
    later_CC = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=device).triu(1)
    wanted, states = sorted(set(at)), dict[int, Tensor]()
    for first in range(0, tokens, CHUNK):
        of = slice(first, min(first + CHUNK, tokens))
        part = x.part(of.start, of.stop)
        q_HCd = part.of_heads(part.q_BKTd)[0].to(device).double()
        k_HCd = part.of_heads(part.k_BKTd)[0].to(device).double()
        v_HCe, beta_HC, g_HC = part.v_BHTe[0].to(device).double(), beta_HT[:, of], g_HT[:, of]
        later = later_CC[: k_HCd.shape[1], : k_HCd.shape[1]]
        sums_HC = g_HC.cumsum(-1)
        decays_HCC = _decays(sums_HC, later)
        products_HCC = k_HCd @ k_HCd.mT
        kept_HCe = sums_HC.exp()[..., None] * (k_HCd @ state_Hde)
        within_HCC = (decays_HCC * products_HCC).tril(-1)
        if x.plain:
            written_HCe = beta_HC[..., None] * v_HCe
            read_HC = torch.zeros_like(g_HC)
        else:
            beta_HC1 = beta_HC[..., None]
            written_HCe = torch.linalg.solve_triangular(
                beta_HC1 * within_HCC,
                beta_HC1 * (v_HCe - kept_HCe),
                upper=False,
                unitriangular=True,
            )
            read_HC = (kept_HCe + within_HCC @ written_HCe).norm(dim=-1)
        # ‖e^c S + Σ_j G_ij k_j u_jᵀ‖² of every token, without the states themselves
        crossed_HC = ((k_HCd @ state_Hde) * written_HCe).sum(-1, keepdim=True)
        own_HCC = products_HCC * (written_HCe @ written_HCe.mT)
        squares_HC = (
            (2 * sums_HC).exp() * state_Hde.square().sum((1, 2))[:, None]
            + 2 * sums_HC.exp() * (decays_HCC @ crossed_HC)[..., 0]
            + ((decays_HCC @ own_HCC) * decays_HCC).sum(-1)
        )
        norms_HC = squares_HC.clamp_min(0).sqrt()
        k_HC, v_HC = k_HCd.norm(dim=-1), v_HCe.norm(dim=-1)
        rounded_HC = norms_HC.square() + (beta_HC * k_HC * (v_HC + read_HC)).square()
        if x.log_decay_BHT.dtype == torch.float64 or device.type == "cpu" != x.v_BHTe.device.type:
            # e^(c_i − c_j) is as wrong as a chunk's sums are large, where no wider dtype has them
            rounded_HC = rounded_HC * (1 + sums_HC.abs()).square()
        reach_HC = g_HC
        if not x.plain:
            reach_HC = g_HC + (1 - beta_HC * k_HC.square()).abs().clamp_min(1).log()
        reach_HC = reach_HC.cumsum(-1)
        errors_HC = _decays(2 * reach_HC, later) @ rounded_HC[..., None]
        errors_HC = errors_HC[..., 0] + (2 * reach_HC).exp() * error_H[:, None]
        error_H = errors_HC[:, -1]
        norms_HT[:, of], errors_HT[:, of], read_HT[:, of] = norms_HC, errors_HC, read_HC
        values_HT[:, of], q_HT[:, of] = v_HC, q_HCd.norm(dim=-1)
        if results:
            mixes_HCC = (q_HCd @ k_HCd.mT) * decays_HCC
            z.append(sums_HC.exp()[..., None] * (q_HCd @ state_Hde) + mixes_HCC @ written_HCe)
        for position in wanted:
            if of.start <= position < of.stop:
                own = position - first
                states[position] = _state(state_Hde, sums_HC, k_HCd, written_HCe, own)
                if results:
                    z[-1][:, own] = (q_HCd[:, own, None] @ states[position])[:, 0]
        state_Hde = _state(state_Hde, sums_HC, k_HCd, written_HCe, -1)
    return Walk(
        norms_HT=norms_HT,
        sizes_HT=q_HT * errors_HT.sqrt(),
        read_HT=beta_HT * read_HT,
        written_HT=beta_HT * values_HT,
        log_decay_HT=g_HT,
        plain=x.plain,
        states=states,
        z_HTe=torch.cat(z, 1) if results else None,
        end=End(state_Hde=state_Hde, sizes_H=error_H.sqrt()),
    )


def _state(
    before_Hde: Tensor, sums_HC: Tensor, k_HCd: Tensor, written_HCe: Tensor, at: int
) -> Tensor:
    """The state after the token number `at` of a chunk."""
    last = slice(None) if at == -1 else slice(at + 1)
    kept_HC1 = (sums_HC[:, at, None] - sums_HC[:, last]).exp()[..., None]
    own_Hde = (kept_HC1 * k_HCd[:, last]).mT @ written_HCe[:, last]
    return before_Hde * sums_HC[:, at].exp()[:, None, None] + own_Hde


def _decays(sums_HC: Tensor, later_CC: Tensor) -> Tensor:
    """`e^(c_i − c_j)`, 0 where j > i: masked before the exponential."""
    apart_HCC = sums_HC[:, :, None] - sums_HC[:, None]
    return apart_HCC.masked_fill(later_CC, -math.inf).exp()

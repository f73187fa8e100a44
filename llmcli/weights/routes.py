"""Assignment of input rows to experts' matrices.

Axes: B batch, T tokens, K chosen experts, N = B · K · T pairs of a token and an expert.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from llmcli.kernels.program import Pairs
from llmcli.ops.linear import pad_rows

Places = Tensor | slice  # of pairs or of rows


@dataclass(frozen=True, kw_only=True)
class ExpertAssignment:
    """Pairs of a token and an expert in the order `[B, K, T]`; `expert_N` is int64.

    Pair n reads row `row_N[n]` of the input, or row n // `experts_per_row` if None. `static`:
    shapes and host code must not depend on the choice, so that a step can be captured; then
    `at_once` pairs of a token are multiplied together.
    """

    expert_N: Tensor
    row_N: Tensor | None
    experts_per_row: int
    static: bool
    at_once: int

    @classmethod
    def of(cls, chosen_BTK: Tensor, *, static: bool) -> ExpertAssignment:
        """The assignment to the chosen experts of an input with one row per token, `[B · T, …]`.

        Always `static` on the meta device, and while `torch.compile` traces.
        """
        batch, tokens, chosen = chosen_BTK.shape
        device = chosen_BTK.device
        row_N = None
        if tokens > 1:
            row_BT = torch.arange(batch * tokens, device=device).view(batch, 1, tokens)
            row_N = row_BT.expand(batch, chosen, tokens).reshape(-1)
        return cls(
            expert_N=chosen_BTK.transpose(1, 2).reshape(-1),
            row_N=row_N,
            experts_per_row=chosen,
            static=static or chosen_BTK.is_meta or torch.compiler.is_compiling(),
            at_once=chosen,
        )

    @property
    def by_pair(self) -> ExpertAssignment:
        """The assignment for an input with one row per pair."""
        return replace(self, row_N=None, experts_per_row=1)

    def few(self, experts: int) -> bool:
        """Whether kernels should read a matrix per pair, not one of each of the `experts` once."""
        return self.static or len(self.expert_N) <= experts

    @property
    def pairs(self) -> Pairs:
        """What kernels read of it, on the device."""
        row_N = None if self.row_N is None else self.row_N.contiguous()
        return self.expert_N.contiguous(), row_N, self.experts_per_row

    def rows(self, pairs: Tensor) -> Tensor:
        """The input rows of pairs."""
        return pairs // self.experts_per_row if self.row_N is None else self.row_N[pairs]

    def by_expert(
        self,
        x_MK: Tensor,
        bias_EN: Tensor | None,
        product: Callable[[int, Tensor, Tensor | None], Tensor],
    ) -> Tensor:
        """Each expert's rows at once, `[P, N]`: `product(expert, rows, bias)` in order of pairs."""
        out_PN: Tensor | None = None
        for expert, pairs, rows in self._groups:
            bias_N = None if bias_EN is None else bias_EN[expert]
            y = product(expert, x_MK[pad_rows(rows, x_MK)], bias_N)
            if out_PN is None:
                out_PN = y.new_empty(len(self.expert_N), y.shape[-1])
            if isinstance(pairs, Tensor) and len(pairs) < len(y):
                y = y[: len(pairs)]
            out_PN[pairs] = y
        assert out_PN is not None
        return out_PN

    @property
    def _groups(self) -> Iterator[tuple[int, Places, Places]]:
        """Yield every expert with pairs, the pairs, and their input rows."""
        if len(self.expert_N) == self.at_once:  # of one token: each pair has a different expert
            for pair, expert in enumerate(self.expert_N.tolist()):
                place = slice(pair, pair + 1)
                yield expert, place, place if self.experts_per_row == 1 else slice(0, 1)
            return
        for expert, pairs in self._together:
            yield expert, pairs, self.rows(pairs)

    @cached_property
    def _together(self) -> tuple[tuple[int, Tensor], ...]:
        """The pairs of each expert, ascending."""
        order_N = self.expert_N.argsort(stable=True)
        counts = sorted(Counter(self.expert_N.tolist()).items())
        starts = [0, *accumulate(count for _, count in counts)]
        return tuple(
            (expert, order_N[start:stop])
            for (expert, _), (start, stop) in zip(counts, pairwise(starts), strict=True)
        )

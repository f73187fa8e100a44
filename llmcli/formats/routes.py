"""Assignment of input rows to experts' matrices.

Axes: B batch, T tokens, K chosen experts, N = B · K · T pairs of a token and an expert.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise

import torch
from torch import Tensor

Places = Tensor | slice  # of pairs or of rows


@dataclass(frozen=True, kw_only=True)
class Routes:
    """Pairs of a token and an expert in the order `[B, K, T]`; `expert_N` is int64.

    Pair n reads row `row_N[n]` of the input, or row n // `each` if None. `static`: shapes and host
    code must not depend on the choice, so that a step can be captured; then `at_once` pairs of a
    token are multiplied together.
    """

    expert_N: Tensor
    row_N: Tensor | None
    each: int
    static: bool
    at_once: int

    @classmethod
    def of(cls, chosen_BTK: Tensor, *, static: bool) -> Routes:
        """Routes for the chosen experts; the input has one row per token, `[B · T, …]`.

        Always `static` on the meta device, and while `torch.compile` traces.
        """
        batch, tokens, chosen = chosen_BTK.shape
        device = chosen_BTK.device
        row_BT = torch.arange(batch * tokens, device=device).view(batch, 1, tokens)
        return cls(
            expert_N=chosen_BTK.transpose(1, 2).reshape(-1),
            row_N=None if tokens == 1 else row_BT.expand(batch, chosen, tokens).reshape(-1),
            each=chosen,
            static=static or chosen_BTK.is_meta or torch.compiler.is_compiling(),
            at_once=chosen,
        )

    @property
    def by_pair(self) -> Routes:
        """The same routes for an input with one row per pair."""
        return replace(self, row_N=None, each=1)

    def rows(self, pairs: Tensor) -> Tensor:
        """The input rows of pairs."""
        return pairs // self.each if self.row_N is None else self.row_N[pairs]

    @property
    def groups(self) -> Iterator[tuple[int, Places, Places]]:
        """Yield every expert with pairs, the pairs, and their input rows."""
        if self._alone:  # each pair has a different expert
            for pair, expert in enumerate(self.expert_N.tolist()):
                place = slice(pair, pair + 1)
                yield expert, place, place if self.each == 1 else slice(0, 1)
            return
        for expert, pairs in self._together:
            yield expert, pairs, self.rows(pairs)

    @property
    def _alone(self) -> bool:
        """Whether all pairs belong to one token."""
        return len(self.expert_N) == self.at_once

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

"""Ops of recurrences with a matrix state: gated DeltaNet and Mamba-2.

No torch. See `graph.ops`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from llmcli.graph.ops import Letter, Op


@dataclass(frozen=True, kw_only=True)
class Cut(Op):
    """`V = Z[64:128], cut into heads`: `heads · size` numbers of each row from `first` on.

    The result is `[H, T, d]`.
    """

    source: str
    first: int
    heads: int
    size: int

    def _form(self) -> str:
        span = f"[{self.first}:{self.first + self.heads * self.size}]"
        return "{source}" + f"{span}, cut into heads"


@dataclass(frozen=True, kw_only=True)
class UnitLength(Op):
    """`Q = Z[…] / √(Σ Z² + ε) · s`: `Cut`, then each head normalized to length 1, times `scale`."""

    INPUTS = ("cut.source",)
    cut: Cut
    eps: float
    scale: float = 1.0

    def right_side(self, own: str, letter: Letter) -> str:
        """`x / √(Σ x² + ε), x = Z[64:128], cut into heads`."""
        scale = f" · {self.scale:.6g}" if self.scale != 1 else ""
        return f"x / √(Σ x² + ε){scale}, {self.cut.formula('x', letter)}"


@dataclass(frozen=True, kw_only=True)
class StepSize(Op):
    """`dt = clip(softplus(X + b), least, most)`, number by number, `[T, H]`; softplus is > 0."""

    source: str
    bias: str
    least: float = 0.0
    most: float = math.inf

    @property
    def bounded(self) -> bool:
        """Whether the result is clipped; a softplus is never below 0."""
        return self.least > 0 or self.most < math.inf

    def _form(self) -> str:
        inside = "softplus({source} + {bias})"
        return f"clip({inside}, {self.least:g}, {self.most:g})" if self.bounded else inside


@dataclass(frozen=True, kw_only=True)
class LogDecay(Op):
    """`g = −e^A · dt`, number by number, `[T, H]`: the state is multiplied by e^g."""

    FORM = "−e^{rate} · {source}"
    source: str
    rate: str


@dataclass(frozen=True, kw_only=True)
class Recurrence:
    """`S ← e^g S; S ← S + β k (v − kᵀS); z = Sᵀq`, for each head; `plain`: S ← e^g S + β k vᵀ.

    `step` is β `[T, H]` (of Mamba-2: dt), `log_decay` g. Head h of `heads` reads key and query
    ⌊h / group⌋, or h mod (heads / group) where heads are `tiled`.
    """

    query: str
    key: str
    step: str
    log_decay: str
    heads: int
    group: int
    plain: bool = False
    tiled: bool = False

    def key_head(self, head: int) -> int:
        """The query and key head that a head reads."""
        return head % (self.heads // self.group) if self.tiled else head // self.group


@dataclass(frozen=True, kw_only=True)
class LinearMap(Op):
    """The map `[H, T, S]` of a recurrence, `z = A V`, with both signs and rows of any sum."""

    INPUTS = ("of.query", "of.key", "of.step", "of.log_decay")  # all except the values
    by_rows = True
    of: Recurrence

    def right_side(self, own: str, letter: Letter) -> str:
        """`tril(G ∘ Q Kᵀ) (I + tril₋₁(diag β (G ∘ K Kᵀ)))⁻¹ diag β, G[t,s] = e^(Σ g)`."""
        q, k, step, g = map(letter, self.inputs)
        solve = "" if self.of.plain else f" (I + tril₋₁(diag {step} (G ∘ {k} {k}ᵀ)))⁻¹"
        decay = f"G[t,s] = e^(Σ {g}[s+1…t])"
        return f"tril(G ∘ {q} {k}ᵀ){solve} diag {step}, {decay}"


@dataclass(frozen=True, kw_only=True)
class StateAfter(Op):
    """The state after each token, `[H, T, dk·dv]`: one row of `columns` per key dimension."""

    INPUTS = ("of.key", "value", "of.step", "of.log_decay")  # all except the queries
    by_rows = True
    of: Recurrence
    value: str
    columns: int

    def right_side(self, own: str, letter: Letter) -> str:
        """`e^g S[t−1] + β k (v − kᵀ e^g S[t−1])`."""
        k, v, step, g = map(letter, self.inputs)
        before = f"e^{g} {own}[t−1]"
        written = f"{v}ᵀ" if self.of.plain else f"({v} − {k}ᵀ {before})"
        return f"{before} + {step} {k} {written}"


@dataclass(frozen=True, kw_only=True)
class Skip(Op):
    """`Y = C + D X`: mixed values plus values times a scalar per head, `[H, T, d]`."""

    INPUTS = ("source", "value")
    FORM = "{source} + {weight} {value}"
    source: str
    value: str
    weight: str

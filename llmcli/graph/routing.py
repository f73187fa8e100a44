"""The ops of mixtures of experts: scores, the choice, weights, products with chosen experts. No
torch.

Letters: T tokens, E experts, K chosen ones, D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from llmcli.graph.ops import Op
from llmcli.records.numbers import best_groups


@dataclass(frozen=True, kw_only=True)
class Share(Op):
    """`P = softmax(R)` row by row, or `P = σ(R)` number by number, the shape of R."""

    source: str
    function: Literal["softmax", "sigmoid"]

    def _form(self) -> str:
        return "σ({source})" if self.function == "sigmoid" else "softmax({source})"


@dataclass(frozen=True, kw_only=True)
class Choose(Op):
    """`e = top-K(P + c)`: the numbers of the experts with the largest scores, `[T, K]`.

    In descending order; of equal scores the first. `correction` c is a bias for the choice only.
    With `groups` only experts of the `kept` best groups can be chosen; a group's score is the sum
    of its `best` largest.
    """

    source: str
    count: int
    correction: str | None = None
    groups: int = 1
    kept: int = 1
    best: int = 2

    def _form(self) -> str:
        scores = "{source}" + (" + {correction}" if self.correction else "")
        best = best_groups(self.kept, self.groups, self.best)
        within = f", of the best {best}" if self.groups > 1 else ""
        return f"top-{self.count}({scores}){within}"


@dataclass(frozen=True, kw_only=True)
class Weigh(Op):
    """`g = 2.5 · P[e] / Σ P[e]`: the weight of each chosen expert, `[T, K]`.

    `renormalized`: divided by their sum, to which `least` is added. `softmax`: the source has
    logits, and the weights are the softmax of the chosen ones. Times `scale`, and times the
    expert's entry of the parameter `factors`.
    """

    INPUTS = ("source", "chosen")
    source: str
    chosen: str
    renormalized: bool
    softmax: bool
    scale: float
    least: float
    factors: str | None = None

    def _form(self) -> str:
        picked = "{source}[{chosen}]"
        scale = "" if self.scale == 1 else f"{self.scale:g} · "
        if self.factors is not None:
            scale += "{factors}[{chosen}] · "
        if self.softmax:
            return f"{scale}softmax({picked})"
        return f"{scale}{picked}{f' / Σ {picked}' if self.renormalized else ''}"


@dataclass(frozen=True, kw_only=True)
class WeighInput(Op):
    """`Xₑ[k] = g[k] · X`: the input of each chosen expert, `[K, T, D]`."""

    INPUTS = ("share", "source")
    share: str
    source: str

    def _form(self) -> str:
        return "{share}[k] · {source}"


@dataclass(frozen=True, kw_only=True)
class ExpertProject(Op):
    """`G[k] = X W[e_k] + b[e_k]`: each token's rows times its chosen matrices, `[K, T, N]`.

    The source has one row per token, `[T, M]`, or one per expert, `[K, T, M]`. `over`, `columns`
    and `fused` as in `Project`.
    """

    INPUTS = ("source", "chosen")
    by_rows = True
    source: str
    weight: str
    chosen: str
    over: str
    columns: str
    by_token: bool
    bias: str | None = None
    fused: str = ""

    @property
    def multiplies(self) -> str:
        """The numbers of the chosen matrices."""
        return f"K·{self.over}·{self.columns}"

    def _form(self) -> str:
        return "{source} {weight}[{chosen}]" + (" + {bias}[{chosen}]" if self.bias else "")


@dataclass(frozen=True, kw_only=True)
class SumExperts(Op):
    """`Y = Σ_k g[k] · O[k] + Z`: weighted outputs of chosen experts plus `also`, `[T, D]`.

    Without a `share` the outputs are not weighted.
    """

    INPUTS = ("share", "value", "also")
    share: str | None
    value: str
    also: str | None

    def _form(self) -> str:
        share = "{share}[k] · " if self.share else ""
        return f"Σ_k {share}" + "{value}[k]" + (" + {also}" if self.also else "")

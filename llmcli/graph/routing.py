"""The ops of mixtures of experts: scores, the choice, weights, products with chosen experts. No
torch.

Letters: T tokens, E experts, K chosen ones, D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from llmcli.graph.ops import Letter, Op, Sizes, size
from llmcli.graph.spec import Call
from llmcli.records.numbers import best_groups


@dataclass(frozen=True, kw_only=True)
class Share(Op):
    """`P = softmax(R)` row by row, or `P = σ(R)` number by number, the shape of R."""

    source: str
    function: Literal["softmax", "sigmoid"]

    @property
    def inputs(self) -> tuple[str, ...]:
        """The logits."""
        return (self.source,)

    def formula(self, own: str, letter: Letter) -> str:
        """`P = softmax(R)`."""
        function = "σ" if self.function == "sigmoid" else self.function
        return f"{own} = {function}({letter(self.source)})"


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

    @property
    def inputs(self) -> tuple[str, ...]:
        """The scores."""
        return (self.source,)

    def formula(self, own: str, letter: Letter) -> str:
        """`e = top-2(P + c)`."""
        scores = letter(self.source)
        if self.correction is not None:
            scores += f" + {letter(self.correction)}"
        best = best_groups(self.kept, self.groups, self.best)
        within = f", of the best {best}" if self.groups > 1 else ""
        return f"{own} = top-{self.count}({scores}){within}"


@dataclass(frozen=True, kw_only=True)
class Weigh(Op):
    """`g = P[e]`: the weight of each chosen expert, `[T, K]`.

    `renormalized`: divided by their sum, to which `least` is added. `softmax`: the source has
    logits, and the weights are the softmax of the chosen ones. Times `scale`, and times the
    expert's entry of the parameter `factors`.
    """

    source: str
    chosen: str
    renormalized: bool
    softmax: bool
    scale: float
    least: float
    factors: str | None = None

    @property
    def inputs(self) -> tuple[str, ...]:
        """Scores, and the chosen experts."""
        return (self.source, self.chosen)

    def formula(self, own: str, letter: Letter) -> str:
        """`g = 2.5 · P[e] / Σ P[e]`."""
        picked = f"{letter(self.source)}[{letter(self.chosen)}]"
        scale = "" if self.scale == 1 else f"{self.scale:g} · "
        if self.factors is not None:
            scale += f"{letter(self.factors)}[{letter(self.chosen)}] · "
        if self.softmax:
            return f"{own} = {scale}softmax({picked})"
        return f"{own} = {scale}{picked}{f' / Σ {picked}' if self.renormalized else ''}"


@dataclass(frozen=True, kw_only=True)
class WeighInput(Op):
    """`Xₑ[k] = g[k] · X`: the input of each chosen expert, `[K, T, D]`."""

    share: str
    source: str

    @property
    def inputs(self) -> tuple[str, ...]:
        """Weights, and the input of all experts."""
        return (self.share, self.source)

    def formula(self, own: str, letter: Letter) -> str:
        """`Xₑ = g[k] · X`."""
        return f"{own} = {letter(self.share)}[k] · {letter(self.source)}"


@dataclass(frozen=True, kw_only=True)
class ExpertProject(Op):
    """`G[k] = X W[e_k] + b[e_k]`: each token's rows times its chosen matrices, `[K, T, N]`.

    The source has one row per token, `[T, M]`, or one per expert, `[K, T, M]`. `over`, `columns`
    and `fused` as in `Project`.
    """

    source: str
    weight: str
    chosen: str
    over: str
    columns: str
    by_token: bool
    bias: str | None = None
    fused: str = ""

    @property
    def inputs(self) -> tuple[str, ...]:
        """Rows, and their chosen experts."""
        return (self.source, self.chosen)

    def formula(self, own: str, letter: Letter) -> str:
        """`G = X W_gate[e] + b_gate[e]`."""
        e = letter(self.chosen)
        bias = "" if self.bias is None else f" + {letter(self.bias)}[{e}]"
        return f"{own} = {letter(self.source)} {letter(self.weight)}[{e}]{bias}"

    def flops(self, call: Call, tokens: int, sizes: Sizes) -> tuple[int, int]:
        """FLOPs of the products with the chosen experts."""
        matrix = size(self.over, sizes) * size(self.columns, sizes)
        return 2 * call.batch * tokens * sizes["K"] * matrix, 0

    @property
    def by_rows(self) -> bool:
        """True: a row costs one multiplication per number of its experts' matrices."""
        return True


@dataclass(frozen=True, kw_only=True)
class SumExperts(Op):
    """`Y = Σ_k g[k] · O[k] + Z`: weighted outputs of chosen experts plus `also`, `[T, D]`.

    Without a `share` the outputs are not weighted.
    """

    share: str | None
    value: str
    also: str | None

    @property
    def inputs(self) -> tuple[str, ...]:
        """Weights, the experts' outputs, and `also`."""
        return tuple(filter(None, (self.share, self.value, self.also)))

    def formula(self, own: str, letter: Letter) -> str:
        """`Y = Σ_k g O + Z`."""
        also = "" if self.also is None else f" + {letter(self.also)}"
        share = "" if self.share is None else f"{letter(self.share)}[k] · "
        return f"{own} = Σ_k {share}{letter(self.value)}[k]{also}"

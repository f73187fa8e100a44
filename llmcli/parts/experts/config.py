"""What a mixture of experts is (Shazeer et al. 2017, arXiv 1701.06538)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from llmcli.parts.mlp.config import Activation, GateClamp
from llmcli.parts.norm.config import NormConfig

Scores = Literal["softmax", "sigmoid", "softmax of the chosen"]


@dataclass(frozen=True, kw_only=True)
class RoutingConfig:
    """How a token chooses `chosen` of the experts, and what each of them counts.

    `softmax` and `sigmoid` make scores of the router's logits; the largest choose, and those
    scores are the weights: divided by their sum where `renormalized`, to which `least` is added
    (sigmoids may all be 0), then times `scale`. With
    `softmax of the chosen` the largest logits choose, and the weights are the softmax of these.
    `bias`: the router has one. `correction`: a bias is added to the scores that choose, not to the
    weights. Of `groups` of neighbouring experts only the `kept_groups` best are chosen from: those
    whose `group_best` largest scores have the largest sum: 2 (DeepSeek-V3, arXiv 2412.19437), or 1
    (DeepSeek-V2, arXiv 2405.04434). With a `norm` of its own the router reads the residual stream
    through that, not what the experts read. `factors`: the weight of each chosen expert is
    multiplied by a parameter of that expert, last.
    """

    chosen: int
    scores: Scores = "softmax"
    renormalized: bool = False
    least: float = 1e-20
    scale: float = 1.0
    bias: bool = False
    correction: bool = False
    groups: int = 1
    kept_groups: int = 1
    group_best: Literal[1, 2] = 2
    norm: NormConfig | None = None
    factors: bool = False


@dataclass(frozen=True, kw_only=True)
class SharedConfig:
    """An expert that every token passes; where it is `weighed`, times `σ(x · w)`."""

    hidden: int
    weighed: bool = False


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """`Σ_k g[k] · (act(X W_gate[e_k]) ∘ X W_up[e_k]) W_down[e_k]`, and the shared expert's output.

    `experts` networks of `hidden` neurons each, of which every token chooses some; where they are
    not `gated`, nor is the shared one, it is `act(X W_up) W_down` of each. `bias`: every expert's
    products have biases of their own. `clamp`: what bounds gates and neurons of the chosen experts
    (`GateClamp`).
    """

    experts: int
    hidden: int
    activation: Activation
    routing: RoutingConfig
    shared: SharedConfig | None = None
    gated: bool = True
    bias: bool = False
    clamp: GateClamp | None = None

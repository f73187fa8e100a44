"""Configuration of a mixture of experts (Shazeer et al. 2017, arXiv 1701.06538)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from llmcli.config.mlp import Activation, GateClamp
from llmcli.config.norm import NormConfig

Scores = Literal["softmax", "sigmoid", "softmax of the chosen"]


@dataclass(frozen=True, kw_only=True)
class ExpertGroups:
    """`count` groups of adjacent experts, of which only the `kept` best are eligible.

    Those with the largest sum of their `best` largest scores: 2 (DeepSeek-V3, arXiv 2412.19437), or
    1 (DeepSeek-V2, arXiv 2405.04434).
    """

    count: int = 1
    kept: int = 1
    best: Literal[1, 2] = 2


@dataclass(frozen=True, kw_only=True)
class RoutingConfig:
    """How a token chooses `chosen` experts, and their weights.

    `softmax` and `sigmoid` turn the router's logits into scores; the experts with the largest
    scores are chosen, with their scores as weights: divided by their sum plus `least` if
    `renormalized` (sigmoids may all be 0), then times `scale`. With `softmax of the chosen` the
    largest logits are chosen, and their softmax is the weights. `by_logits`: the largest logits are
    chosen with any scores, of which several may round to 1 (Llama 4). `bias`: of the router.
    `correction`: a bias on the scores for the choice only, also for that of `groups`. With a `norm`
    the router reads the residual stream through that norm, not the experts' input. `factors`: each
    chosen expert's weight is finally multiplied by a parameter. `weighs_input`: the weights
    multiply the experts' inputs, not their outputs (Llama 4).
    """

    chosen: int
    scores: Scores = "softmax"
    renormalized: bool = False
    least: float = 1e-20
    scale: float = 1.0
    bias: bool = False
    correction: bool = False
    groups: ExpertGroups = ExpertGroups()
    norm: NormConfig | None = None
    factors: bool = False
    by_logits: bool = False
    weighs_input: bool = False


@dataclass(frozen=True, kw_only=True)
class SharedConfig:
    """An expert that processes every token; if `weighed`, times `σ(x · w)`."""

    hidden: int
    weighed: bool = False


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """`Σ_k g[k] · (act(X W_gate[e_k]) ∘ X W_up[e_k]) W_down[e_k]`, plus the shared expert.

    `experts` networks of `hidden` neurons each, of which every token chooses some. Without `gated`
    each (also the shared one) is `act(X W_up) W_down`. `bias`: in every expert's products. `clamp`:
    bounds of the chosen experts' gates and neurons (`GateClamp`).
    """

    experts: int
    hidden: int
    activation: Activation
    routing: RoutingConfig
    shared: SharedConfig | None = None
    gated: bool = True
    bias: bool = False
    clamp: GateClamp | None = None

    AXES = "E experts, K routing.chosen, F hidden, Fe hidden, Fs shared.hidden"

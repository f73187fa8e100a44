"""A mixture of experts: each token is processed by its chosen experts, and a shared one.

    x ──┬── router ── scores ── choice ── weights ──┐
        ├── W_gate|W_up of the chosen ── W_down ────┴── Σ ──(+)──   (or W_up alone)
        └── shared expert ── · σ(x · w) ────────────────────┘

Axes: B batch, T tokens, D width, E experts, K chosen ones, F hidden. Tensors of (token, expert)
pairs are `[B, K, T, …]`, with the expert's rank as an axis like heads.
"""

from __future__ import annotations

from torch import Tensor

from llmcli.config.experts import ExpertsConfig, SharedConfig
from llmcli.config.mlp import MlpConfig
from llmcli.nn.linear import Fused, Linear, RoutedLinear
from llmcli.nn.parameters import Parameters
from llmcli.nn.step import Step
from llmcli.ops import on_card
from llmcli.ops.activations import activation
from llmcli.ops.compiled import cast
from llmcli.ops.elements import gate, scale_rows
from llmcli.ops.norm import at_least_float32
from llmcli.ops.routing import choose, logits, share, summed, weigh
from llmcli.parts.mlp import build_mlp
from llmcli.parts.norm import Norm
from llmcli.weights.dense import Dense
from llmcli.weights.routes import ExpertAssignment


class Experts:
    """`Σ_k g[k] · (act(X W_gate[e_k]) ∘ X W_up[e_k]) W_down[e_k]`, and the shared expert."""

    def __init__(self, config: ExpertsConfig, name: str, parameters: Parameters) -> None:
        self.config, self.name = config, name
        self.act = activation(
            config.activation, None if config.clamp is None else config.clamp.limit
        )
        routing = config.routing
        self.router = Linear(parameters, name, "router", bias=routing.bias, exact=True)
        self.norm: Norm | None = None
        if routing.norm is not None:
            self.norm = Norm(routing.norm, f"{name}.router_norm", parameters)
        self.factors: Tensor | None = None
        if routing.factors:
            self.factors = parameters.vector((f"{name}.expert_factor",))
        self.correction: Tensor | None = None
        if routing.correction:
            self.correction = parameters.vector((f"{name}.b_choice",))
        enter = ("gate", "up") if config.gated else ("up",)
        self.enter = RoutedLinear(parameters, name, *enter, bias=config.bias)
        self.down = RoutedLinear(parameters, name, "down", bias=config.bias)
        self.shared: SharedExpert | None = None
        if config.shared is not None:
            self.shared = SharedExpert(config.shared, config, name, parameters)

    def fuses(self, x_BTD: Tensor) -> bool:
        """Whether kernels of a card support its router and sum."""
        return self.norm is None and self.router.fuses(x_BTD)

    def __call__(
        self, x_BTD: Tensor, step: Step, fused: Fused | None = None,
        stream_BTD: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """`[B, T, D]` → `[B, T, D]` in at least float32; a router norm reads `stream`."""
        p, reads_BTD = self.name, x_BTD
        if fused is not None:
            x_BTD = reads_BTD.new_empty(reads_BTD.shape, dtype=self.router.dtype)
            logits_BTE = self.router.fused(reads_BTD, norm=fused.norm, wide=True, kept=x_BTD)
        else:
            if self.norm is not None:
                assert stream_BTD is not None
                reads_BTD = self.norm.observed(stream_BTD, step)
            logits_BTE = _logits(reads_BTD, self.router)
        chosen_BTK, found_BTK = self._route(logits_BTE, step)
        weight_BTK = None if self.config.routing.weighs_input else found_BTK
        routes = ExpertAssignment.of(chosen_BTK, static=step.fixed)
        batch, tokens, count = chosen_BTK.shape
        post_NF = None
        if x_BTD.is_cuda and not step.observed:
            post_NF = self._fused(x_BTD.flatten(0, 1), routes, found_BTK)
        if post_NF is None:
            read = x_BTD.flatten(0, 1), routes
            if weight_BTK is None:
                factor_BKT1 = found_BTK.transpose(1, 2).unsqueeze(-1)
                x_BKTD = x_BTD.unsqueeze(1).expand(batch, count, tokens, -1)
                x_BKTD = cast(scale_rows(x_BKTD, factor_BKT1), x_BTD.dtype)
                x_BKTD = step.emit(f"{p}.expert_in", x_BKTD)
                read = x_BKTD.flatten(0, 2), routes.by_pair
            hidden_ND = self.enter(*read)
            post_BKTF = self._activated(hidden_ND.view(batch, count, tokens, -1), step)
            post_NF = post_BKTF.flatten(0, 2)
        out_ND = self.down(post_NF, routes.by_pair, wide=True)
        out_BKTD = step.emit(f"{p}.expert_out", out_ND.view(batch, count, tokens, -1))
        if fused is not None:
            shared = (None, None) if self.shared is None else self.shared.fused(x_BTD, step)
            return on_card.sum_experts(out_BKTD, weight_BTK, *shared, onto=fused.onto)
        shared_BTD = None if self.shared is None else self.shared(x_BTD, step)
        return summed(out_BKTD, weight_BTK, shared_BTD)

    def _fused(
        self, x_MD: Tensor, routes: ExpertAssignment, weight_BTK: Tensor
    ) -> Tensor | None:
        """The hidden layers of pairs in one launch, `[N, F]`; None if no kernel supports that."""
        weight, bias = self.enter.wholes[0]
        if len(self.enter.wholes) > 1 or not isinstance(weight, Dense):
            return None
        if not routes.few(weight.shape[0]) or not on_card.multiplies_experts(x_MD, weight.tensor):
            return None
        weighs = self.config.routing.weighs_input
        return on_card.product_of_dense_experts(
            x_MD, weight.tensor, routes.pairs, bias, x_MD.dtype, self.config,
            weight_BTK.transpose(1, 2).reshape(-1) if weighs else None,
        )

    def _activated(self, x_BKTF: Tensor, step: Step) -> Tensor:
        """The hidden layers from their input: gates and neurons concatenated, or only neurons."""
        p = self.name
        if not self.config.gated:
            pre_BKTF = step.emit(f"{p}.pre", x_BKTF)
            return step.emit(f"{p}.post", self.act(pre_BKTF))
        gate_BKTF, up_BKTF = self.enter.split(x_BKTF)
        gate_BKTF = step.emit(f"{p}.gate", gate_BKTF)
        up_BKTF = step.emit(f"{p}.up", up_BKTF)
        act_BKTF = step.emit(f"{p}.act", self.act(gate_BKTF))
        return step.emit(f"{p}.post", gate(act_BKTF, up_BKTF, self.config.clamp))

    def _route(self, logits_BTE: Tensor, step: Step) -> tuple[Tensor, Tensor]:
        """The chosen experts of each token, and their weights, both `[B, T, K]`."""
        p, routing = self.name, self.config.routing
        logits_BTE = step.emit(f"{p}.router_logits", logits_BTE)
        if not step.observed and on_card.routes(logits_BTE):
            return on_card.route(logits_BTE, self.correction, self.factors, routing)
        scores_BTE = logits_BTE
        if routing.scores != "softmax of the chosen":
            made_BTE = share(scores_BTE, sigmoid=routing.scores == "sigmoid")
            scores_BTE = step.emit(f"{p}.router_probs", made_BTE)
        by_BTE = logits_BTE if routing.by_logits else scores_BTE
        chosen_BTK = step.emit(f"{p}.expert_idx", choose(by_BTE, self.correction, routing))
        weight_BTK = weigh(scores_BTE, chosen_BTK, routing, self.factors)
        return chosen_BTK, step.emit(f"{p}.expert_weight", weight_BTK)


class SharedExpert:
    """A feed-forward that processes every token, times `σ(x · w)` if weighed."""

    def __init__(
        self, config: SharedConfig, of: ExpertsConfig, part: str, parameters: Parameters
    ) -> None:
        self.part = part
        mlp = MlpConfig(hidden=config.hidden, activation=of.activation, gated=of.gated)
        self.mlp = build_mlp(mlp, f"{part}.shared", parameters)
        self.weigh: Linear | None = None
        if config.weighed:
            self.weigh = Linear(parameters, part, "shared")

    def fused(self, x_BTD: Tensor, step: Step) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """The result, and if it is not weighed yet x and w of its weight."""
        if self.weigh is None or not isinstance(self.weigh.weight, Dense):
            return self(x_BTD, step), None
        return self.mlp(x_BTD, step), (x_BTD, self.weigh.weight.tensor)

    def __call__(self, x_BTD: Tensor, step: Step) -> Tensor:
        """`[B, T, D]` → `[B, T, D]` in at least float32."""
        p = self.part
        out_BTD = self.mlp(x_BTD, step)
        if self.weigh is not None:
            out_BTD = step.emit(f"{p}.shared.out", out_BTD)
            logit_BT1 = _logits(x_BTD, self.weigh)
            logit_BT1 = step.emit(f"{p}.shared_logit", logit_BT1)
            weight_BT1 = step.emit(f"{p}.shared_weight", share(logit_BT1, sigmoid=True))
            out_BTD = scale_rows(out_BTD, weight_BT1)
        return step.emit(f"{p}.shared_out", at_least_float32(out_BTD))


def _logits(x_BTD: Tensor, router: Linear) -> Tensor:
    weight = router.weight
    if isinstance(weight, Dense):
        return logits(x_BTD, weight.tensor, router.bias)
    return weight.matmul_float32(x_BTD, router.bias)

"""Per-layer embeddings, and the part of a block that uses them, token by token.

Axes: B batch, T tokens, D width, L layers, P size of a layer's embedding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from llmcli.config.embedding import EmbeddingConfig
from llmcli.config.mlp import MlpConfig
from llmcli.config.ple import PleConfig
from llmcli.graph.parts.ple import BOTH
from llmcli.nn.linear import Fused, Linear
from llmcli.nn.parameters import Parameters
from llmcli.nn.step import Step
from llmcli.ops.activations import activation
from llmcli.ops.elements import add, gate, scale
from llmcli.parts.norm import Norm
from llmcli.weights.dense import Dense
from llmcli.weights.weight import Weight


class LayerEmbeddings:
    """`(scale · W[id] + norm(E W_proj)) · 2^-½`, once for all layers."""

    def __init__(self, config: EmbeddingConfig, parameters: Parameters) -> None:
        assert config.per_layer is not None
        self.dtype = parameters.dtype
        self.shape = (config.per_layer.layers, config.per_layer.size)
        self.table = parameters.table("ple.embed.W")
        self.scale = rounded(config.per_layer.scale, config, self.table)
        self.project = Linear(parameters, "ple", "proj")
        self.norm = Norm(config.per_layer.norm, "ple.proj_norm", parameters, wide=True)

    def __call__(self, ids_BT: Tensor, x_BTD: Tensor, step: Step) -> Tensor:
        """Ids and embeddings of the new tokens → `[B, T, L, P]` in at least float32."""
        normed_BTLP = self._projected(x_BTD, step)
        rows = scale(self.table.rows(ids_BT), self.scale)
        both_BTLP = add(normed_BTLP, self._emit("embed", rows.view(normed_BTLP.shape), step))
        del rows, normed_BTLP
        return self._emit("in", scale(both_BTLP, BOTH), step)

    def _projected(self, x_BTD: Tensor, step: Step) -> Tensor:
        product = self.project.wide(x_BTD.to(self.dtype))
        product_BTLP = self._emit("proj", product.view(*x_BTD.shape[:2], *self.shape), step)
        return self._emit("proj_norm", self.norm(product_BTLP), step)

    def _emit(self, leaf: str, x_BTLP: Tensor, step: Step) -> Tensor:
        """Emit with layers in the place of heads: `[B, L, T, P]`."""
        return step.emit(f"ple.{leaf}", x_BTLP.transpose(1, 2)).transpose(1, 2)


class Ple:
    """`(act(X W_gate) ∘ E_i) W_out`."""

    def __init__(self, config: PleConfig, name: str, parameters: Parameters) -> None:
        self.name, self.layer = name, int(name.split(".")[1])
        self.act = activation(config.activation)
        self.hidden = MlpConfig(hidden=config.size, activation=config.activation, gated=False)
        self.gate = Linear(parameters, name, "gate")
        self.out = Linear(parameters, name, "out")

    def fuses(self, x_BTD: Tensor) -> bool:
        """Whether kernels of a card support its products."""
        return self.gate.fuses(x_BTD) and self.out.fuses(x_BTD)

    def __call__(self, x_BTD: Tensor, step: Step, fused: Fused | None = None) -> Tensor:
        """`[B, T, D]` → `[B, T, D]` in at least float32."""
        assert step.per_layer is not None
        own_BTP = step.per_layer[:, :, self.layer]
        if fused is not None:
            act_BTP = self.gate.fused(x_BTD, norm=fused.norm, hidden=self.hidden)
            post_BTP = gate(act_BTP, own_BTP).to(act_BTP.dtype)
            return self.out.fused(post_BTP, onto=fused.onto, wide=True)
        gate_BTP = step.emit(f"{self.name}.gate", self.gate(x_BTD))
        act_BTP = step.emit(f"{self.name}.act", self.act(gate_BTP))
        post_BTP = gate(act_BTP, own_BTP).to(x_BTD.dtype)
        return self.out.wide(step.emit(f"{self.name}.post", post_BTP))


def rounded(factor: float, config: EmbeddingConfig, table: Weight) -> float:
    """The factor on rows of a table, rounded to its 16 bits if configured."""
    if config.rounded_scale and isinstance(table, Dense):
        return float(torch.tensor(factor, dtype=table.tensor.dtype))
    return factor

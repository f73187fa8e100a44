"""Normalization with its parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from llmcli.config.norm import NormConfig
from llmcli.nn.parameters import Parameters
from llmcli.nn.step import Step
from llmcli.ops.norm import layer_norm, layer_scale, rms_norm, rms_scale

if TYPE_CHECKING:
    from llmcli.kernels.triton.products import Norm as FusedNorm


class Norm:
    """RMSNorm or LayerNorm over the last axis; emits `{name}.scale` (the divisor)."""

    def __init__(
        self, config: NormConfig, name: str, parameters: Parameters, *, wide: bool = False
    ) -> None:
        self.config = config
        self.name = name
        self.w = parameters.vector((f"{name}.w",)) if config.weights else None
        self.b = parameters.vector((f"{name}.b",)) if config.bias else None
        # inputs of products have at most 16 bits, parts of the stream at least 32
        narrow = parameters.dtype.itemsize < 4
        self.dtype = torch.float32 if wide and narrow else parameters.dtype

    def __call__(self, x: Tensor) -> Tensor:
        """Normalize `x` (at least float32); the result is in the model's dtype, or wide."""
        if self.config.kind == "rms":
            return rms_norm(x, self.w, self.config.eps, self.dtype, offset=self.config.offset)
        return layer_norm(x, self.w, self.b, self.config.eps, self.dtype, offset=self.config.offset)

    @property
    def fused(self) -> FusedNorm:
        """The arguments of a card's kernels."""
        kind = 1 if self.config.kind == "rms" else 2
        return self.w, self.b, self.config.eps, kind, self.config.offset

    def observed(self, x: Tensor, step: Step) -> Tensor:
        """Normalize `x`, and emit `{name}.scale` (recomputed, for a tap only) and `{name}.out`.

        Returns the emitted `{name}.out`, possibly edited.
        """
        out = self(x)
        if step.tap is not None:
            scale = rms_scale if self.config.kind == "rms" else layer_scale
            step.emit(f"{self.name}.scale", scale(x, self.config.eps))
        return step.emit(f"{self.name}.out", out)

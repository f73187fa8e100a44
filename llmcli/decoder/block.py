"""One layer of the decoder: a sequence of sublayers `x + Σ branches`.

x ──┬── pre-norm ── part ── post-norm ── · multiplier ──(+)── x of the next sublayer
    └─────────────────────────────────────────────────────┘

If the sum of branches has a norm, the normalized sum is added. If the residual is normed, the
output of the first pre-norm replaces x in the sum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from llmcli.config.attention import AttentionConfig
from llmcli.config.conv import ShortConvConfig
from llmcli.config.delta import DeltaConfig
from llmcli.config.experts import ExpertsConfig
from llmcli.config.latent import LatentConfig
from llmcli.config.mlp import MlpConfig
from llmcli.config.model import LayerConfig
from llmcli.config.ple import PleConfig
from llmcli.config.ssm import SsmConfig
from llmcli.graph.block import BranchNames, SublayerNames, block_names
from llmcli.graph.parts.registry import part_of
from llmcli.nn.linear import Fused
from llmcli.nn.parameters import Parameters
from llmcli.nn.state import LayerState
from llmcli.nn.step import Emitted, Step
from llmcli.ops.compiled import cast
from llmcli.ops.elements import add, scale
from llmcli.parts.attention import Attention
from llmcli.parts.conv import ShortConv
from llmcli.parts.delta import GatedDelta
from llmcli.parts.experts import Experts
from llmcli.parts.latent import LatentAttention
from llmcli.parts.mlp import GatedMlp, Mlp, build_mlp
from llmcli.parts.norm import Norm
from llmcli.parts.ple import Ple
from llmcli.parts.ssm import Ssm


class Mixer(Protocol):
    """A part that mixes tokens, with a state."""

    name: str

    def __call__(self, x_BTD: Tensor, state: LayerState, step: Step) -> Tensor:
        """`[B, T, D]` → `[B, T, D]` in at least float32; appends the new tokens to `state`.

        `state` has the tensors of all mixers of the layer, by the names in their `State` rows; it
        has no slots to write to if not `step.cached`.
        """
        ...

    def derive(
        self, name: str, emitted: Emitted, first: int, stop: int, *, heads: slice = slice(None)
    ) -> Tensor:
        """Rows `first` … `stop`-1 of an activation that no kernel stores, `[B, H, t, …]`.

        Derived in at least float32 from `emitted` tensors of all tokens, for `heads` only.
        """
        ...


# what computes a part of a configuration with its name, and claims its parameters
FORWARDS: dict[type, Callable[[Any, str, Parameters], Any]] = {
    AttentionConfig: Attention,
    ShortConvConfig: ShortConv,
    DeltaConfig: GatedDelta,
    ExpertsConfig: Experts,
    LatentConfig: LatentAttention,
    MlpConfig: build_mlp,
    PleConfig: Ple,
    SsmConfig: Ssm,
}


class Branch:
    """A part with its norms: a sublayer's output, or one term of it."""

    def __init__(self, names: BranchNames, parameters: Parameters) -> None:
        config = names.config
        self.names = names
        self.pre_norm = self.post_norm = None
        if names.norm is not None and config.pre_norm is not None:
            self.pre_norm = Norm(
                config.pre_norm, names.norm, parameters, wide=names.normed_residual
            )
        self.part = FORWARDS[type(config.part)](config.part, names.part, parameters)
        if names.post is not None and config.post_norm is not None:
            self.post_norm = Norm(config.post_norm, names.post, parameters, wide=True)
        kind = part_of(config.part)
        self.mixer: Mixer | None = self.part if kind.mixes else None
        self.reads_stream = kind.reads_stream(config.part)
        self.adds_norm = names.residual_update == f"{names.post}.out"  # emitted by the norm

    def fuses(self, x_BTD: Tensor, step: Step) -> bool:
        """Whether `fused` supports it: on a card, if nothing of it is observed."""
        part = self.part
        unseen = x_BTD.is_cuda and not step.observed and not self.names.normed_residual
        if isinstance(part, Experts) and self.post_norm is not None:
            return False
        fusable = isinstance(part, Attention | Mlp | GatedMlp | Experts | Ple)
        return unseen and fusable and part.fuses(x_BTD)

    def fused(
        self, x_BTD: Tensor, state: LayerState, step: Step, norm: Norm | None, stream_BTD: Tensor
    ) -> Tensor:
        """`stream_BTD` with this branch of x, normalized by `norm`, added by the part's kernels."""
        post = None if self.post_norm is None else self.post_norm.fused
        onto = stream_BTD, post, float(self.names.config.multiplier)
        before = () if self.mixer is None else (state,)
        fused = Fused(None if norm is None else norm.fused, onto)
        added: Tensor = self.part(x_BTD, *before, step, fused)
        return added

    def __call__(self, x_BTD: Tensor, state: LayerState, step: Step, stream_BTD: Tensor) -> Tensor:
        """The part's input from the stream, `[B, T, D]` → `[B, T, D]` in at least float32."""
        names, multiplier = self.names, self.names.config.multiplier
        if self.mixer is not None:
            out = self.mixer(x_BTD, state, step)
        elif self.reads_stream:
            out = self.part(x_BTD, step, stream_BTD=stream_BTD)
        else:
            out = self.part(x_BTD, step)
        if names.output != names.residual_update:
            out = step.emit(names.output, out)
        if self.post_norm is not None:
            out = self.post_norm.observed(out, step)
        if self.adds_norm:
            return out
        if multiplier != 1:
            out = scale(out, multiplier)
        return step.emit(names.residual_update, out)


class Block:
    """A block of sublayers on the stream x in at least float32."""

    def __init__(self, config: LayerConfig, name: str, parameters: Parameters) -> None:
        self.name = name
        self.device = parameters.device
        self.dtype = parameters.dtype  # of product inputs
        self.scale = config.scale
        self.factor: Tensor | None = None
        if config.scaled:
            self.factor = parameters.vector((f"{name}.out_scale.w",))
        self.sublayers: list[tuple[SublayerNames, list[Branch]]] = [
            (names, [Branch(one, parameters) for one in names.branches])
            for names in block_names(config, name)
        ]
        self.sum_norms = {
            one.sum: Norm(one.config, one.norm, parameters, wide=True)
            for names, _ in self.sublayers
            if (one := names.summed) is not None
        }

    @property
    def parts(self) -> dict[str, Any]:
        """The parts by name (`blocks.3.attn`)."""
        return {
            branch.names.part: branch.part for _, branches in self.sublayers for branch in branches
        }

    @property
    def mixers(self) -> list[Mixer]:
        """The parts with a state."""
        every = (branch.mixer for _, branches in self.sublayers for branch in branches)
        return [mixer for mixer in every if mixer is not None]

    def _scaled(self, x_BTD: Tensor) -> Tensor:
        if self.scale != 1:
            x_BTD = scale(x_BTD, self.scale)
        return x_BTD if self.factor is None else scale(x_BTD, self.factor)

    def __call__(self, x_BTD: Tensor, state: LayerState, step: Step) -> Tensor:
        """`[B, T, D]` → `[B, T, D]`; appends the new tokens to `state`."""
        x_BTD = step.emit(f"{self.name}.resid_pre", x_BTD)
        for names, branches in self.sublayers:
            out_BTD: Tensor | None = x_BTD if names.summed is None else None
            norm: Norm | None = None
            reads: Tensor | None = None
            for branch in branches:
                if not branch.names.config.shares_norm:
                    norm, reads = branch.pre_norm, None
                if out_BTD is not None and branch.fuses(x_BTD, step):
                    out_BTD = branch.fused(x_BTD, state, step, norm, out_BTD)
                    continue
                if reads is None and norm is not None:
                    reads = norm.observed(x_BTD, step)
                elif reads is None:
                    reads = cast(x_BTD, self.dtype)
                if branch.names.normed_residual:
                    # x is now normalized, also for branches that share the norm
                    x_BTD, reads, norm = reads, cast(reads, self.dtype), None
                    out_BTD = x_BTD if names.summed is None else None
                added_BTD = branch(reads, state, step, x_BTD)
                out_BTD = added_BTD if out_BTD is None else add(out_BTD, added_BTD)
            assert out_BTD is not None
            if (summed := names.summed) is not None:
                out_BTD = step.emit(summed.sum, out_BTD)
                out_BTD = self.sum_norms[summed.sum].observed(out_BTD, step)
                out_BTD = add(x_BTD, step.emit(names.residual_updates[0], out_BTD))
            if names is self.sublayers[-1][0]:
                out_BTD = self._scaled(out_BTD)
            x_BTD = step.emit(names.stream_out, out_BTD)
        return x_BTD

"""A checkpoint's model and what fills its parameters, from the headers. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TypedDict

from llmcli.checkpoints import Checkpoint
from llmcli.config.formats import PACKED, RUN
from llmcli.config.model import ModelConfig
from llmcli.families import planned, translate
from llmcli.families.rules import Plan, Rule, packable, parts_to_fill, plan, shape_after
from llmcli.families.scales import scale_problem
from llmcli.graph.plan import stored_shapes
from llmcli.graph.precision import QUANTIZED, Precision, matrices, quantizable, resolve_precision
from llmcli.kernels import native


class PrecisionOptions(TypedDict, total=False):
    """The options that choose the precision, `auto` unless given; see `Prepared.precision`."""

    dtype: str
    quantize: str
    activations: str
    cache: str


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What is known before any weight is read; prefetching, loading and the views share it.

    `random`: the weights are drawn, not read.
    """

    checkpoint: Checkpoint
    config: ModelConfig
    rules: tuple[Rule, ...]
    random: bool = False

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of every parameter as stored."""
        return stored_shapes(self.config)

    @cached_property
    def plan(self) -> Plan:
        """How the tensors fill the parameters; of no tensors for random weights."""
        if self.random:
            return plan((), self.rules, self.config)
        return planned(self.checkpoint, self.rules, self.config, self.shapes)

    @cached_property
    def packable(self) -> dict[str, str]:
        """Matrices that can keep the file's format, with this format."""
        formats = {name: info.format for name, info in self.checkpoint.tensors.items()}
        return packable(self.plan.loads, formats, matrices(self.config))

    @property
    def misfits(self) -> list[str]:
        """Parameters that no tensor makes in their shape, then tensors without a place.

        `loading.weights.check_fit` raises for these before anything is read.
        """
        plan, tensors = self.plan, self.checkpoint.tensors
        parts = parts_to_fill(plan.loads, self.shapes)
        made = {load.part: shape_after(tensors[load.source].shape, load.ops) for load in plan.loads}
        wrong = [part for part, shape in parts.items() if made.get(part) != shape]
        foreign = [load.source for load in plan.loads if load.part not in parts]
        return [*wrong, *foreign, *plan.unexpected]

    @property
    def unscaled(self) -> list[str]:
        """Parameters whose tensor lacks the scale that its format needs, or has a wrong one."""
        tensors, scales = self.checkpoint.tensors, self.plan.scales
        return [
            load.target
            for load in self.plan.loads
            if scale_problem(load.source, load.scale, tensors, scales) is not None
        ]

    def precision(
        self,
        device: str,
        *,
        bfloat16: bool,
        dtype: str = "auto",
        quantize: str = "auto",
        activations: str = "auto",
        cache: str = "auto",
    ) -> Precision:
        """The precision on a device with these options.

        `device` may have a number (`cuda:0`); `bfloat16`: whether it has bfloat16 multiplication.
        Raises UsageError for impossible options.
        """
        kind = device.partition(":")[0]
        return resolve_precision(
            self.config,
            dtype=dtype,
            quantize=quantize,
            device=kind,
            stored=set(self.checkpoint.formats),
            bfloat16=bfloat16,
            kernels=native.kernels_of(kind),
            packable=self.packable,
        ).given(activations, cache)


def prepare(checkpoint: Checkpoint, *, random: bool = False) -> Prepared:
    """Read the checkpoint's configuration. Raises the errors of `translate`."""
    config, rules = translate(checkpoint)
    return Prepared(checkpoint=checkpoint, config=config, rules=rules, random=random)


def quantize_without_effect(checkpoint: Checkpoint, quantize: str) -> str:
    """A message with the reason if `--quantize int8` or `int4` has no effect; else empty.

    Raises the errors of `prepare`.
    """
    if quantize not in QUANTIZED or not checkpoint.tensors:
        return ""
    prepared = prepare(checkpoint)
    if quantizable(prepared.config, prepared.packable):
        return ""
    packed = " + ".join(sorted({name for name in prepared.packable.values() if name in PACKED}))
    why = f"has no matrix whose rows are whole blocks of {RUN} numbers"
    if packed:
        why = f"is already quantized ({packed})"
    return f"`--quantize {quantize}` has no effect: `{checkpoint.name}` {why}"

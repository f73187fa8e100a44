"""The arithmetic of a checkpoint, from its headers. No torch."""

from __future__ import annotations

from llmcli.anatomy.arithmetic import QUANTIZED, Arithmetic, arithmetic, matrices, quantizable
from llmcli.checkpoints import Checkpoint
from llmcli.config import ModelConfig
from llmcli.families import Plan, packable, plan, translate
from llmcli.graph.blocks import PACKED, RUN
from llmcli.kernels import native


def arithmetic_of(
    checkpoint: Checkpoint,
    config: ModelConfig,
    todo: Plan | None,
    *,
    dtype: str,
    quantize: str,
    device: str,
    bfloat16: bool,
) -> Arithmetic:
    """The arithmetic on a device for `--dtype` and `--quantize`.

    `todo`: the plan to fill parameters; None: random weights. `device` may have a number
    (`cuda:0`); `bfloat16`: whether it has bfloat16 multiplication. Raises UsageError for impossible
    options.
    """
    formats = {name: info.format for name, info in checkpoint.tensors.items()}
    kind = device.partition(":")[0]
    loads = () if todo is None else todo.loads
    return arithmetic(
        config,
        dtype=dtype,
        quantize=quantize,
        device=kind,
        stored=set(formats.values()),
        bfloat16=bfloat16,
        kernels=native.kernels_of(kind),
        packable=packable(loads, formats, matrices(config)),
    )


def quantize_without_effect(checkpoint: Checkpoint, quantize: str) -> str:
    """A message with the reason if `--quantize int8` or `int4` has no effect; else empty.

    Raises errors of `translate` and `plan`.
    """
    if quantize not in QUANTIZED or not checkpoint.tensors:
        return ""
    config, rules = translate(checkpoint)
    formats = {name: info.format for name, info in checkpoint.tensors.items()}
    loads = plan(checkpoint.tensors, rules, config).loads
    kept = packable(loads, formats, matrices(config))
    if quantizable(config, kept):
        return ""
    packed = " + ".join(sorted({name for name in kept.values() if name in PACKED}))
    why = f"has no matrix whose rows are whole blocks of {RUN} numbers"
    if packed:
        why = f"is already quantized ({packed})"
    return f"`--quantize {quantize}` has no effect: `{checkpoint.name}` {why}"

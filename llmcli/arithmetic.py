"""In which arithmetic a checkpoint is run, from its headers. No torch."""

from __future__ import annotations

from llmcli.anatomy.arithmetic import Arithmetic, arithmetic, matrices, stacks
from llmcli.checkpoints import Checkpoint
from llmcli.config import ModelConfig
from llmcli.errors import UnsupportedModel
from llmcli.families import Plan, packable
from llmcli.graph.blocks import PACKED
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
    """What a model runs in on that device as `--dtype` and `--quantize` say.

    `todo` fills the parameters; None: they are drawn, and nothing of the file is kept. `device` may
    have a number (`cuda:0`), `bfloat16`: whether it multiplies that itself. Raises UsageError for
    options that cannot be had.
    """
    formats = {name: info.format for name, info in checkpoint.tensors.items()}
    loads = () if todo is None else todo.loads
    return arithmetic(
        config,
        dtype=dtype,
        quantize=quantize,
        device=device.partition(":")[0],
        stored=set(formats.values()),
        bfloat16=bfloat16,
        kernels=native.level(),
        packable=packable(loads, formats, matrices(config), stacks(config)),
    )


def check_experts(
    checkpoint: Checkpoint, config: ModelConfig, todo: Plan, numbers: Arithmetic
) -> None:
    """Raises UnsupportedModel for experts in blocks that would have to stay so."""
    experts = stacks(config)
    loads = (load for load in todo.loads if load.target in experts)
    stored = {checkpoint.tensors[load.source].format for load in loads} & PACKED.keys()
    if stored and numbers.formats:
        raise UnsupportedModel(
            f"experts in {' and '.join(sorted(stored))} are not supported yet: there are no kernels"
            " for them",
            hint="`--dtype bfloat16` unpacks all weights, where there is memory for them",
        )

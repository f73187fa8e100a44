"""In which arithmetic a checkpoint is run, from its headers. No torch."""

from __future__ import annotations

from llmcli.anatomy.arithmetic import Arithmetic, arithmetic, matrices
from llmcli.checkpoints import Checkpoint
from llmcli.config import ModelConfig
from llmcli.families import Plan, packable
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

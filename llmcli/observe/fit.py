"""In what arithmetic a model would be held, and whether it fits a device. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from llmcli.anatomy.arithmetic import Arithmetic, arithmetic, matrices
from llmcli.anatomy.counts import longest_context, memory_need
from llmcli.anatomy.model import parameters
from llmcli.anatomy.work import total_work
from llmcli.checkpoints.catalog import CATALOG, CatalogEntry
from llmcli.checkpoints.checkpoint import Checkpoint
from llmcli.checkpoints.tensors import TensorInfo
from llmcli.config import ModelConfig
from llmcli.families.family import find
from llmcli.families.rules import Plan
from llmcli.families.scales import scale_problem
from llmcli.graph.blocks import PACKED, ROWS, packed_bytes
from llmcli.graph.spec import Call
from llmcli.kernels import native
from llmcli.loading.arithmetic import arithmetic_of
from llmcli.reports.info import Device, DeviceFit
from llmcli.text.tokenizer import table_bytes


def chosen_arithmetic(
    checkpoint: Checkpoint,
    config: ModelConfig,
    todo: Plan | None,
    device: Device,
    dtype: str,
    quantize: str,
    activations: str = "auto",
    cache: str = "auto",
) -> Arithmetic:
    """See `arithmetic_of` and `Arithmetic.given`. Raises their errors."""
    return arithmetic_of(
        checkpoint, config, todo, dtype=dtype, quantize=quantize, device=device.device,
        bfloat16=device.bfloat16,
    ).given(activations, cache)  # fmt: skip


def best_fitting(
    device: Device, *, dtype: str, quantize: str, context: int
) -> CatalogEntry | None:
    """The best model of the catalog that is better than the default and fits there.

    None where none does, and where the free memory of the device is not known. Nothing is read.
    """
    for entry in reversed(CATALOG.values()):
        if entry.config:
            config = find(entry.config["model_type"], "safetensors").from_hf(entry.config)
            kind = device.device.partition(":")[0]
            numbers = arithmetic(
                config, dtype=dtype, quantize=quantize, device=kind,
                stored={"Q8_0"}, bfloat16=device.bfloat16, kernels=native.kernels_of(kind),
                packable=_blocks(config, entry.size),
            )  # fmt: skip
            run = Run(batch=1, context=context, tokenizer=table_bytes(config.vocab))
            if fit(config, device, numbers, run).fits:
                return entry
    return None


def _blocks(config: ModelConfig, nbytes: int) -> dict[str, str]:
    """All matrices in one format, the smallest in which they take at least the bytes of a file."""
    found: dict[str, str] = {}
    for name in sorted(PACKED, key=lambda name: packed_bytes(name, ROWS, 256)):
        found = dict.fromkeys(matrices(config), name)
        if sum(spec.bytes or 0 for spec in parameters(config, formats=found)) >= nbytes:
            break
    return found


@dataclass(frozen=True, kw_only=True)
class Run:
    """`batch` sequences of `context` tokens, with a `tokenizer` of so many bytes."""

    batch: int
    context: int
    tokenizer: int


def fit(config: ModelConfig, device: Device, numbers: Arithmetic, run: Run) -> DeviceFit:
    """Bytes that a run needs on a device, against what is free there."""
    cuda = device.device.startswith("cuda")
    multiplies = numbers.dtype == "bfloat16" and device.bfloat16
    need = memory_need(
        config, numbers, batch=run.batch, context=run.context, cuda=cuda, native=multiplies,
        tokenizer=run.tokenizer,
    )  # fmt: skip
    last = Call(batch=run.batch, tokens=1, past=run.context - 1, phase="decode")
    token = total_work(config, last, numbers=numbers)
    free = device.free_bytes
    if free is None or not device.usable:
        return DeviceFit(device=device, need=need, token=token, fits=None, longest=None)
    most = config.embedding.positions or max(run.context, config.context)
    longest = longest_context(
        config, numbers, need, free=free, most=most, cuda=cuda, native=multiplies
    )
    return DeviceFit(
        device=device, need=need, token=token, fits=need.total <= free, longest=longest
    )


def unscaled(todo: Plan, tensors: Mapping[str, TensorInfo]) -> list[str]:
    """Parameters whose tensor lacks the scale that its format needs, or has one that is wrong."""
    return [
        load.target
        for load in todo.loads
        if scale_problem(load.source, load.scale, tensors, todo.scales) is not None
    ]

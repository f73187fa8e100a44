"""What a checkpoint is and whether it fits this machine, from its headers. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from llmcli.anatomy import parameters
from llmcli.anatomy.counts import count_parameters, layer_types, longest_context, memory_need
from llmcli.anatomy.work import total_work
from llmcli.checkpoints.catalog import CATALOG, CatalogEntry
from llmcli.errors import CheckpointError, UnsupportedModel
from llmcli.families import Plan, Rule, families, find, parts_to_fill, plan, translate
from llmcli.families.read import gguf_ignored
from llmcli.graph.spec import DTYPE_BYTES, Call
from llmcli.measure.about import about
from llmcli.measure.memory import dtype_on
from llmcli.measure.shapes import difference
from llmcli.measure.stored import unscaled
from llmcli.reports.checks import ViewCheck
from llmcli.reports.info import (
    Device,
    DeviceFit,
    FamilyFacts,
    FileFacts,
    FlopsNeed,
    InfoReport,
    ModelFacts,
    StoredFormat,
    TokenizerFacts,
)
from llmcli.reports.work import PartWork
from llmcli.text import load_tokenizer

if TYPE_CHECKING:
    from llmcli.checkpoints import Checkpoint
    from llmcli.config import ModelConfig
    from llmcli.text import Tokenizer


def measure_info(
    checkpoint: Checkpoint,
    devices: Sequence[Device],
    *,
    dtype: str = "auto",
    batch: int = 1,
    context: int | None = None,
) -> InfoReport:
    """What the headers say, and what `batch` sequences of `context` tokens take in `dtype`.

    `context` None: the model's own. A configuration that is missing or of a kind that we do not
    know leaves `model` None, as a tokenizer of an unknown kind leaves `tokenizer`; one that
    contradicts itself raises CheckpointError.
    """
    unknown: list[str] = []
    loaded, untold = None, None
    try:
        loaded = load_tokenizer(checkpoint)
    except CheckpointError as error:
        untold = error.message
    model: ModelFacts | None = None
    checks: tuple[ViewCheck, ...] = ()
    ignored: dict[str, str] = {}
    if checkpoint.config is None:
        unknown.append("there is no config.json beside the weights, so the model is not known")
    else:
        try:
            config, rules = translate(checkpoint)
            entries = 0 if loaded is None else loaded.vocab_size
            model = _model(config, checkpoint, devices, dtype, batch, context, entries)
            checks = _checks(checkpoint, config, rules)
            if checkpoint.kind == "gguf":
                ignored = gguf_ignored(checkpoint.metadata, config.model_type)
        except UnsupportedModel as error:
            unknown.append(error.message)
    if untold is not None:
        unknown.append(untold)
    return InfoReport(
        name=checkpoint.name,
        about=about(checkpoint),
        file=_file(checkpoint),
        model=model,
        tokenizer=_tokenizer(loaded),
        unknown=tuple(unknown),
        ignored=ignored,
        checks=checks,
    )


def best_fitting(device: Device, *, dtype: str, context: int) -> CatalogEntry | None:
    """The best model of the catalog that is better than the default and fits there.

    None where none does, and where the free memory of the device is not known. Nothing is read.
    """
    for entry in reversed(CATALOG.values()):
        if entry.config:
            config = find(entry.config["model_type"], "safetensors").from_hf(entry.config)
            arithmetic = dtype_on(device, dtype, {"Q8_0"})  # all of them are GGUF files of blocks
            if _fit(config, device, arithmetic, 1, context, config.vocab).fits:
                return entry
    return None


def supported_families() -> tuple[FamilyFacts, ...]:
    """Every family with the names under which checkpoints call it."""
    return tuple(
        FamilyFacts(
            name=family.name,
            words=family.words,
            hf_types=(*family.hf_types, *family.hf_multimodal),
            gguf_architectures=family.gguf_archs,
        )
        for family in families()
    )


def _model(
    config: ModelConfig,
    checkpoint: Checkpoint,
    devices: Iterable[Device],
    dtype: str,
    batch: int,
    context: int | None,
    entries: int,
) -> ModelFacts:
    stored = {info.format for info in checkpoint.tensors.values()}
    fits = [
        _fit(config, device, dtype_on(device, dtype, stored), batch,
             context or config.context, entries)
        for device in devices
    ]  # fmt: skip
    counts = count_parameters(config)
    return ModelFacts(
        family=config.family,
        model_type=config.model_type,
        width=config.width,
        vocabulary=config.vocab,
        context=config.context,
        positions=config.embedding.positions,
        tied=config.head.tied,
        counts=counts,
        layers=layer_types(config),
        flops=flops_need(config, context or config.context),
        fits=tuple(fits),
        declared=_declared(checkpoint, counts.total),
    )


def _declared(checkpoint: Checkpoint, numbers: int) -> tuple[str, int] | None:
    """The dtype of config.json; transformers 5 calls it `dtype`, those before `torch_dtype`."""
    settings = checkpoint.config or {}
    name = settings.get("dtype", settings.get("torch_dtype"))
    if checkpoint.kind == "gguf" or not isinstance(name, str):
        return None
    name = name.removeprefix("torch.")
    return (name, numbers * DTYPE_BYTES[name]) if name in DTYPE_BYTES else None


def flops_need(config: ModelConfig, context: int) -> FlopsNeed:
    """FLOPs for one sequence; which dtype is computed in changes nothing about them."""

    def work(tokens: int, past: int) -> PartWork:
        call = Call(batch=1, tokens=tokens, past=past, phase="decode" if past else "prefill")
        return total_work(config, call, dtype="float32", logits="last")

    prompt = work(context, 0)
    return FlopsNeed(
        context=context,
        first=work(1, 0).flops,
        last=work(1, context - 1).flops,
        prompt=prompt.flops,
        prompt_full=prompt.flops_full,
    )


def _fit(
    config: ModelConfig, device: Device, dtype: str, batch: int, context: int, entries: int
) -> DeviceFit:
    cuda = device.device.startswith("cuda")
    native = dtype == "bfloat16" and device.bfloat16
    need = memory_need(
        config, dtype=dtype, batch=batch, context=context, cuda=cuda, native=native,
        tokenizer=entries,
    )  # fmt: skip
    last = Call(batch=batch, tokens=1, past=context - 1, phase="decode")
    token = total_work(config, last, dtype=dtype)
    free = device.free_bytes
    if free is None or not device.usable:
        return DeviceFit(device=device, need=need, token=token, fits=None, longest=None)
    most = config.embedding.positions or max(context, config.context)
    longest = longest_context(config, need, free=free, most=most, cuda=cuda, native=native)
    return DeviceFit(
        device=device, need=need, token=token, fits=need.total <= free, longest=longest
    )


def _checks(
    checkpoint: Checkpoint, config: ModelConfig, rules: Sequence[Rule]
) -> tuple[ViewCheck, ...]:
    """That the file has what the configuration describes; none where it has no tensors at all."""
    if not checkpoint.tensors:
        return ()
    todo = plan(checkpoint.tensors, rules, config)
    used = {load.source for load in todo.loads}
    held = sum(math.prod(checkpoint.tensors[name].shape) for name in used)
    shapes = {spec.name: spec.stored_shape or spec.shape for spec in parameters(config)}
    parts = parts_to_fill(todo.loads, shapes)
    missing = set(parts) - {load.part for load in todo.loads}
    unexpected = [load.source for load in todo.loads if load.part not in parts]
    unexpected += todo.unexpected
    total = sum(math.prod(shape) for shape in shapes.values())
    return (
        ViewCheck(
            name="stored_numbers",
            words=f"the stored tensors hold the {total:,} parameters of the configuration",
            value=float(abs(held - total)),
            tolerance=0.0,
        ),
        ViewCheck(
            name="stored_names",
            words="every parameter has its tensor, and every tensor its place",
            value=float(len(missing) + len(unexpected)),
            tolerance=0.0,
            where=_first(missing, parts, unexpected),
        ),
        *_scales(checkpoint, todo),
    )


def _scales(checkpoint: Checkpoint, todo: Plan) -> tuple[ViewCheck, ...]:
    """That what is quantized has its scales; nothing where all is stored as it is."""
    wrong = unscaled(todo, checkpoint.tensors)
    if todo.scales is None and not wrong:
        return ()
    return (difference("stored_scales", "every quantized tensor has a scale that fits it", wrong),)


def _first(missing: set[str], wanted: Iterable[str], unexpected: Sequence[str]) -> str:
    """The first parameter without a tensor, else the first tensor without a parameter."""
    return next((name for name in wanted if name in missing), next(iter(unexpected), ""))


def _file(checkpoint: Checkpoint) -> FileFacts:
    found: dict[str, list[tuple[int, int]]] = {}
    for info in checkpoint.tensors.values():
        found.setdefault(info.format, []).append((math.prod(info.shape), info.nbytes))
    formats = [
        StoredFormat(
            format=name,
            tensors=len(sizes),
            numbers=sum(count for count, _ in sizes),
            bytes=sum(nbytes for _, nbytes in sizes),
        )
        for name, sizes in found.items()
    ]
    return FileFacts(
        kind=checkpoint.kind,
        path=str(checkpoint.path),
        files=len(checkpoint.files),
        bytes=checkpoint.nbytes,
        tensors=len(checkpoint.tensors),
        formats=tuple(sorted(formats, key=lambda stored: -stored.bytes)),
        metadata=checkpoint.metadata,
    )


def _tokenizer(tokenizer: Tokenizer | None) -> TokenizerFacts | None:
    if tokenizer is None:
        return None

    def named(token: int) -> tuple[int, str]:
        return token, tokenizer.token_text(token)

    return TokenizerFacts(
        kind=tokenizer.name,
        vocabulary=tokenizer.vocab_size,
        bos=None if tokenizer.bos_id is None else named(tokenizer.bos_id),
        adds_bos=tokenizer.add_bos,
        eos=tuple(named(token) for token in sorted(tokenizer.eos_ids)),
        chat_template=tokenizer.chat_template is not None,
    )

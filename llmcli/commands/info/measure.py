"""What a checkpoint is and whether it fits this machine, from its headers. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from llmcli.anatomy import stored_shapes
from llmcli.anatomy.arithmetic import Arithmetic
from llmcli.anatomy.counts import count_parameters, layer_types
from llmcli.anatomy.work import total_work
from llmcli.checkpoints.catalog import CATALOG
from llmcli.checkpoints.sniff import no_model
from llmcli.commands.info.report import (
    About,
    FamilyFacts,
    FileFacts,
    FlopsNeed,
    InfoReport,
    ModelFacts,
    StoredFormat,
    TokenizerFacts,
)
from llmcli.errors import CheckpointError, UnsupportedModel, UsageError
from llmcli.families import (
    Plan,
    families,
    ignored_metadata,
    parts_to_fill,
    planned,
    translate,
)
from llmcli.graph.spec import DTYPE_BYTES, Call
from llmcli.measure.fit import Run, chosen_arithmetic, fit, unscaled
from llmcli.records.checks import ViewCheck, difference
from llmcli.records.info import Device, DeviceFit
from llmcli.records.work import PartWork
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
    quantize: str = "auto",
    activations: str = "auto",
    cache: str = "auto",
    batch: int = 1,
    context: int | None = None,
) -> InfoReport:
    """What the headers say, and what `batch` sequences of `context` tokens take.

    In what `dtype`, `quantize`, `activations` and `cache` are on each device. `context` None: the
    model's own. A configuration that is missing or of a kind that we do not know leaves `model`
    None, as a tokenizer of an unknown kind leaves `tokenizer`; one that contradicts itself raises
    CheckpointError.
    """
    unknown: list[str] = []
    unsupported: UnsupportedModel | None = None
    loaded, unreadable = None, None
    try:
        loaded = load_tokenizer(checkpoint)
    except CheckpointError as error:
        unreadable = error.message
    model: ModelFacts | None = None
    checks: tuple[ViewCheck, ...] = ()
    ignored: dict[str, str] = {}
    surplus: tuple[str, ...] = ()
    if checkpoint.config is None:
        try:
            no_model(checkpoint.name, checkpoint.folder, checkpoint.tensors)
            unknown.append("there is no config.json beside the weights, so the model is not known")
        except UnsupportedModel as error:
            unsupported = error
            unknown.append(error.message)
    else:
        try:
            config, rules = translate(checkpoint)
            todo = planned(checkpoint, rules, config, stored_shapes(config))
            asked = partial(
                chosen_arithmetic, checkpoint, config, todo, dtype=dtype, activations=activations,
                cache=cache,
            )  # fmt: skip
            numbers = [(device, asked(device=device, quantize=quantize)) for device in devices]
            run = Run(
                batch=batch, context=context or config.context,
                tokenizer=0 if loaded is None else loaded.nbytes,
            )  # fmt: skip
            model = _model(config, checkpoint, numbers, run)
            if model.fits:
                fitting = _would_fit(config, model.fits[0], run, asked)
                model = replace(model, would_fit=fitting)
            checks = _checks(checkpoint, config, todo)
            ignored, surplus = ignored_metadata(checkpoint), todo.surplus
        except UnsupportedModel as error:
            unsupported = error
            unknown.append(error.message)
    if unreadable is not None:
        unknown.append(unreadable)
    unknown.extend(() if loaded is None else loaded.notes)
    return InfoReport(
        name=checkpoint.name,
        about=about(checkpoint),
        file=_file(checkpoint),
        model=model,
        tokenizer=_tokenizer(loaded),
        unknown=tuple(unknown),
        unsupported=unsupported,
        ignored=ignored,
        surplus=surplus,
        checks=checks,
    )


def supported_families() -> tuple[FamilyFacts, ...]:
    """Every family with the names under which checkpoints call it."""
    return tuple(
        FamilyFacts(
            name=family.name,
            words=family.words,
            hf_types=(*family.hf_types, *family.hf_multimodal),
            gguf_architectures=family.gguf_archs,
            mixers=family.mixers,
            feed_forwards=family.feed_forwards,
            checked="parity with transformers on random weights"
            + "".join(f", `{name}` run" for name in family.ran),
        )
        for family in families()
    )


def _model(
    config: ModelConfig,
    checkpoint: Checkpoint,
    numbers: Iterable[tuple[Device, Arithmetic]],
    run: Run,
) -> ModelFacts:
    fits = [fit(config, device, chosen, run) for device, chosen in numbers]
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
        flops=flops_need(config, run.context),
        fits=tuple(fits),
        declared=_declared(checkpoint, counts.total),
        embedding_scale=config.embedding.scale,
        logit_scale=config.head.scale,
        logit_cap=config.head.cap,
    )


def _would_fit(
    config: ModelConfig, first: DeviceFit, run: Run, asked: Callable[..., Arithmetic]
) -> tuple[tuple[str, DeviceFit], ...]:
    """Options with which a model that does not fit would, and what it would need then.

    Of each weight format the whole context, or as much of it as fits.
    """
    found: list[tuple[str, DeviceFit]] = []
    smallest = first.need.weights + 1
    for quantize in ("auto", "int8", "int4") if first.fits is False else ():
        try:
            numbers = asked(device=first.device, quantize=quantize)
        except UsageError:  # which the dtype that was asked for excludes
            continue
        now = fit(config, first.device, numbers, run)
        if now.need.weights >= smallest:
            continue
        smallest = now.need.weights
        options = [] if quantize == "auto" else [f"--quantize {quantize}"]
        if not now.fits and now.longest:
            tokens = now.longest // 1024 * 1024 or now.longest
            options.append(f"-c {tokens}")
            now = fit(config, first.device, numbers, replace(run, context=tokens))
        if now.fits:
            found.append((" ".join(options), now))
    return tuple(found)


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
        return total_work(config, call, numbers=Arithmetic.of("float32"), logits="last")

    prompt = work(context, 0)
    return FlopsNeed(
        context=context,
        first=work(1, 0).flops,
        last=work(1, context - 1).flops,
        prompt=prompt.flops,
        prompt_full=prompt.flops_full,
    )


def _checks(
    checkpoint: Checkpoint, config: ModelConfig, todo: Plan
) -> tuple[ViewCheck, ...]:
    """That the file has what the configuration describes; none where it has no tensors at all."""
    if not checkpoint.tensors:
        return ()
    used = {load.source for load in todo.loads}
    held = sum(math.prod(checkpoint.tensors[name].shape) for name in used)
    shapes = stored_shapes(config)
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


def about(checkpoint: Checkpoint) -> About:
    """A GGUF file's `general.…`; of a directory, the name and kind that its config.json has."""
    entry = CATALOG.get(checkpoint.name)
    summary = "" if entry is None else entry.summary
    settings = checkpoint.config or {}
    if checkpoint.kind != "gguf":
        kinds = _texts(settings, "architectures")
        return About(summary=summary, name=_text(settings, "_name_or_path"), kind=", ".join(kinds))
    return About(
        summary=summary,
        name=_text(settings, "general.name"),
        organization=_text(settings, "general.organization"),
        license=_text(settings, "general.license"),
        languages=_texts(settings, "general.languages"),
    )


def _text(settings: Mapping[str, Any], key: str) -> str:
    found = settings.get(key)
    return found if isinstance(found, str) else ""


def _texts(settings: Mapping[str, Any], key: str) -> tuple[str, ...]:
    found = settings.get(key)
    return tuple(map(str, found)) if isinstance(found, list | tuple) else ()

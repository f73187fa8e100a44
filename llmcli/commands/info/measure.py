"""What a checkpoint is and whether it fits this machine, from its headers. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
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
    Architecture,
    DeclaredDtype,
    FamilyFacts,
    FileFacts,
    FlopsNeed,
    InfoReport,
    Offer,
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
from llmcli.records.text import Token
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

    With `dtype`, `quantize`, `activations` and `cache` as each device resolves them. `context`
    None: the model's own. Without a known configuration `architecture` is None, and without a known
    tokenizer `tokenizer`; a configuration that contradicts itself raises CheckpointError.
    """
    unknown: list[str] = []
    found: dict[str, Any] = {}
    loaded, unreadable = None, None
    try:
        loaded = load_tokenizer(checkpoint)
    except CheckpointError as error:
        unreadable = error.message
    try:
        if checkpoint.config is None:
            no_model(checkpoint.name, checkpoint.folder, checkpoint.tensors)
            unknown.append("there is no config.json beside the weights, so the model is not known")
        else:
            config, rules = translate(checkpoint)
            shapes = stored_shapes(config)
            todo = planned(checkpoint, rules, config, shapes)
            arithmetic = partial(
                chosen_arithmetic, checkpoint, config, todo, dtype=dtype, activations=activations,
                cache=cache,
            )  # fmt: skip
            run = Run(
                batch=batch,
                context=context or config.context,
                tokenizer=0 if loaded is None else loaded.nbytes,
            )
            fits = [
                fit(config, device, arithmetic(device=device, quantize=quantize), run)
                for device in devices
            ]
            found = {
                "architecture": _architecture(config, checkpoint),
                "flops": flops_need(config, run.context),
                "fits": tuple(fits),
                "would_fit": _would_fit(config, fits[0], run, arithmetic) if fits else (),
                "checks": _checks(checkpoint, shapes, todo),
                "ignored": ignored_metadata(checkpoint),
                "surplus": todo.surplus,
            }
    except UnsupportedModel as error:
        unknown.append(error.message)
        found = {"unsupported": error}
    unknown += [] if unreadable is None else [unreadable]
    unknown += [] if loaded is None else loaded.notes
    return InfoReport(
        name=checkpoint.name,
        about=about(checkpoint),
        file=_file(checkpoint),
        tokenizer=_tokenizer(loaded),
        unknown=tuple(unknown),
        **found,
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


def _architecture(config: ModelConfig, checkpoint: Checkpoint) -> Architecture:
    counts = count_parameters(config)
    return Architecture(
        family=config.family,
        model_type=config.model_type,
        width=config.width,
        vocabulary=config.vocab,
        context=config.context,
        positions=config.embedding.positions,
        tied=config.head.tied,
        embedding_scale=config.embedding.scale,
        logit_scale=config.head.scale,
        logit_cap=config.head.cap,
        declared=_declared(checkpoint, counts.total),
        parameters=counts,
        layers=layer_types(config),
    )


def _would_fit(
    config: ModelConfig, first: DeviceFit, run: Run, arithmetic: Callable[..., Arithmetic]
) -> tuple[Offer, ...]:
    """Options with which a model that does not fit would, and what it would need then.

    For each weight format the whole context, or as much of it as fits.
    """
    found: list[Offer] = []
    smallest = first.need.weights + 1
    for quantize in ("auto", "int8", "int4") if first.fits is False else ():
        try:
            numbers = arithmetic(device=first.device, quantize=quantize)
        except UsageError:  # the requested dtype excludes it
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
            offer = Offer(
                options=" ".join(options),
                context=now.need.context,
                needed_bytes=now.need.total,
            )
            found.append(offer)
    return tuple(found)


def _declared(checkpoint: Checkpoint, numbers: int) -> DeclaredDtype | None:
    """The dtype of config.json; transformers 5 calls it `dtype`, those before `torch_dtype`."""
    settings = checkpoint.config or {}
    name = settings.get("dtype", settings.get("torch_dtype"))
    if checkpoint.kind == "gguf" or not isinstance(name, str):
        return None
    name = name.removeprefix("torch.")
    known = DTYPE_BYTES.get(name)
    return None if known is None else DeclaredDtype(dtype=name, bytes=numbers * known)


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
    checkpoint: Checkpoint, shapes: Mapping[str, tuple[int, ...]], todo: Plan
) -> tuple[ViewCheck, ...]:
    """That the file has each parameter in `shapes`, and a scale for each quantized tensor.

    Without tensors there is nothing to check.
    """
    if not checkpoint.tensors:
        return ()
    used = {load.source for load in todo.loads}
    held = sum(math.prod(checkpoint.tensors[name].shape) for name in used)
    parts = parts_to_fill(todo.loads, shapes)
    missing = set(parts) - {load.part for load in todo.loads}
    unexpected = [load.source for load in todo.loads if load.part not in parts]
    unexpected += todo.unexpected
    total = sum(math.prod(shape) for shape in shapes.values())
    scales = []
    wrong = unscaled(todo, checkpoint.tensors)
    if todo.scales is not None or wrong:
        words = "every quantized tensor has a scale that fits it"
        scales.append(difference("stored_scales", words, wrong))
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
            where=next((part for part in parts if part in missing), next(iter(unexpected), "")),
        ),
        *scales,
    )


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
        entries=checkpoint.metadata,
    )


def _tokenizer(tokenizer: Tokenizer | None) -> TokenizerFacts | None:
    if tokenizer is None:
        return None

    def named(token: int) -> Token:
        return Token(id=token, text=tokenizer.token_text(token))

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

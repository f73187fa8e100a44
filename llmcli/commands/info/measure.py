"""What a checkpoint is and whether it fits this machine, from its headers. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Unpack

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
from llmcli.families import families, ignored_metadata
from llmcli.graph.cost import count_parameters, total_cost
from llmcli.graph.memory import PlannedRun, longest_context, memory_need
from llmcli.graph.parts.registry import layer_types
from llmcli.graph.precision import Precision
from llmcli.graph.spec import DTYPE_BYTES, Call
from llmcli.prepare.prepared import PrecisionOptions, Prepared, prepare
from llmcli.records.document import ViewCheck, difference
from llmcli.records.info import Device, DeviceFit
from llmcli.records.ledger import EACH_HAS_ITS_PLACE
from llmcli.records.text import Token
from llmcli.records.work import Cost
from llmcli.text import load_tokenizer

if TYPE_CHECKING:
    from llmcli.checkpoints import Checkpoint
    from llmcli.config.model import ModelConfig
    from llmcli.text import Tokenizer


def measure_info(
    checkpoint: Checkpoint,
    devices: Sequence[Device],
    *,
    batch: int = 1,
    context: int | None = None,
    **options: Unpack[PrecisionOptions],
) -> InfoReport:
    """What the headers say, and what `batch` sequences of `context` tokens take.

    Each device resolves `options` to its precision. `context` None: the model's own.
    Without a known configuration `architecture` is None, and without a known tokenizer `tokenizer`;
    a configuration that contradicts itself raises CheckpointError.
    """
    unknown: list[str] = []
    found: dict[str, Any] = {}
    loaded, unreadable = None, list[str]()
    try:
        loaded = load_tokenizer(checkpoint)
        unreadable += () if loaded is None else loaded.notes
    except CheckpointError as error:
        unreadable.append(error.message)
    try:
        if checkpoint.config is None:
            no_model(checkpoint.name, checkpoint.folder, checkpoint.tensors)
            unknown.append("there is no config.json beside the weights, so the model is not known")
        else:
            prepared = prepare(checkpoint)
            config = prepared.config
            tokens = context or config.context
            size = 0 if loaded is None else loaded.nbytes

            def fit(device: Device, quantize: str, context: int) -> DeviceFit:
                chosen: PrecisionOptions = {**options, "quantize": quantize}
                precision = prepared.precision(device.device, bfloat16=device.bfloat16, **chosen)
                return _fit(config, device, precision, batch=batch, context=context, tokenizer=size)

            fits = [fit(device, options.get("quantize", "auto"), tokens) for device in devices]
            counts = count_parameters(config)
            architecture = Architecture(
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
            found = {
                "architecture": architecture,
                "flops": _flops(config, tokens),
                "memory": tuple(fits),
                "would_fit": _would_fit(fits[0], tokens, fit) if fits else (),
                "checks": _checks(prepared),
                "ignored": ignored_metadata(checkpoint),
                "surplus": prepared.plan.surplus,
            }
    except UnsupportedModel as error:
        unknown.append(error.message)
        found = {"unsupported": error}
    return InfoReport(
        name=checkpoint.name,
        about=_about(checkpoint),
        file=_file(checkpoint),
        tokenizer=None if loaded is None else _tokenizer(loaded),
        unknown=(*unknown, *unreadable),
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


def _fit(
    config: ModelConfig,
    device: Device,
    precision: Precision,
    *,
    batch: int,
    context: int,
    tokenizer: int,
) -> DeviceFit:
    """Bytes that `batch` sequences of `context` tokens need on a device, and what is free there.

    With a `tokenizer` of so many bytes.
    """
    where = {"cuda": device.device.startswith("cuda"), "native": device.bfloat16}
    planned = PlannedRun(config, precision, batch=batch, context=context, **where)
    need = memory_need(planned, tokenizer=tokenizer)
    last = Call(batch=batch, tokens=1, past=context - 1, phase="decode")
    token = total_cost(config, last, precision=precision)
    free, longest = device.free_bytes, None
    if free is not None and device.usable:
        most = config.embedding.positions or max(context, config.context)
        longest = longest_context(planned, need, free=free, most=most)
    fits = None if free is None or longest is None else need.needed_bytes <= free
    return DeviceFit(device=device, need=need, token=token, fits=fits, longest_context=longest)


def _would_fit(
    first: DeviceFit, context: int, fit: Callable[[Device, str, int], DeviceFit]
) -> tuple[Offer, ...]:
    """Options with which a model that does not fit would, and what it would need then.

    For each weight format the whole context, or as much of it as fits.
    """
    found: list[Offer] = []
    smallest = first.need.weights_bytes + 1
    for quantize in ("auto", "int8", "int4") if first.fits is False else ():
        try:
            now = fit(first.device, quantize, context)
        except UsageError:  # the requested dtype excludes it
            continue
        if now.need.weights_bytes >= smallest:
            continue
        smallest = now.need.weights_bytes
        options = [] if quantize == "auto" else [f"--quantize {quantize}"]
        if not now.fits and now.longest_context:
            tokens = now.longest_context // 1024 * 1024 or now.longest_context
            options.append(f"-c {tokens}")
            now = fit(first.device, quantize, tokens)
        if now.fits:
            need, words = now.need, " ".join(options)
            found.append(Offer(options=words, context=need.context, needed_bytes=need.needed_bytes))
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


def _flops(config: ModelConfig, context: int) -> FlopsNeed:
    """FLOPs for one sequence; which dtype is computed in changes nothing about them."""

    def work(tokens: int, past: int) -> Cost:
        call = Call(batch=1, tokens=tokens, past=past, phase="decode" if past else "prefill")
        return total_cost(config, call, precision=Precision.of("float32"), logits="last")

    prompt = work(context, 0)
    return FlopsNeed(
        context=context,
        first=work(1, 0).flops,
        last=work(1, context - 1).flops,
        prompt=prompt.flops,
        prompt_full=prompt.flops_full,
    )


def _checks(prepared: Prepared) -> tuple[ViewCheck, ...]:
    """That the file makes each parameter in its shape, and has a scale for each quantized tensor.

    Without tensors there is nothing to check.
    """
    tensors = prepared.checkpoint.tensors
    if not tensors:
        return ()
    loads = {load.source: load for load in prepared.plan.loads}
    held = sum(math.prod(tensors[n].shape) - f.unused(tensors[n].shape) for n, f in loads.items())
    total = sum(math.prod(shape) for shape in prepared.shapes.values())
    words = f"the stored tensors hold the {total:,} parameters of the configuration"
    off, scaleless = float(abs(held - total)), prepared.unscaled
    checks = (
        ViewCheck(name="stored_numbers", words=words, value=off, tolerance=0.0),
        difference("stored_names", EACH_HAS_ITS_PLACE, prepared.misfits),
    )
    if prepared.plan.scales is None and not scaleless:
        return checks
    words = "every quantized tensor has a scale that fits it"
    return (*checks, difference("stored_scales", words, scaleless))


def _file(checkpoint: Checkpoint) -> FileFacts:
    formats = []
    for name in dict.fromkeys(info.format for info in checkpoint.tensors.values()):
        infos = [info for info in checkpoint.tensors.values() if info.format == name]
        numbers = sum(math.prod(info.shape) for info in infos)
        held = sum(info.nbytes for info in infos)
        formats.append(StoredFormat(format=name, tensors=len(infos), numbers=numbers, bytes=held))
    return FileFacts(
        kind=checkpoint.kind,
        path=str(checkpoint.path),
        files=len(checkpoint.files),
        bytes=checkpoint.nbytes,
        tensors=len(checkpoint.tensors),
        formats=tuple(sorted(formats, key=lambda one: -one.bytes)),
        entries=checkpoint.metadata,
    )


def _tokenizer(tokenizer: Tokenizer) -> TokenizerFacts:
    def named(id: int) -> Token:
        return Token(id=id, text=tokenizer.token_text(id))

    return TokenizerFacts(
        kind=tokenizer.name,
        vocabulary=tokenizer.vocab_size,
        bos=None if tokenizer.bos_id is None else named(tokenizer.bos_id),
        adds_bos=tokenizer.add_bos,
        eos=tuple(map(named, sorted(tokenizer.eos_ids))),
        chat_template=tokenizer.chat_template is not None,
    )


def _about(checkpoint: Checkpoint) -> About:
    """A GGUF file's `general.…`; of a directory, the name and kind that its config.json has."""
    settings = checkpoint.config or {}
    entry = CATALOG.get(checkpoint.name)
    gguf = checkpoint.kind == "gguf"

    def text(key: str) -> str:
        found = settings.get(key)
        return found if isinstance(found, str) else ""

    def texts(key: str) -> tuple[str, ...]:
        found = settings.get(key)
        return tuple(map(str, found)) if isinstance(found, list | tuple) else ()

    return About(
        summary="" if entry is None else entry.summary,
        name=text("general.name" if gguf else "_name_or_path"),
        organization=text("general.organization"),
        license=text("general.license"),
        languages=texts("general.languages"),
        kind="" if gguf else ", ".join(texts("architectures")),
    )

"""Loads a model by its name."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from typing import Unpack

import torch

from llmcli import devices
from llmcli.checkpoints import Checkpoint, open_model
from llmcli.config.attention import FrequencyFactors, LongRopeScaling, RopeConfig
from llmcli.config.formats import IN_16_BITS
from llmcli.config.model import LayerConfig, ModelConfig
from llmcli.decoder.decoder import Decoder
from llmcli.errors import CheckpointError, UsageError
from llmcli.graph.precision import Precision, matrices
from llmcli.graph.spec import TensorSpec
from llmcli.loading.filling import in_16_bits, mapped, read_values
from llmcli.loading.weights import check_fit, load_weights, randomize
from llmcli.model import Model
from llmcli.nn.parameters import Memory
from llmcli.prepare.ahead import Prefetcher
from llmcli.prepare.placement import Placement, listed, place
from llmcli.prepare.prepared import PrecisionOptions, Prepared, prepare
from llmcli.records.info import Device
from llmcli.records.ledger import Ledger
from llmcli.records.work import LoadTimings, Progress
from llmcli.text.load import text_interface
from llmcli.weights.weight import Weight


def load(
    spec: str | None,
    *,
    device: str = "auto",
    revision: str | None = None,
    offline: bool = False,
    random_weights: int | None = None,
    progress: Progress | None = None,
    **options: Unpack[PrecisionOptions],
) -> Model:
    """Find the checkpoint `spec`, as `llmcli -m` does, and load it.

    Raises errors of `open_model` and `load_checkpoint`.
    """
    checkpoint = open_model(spec, revision=revision, offline=offline, progress=progress)
    return load_checkpoint(
        checkpoint, device=device, random_weights=random_weights, progress=progress, **options
    )


def load_checkpoint(
    checkpoint: Checkpoint,
    *,
    device: str = "auto",
    random_weights: int | None = None,
    text: bool = True,
    progress: Progress | None = None,
    stages: LoadTimings | None = None,
    ahead: Prefetcher | None = None,
    prepared: Prepared | None = None,
    context: int | None = None,
    **options: Unpack[PrecisionOptions],
) -> Model:
    """Build the decoder of the checkpoint's configuration and load its weights.

    With `random_weights` (a seed) the weights are random. Without `text`, a broken or unknown
    tokenizer is not an error, since ids need none. `stages` receives the times of each part.
    Weights packed by `ahead` are not read again; `prepared`: of this checkpoint, if it was made
    before. `context`: tokens for which layers are placed on several devices (`place`). Weights in
    blocks and in 16 bits stay in the mapped file if they do not fit into free memory. Raises
    UnsupportedModel, CheckpointError, WeightMismatch (exit 4), OutOfMemory (5), UsageError.
    """
    stages = stages or LoadTimings()
    with stages("plan"):
        prepared = prepared or prepare(checkpoint, random=random_weights is not None)
        config = configured(prepared)
        if not prepared.random:
            check_loadable(prepared)
    with stages("tokenizer"):
        interface = text_interface(checkpoint, config, text=text)
    with stages("build"):
        every = resolve_devices(device)
        asked = partial(placed_on, every, prepared, context)
        placement = asked(**options)
        precision, on = placement.precision, torch.device(placement.home)
        specs = {spec.name: spec for spec in precision.parameters(config)
                 if placement.of(spec.layer) == placement.home}  # fmt: skip
        weights = sum(spec.bytes for spec in specs.values())
        elsewhere = precision.weight_bytes(config) - weights
        memory: Memory | None = None
        in_file: Mapping[str, Weight] = {}
        if ahead is not None and on.type == "cpu" and not prepared.random:
            memory = ahead.memory
            weights -= ahead.nbytes(precision.formats)
        if not prepared.random and _exceeds(weights, on):
            in_file, weights = _in_the_file(prepared, precision, specs)
            ahead = memory = None
        smaller = partial(_smaller, config, weights + elsewhere, every, asked)
        devices.require_memory(weights, on, _left_for(on, every), smaller)
        placed = [torch.device(name) for name in placement.placed]
        decoder = Decoder(
            config, precision, device=on, placed=placed, memory=memory, in_file=in_file
        )
    if prepared.random:
        randomize(decoder, random_weights or 0)
        ledger = Ledger()
    else:
        ledger = load_weights(
            decoder, checkpoint, prepared.plan, progress=progress, stages=stages, ahead=ahead
        )
    if torch.device("cpu") in decoder.devices:
        devices.keep_freed_memory()
    decoder.check_kernels()
    return Model(
        **vars(interface),
        decoder=decoder,
        checkpoint=checkpoint,
        ledger=ledger,
        random_seed=random_weights,
    )


def resolve_devices(names: str) -> tuple[torch.device, ...]:
    """The devices of `--device`, in order. Raises UsageError for wrong and missing ones."""
    return tuple(map(devices.resolve_device, listed(names)))


def placed_on(
    every: Sequence[torch.device],
    prepared: Prepared,
    context: int | None,
    **options: Unpack[PrecisionOptions],
) -> Placement:
    """`place` on existing devices. Raises UsageError for unsupported options."""
    devices.check_dtype(options.get("dtype", "auto"), every[0])
    found = [
        Device(
            device=str(one),
            name="",
            total_bytes=None,
            free_bytes=devices.available_bytes(one) if len(every) > 1 else None,
            bfloat16=devices.multiplies_bfloat16(one),
        )
        for one in every
    ]
    return place(prepared, found, context=context, **options)


def check_loadable(prepared: Prepared) -> None:
    """Validate by headers that the checkpoint's tensors fill all parameters.

    Raises CheckpointError without tensors, and errors of `check_fit`.
    """
    if not prepared.checkpoint.tensors:
        raise CheckpointError(
            f"`{prepared.checkpoint.name}` has a configuration but no weights",
            hint="fetch its safetensors, or try the architecture with --random-weights",
        )
    check_fit(prepared.plan, prepared.checkpoint.tensors, prepared.shapes)


def load_shapes(
    checkpoint: Checkpoint, *, like: str = "auto", **options: Unpack[PrecisionOptions]
) -> Model:
    """The model on the device `meta`: shapes without data, for any size.

    `dtype` `auto` is that of the device `like`. Weights need not be present. Raises
    UnsupportedModel, CheckpointError and UsageError like `load_checkpoint`.
    """
    prepared = prepare(checkpoint)
    config = configured(prepared)
    precision = placed_on([devices.resolve_device(like)], prepared, None, **options).precision
    interface = text_interface(checkpoint, config, text=False)
    decoder = Decoder(config, precision, device="meta")
    return Model(**vars(interface), decoder=decoder, checkpoint=checkpoint)


def _exceeds(weights: int, device: torch.device) -> bool:
    free = devices.available_bytes(device) if device.type == "cpu" else None
    return free is not None and weights > free


def _in_the_file(
    prepared: Prepared, precision: Precision, specs: Mapping[str, TensorSpec]
) -> tuple[dict[str, Weight], int]:
    """Weights of `specs` that can stay in the mapped file, and the bytes of all others."""
    checkpoint = prepared.checkpoint
    named = matrices(prepared.config)
    found: dict[str, Weight] = {}
    for load_ in prepared.plan.loads:
        info, spec = checkpoint.tensors[load_.source], specs.get(load_.target)
        if info.scales is not None or spec is None:
            continue
        format = spec.dtype
        if info.format == format:
            found[load_.target] = mapped(checkpoint, load_)
        elif IN_16_BITS.get(info.format) == format and load_.target in named and load_.as_stored:
            found[load_.target] = in_16_bits(checkpoint, load_, devices.DTYPES[precision.dtype])
    return found, sum(spec.bytes for name, spec in specs.items() if name not in found)


# Suggestions if the weights do not fit: `--dtype`, `--quantize`, hint.
_SMALLER = (
    ("bfloat16", "none", "try `--dtype bfloat16`"),
    ("auto", "auto", "leave out `--dtype` and `--quantize`"),
    ("auto", "int8", "try `--quantize int8`"),
    ("auto", "int4", "try `--quantize int4`"),
)


def _left_for(home: torch.device, every: Sequence[torch.device]) -> str:
    """What `home` has to hold, in words."""
    rooms = [
        f"`{one}` ({devices.gib(devices.available_bytes(one) or 0)} free)"
        for one in every[: every.index(home)]
    ]
    return f"the weights that do not fit on {' and '.join(rooms)}" if rooms else "the weights"


def _smaller(
    config: ModelConfig,
    weights: int,
    every: Sequence[torch.device],
    asked: Callable[..., Placement],
) -> str:
    """The hint if `weights` bytes do not fit: the first suggestion that does."""
    free = sum(devices.available_bytes(one) or 0 for one in every)
    for dtype, quantize, words in _SMALLER:
        with suppress(UsageError):
            found = asked(dtype=dtype, quantize=quantize).precision.weight_bytes(config)
            if found < weights and found <= free:
                return f"{words}, or use a smaller model"
    return "use a smaller model; `llmcli info` says what fits here"


def configured(prepared: Prepared) -> ModelConfig:
    """The configuration with the RoPE divisors that a file stores in tensors, not in metadata.

    Raises CheckpointError.
    """
    config, checkpoint = prepared.config, prepared.checkpoint

    def read(source: str, rope: RopeConfig) -> tuple[float, ...]:
        info = checkpoint.tensors[source]
        count, needed = math.prod(info.shape), rope.dims // 2
        if count != needed:
            raise CheckpointError(f"`{info.name}` has {count} numbers for {needed} frequencies")
        values = read_values(checkpoint, info, torch.empty(0, dtype=torch.float64))
        return tuple(values.flatten().tolist())

    @cache
    def filled(rope: RopeConfig) -> RopeConfig:
        match rope.scaling:
            case FrequencyFactors(source=source) as scaling:
                return replace(rope, scaling=replace(scaling, factors=read(source, rope)))
            case LongRopeScaling(sources=(short, long)) as scaling:
                scaling = replace(scaling, short=read(short, rope), long=read(long, rope))
                return replace(rope, scaling=replace(scaling, sources=()))
        return rope

    def layer_of(layer: LayerConfig) -> LayerConfig:
        attention = layer.attention
        if attention is None or attention.rope is None:
            return layer
        rope = filled(attention.rope)
        if rope is attention.rope:
            return layer
        return layer.with_attention(replace(attention, rope=rope))

    return replace(config, layers=tuple(map(layer_of, config.layers)))

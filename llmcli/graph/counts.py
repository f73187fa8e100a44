"""Counts a model's parameters and estimates memory of a run, from its configuration."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from math import prod
from typing import Any

from llmcli.config.model import LayerConfig, ModelConfig
from llmcli.graph.arithmetic import Arithmetic
from llmcli.graph.graph import Graph, graph
from llmcli.graph.memory import PROMPT_CHUNK, prefill_peak
from llmcli.graph.ops import Mix, size
from llmcli.graph.parts.registry import part_of
from llmcli.graph.plan import parameters
from llmcli.graph.recurrence import LinearMap
from llmcli.graph.routing import ExpertProject
from llmcli.graph.spec import DTYPE_BYTES, TensorSpec
from llmcli.records.info import LayerType, MemoryNeed, ParameterCounts, StateNeed

# Measured on x86 with PyTorch 2.13 and two threads (tests/benchmarks/memory_estimate.py): code
# pages loaded by computing, and freed memory not returned to the system. Less if matrices are in
# the file's format, with products by our kernels.
_CODE = {False: 33 << 20, True: 36 << 20}  # by whether the dtype has 16 bits
_CODE_OF_KERNELS = 27 << 20
# Code that oneDNN generates and caches per 16-bit product and number of rows. Measured with
# AVX512-BF16 and one thread.
_GENERATED = 600 << 10
_CUBLAS = 32 << 20  # PyTorch's workspace for cuBLAS on Hopper; 8 MiB on others


def count_parameters(config: ModelConfig) -> ParameterCounts:
    """Count every parameter once, by part; a tied head counts 0.

    Active experts: as many as a token chooses.
    """
    model = graph(config)
    parts = dict.fromkeys(("embedding", "attention", "mixers", "mlp", "norms", "head"), 0)
    idle = 0
    for spec in parameters(config):
        row = model.parameters[spec.name]
        parts[row.kind] += spec.count
        if isinstance(model[row.makes].op, ExpertProject):
            idle += spec.count - spec.count // spec.shape[0] * model.sizes(spec.layer)["K"]
    total = sum(parts.values())
    return ParameterCounts(total=total, active=total - idle, **parts)


def layer_types(config: ModelConfig) -> tuple[LayerType, ...]:
    """The layers grouped by their `LayerType`, ordered by first layer."""
    found: dict[LayerType, list[int]] = {}
    for index, layer in enumerate(config.layers):
        found.setdefault(_layer_type(layer), []).append(index)
    return tuple(replace(kind, layers=tuple(layers)) for kind, layers in found.items())


def _layer_type(layer: LayerConfig) -> LayerType:
    found: dict[str, Any] = {}
    kinds: list[str] = []
    details: list[str] = []
    for part in layer.parts:
        facts = dict(part_of(part).facts(part))
        kinds += [facts.pop("kind")] if "kind" in facts else []
        details += facts.pop("details", ())
        found |= facts
    if not kinds:  # without a token mixer
        kinds = [part_of(part).noun.removeprefix("the ") for part in layer.parts]
    return LayerType(
        layers=(), kind=" + ".join(kinds), norm=_norms(layer), details=tuple(details), **found
    )


def _norms(layer: LayerConfig) -> str:
    """`RMSNorm`, `RMSNorm after`, `RMSNorm before and after` (each part); empty without norms."""
    places = {
        "before": [one.pre_norm for one in layer.branches if one.pre_norm is not None],
        "after": [
            norm
            for norm in (*(one.post_norm for one in layer.branches), layer.sum_norm)
            if norm is not None
        ],
    }
    kinds = {norm.kind for norms in places.values() for norm in norms}
    names = [{"rms": "RMSNorm", "layer": "LayerNorm"}[kind] for kind in sorted(kinds)]
    where = " and ".join(place for place, norms in places.items() if norms)
    return " and ".join(names) + (f" {where}" if places["after"] else "")


def memory_need(
    config: ModelConfig,
    numbers: Arithmetic,
    *,
    batch: int,
    context: int,
    cuda: bool = False,
    native: bool = False,
    tokenizer: int = 0,
    chunk: int = PROMPT_CHUNK,
) -> MemoryNeed:
    """Bytes of a run with `batch` sequences of `context` tokens in arithmetic `numbers`.

    `cuda`: on a GPU, where masked attention with shared keys has no fused kernel; only GPU memory
    is counted. `native`: the processor has bfloat16 multiplication, which makes a difference in
    that dtype alone. `tokenizer`: its bytes. Prompts are processed `chunk` tokens at a time.
    """
    fixed, one = (
        sum(spec.bytes for spec in numbers.states(config, batch=batch, capacity=n))
        for n in (0, 1)
    )
    per_token = one - fixed  # states of fixed size
    cache = fixed + per_token * context
    return MemoryNeed(
        formats=numbers.describe(config),
        batch=batch,
        context=context,
        weights_bytes=numbers.weight_bytes(config),
        cache_bytes=cache,
        cache_bytes_per_token=per_token,
        states=state_need(config, numbers),
        # when a sequence ends, the caches of the others are copied
        cache_copies_bytes=cache // batch * (batch - 1),
        prompt_bytes_estimate=prefill_peak(
            config, numbers, batch, context, cuda=cuda, native=native, chunk=chunk
        ),
        runtime_bytes_estimate=(
            _CUBLAS if cuda else _runtime(config, numbers, context, native, chunk) + tokenizer
        ),
    )


def state_need(config: ModelConfig, numbers: Arithmetic) -> StateNeed | None:
    """States of recurrent mixers, and the length from which a cache would be larger; or None."""
    model = graph(config)
    mixed = {layer: node.op for layer, node in model.mixers.items()
             if isinstance(node.op, Mix) and node.op.state}  # fmt: skip
    if not mixed:
        return None
    empty, one = (
        _bytes_by_layer(numbers.states(config, batch=1, capacity=capacity)) for capacity in (0, 1)
    )
    grown = {layer: one[layer] - empty[layer] for layer in one}
    attention = [grown[layer] for layer in grown if layer not in mixed and grown[layer]]
    if attention:
        each = sum(attention) / len(attention)
    else:
        held = DTYPE_BYTES[numbers.cache]
        each = held * sum(_keys_and_values(model, layer, op) for layer, op in mixed.items())
        each /= len(mixed)
    fixed, per_token = sum(empty[layer] for layer in mixed), each * len(mixed)
    return StateNeed(
        layers=len(mixed), bytes=fixed, against="attention" if attention else "same_size",
        against_per_token=per_token, smaller_from=int(fixed // per_token) + 1,
    )  # fmt: skip


def _bytes_by_layer(states: Iterable[TensorSpec]) -> Counter[int]:
    found = Counter[int]()
    for spec in states:
        assert spec.layer is not None
        found[spec.layer] += spec.bytes
    return found


def _keys_and_values(model: Graph, layer: int, op: Mix) -> int:
    """Numbers of keys and values per token in a recurrence."""
    of = model[op.pattern].op
    names = (of.of.key, op.value) if isinstance(of, LinearMap) else (op.value,)
    sizes = {**model.sizes(layer), "T": 1}
    return sum(prod(size(axis, sizes) for axis in model[name].axes) for name in names)


def _runtime(
    config: ModelConfig, numbers: Arithmetic, context: int, native: bool, chunk: int
) -> int:
    """Bytes of the libraries' code, including generated code."""
    short = DTYPE_BYTES[numbers.dtype] < 4
    if numbers.formats and not short:
        return _CODE_OF_KERNELS
    if not (native and numbers.dtype == "bfloat16"):
        return _CODE[short]
    parts: dict[tuple[int, str], list[tuple[int, ...]]] = {}
    for spec in numbers.parameters(config):
        if spec.layer is not None and spec.stored_shape is not None and len(spec.stored_shape) > 1:
            leaf = (spec.shares or spec.name).split(".", 2)[2]
            parts.setdefault((spec.layer, leaf), []).append(spec.stored_shape)
    products = {(leaf, *shapes) for (_, leaf), shapes in parts.items()}
    chunks = 2 if context > chunk else 1  # the last one has fewer rows
    # experts have any number of rows, in lots of 32 (`ops.linear`)
    each = [-(-min(context, chunk) // 32) if len(shapes[0]) == 3 else chunks
            for _, *shapes in products]  # fmt: skip
    return _CODE[short] + _GENERATED * sum(each)


def longest_context(
    config: ModelConfig,
    numbers: Arithmetic,
    need: MemoryNeed,
    *,
    free: int,
    most: int,
    cuda: bool = False,
    native: bool = False,
) -> int:
    """The largest number of tokens, up to `most`, that fits in `free` bytes.

    `need`: of the same run at any length. 0 if not even one token fits.
    """
    batch = need.batch
    fixed = need.cache_bytes - need.cache_bytes_per_token * need.context

    def fits(tokens: int) -> bool:
        cache = fixed + need.cache_bytes_per_token * tokens
        peak = prefill_peak(config, numbers, batch, tokens, cuda=cuda, native=native)
        now = replace(
            need,
            cache_bytes=cache,
            cache_copies_bytes=cache // batch * (batch - 1),
            prompt_bytes_estimate=peak,
        )
        return now.needed_bytes <= free

    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low

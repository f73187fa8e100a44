"""What each part of a forward call takes: FLOPs, and bytes read and written. No torch.

FLOPs are those of the specs: matrix products, 2 a multiply-add, whatever kernel computes them.
Bytes are counted once a call, as if what a part reads a second time were in a cache by then:
parameters as they lie in memory, the keys and values that some new token sees, and each named
activation written once and read by what is computed from it. What a kernel keeps for itself
(float32 copies, tiles, masks) is in none of them, nor is the `scale` of a norm, which only a tap
asks for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from llmcli.anatomy.counts import PROMPT_CHUNK
from llmcli.anatomy.layer_call import LayerCall, Logits, keys_read
from llmcli.anatomy.model import parameters
from llmcli.anatomy.places import Place, part_of, place_of
from llmcli.anatomy.spec import DTYPE_BYTES, Call
from llmcli.config import LayerConfig, ModelConfig
from llmcli.reports.work import PartWork

__all__ = [
    "added", "decode_work", "keys_read", "part_of", "part_work", "place_of", "prompt_work",
    "total_work",
]  # fmt: skip

Works = tuple[tuple[str, int | None, PartWork], ...]  # part, layer, what it takes


def part_work(
    config: ModelConfig,
    call: Call,
    *,
    dtype: str,
    logits: Logits = "last",
    weight_bytes: Mapping[str, int] | None = None,
) -> Works:
    """Each (part, layer) of one call in the order of the forward pass, the layer None outside.

    `dtype` is what is computed in, and what activations and the cache are kept in.
    `weight_bytes`: bytes of each parameter by its name (default: all are of `dtype`).
    """
    return _summed(config, (call,), dtype, logits, weight_bytes)


def prompt_work(
    config: ModelConfig,
    *,
    batch: int,
    tokens: int,
    past: int = 0,
    chunk: int = PROMPT_CHUNK,
    dtype: str,
    logits: Logits = "last",
    weight_bytes: Mapping[str, int] | None = None,
) -> Works:
    """The same of a whole prompt, read `chunk` tokens at a time: the sum over those calls."""
    calls = (
        Call(batch=batch, tokens=min(chunk, tokens - start), past=past + start, phase="prefill")
        for start in range(0, tokens, chunk)
    )
    return _summed(config, calls, dtype, logits, weight_bytes)


def decode_work(
    config: ModelConfig,
    *,
    batch: int,
    tokens: int,
    past: int,
    dtype: str,
    weight_bytes: Mapping[str, int] | None = None,
) -> Works:
    """The same of `tokens` tokens after `past` ones, one a call: the sum over those calls."""
    calls = (
        Call(batch=batch, tokens=1, past=past + later, phase="decode") for later in range(tokens)
    )
    return _summed(config, calls, dtype, "last", weight_bytes)


def total_work(
    config: ModelConfig,
    call: Call,
    *,
    dtype: str,
    logits: Logits = "last",
    weight_bytes: Mapping[str, int] | None = None,
) -> PartWork:
    """All parts of one call together."""
    return added(part_work(config, call, dtype=dtype, logits=logits, weight_bytes=weight_bytes))


def added(works: Works) -> PartWork:
    """All parts together."""
    return sum((work for *_, work in works), PartWork())


def _summed(
    config: ModelConfig,
    calls: Iterable[Call],
    dtype: str,
    logits: Logits,
    weight_bytes: Mapping[str, int] | None,
) -> Works:
    """Layers that are alike are counted once; their weights may differ in size."""
    alike = {layer: replace(config, layers=(layer,)) for layer in dict.fromkeys(config.layers)}
    sums: dict[LayerConfig, dict[Place, PartWork]] = {}
    number = looked_up = positions = 0
    for call in calls:
        number += 1
        looked_up += call.batch * call.tokens
        positions += call.tokens
        for layer, single in alike.items():
            seen = sums.setdefault(layer, {})
            for place, work in LayerCall(single, replace(call, dtype=dtype), logits).works():
                seen[place] = seen.get(place, PartWork()) + work
    weights = _weights(config, weight_bytes, dtype, number, looked_up, positions)
    return tuple(
        (part, layer, work + PartWork(weights=weights[part, layer]))
        for part, layer, work in _unrolled(config, sums)
    )


def _unrolled(
    config: ModelConfig, sums: Mapping[LayerConfig, Mapping[Place, PartWork]]
) -> Iterator[tuple[str, int | None, PartWork]]:
    """What comes before the layers, every layer, what comes after them."""
    outside = [item for item in sums[config.layers[0]].items() if item[0][1] is None]
    yield from ((part, None, work) for (part, _), work in outside if part == "embed")
    for index, layer in enumerate(config.layers):
        for (part, inside), work in sums[layer].items():
            if inside is not None:
                yield part, index, work
    yield from ((part, None, work) for (part, _), work in outside if part != "embed")


def _weights(
    config: ModelConfig,
    weight_bytes: Mapping[str, int] | None,
    dtype: str,
    calls: int,
    looked_up: int,
    positions: int,
) -> Counter[Place]:
    """Bytes of parameters that each part reads: all of them in each call, or rows of a table."""
    found: Counter[Place] = Counter()
    for spec in parameters(config):
        nbytes = (
            spec.count * DTYPE_BYTES[dtype] if weight_bytes is None else weight_bytes[spec.name]
        )
        if spec.name == "embed.W" and config.head.tied:
            found["head", None] += nbytes * calls
        elif spec.name in ("embed.W", "pos_embed.W"):
            rows = looked_up if spec.name == "embed.W" else positions
            found["embed", None] += nbytes * rows // spec.shape[0]
        else:
            found[place_of(spec.name)] += nbytes * calls
    return found

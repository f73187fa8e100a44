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
from llmcli.anatomy.layer_call import LayerCall, keys_read
from llmcli.anatomy.model import parameters
from llmcli.anatomy.places import Place, part_of, place_of
from llmcli.anatomy.spec import DTYPE_BYTES, Call, Logits
from llmcli.config import LayerConfig, ModelConfig
from llmcli.reports.work import PartWork

__all__ = [
    "added", "calls_work", "decode_calls", "decode_work", "keys_read", "part_of", "part_work",
    "place_of", "prompt_calls", "prompt_work", "step_bytes", "total_work",
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
    return calls_work(config, ((call, logits),), dtype=dtype, weight_bytes=weight_bytes)


def prompt_calls(
    *, batch: int, tokens: int, past: int = 0, chunk: int = PROMPT_CHUNK
) -> Iterator[tuple[Call, Logits]]:
    """The forward calls that read `batch` prompts of `tokens` tokens, `chunk` at a time.

    Only the last one has logits (`generation.prefill`).
    """
    for start in range(0, tokens, chunk):
        size = min(chunk, tokens - start)
        call = Call(batch=batch, tokens=size, past=past + start, phase="prefill")
        yield call, "last" if start + size == tokens else "none"


def decode_calls(*, batch: int, tokens: int, past: int) -> Iterator[tuple[Call, Logits]]:
    """Those that write `tokens` tokens after `past` ones, one a call."""
    for later in range(tokens):
        yield Call(batch=batch, tokens=1, past=past + later, phase="decode"), "last"


def prompt_work(
    config: ModelConfig,
    *,
    batch: int,
    tokens: int,
    past: int = 0,
    chunk: int = PROMPT_CHUNK,
    dtype: str,
    weight_bytes: Mapping[str, int] | None = None,
) -> Works:
    """The same of a whole prompt, read `chunk` tokens at a time: the sum over those calls."""
    calls = prompt_calls(batch=batch, tokens=tokens, past=past, chunk=chunk)
    return calls_work(config, calls, dtype=dtype, weight_bytes=weight_bytes)


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
    calls = decode_calls(batch=batch, tokens=tokens, past=past)
    return calls_work(config, calls, dtype=dtype, weight_bytes=weight_bytes)


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


def step_bytes(
    config: ModelConfig,
    tokens: int,
    *,
    batch: int = 1,
    dtype: str,
    weight_bytes: Mapping[str, int] | None = None,
) -> int:
    """Bytes that the step which makes it `tokens` tokens streams: weights, keys and values.

    What is not larger than a cache stays in it from one step to the next.
    """
    call = Call(batch=batch, tokens=1, past=max(0, tokens - 1), phase="decode")
    work = total_work(config, call, dtype=dtype, weight_bytes=weight_bytes)
    return work.weights + work.cache


def added(works: Works) -> PartWork:
    """All parts together."""
    return sum((work for *_, work in works), PartWork())


def calls_work(
    config: ModelConfig,
    calls: Iterable[tuple[Call, Logits]],
    *,
    dtype: str,
    weight_bytes: Mapping[str, int] | None = None,
) -> Works:
    """The same of several calls: the sum over them."""
    # layers that are alike are counted once; their weights may differ in size
    alike = {layer: replace(config, layers=(layer,)) for layer in dict.fromkeys(config.layers)}
    sums: dict[LayerConfig, dict[Place, PartWork]] = {}
    number = heads = looked_up = positions = 0
    for call, logits in calls:
        number += 1
        heads += logits != "none"
        looked_up += call.batch * call.tokens
        positions += call.tokens
        for layer, single in alike.items():
            seen = sums.setdefault(layer, {})
            for place, work in LayerCall(single, replace(call, dtype=dtype), logits).works():
                seen[place] = seen.get(place, PartWork()) + work
    weights = _weights(config, weight_bytes, dtype, number, heads, looked_up, positions)
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
    heads: int,
    looked_up: int,
    positions: int,
) -> Counter[Place]:
    """Bytes of parameters that each part reads: all of them in each call, or rows of a table.

    `heads` of the calls have logits.
    """
    found: Counter[Place] = Counter()
    for spec in parameters(config):
        nbytes = (
            spec.count * DTYPE_BYTES[dtype] if weight_bytes is None else weight_bytes[spec.name]
        )
        if spec.name == "embed.W" and config.head.tied:
            found["head", None] += nbytes * heads
        elif spec.name in ("embed.W", "pos_embed.W"):
            rows = looked_up if spec.name == "embed.W" else positions
            found["embed", None] += nbytes * rows // spec.shape[0]
        else:
            place = place_of(spec.name)
            found[place] += nbytes * (heads if place[1] is None else calls)
    return found

"""The tables of the topics, from the data that the code itself uses. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

from llmcli.checkpoints.catalog import CATALOG
from llmcli.config.formats import FORMATS, IN_16_BITS, PACKED
from llmcli.config.samples import GATED, MODELS, RMS, layer, llama
from llmcli.graph.graph import Graph, graph
from llmcli.records.attention import METRICS
from llmcli.ui.theme import markdown_cell

_BLOCK = re.compile(r"^(blocks|cache)\.\d+\.")
_MARK = re.compile(r"^<!-- table: ([a-z-]+) -->$", re.MULTILINE)
# what `ops.quant`, which needs torch, does not decode: a test holds this list against it
_NOT_READ = ("I8", "I16", "I32", "I64", "Q8_1", "Q8_K", "Q1_0")
READ = tuple(name for name in FORMATS if name not in _NOT_READ)


def filled(text: str) -> str:
    """`text` with the tables in it. Raises KeyError for a table that does not exist."""
    return _MARK.sub(lambda found: TABLES[found[1]](), text)


def _table(header: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(markdown_cell, row))} |" for row in lines)


def catalog() -> str:
    """The catalog: name, model and size of the download, what it is good for and the licence."""
    rows = (
        (
            f"`{one.name}`",
            one.summary.partition(", from the hub")[0],
            f"{one.purpose} · {one.license}",
        )
        for one in CATALOG.values()
    )
    return _table(("name", "model", "purpose · licence"), rows)


def metrics() -> str:
    """The metrics of a head: name, meaning, definition and its source."""
    rows = (
        (f"`{one.name}`", one.words, f"{one.formula}{f' ({one.source})' if one.source else ''}")
        for one in METRICS
    )
    return _table(("metric", "what it measures", "definition"), rows)


def gguf_types() -> str:
    """The weight formats of GGUF that are read: bits per weight, and whether there is a kernel."""
    bits = {name: 8 * one.bytes / one.block for name, one in FORMATS.items()}
    rows = (
        (
            name,
            f"{bits[name]:.5g}",
            f"{FORMATS[name].block}",
            "packed" if name in PACKED else "16-bit" if name in IN_16_BITS else "",
        )
        for name in sorted(READ, key=lambda name: (-bits[name], name))
    )
    return _table(("format", "bits per weight", "block", "multiplied as"), rows)


@cache
def graphs() -> tuple[Graph, ...]:
    """Models that together have every name; the first is the usual block with all its options."""
    heads: Any = dict(kv_heads=1, qk_norm=RMS, sinks=True, gated=True, qkv_bias=True, out_bias=True)
    usual = llama(layer(replace(GATED, bias=True), **heads))
    return tuple(map(graph, (usual, *MODELS.values())))


@cache
def vocabulary() -> dict[str, tuple[str, ...]]:
    """`activation`, `state` and `parameter`: all names, `blocks.*.` for those of a layer."""
    found = {
        "activation": [name for model in graphs() for name in model.nodes],
        "state": [name for model in graphs() for name in model.states],
        "parameter": [name for model in graphs() for name in model.parameters],
    }
    return {kind: tuple(dict.fromkeys(map(_folded, names))) for kind, names in found.items()}


def _folded(name: str) -> str:
    return _BLOCK.sub(r"\1.*.", name)


def activations() -> str:
    """The activations of the usual block in full; what other parts add, in short."""
    usual, *others = graphs()
    rows = (
        (f"`{_folded(name)}`", " ".join(node.axes), usual.words(name))
        for name, node in usual.nodes.items()
    )
    whole = _table(("attention, gated feed-forward network", "axes", "what it is"), rows)
    seen = {_folded(name) for name in usual.nodes}
    parts: dict[str, list[str]] = {}
    for model in others:
        for name, node in model.nodes.items():
            if _folded(name) not in seen:
                seen.add(_folded(name))
                part, _, leaf = _folded(name).rpartition(".")
                parts.setdefault(part, []).append(f"`{leaf}` {' '.join(node.axes)}")
    rest = ((f"`{part}`" if part else "", " · ".join(own)) for part, own in parts.items())
    return whole + "\n\n" + _table(("other parts", "activations and their axes"), rest)


def states() -> str:
    """What layers keep from token to token."""
    rows, seen = [], set[str]()
    for model in graphs():
        for name, state in model.states.items():
            if _folded(name) not in seen:
                seen.add(_folded(name))
                rows.append((f"`{_folded(name)}`", " ".join(state.axes), state.words))
    return _table(("name", "axes", "what"), iter(rows))


def parameters() -> str:
    """The names of parameters, one part on a line."""
    parts: dict[str, list[str]] = {}
    for name in vocabulary()["parameter"]:
        part, _, leaf = name.rpartition(".")
        parts.setdefault(part, []).append(leaf)
    rows = ((f"`{part}`", " ".join(f"`{leaf}`" for leaf in own)) for part, own in parts.items())
    return _table(("part", "parameters"), rows)


TABLES = {
    "catalog": catalog,
    "metrics": metrics,
    "gguf-types": gguf_types,
    "activations": activations,
    "states": states,
    "parameters": parameters,
}

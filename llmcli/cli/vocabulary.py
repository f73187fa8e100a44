"""The tables of the topics, from the data that the code itself uses. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache

from llmcli.checkpoints.catalog import CATALOG
from llmcli.checkpoints.tensors import GGML_TYPES
from llmcli.config.attention import AttentionConfig, RopeConfig, ScoreConfig
from llmcli.config.conv import ShortConvConfig
from llmcli.config.delta import DeltaConfig
from llmcli.config.embedding import EmbeddingConfig, HeadConfig, LayerEmbeddingConfig
from llmcli.config.experts import ExpertsConfig, RoutingConfig, SharedConfig
from llmcli.config.formats import IN_16_BITS, PACKED
from llmcli.config.latent import LatentConfig
from llmcli.config.mlp import MlpConfig
from llmcli.config.model import Branch, LayerConfig, ModelConfig, sequential
from llmcli.config.norm import NormConfig
from llmcli.config.ple import PleConfig
from llmcli.config.ssm import SsmConfig
from llmcli.graph.graph import graph
from llmcli.records.attention import METRICS
from llmcli.ui.theme import markdown_cell

_BLOCK = re.compile(r"^(blocks|cache)\.\d+\.")
_MARK = re.compile(r"^<!-- table: ([a-z-]+) -->$", re.MULTILINE)
_RMS = NormConfig(kind="rms", eps=1e-5)
_LAYER = NormConfig(kind="layer", eps=1e-5, bias=True)
_GATED = MlpConfig(hidden=8, activation="silu", gated=True, bias=True)
# what `ops.quant`, which needs torch, does not decode: a test holds this list against it
_NOT_READ = ("I8", "I16", "I32", "I64", "Q8_1", "Q8_K", "Q1_0")
READ = tuple(name for name, _, _ in GGML_TYPES.values() if name not in _NOT_READ)
_ROPE = RopeConfig(theta=10_000.0, dims=4)


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
    sizes = {name: (block, 8 * size / block) for name, block, size in GGML_TYPES.values()}
    rows = (
        (
            name,
            f"{sizes[name][1]:.5g}",
            f"{sizes[name][0]}",
            "packed" if name in PACKED else "16-bit" if name in IN_16_BITS else "",
        )
        for name in sorted(READ, key=lambda name: (-sizes[name][1], name))
    )
    return _table(("format", "bits per weight", "block", "multiplied as"), rows)


def sample_models() -> dict[str, ModelConfig]:
    """Small models that together have every part, by the heading of what each adds."""
    plain = AttentionConfig(
        heads=2,
        kv_heads=2,
        head_dim=4,
        value_dim=4,
        scores=ScoreConfig(scale=0.5),
        rope=None,
        qkv_bias=True,
        out_bias=True,
    )
    attention = plain.changed(kv_heads=1, rope=_ROPE, qk_norm=_RMS, sinks=True, gated=True)
    latent = LatentConfig(
        heads=2, content=4, value_dim=4, rank=8, query_rank=8, scale=0.5, rope=_ROPE, norm=_RMS
    )
    routing = RoutingConfig(chosen=2, renormalized=True, bias=True, correction=True)
    experts = ExpertsConfig(
        experts=4,
        hidden=8,
        activation="silu",
        routing=routing,
        bias=True,
        shared=SharedConfig(hidden=8, weighed=True),
    )
    ungated = MlpConfig(hidden=8, activation="gelu", gated=False, bias=True)
    delta = DeltaConfig(heads=2, key_heads=1, key_dim=4, value_dim=4, length=4, norm=_RMS)
    ssm = SsmConfig(heads=2, head_dim=4, groups=1, state=4, length=4, norm=_RMS, bias=True)
    ple = LayerEmbeddingConfig(vocab=8, layers=1, size=4, scale=1.0, norm=_RMS)
    per_layer = LayerConfig(
        sublayers=(
            (Branch(part=attention, pre_norm=_RMS, post_norm=_RMS),),
            (Branch(part=_GATED, pre_norm=_RMS, post_norm=_RMS),),
            (Branch(part=PleConfig(size=4, activation="silu"), post_norm=_RMS),),
        )
    )
    return {
        "Attention and a gated feed-forward network": _model(
            sequential(attention, _GATED, norm=_RMS)
        ),
        "Feed-forward network without a gate, learned positions": _model(
            sequential(plain, ungated, norm=_LAYER), embedding=EmbeddingConfig(positions=8)
        ),
        "Latent attention (MLA)": _model(sequential(latent, _GATED, norm=_RMS)),
        "Mixture of experts": _model(sequential(attention, experts, norm=_RMS)),
        "Gated DeltaNet": _model(sequential(delta, _GATED, norm=_RMS)),
        "Mamba-2": _model(sequential(ssm, _GATED, norm=_RMS)),
        "Short convolution": _model(
            sequential(ShortConvConfig(length=3, bias=True), _GATED, norm=_RMS)
        ),
        "Norms after a part, per-layer embeddings": _model(
            per_layer, embedding=EmbeddingConfig(per_layer=ple)
        ),
    }


def _model(layer: LayerConfig, embedding: EmbeddingConfig | None = None) -> ModelConfig:
    return ModelConfig(
        family="",
        model_type="",
        vocab=8,
        width=8,
        context=8,
        layers=(layer,),
        embedding=embedding or EmbeddingConfig(),
        final_norm=_RMS,
        head=HeadConfig(tied=False),
    )


@cache
def vocabulary() -> dict[str, tuple[str, ...]]:
    """`activation`, `state` and `parameter`: all names, `blocks.*.` for those of a layer."""
    models = [graph(config) for config in sample_models().values()]
    found = {
        "activation": [name for model in models for name in model.nodes],
        "state": [name for model in models for name in model.states],
        "parameter": [name for model in models for name in model.parameters],
    }
    return {kind: tuple(dict.fromkeys(map(_folded, names))) for kind, names in found.items()}


def _folded(name: str) -> str:
    return _BLOCK.sub(r"\1.*.", name)


def activations() -> str:
    """The activations of the usual block in full; what other parts add, in short."""
    (_, usual), *others = sample_models().items()
    model = graph(usual)
    rows = (
        (f"`{_folded(name)}`", " ".join(node.axes), model.words(name))
        for name, node in model.nodes.items()
    )
    whole = _table(("attention, gated feed-forward network", "axes", "what it is"), rows)
    seen = {_folded(name) for name in model.nodes}
    parts: dict[str, list[str]] = {}
    for _, config in others:
        for name, node in graph(config).nodes.items():
            if _folded(name) not in seen:
                seen.add(_folded(name))
                part, _, leaf = _folded(name).rpartition(".")
                parts.setdefault(part, []).append(f"`{leaf}` {' '.join(node.axes)}")
    rest = ((f"`{part}`" if part else "", " · ".join(own)) for part, own in parts.items())
    return whole + "\n\n" + _table(("other parts", "activations and their axes"), rest)


def states() -> str:
    """What layers keep from token to token."""
    rows, seen = [], set[str]()
    for config in sample_models().values():
        model = graph(config)
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

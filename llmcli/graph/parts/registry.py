"""The parts of models, a row for each kind.

A part has one name in four folders: `config` has its configuration, `graph.parts` describes its
tensors, `llmcli.parts` computes it, and `decoder.block` lists what computes it by configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from llmcli.config.attention import AttentionConfig
from llmcli.config.conv import ShortConvConfig
from llmcli.config.delta import DeltaConfig
from llmcli.config.experts import ExpertsConfig
from llmcli.config.latent import LatentConfig
from llmcli.config.mlp import MlpConfig
from llmcli.config.model import LayerConfig, ModelConfig
from llmcli.config.ple import PleConfig
from llmcli.config.ssm import SsmConfig
from llmcli.graph.node import PartGraph, Site
from llmcli.graph.parts.attention import attention_facts, attention_graph
from llmcli.graph.parts.conv import conv_facts, conv_graph
from llmcli.graph.parts.delta import delta_facts, delta_graph
from llmcli.graph.parts.experts import experts_facts, experts_graph
from llmcli.graph.parts.latent import latent_facts, latent_graph
from llmcli.graph.parts.mlp import mlp_facts, mlp_graph
from llmcli.graph.parts.ple import ple_facts, ple_graph
from llmcli.graph.parts.ssm import ssm_facts, ssm_graph
from llmcli.records.info import LayerType


@dataclass(frozen=True, kw_only=True)
class Part:
    """A kind of part, identified by the type of its configuration.

    `prefix`: of its tensors' names in a block (`blocks.3.attn.q`); `noun`: for messages. `mixes`:
    tokens depend on each other, so it has a state; otherwise tokens are independent. `graph(config,
    site)` describes its tensors, `facts(config)` provides facts for `info`. It is computed with the
    residual stream, too, if `reads_stream(config)`. `gives`: the leaf name of the output before a
    norm or multiplier, distinct from its other tensors. `foreign`: lines of
    `graph.aliases._FOREIGN`, suggestions for other programs' names.
    """

    prefix: str
    noun: str
    mixes: bool
    graph: Callable[[Any, Site], PartGraph]
    facts: Callable[[Any], Mapping[str, Any]]
    gives: str = "out"
    foreign: str = ""
    reads_stream: Callable[[Any], bool] = lambda config: False


PARTS: dict[type, Part] = {
    AttentionConfig: Part(
        prefix="attn", noun="attention", mixes=True, graph=attention_graph,
        facts=attention_facts,
    ),
    ShortConvConfig: Part(
        prefix="conv", noun="the short convolution", mixes=True, graph=conv_graph,
        facts=conv_facts, gives="out_raw",
    ),
    DeltaConfig: Part(
        prefix="linattn", noun="the gated DeltaNet", mixes=True, graph=delta_graph,
        facts=delta_facts, gives="out_raw",
    ),
    ExpertsConfig: Part(
        prefix="moe", noun="the mixture of experts", mixes=False, graph=experts_graph,
        facts=experts_facts,
        reads_stream=lambda config: config.routing.norm is not None,
    ),
    LatentConfig: Part(
        prefix="attn", noun="attention", mixes=True, graph=latent_graph,
        facts=latent_facts,
    ),
    MlpConfig: Part(
        prefix="mlp", noun="the feed-forward", mixes=False, graph=mlp_graph,
        facts=mlp_facts,
    ),
    PleConfig: Part(
        prefix="ple", noun="the embedding for this layer", mixes=False, graph=ple_graph,
        facts=ple_facts,
    ),
    SsmConfig: Part(
        prefix="ssm", noun="the Mamba-2 mixer", mixes=True, graph=ssm_graph,
        facts=ssm_facts, gives="out_raw",
    ),
}  # fmt: skip


def part_of(config: object) -> Part:
    """The part of a configuration. Raises KeyError for an unknown type."""
    return PARTS[type(config)]


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

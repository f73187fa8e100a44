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
    residual stream, too, if `reads_stream(config)`. `raw_output`: the leaf name of its output
    before a norm or multiplier, distinct from its other tensors. `foreign`: lines of
    `graph.aliases._FOREIGN`, suggestions for other programs' names.
    """

    prefix: str
    noun: str
    mixes: bool
    graph: Callable[[Any, Site], PartGraph]
    facts: Callable[[Any], Mapping[str, Any]]
    raw_output: str = "out"
    foreign: str = ""
    reads_stream: Callable[[Any], bool] = lambda config: False


def _mixer(prefix: str, noun: str, *described: Any, out: str = "out_raw") -> Part:
    graph, facts = described
    return Part(prefix=prefix, noun=noun, mixes=True, graph=graph, facts=facts, raw_output=out)


def _feed(prefix: str, noun: str, *described: Any) -> Part:
    graph, facts = described
    return Part(prefix=prefix, noun=noun, mixes=False, graph=graph, facts=facts)


_EXPERTS = _feed("moe", "the mixture of experts", experts_graph, experts_facts)
PARTS: dict[type, Part] = {
    AttentionConfig: _mixer("attn", "attention", attention_graph, attention_facts, out="out"),
    ShortConvConfig: _mixer("conv", "the short convolution", conv_graph, conv_facts),
    DeltaConfig: _mixer("linattn", "the gated DeltaNet", delta_graph, delta_facts),
    ExpertsConfig: replace(_EXPERTS, reads_stream=lambda e: e.routing.norm is not None),
    LatentConfig: _mixer("attn", "attention", latent_graph, latent_facts, out="out"),
    MlpConfig: _feed("mlp", "the feed-forward", mlp_graph, mlp_facts),
    PleConfig: _feed("ple", "the embedding for this layer", ple_graph, ple_facts),
    SsmConfig: _mixer("ssm", "the Mamba-2 mixer", ssm_graph, ssm_facts),
}


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
    """`RMSNorm`, `RMSNorm after`, `RMSNorm before and after` (each part); empty without norms.

    With a normed residual `LayerNorm on the residual stream`.
    """
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
    where = f" {where}" if places["after"] else ""
    return " and ".join(names) + where + " on the residual stream" * layer.normed_residual

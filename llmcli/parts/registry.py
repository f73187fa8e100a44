"""The parts of models, a row for each kind.

In the folder of a part `config.py` configures it, `graph.py` describes its tensors, `forward.py`
computes it, and an optional `evaluation.py` has the functions of its `Opaque` ops.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from llmcli.graph.node import PartGraph, Site
from llmcli.parts.attention.config import AttentionConfig
from llmcli.parts.attention.graph import attention_facts, attention_graph
from llmcli.parts.conv.config import ShortConvConfig
from llmcli.parts.conv.graph import conv_facts, conv_graph
from llmcli.parts.delta.config import DeltaConfig
from llmcli.parts.delta.graph import delta_facts, delta_graph
from llmcli.parts.experts.config import ExpertsConfig
from llmcli.parts.experts.graph import experts_facts, experts_graph
from llmcli.parts.latent.config import LatentConfig
from llmcli.parts.latent.graph import latent_facts, latent_graph
from llmcli.parts.mlp.config import MlpConfig
from llmcli.parts.mlp.graph import mlp_facts, mlp_graph
from llmcli.parts.ple.config import PleConfig
from llmcli.parts.ple.graph import ple_facts, ple_graph
from llmcli.parts.ssm.config import SsmConfig
from llmcli.parts.ssm.graph import ssm_facts, ssm_graph


@dataclass(frozen=True, kw_only=True)
class Part:
    """A kind of part, identified by the type of its configuration.

    `prefix`: of its tensors' names in a block (`blocks.3.attn.q`); `noun`: for messages. `mixes`:
    tokens depend on each other, so it has a state; otherwise tokens are independent. `graph(config,
    site)` describes its tensors, `facts(config)` provides facts for `info`. `forward` is
    `module:callable`, imported when a decoder is built, since it needs torch; `callable(config,
    name, parameters)` returns the part, which is called with the residual stream too if
    `reads_stream(config)`. `gives`: the leaf name of the output before a norm or multiplier,
    distinct from its other tensors. `foreign`: lines of `anatomy.aliases._FOREIGN`, suggestions for
    other programs' names.
    """

    prefix: str
    noun: str
    mixes: bool
    graph: Callable[[Any, Site], PartGraph]
    facts: Callable[[Any], Mapping[str, Any]]
    forward: str
    gives: str = "out"
    foreign: str = ""
    reads_stream: Callable[[Any], bool] = lambda config: False


PARTS: dict[type, Part] = {
    AttentionConfig: Part(
        prefix="attn", noun="attention", mixes=True, graph=attention_graph,
        facts=attention_facts, forward="llmcli.parts.attention.forward:Attention",
    ),
    ShortConvConfig: Part(
        prefix="conv", noun="the short convolution", mixes=True, graph=conv_graph,
        facts=conv_facts, forward="llmcli.parts.conv.forward:ShortConv", gives="out_raw",
    ),
    DeltaConfig: Part(
        prefix="linattn", noun="the gated DeltaNet", mixes=True, graph=delta_graph,
        facts=delta_facts, forward="llmcli.parts.delta.forward:GatedDelta", gives="out_raw",
    ),
    ExpertsConfig: Part(
        prefix="moe", noun="the mixture of experts", mixes=False, graph=experts_graph,
        facts=experts_facts, forward="llmcli.parts.experts.forward:Experts",
        reads_stream=lambda config: config.routing.norm is not None,
    ),
    LatentConfig: Part(
        prefix="attn", noun="attention", mixes=True, graph=latent_graph,
        facts=latent_facts, forward="llmcli.parts.latent.forward:LatentAttention",
    ),
    MlpConfig: Part(
        prefix="mlp", noun="the feed-forward", mixes=False, graph=mlp_graph,
        facts=mlp_facts, forward="llmcli.parts.mlp.forward:build_mlp",
    ),
    PleConfig: Part(
        prefix="ple", noun="the embedding for this layer", mixes=False, graph=ple_graph,
        facts=ple_facts, forward="llmcli.parts.ple.forward:Ple",
    ),
    SsmConfig: Part(
        prefix="ssm", noun="the Mamba-2 mixer", mixes=True, graph=ssm_graph,
        facts=ssm_facts, forward="llmcli.parts.ssm.forward:Ssm", gives="out_raw",
    ),
}  # fmt: skip


def part_of(config: object) -> Part:
    """The part of a configuration. Raises KeyError for an unknown type."""
    return PARTS[type(config)]


def forward_of(config: object, name: str, parameters: object) -> Any:
    """Build the callable part, which claims its parameters."""
    module, _, made = part_of(config).forward.partition(":")
    return vars(import_module(module))[made](config, name, parameters)

"""The reason why a model lacks a tensor that others have.

The tables have a pattern of names (from the beginning, without the block's number), then the
reason, on its line or the next one. A reason applies if the model lacks what the pattern matched,
of a bias its matrix, and if the values in braces exist.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from llmcli.config.attention import AttentionConfig
from llmcli.config.conv import ShortConvConfig
from llmcli.config.delta import DeltaConfig
from llmcli.config.experts import ExpertsConfig
from llmcli.config.latent import LatentConfig
from llmcli.config.mlp import MlpConfig
from llmcli.config.model import LayerConfig, ModelConfig
from llmcli.config.ssm import SsmConfig
from llmcli.graph.graph import graph
from llmcli.graph.parts.registry import PARTS, part_of

_NUMBERED = re.compile(r"(?:^|\.)(blocks|cache|layers|h|blk)\.(-?\d{1,9})(?=\.|$)")
_RECURRENT = r"""
\w+\.scores                     {mixer} has no scores: its map is no softmax
(attn|linattn|ssm)\b            its mixer is {mixer}
cache\.[kv]\b                   {mixer} keeps a state and no keys and values
ssm\.b(_|$)                     it has no such bias
"""
_PARTS = {
    AttentionConfig: r"""
attn\.(gate(_act|d)?|[Wb]_gate)\b
    its attention has no gate
attn\.sink\b                    its attention has no sinks
(linattn|ssm)\b                 its mixer is softmax attention
cache\.(state|conv|latent|k_pe)\b
    its cache is of keys and values only
attn\.([Wb]_)?(q_latent|kv_latent|[qk]_pe)
    its queries and keys are projections of what enters the attention, not of latents
pos_embed\b                     it has no learned positions, {instead}
attn\.[qk]_rot$                 no rotation{learned}
(attn\.([kv](_norm|_rot)?|[Wb]_[kv])|cache\.[kv])\b
    its keys and values are those of block {lender}
attn\.[Wb]_v\b                  its values are its keys before norm and rotation
attn\.v_norm                    it does not normalize values
attn\.[qk]_norm                 it does not normalize queries and keys
attn\.b_                        it has no such bias
""",
    LatentConfig: r"""
attn\.(sink|gate)\b             its attention has neither sinks nor a gate
(linattn|ssm)\b                 its mixer is softmax attention
pos_embed\b                     it has no learned positions, {instead}
cache\.[kv]\b
    it keeps latents and rotated keys, from which keys and values follow
cache\.(state|conv)\b           its cache is of latents and rotated keys
attn\.[qk]_norm
    it normalizes the latents that queries and keys are made of, not these
attn\.([Wb]_)?q_latent          its queries are projections of what enters the attention
attn\.b_                        it has no such bias
""",
    DeltaConfig: _RECURRENT.replace("{mixer}", "a gated DeltaNet"),
    SsmConfig: _RECURRENT.replace("{mixer}", "a Mamba-2 mixer"),
    ShortConvConfig: r"""
conv\.b                         it has no such bias
""",
    ExpertsConfig: r"""
moe\.(W_shared|shared_logit|shared_weight|shared\.out)$
    its shared expert has no weight of its own, all of it is {added}
moe\.(W_)?shared                it has no shared expert
moe\.router_probs$              logits choose, and only the chosen ones are normalized
moe\.router_norm\b              its router reads what its experts read
moe\.expert_factor$             its experts have no factors
moe\.(shared\.)?pre$
    its experts are gated, the neurons are `moe.gate`, `up`, `act` and `post`
moe\.(shared\.)?(gate|up|act|W_gate|b_gate)$
    its experts have no gates, the neurons are `moe.pre` and `moe.post`
moe\.b_(?=(gate|up|down)$)      its experts have no biases
moe\.b_                         its router has no such bias
""",
    MlpConfig: r"""
moe\b                           its feed-forward is one network, no mixture of experts
mlp\.pre$
    its feed-forward is gated, the neurons are `mlp.gate`, `up`, `act` and `post`
mlp\.(gate|up|act|W_gate|b_gate)$
    its feed-forward has no gate, the neurons are `mlp.pre` and `mlp.post`
mlp\.b_                         it has no such bias
""",
}
_BLOCK = r"""
(branch_sum|sum_norm)\b         the sum of its parts has no norm
out_scale\b                     no parameter multiplies its block's output
(ln\d(_post)?|sum_norm)\.b$     it has no such bias
"""
_MODEL = r"""
pos_embed\b                     it has no learned positions
ple\b                           it has no embeddings for each layer
(embed|head)_proj\b             its embeddings are as wide as its residual stream
head\.W                         its output head is tied, the transpose of `embed.W`
(head|ln_final)\.b$             it has no such bias
"""


def absence_reason(name: str, config: ModelConfig) -> str:
    """The reason for `this model has no …`; empty for a name unknown to every model."""
    layer = _NUMBERED.search(name)
    if layer and not 0 <= int(layer[2]) < len(config.layers):
        return blocks_of(config, "cache" if layer[1] == "cache" else "blocks")
    there = _names(config)
    learned = config.embedding.positions is not None
    reasons = [
        _reason(_inside(name), _rows(config.layers[at], learned), there[at])
        for at in ([int(layer[2])] if layer else range(len(config.layers)))
    ]
    if reasons and all(reasons):  # some layers have it
        return reasons[0]
    return "" if layer else _reason(name, _table(_MODEL), there[None])


def blocks_of(config: ModelConfig, part: str = "blocks") -> str:
    """`its 30 blocks are `blocks.0` to `blocks.29``."""
    layers = len(config.layers)
    if layers == 1:
        return f"its only block is `{part}.0`"
    return f"its {layers} blocks are `{part}.0` to `{part}.{layers - 1}`"


def _inside(name: str) -> str:
    """A name without its block's number: `attn.q`, `cache.k`."""
    return _NUMBERED.sub(lambda found: "cache" if found[1] == "cache" else "", name).lstrip(".")


def _names(config: ModelConfig) -> dict[int | None, set[str]]:
    """The names of each layer's tensors without its number, and of the modules around them."""
    model = graph(config)
    found: dict[int | None, set[str]] = {at: set() for at in (None, *range(len(config.layers)))}
    for rows in (model.nodes, model.parameters, model.states):
        for name, row in rows.items():
            inside = _inside(name)
            while inside:
                found[row.layer].add(inside)
                inside = inside.rpartition(".")[0]
    return found


def _reason(name: str, rows: Iterator[tuple[str, str]], there: set[str]) -> str:
    for pattern, reason in rows:
        found = re.match(pattern, name)
        if found is not None and found[0].replace(".b_", ".W_") not in there:
            return reason
    return ""


def _rows(layer: LayerConfig, learned: bool) -> Iterator[tuple[str, str]]:
    """Patterns and reasons for a block; `learned`: the embedding has positions."""
    for part in layer.parts:
        yield from _table(_PARTS.get(type(part), ""), _values(part, learned))
    nouns = [part_of(part).noun for part in layer.parts]
    for number in range(1, 4):
        if number > len(nouns):
            yield rf"ln{number}(_post)?\b", f"its block has {' and '.join(nouns)}"
            continue
        yield rf"ln{number}_post\b", "no norm follows its attention or feed-forward"
        yield rf"ln{number}\b", f"no separate norm precedes {nouns[number - 1]}"
    yield from _table(_BLOCK)
    prefixes = "|".join(part.prefix for part in PARTS.values())
    yield rf"({prefixes})\b", f"its block is {' and '.join(nouns)}"


def _table(table: str, values: Mapping[str, object] = {}) -> Iterator[tuple[str, str]]:
    for pattern, reason in re.findall(r"^(\S+)\s+(.+)$", table, re.MULTILINE):
        if all(values[name] is not None for name in re.findall("{(.+?)}", reason)):
            yield pattern, reason.format(**values)


def _values(part: object, learned: bool) -> dict[str, object]:
    """The values in braces: None if a reason does not apply to the part."""
    instead = None if learned else "it rotates queries and keys instead"
    match part:
        case AttentionConfig(rope=None):
            unrotated = ", it has learned positions" * learned
            return {"lender": part.kv.layer, "learned": unrotated, "instead": None}
        case AttentionConfig():
            return {"lender": part.kv.layer, "learned": None, "instead": instead}
        case ExpertsConfig():
            return {"added": None if part.shared is None else "added"}
    return {"instead": instead}

"""Names of tensors in TransformerLens, transformers and llama.cpp.

The parts provide TransformerLens' names, which a test compares with its hooks' values. Names of
transformers and llama.cpp follow from a family's rules: a parameter's checkpoint tensor determines
its module, and the module's output. A name is accepted only if it means the same tensor; see
`UNLIKE`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from llmcli.anatomy.block import block_names
from llmcli.anatomy.graph import Graph, graph
from llmcli.config import ModelConfig
from llmcli.graph.node import Node, Parameter
from llmcli.parts.registry import part_of

Sources = Mapping[str, tuple[str, ...]]
"""Checkpoint tensor → parameters that it fills; a fused one (`c_attn`) fills several."""

# TransformerLens' `get_act_name`: `k6` is `blocks.6.attn.hook_k`, `scale4ln1` its norm's
_SHORT = re.compile(r"(?:(?P<norm>ln[12])\.|attn\.|mlp\.)?hook_(?P<word>[a-z_]+)")
_SHORTER = {
    "attn.hook_pattern": "attn",
    "attn.hook_attn_scores": "attn_logits",
    "attn.hook_q": "query",
    "attn.hook_k": "key",
    "attn.hook_v": "value",
    "mlp.hook_pre": "mlp_pre",
    "mlp.hook_post": "mlp_post",
}
_NOT_SHORT = ("in", "out")  # only names before 3.0 have a short form

# Ambiguous names: (pattern, meaning, our names to use instead).
UNLIKE = (
    (
        r"(?P<norm>(?:blocks\.[^.]+\.)?ln(?:1|2|_final))\.hook_normalized",
        "is after the norm's weight in one version of TransformerLens and before it in another",
        ("{norm}.out",),
        "after the weight and bias",
    ),
    (
        r"(?P<block>blocks\.[^.]+)\.hook_(?:attn_in|[qkv]_input)",
        "is before the norm in one version of TransformerLens and after it in another",
        ("{block}.resid_pre", "{block}.ln1.out"),
        "before and after it",
    ),
    (
        r"(?P<block>blocks\.[^.]+)\.hook_mlp_in",
        "is before the norm in one version of TransformerLens and after it in another",
        ("{block}.resid_mid", "{block}.ln2.out"),
        "before and after it",
    ),
)

# llama.cpp has tensors but no modules; names without `.weight` are accepted too
_GGUF = re.compile(r"blk\.|(?:token_embd|position_embd|output_norm|output)\.")


def others(config: ModelConfig, sources: Sources) -> dict[str, tuple[str, ...]]:
    """Every other program's name → our names (several for a fused tensor).

    Names may be missing in this model (`hook_pos_embed`); `missing.why_absent` gives the reason.
    """
    found: dict[str, tuple[str, ...]] = {name: (ours,) for name, ours in listed(config)}
    found |= sources  # the checkpoint's rules take precedence
    for name, made in modules(config, sources):
        found.setdefault(name, made)
    return found


def listed(config: ModelConfig) -> Iterator[tuple[str, str]]:
    """Yield TransformerLens' names for this model, and for tensors that only other models have."""
    model = graph(config)
    rows: list[Node | Parameter] = [*model.nodes.values(), *model.parameters.values()]
    for row in rows:
        for name in row.theirs:
            yield from _forms(name, row.name, row.layer)
    if config.layers:
        yield "ln_final.hook_in", f"blocks.{len(config.layers) - 1}.resid_post"
    for layer, missing in model.absent.items():
        for absent in missing:
            for name, ours in absent.theirs.items():
                yield from _forms(name, ours if layer is None else f"blocks.{layer}.{ours}", layer)


def _forms(name: str, ours: str, layer: int | None) -> Iterator[tuple[str, str]]:
    """Yield a name, with its block number if any, and its short forms."""
    if layer is None:
        yield name, ours
        return
    yield f"blocks.{layer}.{name}", ours
    short = _SHORT.fullmatch(name)
    if short and short["word"] not in _NOT_SHORT:
        yield f"{short['word']}{layer}{short['norm'] or ''}", ours
    if name in _SHORTER:
        yield f"{_SHORTER[name]}{layer}", ours


def modules(config: ModelConfig, sources: Sources) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield transformers' modules → their outputs; and llama.cpp's tensors without suffix.

    A module's output is the activation that its parameter makes; the modules around the output
    projections are the attention, the feed-forward and their block.
    """
    model = graph(config)
    branches = [
        (f"blocks.{i}", one, sublayer.leaves)
        for i, layer in enumerate(config.layers)
        for sublayer in block_names(layer, f"blocks.{i}")
        for one in sublayer.branches
    ]
    # output → (block around its module, whether it mixes tokens)
    outputs: dict[str, tuple[str | None, bool]] = {}
    # BLOOM's modules add the residual stream: output → the stream after it
    added: dict[str, str] = {}
    adds = any(".self_attention.dense." in source for source in sources)
    for block, one, leaves in branches:
        mixes = part_of(one.config.part).mixes
        alone = len(config.layers[int(block.rpartition(".")[2])].parts) == 1
        outputs[one.makes] = (block if mixes or alone else None, mixes)
        if adds:
            added[one.makes] = leaves
    # a mixture's output has no matrix; its shared expert is a separate module
    mixtures = {f"{one.part}.W_router": one.makes for _, one, _ in branches}
    shared: dict[str, list[str]] = {}
    for row in model.parameters.values():
        if row.name.endswith(".shared.W_down"):
            outputs[row.makes], shared[row.name] = (None, False), []
    for source, filled in sources.items():
        if filled[0] in shared:
            shared[filled[0]].append(source)
    for source, filled in sources.items():
        module, _, ending = source.rpartition(".")
        if ending != "weight":
            continue
        if _GGUF.match(source):
            yield module, filled
            continue
        if any("E" in model.parameters[one].axes[:1] for one in filled if one in model.parameters):
            continue  # an expert's output has only some tokens' rows
        made = [_made_by(parameter, model) for parameter in filled]
        yield module, tuple(made)
        if filled[0] in mixtures:
            around, part = module.rpartition(".")[0], filled[0].rpartition(".")[0]
            if f"{part}.router_norm.w" in model.parameters:  # the router is a separate module
                yield around, (f"{part}.router_probs",)
                around = f"{around.rpartition('.')[0]}.experts"
            within = shared.get(f"{part}.shared.W_down")
            if within is not None and not any(one.startswith(f"{around}.") for one in within):
                continue  # a module beside the shared expert
            yield around, (mixtures[filled[0]],)
            if (own := outputs[mixtures[filled[0]]][0]) is not None:
                yield around.rpartition(".")[0], (f"{own}.resid_post",)
        if made[0] not in outputs or not filled[0].rpartition(".")[2].startswith("W"):
            continue
        own, mixes = outputs[made[0]]
        around = module.rpartition(".")[0]
        if around.rpartition(".")[2].isdigit():  # the block itself: its contents have no module
            act = f"{made[0].rpartition('.')[0]}.act"
            if act in model:
                yield f"{around}.act_fn", (act,)
            if module.endswith(".fc2"):  # OPT
                part = filled[0].rpartition(".")[0]
                yield f"{around}.activation_fn", (f"{part}.post",)
            continue
        yield around, (added.get(made[0], made[0]),)
        if own is not None:
            block = around.rpartition(".")[0]
            while block and not block.rpartition(".")[2].isdigit():  # GPT-Neo's `attn.attention`
                yield block, (made[0],)
                block = block.rpartition(".")[0]
            yield block, (f"{own}.resid_post",)
        if not mixes:
            part = filled[0].rpartition(".")[0]
            act = "act" if f"{part}.act" in model else "post"
            function = "act_fn"
            if adds:
                function = "gelu_impl"
            elif module.endswith((".c_proj", ".dense_4h_to_h")):  # GPT-2, GPT-NeoX
                function = "act"
            elif module.endswith(".output_linear"):
                function = "activation"
            elif f"{around}.gate_up_proj.weight" in sources:
                function = "activation_fn"
            yield f"{around}.{function}", (f"{part}.{act}",)


def _made_by(parameter: str, model: Graph) -> str:
    """The activation that a weight makes: `blocks.0.attn.W_q` → `blocks.0.attn.q`.

    A recurrence's output norm and gate are one module.
    """
    if parameter in model.parameters:
        made = model.parameters[parameter].makes
        part, normed, _ = made.partition(".z_norm")
        return f"{part}.out" if normed else made
    # a tied head is not a parameter, and rules may name norms that this model lacks
    return "logits_raw" if parameter == "head.W" else parameter.removesuffix(".w")

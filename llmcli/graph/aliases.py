"""Names of tensors in TransformerLens, transformers and llama.cpp.

TransformerLens' names are a table, which a test compares with its hooks' values. Names of
transformers and llama.cpp follow from a family's rules: a parameter's checkpoint tensor determines
its module, and the module's output. A name is accepted only if it means the same tensor; see
`UNLIKE`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from llmcli.config.attention import AttentionConfig
from llmcli.config.experts import ExpertsConfig
from llmcli.config.latent import LatentConfig
from llmcli.config.mlp import MlpConfig
from llmcli.config.model import ModelConfig
from llmcli.graph.block import block_names
from llmcli.graph.graph import Graph, graph
from llmcli.graph.ops import Scale
from llmcli.graph.parts.registry import PARTS, part_of

Sources = Mapping[str, tuple[str, ...]]
"""Checkpoint tensor → parameters that it fills; a fused one (`c_attn`) fills several."""

# Ours, then TransformerLens', the legacy name first; `a|b`: the first that the model has; `{a,b}`:
# a line for each letter; `<a`: the input of the part that has a. Tensors of other models are
# included.
_OUTSIDE = """
embed                   hook_embed embed.hook_out
pos_embed               hook_pos_embed pos_embed.hook_out
head_proj|ln_final.out  unembed.hook_in
logits_raw              hook_unembed unembed.hook_out lm_head
embed.W                 embed.W_E
pos_embed.W             pos_embed.W_pos
head.W                  unembed.W_U lm_head.weight output.weight
head.b                  unembed.b_U
"""
_BLOCK = """
resid_pre               hook_resid_pre hook_in
resid_mid               hook_resid_mid
resid_post              hook_resid_post hook_out
attn_out                hook_attn_out
mlp_out                 hook_mlp_out
"""
_MIXED = """
attn.scores             attn.hook_attn_scores
attn.pattern            attn.hook_pattern
attn.z                  attn.hook_z
attn.gated|attn.z       attn.o.hook_in
attn.result             attn.hook_result
attn.out|attn_out       attn.o.hook_out attn.hook_out
attn.W_o                attn.W_O
attn.b_{q,k,v,o}        attn.b_{Q,K,V,O}
attn.{q,k}_norm         attn.{q,k}_norm.hook_out attn.hook_{q,k}_normed
"""
_PARTS = {
    AttentionConfig: """
attn.{q,k,v}            attn.hook_{q,k,v} attn.{q,k,v}.hook_out
attn.{q,k}_rot          attn.hook_rot_{q,k}
attn.W_{q,k,v}          attn.W_{Q,K,V}
<attn.W_q               attn.hook_in
<attn.W_{q,k,v,gate}    attn.{q,k,v,gate}.hook_in
""" + _MIXED,
    LatentConfig: """
attn.v                  attn.hook_v
<attn.W_kv_latent       attn.hook_in
""" + _MIXED,
    MlpConfig: """
mlp.gate                mlp.gate.hook_out
mlp.gate|mlp.pre        mlp.hook_pre
mlp.up                  mlp.hook_pre_linear
mlp.up|mlp.pre          mlp.in.hook_out
mlp.post                mlp.hook_post mlp.out.hook_in
mlp.out|mlp_out         mlp.out.hook_out mlp.hook_out
mlp.{W,b}_up            mlp.{W,b}_in
mlp.{W,b}_down          mlp.{W,b}_out
<mlp.W_up               mlp.hook_in mlp.in.hook_in
<mlp.W_gate             mlp.gate.hook_in
""",
    ExpertsConfig: """
moe.out|mlp_out         mlp.hook_out
<moe.W_up               mlp.hook_in
""",
}

# Names that end in a pattern, in a block or outside, and the tensors to suggest; `>a`: the one that
# the parameter a makes.
_FOREIGN = r"""
(attn|self_attn|attention)\.(weights|probs)             attn.pattern
(attn|self_attn|attention)\.(out|output|context)        >attn.W_o attn.z
([qkv])_proj                                            attn.\1 attn.W_\1
o_proj                                                  >attn.W_o attn.W_o
([qkvo])_proj\.weight                                   attn.W_\1
attn_([qkv])(\.weight)?                                 attn.W_\1
(mlp|ffn)\.hidden                                       mlp.post
(gate|up)_proj                                          mlp.\1 mlp.W_\1
(gate|up)_proj                                          moe.\1 moe.W_\1
down_proj                                               >mlp.W_down mlp.W_down
down_proj                                               moe.expert_out moe.W_down
(gate|up|down)_proj\.weight                             mlp.W_\1
((mlp|block_sparse_moe)\.gate|ffn_gate_inp)(\..+)?       moe.router_logits moe.W_router
(input_layernorm|ln_1)(\.weight)?                       ln1.out ln1.w
(post_attention_layernorm|ln_2)(\.weight)?              ln2.out ln2.w
"""
_FOREIGN_OUTSIDE = r"""
(embed|embed_tokens|tok_embeddings|token_embd|wte)(\.weight)?   embed embed.W
(embed_positions|wpe)(\.weight)?                        pos_embed pos_embed.W
embed_tokens_per_layer(\.weight)?                       ple.embed ple.embed.W
(norm|ln_f|final_norm)(\.weight)?                       ln_final.out ln_final.w
(lm_head|unembed|output)(\.weight)?                     logits head.W embed.W
head\.W                                                 embed.W
"""

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
# … in post-norm blocks, where the stream is normalized before it enters the next one.
UNLIKE_POST_NORM = (
    r"(?P<block>blocks\.[^.]+)\.hook_(?:resid_(?:pre|mid|post)|in|out)",
    "is of a pre-norm block's residual stream, and this model is post-norm",
    ("{block}.resid_*", "{block}.ln*.out"),
    "before and after its norms",
)

# TransformerLens' names of norms and places of the stream, which in post-norm blocks are not ours.
_PRE_NORM = re.compile(r"resid_|ln\w*\.hook_|scale\d|blocks\.\d+\.hook_(in|out)$")

# End of a feed-forward's last projection → the activation function's module beside it.
_FUNCTIONS = {
    "c_proj": "act",  # GPT-2
    "dense_4h_to_h": "act",  # GPT-NeoX
    "output_linear": "activation",  # Granite
    "fc2": "activation_fn",  # OPT
    r"feed_forward\.(shared_expert\.)?down_proj": "activation_fn",  # Llama 4
}

# llama.cpp has tensors but no modules; names without `.weight` are accepted too
_GGUF = re.compile(r"blk\.|(?:token_embd|position_embd|output_norm|output)\.")


def others(config: ModelConfig, sources: Sources) -> dict[str, tuple[str, ...]]:
    """Every other program's name → our names (several for a fused tensor).

    Names may be missing in this model (`hook_pos_embed`); `absence_reason` gives the reason.
    """
    names = (one for one in listed(config) if not (config.post_norm and _PRE_NORM.search(one[0])))
    found: dict[str, tuple[str, ...]] = {name: (ours,) for name, ours in names}
    found |= sources  # the checkpoint's rules take precedence
    for name, made in modules(config, sources):
        found.setdefault(name, made)
    return found


def listed(config: ModelConfig) -> Iterator[tuple[str, str]]:
    """Yield TransformerLens' names for this model, and for tensors that only other models have."""
    model = graph(config)
    for name, node in model.nodes.items():
        if isinstance(node.op, Scale):
            norm = name.removesuffix(".scale")
            leaf = norm.rpartition(".")[2]
            yield from _forms(f"{leaf}.hook_scale", name, node.layer)
            yield from _forms(f"{leaf}.hook_out", f"{norm}.out", node.layer)
    yield from _rows(_OUTSIDE, None, model)
    for number, layer in enumerate(config.layers):
        yield from _rows(_BLOCK, number, model)
        known = set()  # whether the part mixes tokens: only the first of either kind has names
        for sublayer in block_names(layer, f"blocks.{number}"):
            for one in sublayer.branches:
                if one.norm is not None:
                    leaf = one.norm.rpartition(".")[2]
                    yield from _forms(f"{leaf}.hook_in", sublayer.stream, number)
                table, mixes = _PARTS.get(type(one.config.part)), part_of(one.config.part).mixes
                if table is not None and mixes not in known:
                    known.add(mixes)
                    yield from _rows(table, number, model, one.reads)
    if config.layers:
        yield "ln_final.hook_in", f"blocks.{len(config.layers) - 1}.resid_post"


def _rows(
    table: str, layer: int | None, model: Graph, reads: str = ""
) -> Iterator[tuple[str, str]]:
    """Yield the names of a table and ours; `reads`: the input of the part."""
    for ours, *names in _expanded(table):
        choices = ours.removeprefix("<").split("|")
        if layer is not None:
            choices = [f"blocks.{layer}.{one}" for one in choices]
        meant = next((one for one in choices if one in model or one in model.parameters), "")
        if ours[0] == "<":
            names, meant = names if meant else [], reads
        for name in names:
            yield from _forms(name, meant or choices[0], layer)


@cache
def _expanded(table: str) -> list[list[str]]:
    """The words of each line; a line with letters in braces is one for each."""
    found = []
    for line in filter(None, table.splitlines()):
        pieces = re.split("[{}]", line)
        for at in range(pieces[1].count(",") + 1 if len(pieces) > 1 else 1):
            choice = (one.split(",")[at] if i % 2 else one for i, one in enumerate(pieces))
            found.append("".join(choice).split())
    return found


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


def foreign_names(name: str, known: Collection[str], config: ModelConfig) -> list[str]:
    """At most two of `known` that another program's name may mean, in its block or the first."""
    number = re.search(r"\.(\d{1,9})\.", name)
    layers = [int(number[1])] if number else range(len(config.layers))
    parameters = graph(config).parameters
    inside = "\n".join((_FOREIGN, *(part.foreign for part in PARTS.values())))
    places = [*((f"blocks.{layer}.", inside) for layer in layers), ("", _FOREIGN_OUTSIDE)]
    for block, table in places:
        for ending, *ours in _expanded(table):
            found = re.search(rf"(?:^|\.)(?:{ending})$", name)
            if found is None:
                continue
            close = []
            for one in ours:
                meant = block + found.expand(one.removeprefix(">"))
                if one[0] == ">":
                    meant = parameters[meant].output if meant in parameters else ""
                close += [meant] if meant in known else []
            if close:
                return close[:2]
    return []


@dataclass(frozen=True, kw_only=True)
class _Output:
    """What a part's module puts out; `block`: the output of the block, if it ends in the part."""

    made: str
    block: str | None = None
    mixes: bool = False


def modules(config: ModelConfig, sources: Sources) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield transformers' modules → their outputs; and llama.cpp's tensors without suffix.

    A module's output is the activation that its parameter makes; the modules around the output
    projections are the attention, the feed-forward and their block.
    """
    model = graph(config)
    # BLOOM's modules add the residual stream
    adds = any(".self_attention.dense." in source for source in sources)
    outputs = _outputs(model, adds=adds)
    sources_of: dict[str, list[str]] = {}
    for source, filled in sources.items():
        sources_of.setdefault(filled[0], []).append(source)
    for source, filled in sources.items():
        module, _, ending = source.rpartition(".")
        if ending != "weight":
            continue
        if _GGUF.match(source):
            yield module, filled
            continue
        if any("E" in model.parameters[one].axes[:1] for one in filled if one in model.parameters):
            continue  # an expert's output has only some tokens' rows
        if _is_block(module):  # a head's norm, in a list within the module of all heads
            module = module.rsplit(".", 2)[0]
        made = tuple(_made_by(parameter, model) for parameter in filled)
        yield module, made
        around, (part, _, leaf) = module.rpartition(".")[0], filled[0].rpartition(".")
        if filled[0] in outputs:
            if f"{part}.router_norm.w" in model.parameters:  # the router is a separate module
                yield around, (f"{part}.router_probs",)
                around = f"{around.rpartition('.')[0]}.experts"
            shared = f"{part}.shared.W_down"
            within = (one.startswith(f"{around}.") for one in sources_of.get(shared, ()))
            if shared in model.parameters and not any(within):
                continue  # a module beside the shared expert
            mixture = outputs[filled[0]]
            yield around, (mixture.made,)
            if mixture.block is not None:
                yield around.rpartition(".")[0], (mixture.block,)
        if made[0] not in outputs or not leaf.startswith("W"):
            continue
        output = outputs[made[0]]
        if not _is_block(around):
            yield around, (output.made,)
            if output.block is not None:
                block = around.rpartition(".")[0]
                while block and not _is_block(block):  # GPT-Neo's `attn.attention`
                    yield block, made[:1]
                    block = block.rpartition(".")[0]
                yield block, (output.block,)
        if not output.mixes:
            act = f"{part}.act" if f"{part}.act" in model else f"{part}.post"
            fused = f"{around}.gate_up_proj.weight" in sources  # Phi-3
            usual = "activation_fn" if fused else "act_fn"
            function = "gelu_impl" if adds else _function(module, usual)
            yield f"{around}.{function}", (act,)


def _outputs(model: Graph, *, adds: bool) -> dict[str, _Output]:
    """The outputs by what a last projection makes; of a mixture, which has none, by its router.

    `adds`: modules put out the stream after they added to it.
    """
    found: dict[str, _Output] = {}
    for i, layer in enumerate(model.config.layers):
        leaves = f"blocks.{i}.resid_post"
        if model.config.post_norm:  # the norm that follows belongs to their block
            last = i == len(model.config.layers) - 1
            leaves = "ln_final.out" if last else f"blocks.{i + 1}.ln1.out"
        for sublayer in block_names(layer, f"blocks.{i}"):
            for one in sublayer.branches:
                mixes = part_of(one.config.part).mixes
                output = _Output(
                    made=sublayer.stream_out if adds else one.output,
                    block=leaves if mixes or len(layer.parts) == 1 else None,
                    mixes=mixes,
                )
                found[one.output] = found[f"{one.part}.W_router"] = output
    for row in model.parameters.values():
        if row.name.endswith(".shared.W_down"):  # a shared expert is a separate module
            found[row.output] = _Output(made=row.output)
    return found


def _function(projection: str, usual: str) -> str:
    """The activation function's module beside a feed-forward's last projection."""
    named = (one for end, one in _FUNCTIONS.items() if re.search(rf"\.{end}$", projection))
    return next(named, usual)


def _is_block(module: str) -> bool:
    return module.rpartition(".")[2].isdigit()


def _made_by(parameter: str, model: Graph) -> str:
    """The activation that a weight makes: `blocks.0.attn.W_q` → `blocks.0.attn.q`.

    A recurrence's output norm and gate are one module.
    """
    if parameter in model.parameters:
        made = model.parameters[parameter].output
        part, normed, _ = made.partition(".z_norm")
        return f"{part}.out" if normed else made
    # a tied head is not a parameter, and rules may name norms that this model lacks
    return "logits_raw" if parameter == "head.W" else parameter.removesuffix(".w")

"""Why a model has not got a tensor that others have, and what of its own is near a name."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from difflib import get_close_matches

from llmcli.anatomy.graph import graph
from llmcli.config import ModelConfig
from llmcli.graph.ops import Rotate

# how a name of another program ends, and what that is here: suggested, not accepted
_OTHERS = (
    (r"(lm_head|unembed|output)(\.weight)?", ("logits", "head.W", "embed.W")),
    (r"head\.W", ("embed.W",)),  # of a tied head
    (r"(embed|embed_tokens|tok_embeddings|token_embd|wte)(\.weight)?", ("embed", "embed.W")),
    (r"(embed_positions|wpe)(\.weight)?", ("pos_embed", "pos_embed.W")),
    (r"(mlp|ffn)\.hidden", ("mlp.post",)),
    (r"(attn|self_attn|attention)\.(weights|probs)", ("attn.pattern",)),
    (r"(attn|self_attn|attention)\.(out|output|context)", ("attn_out", "attn.z")),
    (r"([qkv])_proj", (r"attn.\1", r"attn.W_\1")),
    (r"o_proj", ("attn_out", "attn.W_o")),
    (r"([qkvo])_proj\.weight", (r"attn.W_\1",)),
    (r"attn_([qkv])(\.weight)?", (r"attn.W_\1",)),
    (r"(gate|up)_proj", (r"mlp.\1", r"mlp.W_\1")),
    (r"down_proj", ("mlp_out", "mlp.W_down")),
    (r"(gate|up|down)_proj\.weight", (r"mlp.W_\1",)),
    (r"(input_layernorm|ln_1)(\.weight)?", ("ln1.out", "ln1.w")),
    (r"(post_attention_layernorm|ln_2)(\.weight)?", ("ln2.out", "ln2.w")),
    (r"(norm|ln_f|final_norm)(\.weight)?", ("ln_final.out", "ln_final.w")),
)
_NUMBERED = re.compile(r"(?:^|\.)(blocks|cache|layers|h|blk)\.(-?\d{1,9})(?=\.|$)")


def why_absent(name: str, config: ModelConfig) -> str:
    """The reason for `this model has no …`; empty where no model has a tensor of that name."""
    layer = _NUMBERED.search(name)
    if layer and not 0 <= int(layer[2]) < len(config.layers):
        return layers_there_are(config, "cache" if layer[1] == "cache" else "blocks")
    model = graph(config)
    if re.match(r"(hook_)?pos_embed\b", name) and config.embedding.positions is None:
        turned = any(isinstance(node.op, Rotate) for node in model.nodes.values())
        return "it has no learned positions" + (
            ", it rotates queries and keys instead" if turned else ""
        )
    if name.startswith("head.W") and config.head.tied:
        return "its output head is tied, the transpose of `embed.W`"
    inside = _NUMBERED.sub(lambda found: "cache" if found[1] == "cache" else "", name).lstrip(".")
    for absent in model.absent[int(layer[2]) if layer else 0 if config.layers else None]:
        if re.match(absent.names, inside):
            return absent.why
    if re.fullmatch(r"(head|ln_final)\.b", name):
        return "it has no such bias"
    return ""


def layers_there_are(config: ModelConfig, part: str = "blocks") -> str:
    """`its 30 blocks are `blocks.0` to `blocks.29``."""
    layers = len(config.layers)
    if layers == 1:
        return f"its only block is `{part}.0`"
    return f"its {layers} blocks are `{part}.0` to `{part}.{layers - 1}`"


def near(name: str, known: Collection[str]) -> tuple[str, ...]:
    """At most three of `known` that may have been meant: another program's word, a typing error,
    a block or part named for what is in it, or a last word without where it is.
    """
    close = _others(name, known)
    typed = re.match(r"blocks\.\d+\.", name)
    block = typed[0] if typed else ""
    inside = [n for n in known if n.startswith(block)]  # a block that was typed is kept
    if not close:
        parts = {n.removeprefix(block): n for n in inside}
        close = [parts[n] for n in get_close_matches(name.removeprefix(block), parts, 1, 0.8)]
    if not close:
        close = get_close_matches(name, inside, 3, 0.75)
    if not close:  # a short name, `pattern`: in which block, and where
        inner = [n for n in known if n.endswith(f".{name}")]
        inner = inner or [n for n in known if n.rpartition(".")[2] == name.rpartition(".")[2]]
        inner = inner or _misspelled(name, known)
        close = inner[:1] + inner[-1:] if len(inner) > 1 else inner
    return tuple(close)


def _misspelled(name: str, known: Collection[str]) -> list[str]:
    """Those that end nearly so: `resid_pos`, `attn.patern`, `patern`."""
    ends: dict[str, list[str]] = {}
    for one in known:
        inside = re.sub(r"^(blocks|cache)\.\d+\.", "", one)
        for end in {inside, inside.rpartition(".")[2]}:
            ends.setdefault(end, []).append(one)
    return [one for end in get_close_matches(name, ends, 1, 0.75) for one in ends[end]]


def _others(name: str, known: Collection[str]) -> list[str]:
    """What another program's name is called here, in the block that it names or the first."""
    number = re.search(r"\.(\d+)\.", name)
    for pattern, ours in _OTHERS:
        found = re.search(rf"(?:^|\.){pattern}$", name)
        if found:
            whole = [found.expand(f"blocks.{number[1] if number else 0}.{part}") for part in ours]
            return [n for n in (*ours, *whole) if n in known][:2]
    return []


def either(names: Sequence[str]) -> str:
    """`a`, `b` or `c`, each in backticks."""
    ticked = [f"`{name}`" for name in names]
    return ticked[0] if len(ticked) == 1 else f"{', '.join(ticked[:-1])} or {ticked[-1]}"

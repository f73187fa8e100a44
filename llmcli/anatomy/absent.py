"""Why a model has not got a tensor that others have, and what of its own is near a name."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from difflib import get_close_matches

from llmcli.config import ModelConfig

_ABSENT = (
    (r"(blocks\.\d+\.)?(ln1_post|ln2_post)\b", "no norm follows its attention or feed-forward"),
    (r"blocks\.\d+\.attn\.(sink|gate)\b", "its attention has neither sinks nor a gate"),
    (r"blocks\.\d+\.moe\b", "its feed-forward is one network, no mixture of experts"),
    (r"blocks\.\d+\.(linattn|ssm)\b", "all its layers are softmax attention"),
    (r"cache\.\d+\.(state|conv)\b", "its cache is of keys and values only"),
)

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
    if re.match(r"(hook_)?pos_embed\b", name) and config.embedding.positions is None:
        turned = any(layer.mixer.rope is not None for layer in config.layers)
        return "it has no learned positions" + (
            ", it rotates queries and keys instead" if turned else ""
        )
    if name.startswith("head.W") and config.head.tied:
        return "its output head is tied, the transpose of `embed.W`"
    for pattern, reason in _ABSENT:
        if re.match(pattern, name):
            return reason
    if layer and layer[1] == "blocks":
        return _why_in_block(name[layer.end() + 1 :], config, int(layer[2]))
    if re.fullmatch(r"(head|ln_final)\.b", name):
        return "it has no such bias"
    return ""


def layers_there_are(config: ModelConfig, part: str = "blocks") -> str:
    """`its 30 blocks are `blocks.0` to `blocks.29``."""
    layers = len(config.layers)
    if layers == 1:
        return f"its only block is `{part}.0`"
    return f"its {layers} blocks are `{part}.0` to `{part}.{layers - 1}`"


def _why_in_block(part: str, config: ModelConfig, layer: int) -> str:
    mixer, ffn = config.layers[layer].mixer, config.layers[layer].ffn
    if part in ("attn.q_rot", "attn.k_rot") and mixer.rope is None:
        learned = config.embedding.positions is not None
        return "no rotation" + (", it has learned positions" if learned else "")
    if part.startswith(("attn.q_norm", "attn.k_norm")) and mixer.qk_norm is None:
        return "it does not normalize queries and keys"
    if part in ("mlp.gate", "mlp.up", "mlp.act", "mlp.W_gate", "mlp.b_gate") and not ffn.gated:
        return "its feed-forward has no gate, the neurons are `mlp.pre` and `mlp.post`"
    if part == "mlp.pre" and ffn.gated:
        return "its feed-forward is gated, the neurons are `mlp.gate`, `up`, `act` and `post`"
    if re.fullmatch(r"(attn|mlp)\.b_\w+|ln[12]\.b", part):
        return "it has no such bias"
    return ""


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

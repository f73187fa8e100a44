"""From a name that was typed to a tensor: other programs' names, and why one is not there."""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import get_close_matches

from llmcli.config import ModelConfig
from llmcli.errors import UsageError
from llmcli.explain.index import axis_words
from llmcli.explain.names import Axes
from llmcli.explain.parse import Wanted
from llmcli.explain.rules import rules

# what TransformerLens calls the same thing, once `hook_` is off
_ALIASES = {"attn_scores": "scores", "rot_q": "q_rot", "rot_k": "k_rot"}
_GATED_ALIASES = {"mlp.pre": "mlp.gate", "mlp.pre_linear": "mlp.up"}

_ABSENT = (
    (r"(blocks\.\d+\.)?(ln1_post|ln2_post)\b", "no norm follows its attention or feed-forward"),
    (r"blocks\.\d+\.attn\.(sink|gate)\b", "its attention has neither sinks nor a gate"),
    (r"blocks\.\d+\.moe\b", "its feed-forward is one network, no mixture of experts"),
    (r"blocks\.\d+\.(linattn|ssm)\b", "all its layers are softmax attention"),
    (r"cache\b", "`explain` runs the prompt at once and needs no cache: see `k_rot` and `v`"),
)

# how a name of another program ends, and what that is here: suggested, not accepted
_OTHERS = (
    (r"(lm_head|unembed|output)(\.weight)?", ("logits", "head.W", "embed.W")),
    (r"(embed|embed_tokens|tok_embeddings|token_embd|wte)(\.weight)?", ("embed", "embed.W")),
    (r"(embed_positions|wpe)(\.weight)?", ("pos_embed", "pos_embed.W")),
    (r"(mlp|ffn)\.hidden", ("mlp.post",)),
    (r"(attn|self_attn|attention)\.(weights|probs)", ("attn.pattern",)),
    (r"(attn|self_attn|attention)\.(out|output|context)", ("attn_out", "attn.z")),
    (r"([qkvo])_proj(\.weight)?", (r"attn.W_\1",)),
    (r"(gate|up|down)_proj(\.weight)?", (r"mlp.W_\1",)),
    (r"(input_layernorm|ln_1)(\.weight)?", ("ln1.out", "ln1.w")),
    (r"(post_attention_layernorm|ln_2)(\.weight)?", ("ln2.out", "ln2.w")),
    (r"(norm|ln_f|final_norm)(\.weight)?", ("ln_final.out", "ln_final.w")),
)
_RAISED = str.maketrans("12345", "¹²³⁴⁵")


def find(wanted: Wanted, known: dict[str, Axes], config: ModelConfig) -> Axes:
    """The tensor that was meant; raises UsageError saying why it is not there, or what is."""
    name = wanted.name
    plain = _canonical(name, known)
    if plain in known:
        return known[plain]
    meant = _by_letter(name, known, config)
    if meant is not None:
        raise _of_letter(wanted, meant)
    reason = _reason(plain, config)
    if reason:
        raise UsageError(f"this model has no `{name}`: {reason}", hint=_hint(plain, known))
    raise UsageError(f"there is no activation or parameter `{name}`", hint=_hint(plain, known))


def _by_letter(name: str, known: dict[str, Axes], config: ModelConfig) -> Axes | None:
    """The first tensor that the formulas call so: `A`, `T1` or `T¹`, `H'`, `W_E`."""
    letter = name.replace("'", "′")
    if re.fullmatch(r"T[1-5]", letter):
        letter = letter.translate(_RAISED)
    letters = {"W_E": "embed.W", "W_P": "pos_embed.W", "W_head": "head.W"}
    if config.head.tied:
        letters["W_head"] = "embed.W"
    for tensor, rule in rules(config).items():
        letters.setdefault(rule.letter, tensor)
    letters.setdefault("M", letters.get("S", ""))
    return known.get(letters.get(letter, ""))


def _of_letter(wanted: Wanted, axes: Axes) -> UsageError:
    """What the letter is, and for a hint the same place by its name."""
    first = f"{axes.name}[{','.join(_place(wanted, axes))}]"
    words = ",".join(word.replace(" ", "_") for word in axis_words(axes))
    general = re.sub(r"^blocks\.0\.", "blocks.N.", axes.name)
    role = "the mask in " if wanted.name == "M" else ""
    return UsageError(
        f"`{wanted.name}` is a letter of the formulas, {role}`{general}[{words}]`",
        hint=f"for example `{first}`",
    )


def _place(wanted: Wanted, axes: Axes) -> list[str]:
    """The index that was typed where it could be one of this tensor, else its last number."""
    items = wanted.items or ()
    numbers = [item for item in items if isinstance(item, int)]
    if len(items) == len(numbers) == len(axes.sizes) and all(
        -size <= item < size for item, size in zip(numbers, axes.sizes, strict=True)
    ):
        return [str(item) for item in numbers]
    return ["0" if letter in ("H", "Hk", "1") else str(size - 1)
            for letter, size in zip(axes.letters, axes.sizes, strict=True)]  # fmt: skip


def _canonical(name: str, known: dict[str, Axes]) -> str:
    parts = [part.removeprefix("hook_") for part in name.split(".")]
    plain = ".".join(_ALIASES.get(part, part) for part in parts)
    if plain in known or plain == name:
        return plain
    for theirs, ours in _GATED_ALIASES.items():
        if plain.endswith(theirs) and plain.replace(theirs, ours) in known:
            return plain.replace(theirs, ours)
    return plain


def _reason(name: str, config: ModelConfig) -> str:
    """Why a model has not got something that others have, empty where none has."""
    layers = len(config.layers)
    block = re.match(r"blocks\.(-?\d+)(?=\.|$)", name)
    if block and not 0 <= int(block[1]) < layers:
        if layers == 1:
            return "its only block is `blocks.0`"
        return f"its {layers} blocks are `blocks.0` to `blocks.{layers - 1}`"
    if name.startswith("pos_embed"):
        return "it has no learned positions, it rotates queries and keys instead"
    if name.startswith("head.W") and config.head.tied:
        return "its output head is tied, the transpose of `embed.W`"
    for pattern, reason in _ABSENT:
        if re.match(pattern, name):
            return reason
    if block:
        return _reason_in_block(name[block.end() + 1 :], config, int(block[1]))
    return ""


def _reason_in_block(part: str, config: ModelConfig, layer: int) -> str:
    mixer, ffn = config.layers[layer].mixer, config.layers[layer].ffn
    if part in ("attn.q_rot", "attn.k_rot") and mixer.rope is None:
        learned = config.embedding.positions is not None
        return "no rotation" + (", it has learned positions" if learned else "")
    if part.startswith(("attn.q_norm", "attn.k_norm")):
        return "it does not normalize queries and keys"
    if part in ("mlp.gate", "mlp.up", "mlp.act", "mlp.W_gate", "mlp.b_gate") and not ffn.gated:
        return "its feed-forward has no gate, the neurons are `mlp.pre` and `mlp.post`"
    if part == "mlp.pre" and ffn.gated:
        return "its feed-forward is gated, the neurons are `mlp.gate`, `up`, `act` and `post`"
    if re.fullmatch(r"(attn|mlp)\.b_\w+|ln[12]\.b", part):
        return "it has no such bias"
    return ""


def _hint(name: str, known: dict[str, Axes]) -> str:
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
        inner = [n for n in known if n.rpartition(".")[2] == name.rpartition(".")[2]]
        close = inner[:1] + inner[-1:] if len(inner) > 1 else inner
    if close:
        return f"did you mean {_or(close)}?"
    return "for example `blocks.0.attn.pattern[0,1,0]`, `blocks.0.mlp_out[0,0]` or `logits[-1,0]`"


def _others(name: str, known: dict[str, Axes]) -> list[str]:
    """What another program's name is called here, in the block that it names or the first."""
    number = re.search(r"\.(\d+)\.", name)
    for pattern, ours in _OTHERS:
        found = re.search(rf"(?:^|\.){pattern}$", name)
        if found:
            whole = [found.expand(f"blocks.{number[1] if number else 0}.{part}") for part in ours]
            return [n for n in (*ours, *whole) if n in known][:2]
    return []


def _or(listed: Sequence[str]) -> str:
    ticked = [f"`{name}`" for name in listed]
    return ticked[0] if len(ticked) == 1 else f"{', '.join(ticked[:-1])} or {ticked[-1]}"

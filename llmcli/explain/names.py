"""Which numbers a model has: the axes of every name, and why a name is not there."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from llmcli import anatomy
from llmcli.anatomy import TensorSpec
from llmcli.config import ModelConfig
from llmcli.errors import UsageError

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


@dataclass(frozen=True, kw_only=True)
class Axes:
    """One tensor: `letters` of its axes (`H`, `T`, `dh` …), without a batch, and their sizes."""

    name: str
    letters: tuple[str, ...]
    sizes: tuple[int, ...]
    kind: str


def names(config: ModelConfig, tokens: int) -> dict[str, Axes]:
    """Every activation of a prompt of that many tokens, and every parameter."""
    found: dict[str, Axes] = {}
    for spec in anatomy.activations(config, batch=1, tokens=tokens, past=0, phase="prefill"):
        if spec.name.endswith(".attn.z"):
            found |= _unwritten(config, spec.name.removesuffix(".z"), tokens)
        letters = _letters(config, spec)[1:]
        found[spec.name] = Axes(
            name=spec.name, letters=letters, sizes=spec.shape[1:], kind="activation"
        )
    for spec in anatomy.parameters(config):
        found[spec.name] = Axes(
            name=spec.name, letters=_letters(config, spec), sizes=spec.shape, kind="parameter"
        )
    return found


def _letters(config: ModelConfig, spec: TensorSpec) -> tuple[str, ...]:
    """Its axes; where every head has keys and values of its own, there is one kind of heads."""
    mixer = None if spec.layer is None else config.layers[spec.layer].mixer
    if mixer is not None and mixer.kv_heads == mixer.heads:
        return tuple(letter.replace("Hk", "H") for letter in spec.axes)
    return spec.axes


def _unwritten(config: ModelConfig, prefix: str, tokens: int) -> dict[str, Axes]:
    """What the fused attention never writes."""
    heads = config.layers[int(prefix.split(".")[1])].mixer.heads
    square, share = ("H", "T", "S"), ("H", "T", "D")
    shapes = {
        "scores": (square, (heads, tokens, tokens)),
        "pattern": (square, (heads, tokens, tokens)),
        "result": (share, (heads, tokens, config.width)),
    }
    return {
        f"{prefix}.{name}": Axes(
            name=f"{prefix}.{name}", letters=letters, sizes=sizes, kind="activation"
        )
        for name, (letters, sizes) in shapes.items()
    }


def find(name: str, known: dict[str, Axes], config: ModelConfig) -> Axes:
    """The tensor that was meant; raises UsageError saying why it is not there, or what is."""
    plain = _canonical(name, known)
    if plain in known:
        return known[plain]
    reason = _reason(plain, config)
    if reason:
        raise UsageError(f"this model has no `{name}`: {reason}", hint=_hint(plain, known))
    raise UsageError(f"there is no activation or parameter `{name}`", hint=_hint(plain, known))


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
    close = get_close_matches(name, known, 3, 0.75)
    if not close:  # a short name, `pattern`: in which block, and where
        inner = [n for n in known if n.rpartition(".")[2] == name.rpartition(".")[2]]
        close = inner[:1] + inner[-1:] if len(inner) > 1 else inner
    if close:
        return f"did you mean {_or(close)}?"
    return "for example `blocks.0.attn.pattern[0,1,0]`, `blocks.0.mlp_out[0,0]` or `logits[-1,0]`"


def _or(listed: Sequence[str]) -> str:
    ticked = [f"`{name}`" for name in listed]
    return ticked[0] if len(ticked) == 1 else f"{', '.join(ticked[:-1])} or {ticked[-1]}"

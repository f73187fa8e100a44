"""Which part of a model computes an activation, and reads a parameter. No torch."""

from __future__ import annotations

Place = tuple[str, int | None]  # a part and its layer, None outside of the layers

# the last words of an activation's or parameter's name; `norm` is found by its prefix
_PARTS = {
    "embed": ("embed", "pos_embed", "embed.W", "pos_embed.W"),
    "qkv": tuple(f"attn.{part}{letter}" for part in ("", "W_", "b_") for letter in "qkv"),
    "rope": ("attn.q_rot", "attn.k_rot"),
    "attention": ("attn.z",),
    "out": ("attn_out", "attn.W_o", "attn.b_o"),
    "ffn_up": (
        "mlp.gate", "mlp.up", "mlp.pre", "mlp.W_gate", "mlp.W_up", "mlp.b_gate", "mlp.b_up",
    ),
    "ffn_act": ("mlp.act", "mlp.post"),
    "ffn_down": ("mlp_out", "mlp.W_down", "mlp.b_down"),
    "residual": ("resid_mid", "resid_post"),
    "head": ("logits_raw", "logits", "head.W", "head.b"),
    "gaps": ("step", "resid_pre"),
}  # fmt: skip
_PART_OF = {name: part for part, names in _PARTS.items() for name in names}
_NORMS = ("ln1", "ln2", "ln_final", "q_norm", "k_norm")


def place_of(name: str) -> Place:
    """Part (one of `reports.timing.PARTS`) and layer of an activation or a parameter.

    `blocks.0.resid_pre` is where positions have been added to the embedding: `embed`, in no
    layer. That of another block, and `step`, are `gaps`. Raises ValueError for other names.
    """
    if name == "blocks.0.resid_pre":
        return "embed", None
    words = name.split(".")
    inside = words[0] == "blocks" and len(words) > 2
    layer, rest = (int(words[1]), words[2:]) if inside else (None, words)
    part = "norm" if any(word in _NORMS for word in rest) else _PART_OF.get(".".join(rest))
    if part is None:
        raise ValueError(f"no part computes {name}")
    return part, layer


def part_of(name: str) -> str:
    """The part alone: `ffn_up` for `blocks.3.mlp.gate`. Raises ValueError as `place_of` does."""
    return place_of(name)[0]

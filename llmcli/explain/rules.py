"""The rule of every activation of a model, in the letters of the documents.

Inside a block these are X (its input), T¹ = Norm(X), T² = MultiHeadAttention(T¹), T³ = T² + X,
T⁴ = Norm(T³), T⁵ = FFN(T⁴) and H = T⁵ + T³; in the attention Q, K, V, the mask M, the scores S,
the weights A and the heads' results C = A V; in the feed-forward the neurons U before and the layer
L after the activation, with G what gates them. H′ is the last block's H, normalized.
"""

from __future__ import annotations

from llmcli.anatomy.norm import squared
from llmcli.config import AttentionConfig, LayerConfig, MlpConfig, ModelConfig, NormConfig
from llmcli.explain.attention import Mix, Pattern, Scores, is_usual
from llmcli.explain.linear import Add, HeadShare, LookUp, Multiply
from llmcli.explain.mlp import NAMES, Activate, Gate
from llmcli.explain.norms import Norm, Scale
from llmcli.explain.rope import Rotate
from llmcli.explain.rule import Rule


def rules(config: ModelConfig) -> dict[str, Rule]:
    """Name → rule, in execution order."""
    found: dict[str, Rule] = {
        "embed": LookUp(
            letter="E", formula="E = W_E[id]", weight="embed.W", table="W_E", by_position=False
        )
    }
    if config.embedding.positions is not None:
        found["pos_embed"] = LookUp(
            letter="P",
            formula="P = W_P[position]",
            weight="pos_embed.W",
            table="W_P",
            by_position=True,
        )
    stream = tuple(found)
    parts = tuple((name, found[name].letter) for name in stream)
    enters = Add(
        letter="X",
        formula="X = " + " + ".join(letter for _, letter in parts),
        parts=parts,
        before=stream,
    )
    for i, layer in enumerate(config.layers):
        block = f"blocks.{i}"
        found[f"{block}.resid_pre"] = enters
        found |= _block(layer, block, stream, config.width)
        stream = (*stream, f"{block}.attn_out", f"{block}.mlp_out")
        enters = Add(
            letter="X",
            formula=f"X = H of block {i} = T⁵ + T³",
            parts=((f"{block}.mlp_out", "T⁵"), (f"{block}.resid_mid", "T³")),
            before=stream,
        )
    last = f"blocks.{len(config.layers) - 1}.resid_post" if config.layers else "embed"
    found |= _norm(config.final_norm, "ln_final", "H′", last, "H", "H of the last block")
    for name in ("logits_raw", "logits"):
        found[name] = _head(config, name)
    return found


def _head(config: ModelConfig, name: str) -> Rule:
    bias = " + b" if config.head.bias else ""
    tied = ", W_head = W_Eᵀ (tied)" if config.head.tied else ""
    return Multiply(
        letter=name,
        formula=f"logits = H′ W_head{bias}{tied}",
        source="ln_final.out",
        source_letter="H′",
        weight="head.W",
        weight_letter="W_head",
        bias="head.b" if config.head.bias else None,
        bias_letter="b",
    )


def _block(layer: LayerConfig, block: str, stream: tuple[str, ...], width: int) -> dict[str, Rule]:
    attn, mlp = f"{block}.attn", f"{block}.mlp"
    before = (*stream, f"{block}.attn_out")
    mid = (f"{block}.resid_mid", "T³")
    return {
        **_norm(layer.ln1, f"{block}.ln1", "T¹", f"{block}.resid_pre", "X"),
        **_attention(layer.mixer, attn, f"{block}.ln1.out", width),
        f"{block}.attn_out": _project(
            "T²", "C", f"{attn}.z", f"{attn}.W_o", f"{attn}.b_o" if layer.mixer.out_bias else None
        ),
        mid[0]: Add(
            letter="T³",
            formula="T³ = T² + X",
            parts=((f"{block}.attn_out", "T²"), (f"{block}.resid_pre", "X")),
            before=before,
        ),
        **_norm(layer.ln2, f"{block}.ln2", "T⁴", *mid),
        **_mlp(layer.ffn, mlp, f"{block}.ln2.out"),
        f"{block}.mlp_out": _project(
            "T⁵", "L", f"{mlp}.post", f"{mlp}.W_down", f"{mlp}.b_down" if layer.ffn.bias else None
        ),
        f"{block}.resid_post": Add(
            letter="H",
            formula="H = T⁵ + T³",
            parts=((f"{block}.mlp_out", "T⁵"), mid),
            before=(*before, f"{block}.mlp_out"),
        ),
    }


def _norm(
    norm: NormConfig, name: str, letter: str, source: str, source_letter: str, words: str = ""
) -> dict[str, Rule]:
    """`<name>.scale` and `<name>.out`; `words`: which source it is, where letters are too few."""
    x = source_letter
    square = f"({x} − μ)²" if norm.kind == "layer" else squared(x)
    return {
        f"{name}.scale": Scale(
            letter="s",
            formula=f"s = √(mean({square}) + ε)",
            norm=norm,
            source=source,
            source_letter=x,
        ),
        f"{name}.out": _normed(norm, name, letter, source, x, words),
    }


def _normed(norm: NormConfig, name: str, letter: str, source: str, x: str, words: str = "") -> Norm:
    kind = f"RMSNorm({x}) = {x} / s · w"
    if norm.kind == "layer":
        kind = f"LayerNorm({x}) = ({x} − μ) / s · w"
    return Norm(
        letter=letter,
        formula=f"{letter} = {kind}" + (" + b" if norm.bias else "") + (words and f", {words}"),
        norm=norm,
        source=source,
        source_letter=x,
        weight=f"{name}.w",
        bias=f"{name}.b" if norm.bias else None,
    )


def _project(
    letter: str,
    source_letter: str,
    source: str,
    weight: str,
    bias: str | None,
    heads: int = 0,
    head: str = "head",
) -> Multiply:
    matrix = weight.rpartition(".")[2]
    added = "" if bias is None else bias.rpartition(".")[2]
    return Multiply(
        letter=letter,
        formula=f"{letter} = {source_letter} {matrix}" + (f" + {added}" if added else ""),
        source=source,
        source_letter=source_letter,
        weight=weight,
        weight_letter=matrix,
        bias=bias,
        bias_letter=added,
        heads=heads,
        head=head,
    )


def _attention(a: AttentionConfig, name: str, source: str, width: int) -> dict[str, Rule]:
    found: dict[str, Rule] = {}
    for letter, heads in (("Q", a.heads), ("K", a.kv_heads), ("V", a.kv_heads)):
        part = letter.lower()
        bias = f"{name}.b_{part}" if a.qkv_bias else None
        head = "head" if heads == a.heads else "kv head"
        found[f"{name}.{part}"] = _project(
            letter, "T¹", source, f"{name}.W_{part}", bias, heads, head
        )
    entering = {letter: (f"{name}.{letter.lower()}", letter) for letter in "QK"}
    if a.qk_norm is not None:
        for letter, (origin, _) in entering.items():
            entering[letter] = (f"{origin}_norm", f"{letter}_norm")
            found[f"{origin}_norm"] = _normed(
                a.qk_norm, f"{origin}_norm", f"{letter}_norm", origin, letter
            )
    if a.rope is not None:
        for letter, (origin, form) in entering.items():
            rotated = f"{name}.{letter.lower()}_rot"
            entering[letter] = (rotated, f"{letter}_rot")
            found[rotated] = Rotate(
                letter=f"{letter}_rot",
                formula=f"{letter}_rot = R(position) {form}",
                source=origin,
                source_letter=form,
                rope=a.rope,
            )
    return found | _mixed(a, name, entering["Q"], entering["K"], width)


def _mixed(
    a: AttentionConfig, name: str, query: tuple[str, str], key: tuple[str, str], width: int
) -> dict[str, Rule]:
    root = "√(d/h)" if a.divides(width) else "√d_k"
    scaled = f"{query[1]} {key[1]}ᵀ " + (f"/ {root}" if is_usual(a) else f"· {a.scale:g}")
    scores = Scores(
        letter="S",
        formula=f"S = {scaled} + M",
        attention=a,
        query=query[0],
        key=key[0],
        query_letter=query[1],
        key_letter=key[1],
    )
    pattern = Pattern(
        letter="A",
        formula=f"A = softmax(S) = softmax({scaled} + M)",
        source=f"{name}.scores",
        scores=scores,
    )
    return {
        f"{name}.scores": scores,
        f"{name}.pattern": pattern,
        f"{name}.z": Mix(
            letter="C",
            formula="C = A V",
            attention=a,
            weights=pattern,
            pattern=f"{name}.pattern",
            value=f"{name}.v",
        ),
        f"{name}.result": HeadShare(
            letter="R",
            formula=f"R = C W_o, head by head (T² is their sum{' + b_o' if a.out_bias else ''})",
            source=f"{name}.z",
            source_letter="C",
            weight=f"{name}.W_o",
            weight_letter="W_o",
        ),
    }


def _mlp(mlp: MlpConfig, name: str, source: str) -> dict[str, Rule]:
    def enter(letter: str, part: str) -> Multiply:
        bias = f"{name}.b_{part}" if mlp.bias else None
        return _project(letter, "T⁴", source, f"{name}.W_{part}", bias)

    def activate(letter: str, of: str, part: str) -> Activate:
        function = NAMES[mlp.activation]
        known = f"{letter} = Activation({of})" if letter == "L" else letter
        return Activate(
            letter=letter,
            formula=f"{known} = {function}({of})",
            source=f"{name}.{part}",
            source_letter=of,
            function=mlp.activation,
        )

    if not mlp.gated:
        return {f"{name}.pre": enter("U", "up"), f"{name}.post": activate("L", "U", "pre")}
    return {
        f"{name}.gate": enter("G", "gate"),
        f"{name}.up": enter("U", "up"),
        f"{name}.act": activate("Activation(G)", "G", "gate"),
        f"{name}.post": Gate(
            letter="L", formula="L = Activation(G) ∘ U", act=f"{name}.act", up=f"{name}.up"
        ),
    }

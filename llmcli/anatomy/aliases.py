"""What others call the same tensors: TransformerLens, transformers and llama.cpp.

TransformerLens' names are tables, which a test holds against what its hooks really hold. Those of
transformers and llama.cpp follow from a family's own rules, so that a family is told once: from
which checkpoint tensor a parameter comes says which module holds it, and what that module puts
out. A name is accepted only where it means the same; see `UNLIKE`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from llmcli.config import ModelConfig

Sources = Mapping[str, tuple[str, ...]]
"""Checkpoint tensor → the parameters that it fills; a fused one (`c_attn`) fills several."""

# TransformerLens' names, `{i}` a block's number → ours. The first of ours is the legacy name.
_MODEL = {
    "hook_embed": "embed",
    "embed.hook_out": "embed",
    "hook_pos_embed": "pos_embed",
    "pos_embed.hook_out": "pos_embed",
    "ln_final.hook_scale": "ln_final.scale",
    "ln_final.hook_out": "ln_final.out",
    "unembed.hook_in": "ln_final.out",
    "hook_unembed": "logits_raw",
    "unembed.hook_out": "logits_raw",
    "lm_head": "logits_raw",  # transformers', also where no tensor is stored for a tied head
    "embed.W_E": "embed.W",
    "pos_embed.W_pos": "pos_embed.W",
    "unembed.W_U": "head.W",
    "unembed.b_U": "head.b",
    "lm_head.weight": "head.W",
    "output.weight": "head.W",  # llama.cpp's
}
_BLOCK = {
    "hook_resid_pre": "resid_pre",
    "hook_in": "resid_pre",
    "ln1.hook_in": "resid_pre",
    "ln1.hook_scale": "ln1.scale",
    "ln1.hook_out": "ln1.out",
    "attn.hook_in": "ln1.out",
    "attn.q.hook_in": "ln1.out",
    "attn.k.hook_in": "ln1.out",
    "attn.v.hook_in": "ln1.out",
    "attn.hook_q": "attn.q",
    "attn.hook_k": "attn.k",
    "attn.hook_v": "attn.v",
    "attn.q.hook_out": "attn.q",
    "attn.k.hook_out": "attn.k",
    "attn.v.hook_out": "attn.v",
    "attn.q_norm.hook_out": "attn.q_norm",
    "attn.k_norm.hook_out": "attn.k_norm",
    "attn.hook_q_normed": "attn.q_norm",
    "attn.hook_k_normed": "attn.k_norm",
    "attn.hook_rot_q": "attn.q_rot",
    "attn.hook_rot_k": "attn.k_rot",
    "attn.hook_attn_scores": "attn.scores",
    "attn.hook_pattern": "attn.pattern",
    "attn.hook_z": "attn.z",
    "attn.o.hook_in": "attn.z",
    "attn.hook_result": "attn.result",
    "hook_attn_out": "attn_out",
    "attn.o.hook_out": "attn_out",
    "attn.hook_out": "attn_out",
    "hook_resid_mid": "resid_mid",
    "ln2.hook_in": "resid_mid",
    "ln2.hook_scale": "ln2.scale",
    "ln2.hook_out": "ln2.out",
    "mlp.hook_in": "ln2.out",
    "mlp.in.hook_in": "ln2.out",
    "mlp.gate.hook_out": "mlp.gate",
    "mlp.hook_pre_linear": "mlp.up",
    "mlp.hook_post": "mlp.post",
    "mlp.out.hook_in": "mlp.post",
    "hook_mlp_out": "mlp_out",
    "mlp.out.hook_out": "mlp_out",
    "mlp.hook_out": "mlp_out",
    "hook_resid_post": "resid_post",
    "hook_out": "resid_post",
    **{f"attn.{kind}_{part.upper()}": f"attn.{kind}_{part}" for kind in "Wb" for part in "qkvo"},
    **{f"mlp.{kind}_in": f"mlp.{kind}_up" for kind in "Wb"},
    **{f"mlp.{kind}_out": f"mlp.{kind}_down" for kind in "Wb"},
}
# what the activation function takes and the other factor: a gated network has two projections in
_GATED = {
    "mlp.gate.hook_in": "ln2.out",
    "mlp.hook_pre": "mlp.gate",
    "mlp.in.hook_out": "mlp.up",
}
_PLAIN = {"mlp.hook_pre": "mlp.pre", "mlp.in.hook_out": "mlp.pre"}

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
_NOT_SHORT = ("in", "out")  # only the names of before 3.0 have a short form

# Names of others that are not one thing: (pattern, what they mean, ours to use instead).
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

# llama.cpp has tensors and no modules: without `.weight` they are meant as well
_GGUF = re.compile(r"blk\.|(?:token_embd|position_embd|output_norm|output)\.")


def others(config: ModelConfig, sources: Sources) -> dict[str, tuple[str, ...]]:
    """Every name of others → what it is called here: one name, or several where it is fused.

    The result may be something that this model has not got (`hook_pos_embed`): why it has not is
    `absent.why_absent`'s to say.
    """
    found: dict[str, tuple[str, ...]] = {name: (ours,) for name, ours in listed(config)}
    found |= sources  # the checkpoint's own rules know best
    for name, made in modules(config, sources):
        found.setdefault(name, made)
    return found


def listed(config: ModelConfig) -> Iterator[tuple[str, str]]:
    """TransformerLens' names of this model, and the two names of a head that may not be stored."""
    yield from _MODEL.items()
    if config.layers:
        yield "ln_final.hook_in", f"blocks.{len(config.layers) - 1}.resid_post"
    for i, layer in enumerate(config.layers):
        for name, ours in (_BLOCK | (_GATED if layer.ffn.gated else _PLAIN)).items():
            yield f"blocks.{i}.{name}", f"blocks.{i}.{ours}"
            short = _SHORT.fullmatch(name)
            if short and short["word"] not in _NOT_SHORT:
                yield f"{short['word']}{i}{short['norm'] or ''}", f"blocks.{i}.{ours}"
            if name in _SHORTER:
                yield f"{_SHORTER[name]}{i}", f"blocks.{i}.{ours}"


def modules(config: ModelConfig, sources: Sources) -> Iterator[tuple[str, tuple[str, ...]]]:
    """transformers' modules → what they put out; and llama.cpp's tensors without their ending.

    A module that holds a parameter puts out what that parameter makes; the modules around the
    output projections are the attention, the feed-forward and their block.
    """
    for source, filled in sources.items():
        module, _, ending = source.rpartition(".")
        if ending != "weight":
            continue
        if _GGUF.match(source):
            yield module, filled
            continue
        yield module, tuple(made_by(parameter, config) for parameter in filled)
        block, _, part = filled[0].partition(".attn.W_o")
        if block != filled[0] and not part:
            attention = module.rpartition(".")[0]
            yield attention, (f"{block}.attn_out",)
            yield attention.rpartition(".")[0], (f"{block}.resid_post",)
        block, _, part = filled[0].partition(".mlp.W_down")
        if block != filled[0] and not part:
            network = module.rpartition(".")[0]
            yield network, (f"{block}.mlp_out",)
            gated = config.layers[int(block.partition(".")[2])].ffn.gated
            function = "act" if module.endswith(".c_proj") else "act_fn"  # as GPT-2 calls it
            yield f"{network}.{function}", (f"{block}.mlp.{'act' if gated else 'post'}",)


def made_by(parameter: str, config: ModelConfig) -> str:
    """The activation that a weight makes: `blocks.0.attn.W_q` → `blocks.0.attn.q`."""
    ends = {"embed.W": "embed", "pos_embed.W": "pos_embed", "head.W": "logits_raw"}
    if parameter in ends:
        return ends[parameter]
    module, _, weight = parameter.rpartition(".")
    block, _, part = module.rpartition(".")
    if weight == "w":
        return module if part in ("q_norm", "k_norm") else f"{module}.out"
    if weight in ("W_o", "W_down"):
        return f"{block}.{'attn_out' if weight == 'W_o' else 'mlp_out'}"
    if weight == "W_up" and not config.layers[int(block.partition(".")[2])].ffn.gated:
        return f"{module}.pre"
    return f"{module}.{weight.removeprefix('W_')}"

"""What transformers computes inside, under our names, read with hooks on its own modules."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from parity_reference import fresh_rope, precision
from torch import Tensor, nn
from transformers import PreTrainedModel

Seen = dict[str, Tensor]


@torch.no_grad()
def record(model: PreTrainedModel, ids: Tensor) -> Seen:
    """Our name → tensor, for one whole pass over `ids` `[B, T]`."""
    seen: Seen = {}
    watch = _watch_gpt2 if model.config.model_type == "gpt2" else _watch_rope_family
    with precision(model), watch(model, seen):
        fresh_rope(model)
        out = model(ids, use_cache=False, output_attentions=True)
    for i, pattern in zip(attending(model), out.attentions, strict=True):
        seen[f"blocks.{i}.attn.pattern"] = pattern
    if "pos_embed" in seen:  # computed once for all rows
        seen["pos_embed"] = seen["pos_embed"].expand_as(seen["embed"])
    return seen


def attending(model: PreTrainedModel) -> list[int]:
    """The layers that have attention."""
    kinds = getattr(model.config, "layer_types", None) or ["attention"] * (
        model.config.num_hidden_layers
    )
    return [layer for layer, kind in enumerate(kinds) if kind != "conv"]


def _first(value: Any) -> Tensor:
    return value[0] if isinstance(value, tuple) else value


class _Hooks:
    """Hooks that store a module's input or output under a name, all removed at the end."""

    def __init__(self, seen: Seen) -> None:
        self.seen = seen
        self.handles = ExitStack()

    def out(self, module: nn.Module, name: str, heads: int = 0) -> None:
        def hook(_: nn.Module, __: Any, value: Any) -> None:
            self.seen[name] = per_head(_first(value), heads) if heads else _first(value)

        self.handles.callback(module.register_forward_hook(hook).remove)

    def into(self, module: nn.Module, name: str, heads: int = 0) -> None:
        def hook(_: nn.Module, args: Any, kwargs: Any) -> None:
            value = args[0] if args else kwargs["hidden_states"]
            self.seen[name] = per_head(value, heads) if heads else value

        handle = module.register_forward_pre_hook(hook, with_kwargs=True)
        self.handles.callback(handle.remove)


def per_head(x_BTD: Tensor, heads: int) -> Tensor:
    """`[B, T, H·d]` → `[B, H, T, d]`."""
    return x_BTD.unflatten(-1, (heads, -1)).transpose(1, 2)


@contextmanager
def _watch_rope_family(model: PreTrainedModel, seen: Seen) -> Iterator[None]:
    hooks, config, base = _Hooks(seen), model.config, model.base_model
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    hooks.out(base.embed_tokens, "embed")
    for i, layer in enumerate(base.layers):
        name, attn = f"blocks.{i}", getattr(layer, "self_attn", None)
        mixer, mlp = attn or layer.conv, _one(layer, "mlp", "feed_forward")
        hooks.into(layer, f"{name}.resid_pre")
        if attn is None:
            _watch_conv(hooks, name, layer.conv)
        else:
            _watch_attention(hooks, name, attn, heads, kv_heads)
        pairs = (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2"))
        gate, up, down = (_one(mlp, *names) for names in pairs)
        hooks.out(gate, f"{name}.mlp.gate")
        hooks.out(up, f"{name}.mlp.up")
        if hasattr(mlp, "act_fn"):
            hooks.out(mlp.act_fn, f"{name}.mlp.act")
        hooks.into(down, f"{name}.mlp.post")
        if config.model_type == "olmo2":  # no norm before a part, one after each
            for part, module, norm, adds in (
                ("attn", mixer, layer.post_attention_layernorm, "attn_out"),
                ("mlp", mlp, layer.post_feedforward_layernorm, "mlp_out"),
            ):
                number = 1 if part == "attn" else 2
                hooks.out(module, f"{name}.{part}.out")
                hooks.out(norm, f"{name}.ln{number}_post.out")
                hooks.out(norm, f"{name}.{adds}")
            hooks.into(mlp, f"{name}.resid_mid")
        else:
            after = _one(layer, "post_attention_layernorm", "ffn_norm")
            hooks.out(_one(layer, "input_layernorm", "operator_norm"), f"{name}.ln1.out")
            hooks.out(mixer, f"{name}.attn_out")
            hooks.into(after, f"{name}.resid_mid")
            hooks.out(after, f"{name}.ln2.out")
            hooks.out(mlp, f"{name}.mlp_out")
        hooks.out(layer, f"{name}.resid_post")
    _watch_end(hooks, _one(base, "norm", "embedding_norm"), model)
    with hooks.handles, _watch_rotation(model, seen):
        yield


def _one(module: nn.Module, *names: str) -> Any:
    """The child that has one of these names."""
    return next(getattr(module, name) for name in names if hasattr(module, name))


def _watch_attention(hooks: _Hooks, name: str, attn: Any, heads: int, kv_heads: int) -> None:
    hooks.out(attn.q_proj, f"{name}.attn.q", heads)
    hooks.out(attn.k_proj, f"{name}.attn.k", kv_heads)
    hooks.out(attn.v_proj, f"{name}.attn.v", kv_heads)
    for part, count in (("q", heads), ("k", kv_heads)):
        norm = getattr(attn, f"{part}_norm", getattr(attn, f"{part}_layernorm", None))
        if norm is not None:
            store = partial(_store_normed, hooks.seen, f"{name}.attn.{part}_norm", count)
            hooks.handles.callback(norm.register_forward_hook(store).remove)
    hooks.into(_one(attn, "o_proj", "out_proj"), f"{name}.attn.z", heads)


def _watch_conv(hooks: _Hooks, name: str, conv: Any) -> None:
    """The gates, and from them what the convolution is of and what it gives."""

    def entered(_: nn.Module, __: Any, value: Tensor) -> None:
        B, gate, x = value.chunk(3, dim=-1)
        own = {"B": B, "gate": gate, "x": x, "in": B * x}
        hooks.seen |= {f"{name}.conv.{leaf}": tensor for leaf, tensor in own.items()}

    def left(_: nn.Module, args: Any) -> None:
        hooks.seen[f"{name}.conv.out"] = args[0]
        hooks.seen[f"{name}.conv.conv"] = args[0] / hooks.seen[f"{name}.conv.gate"]

    hooks.handles.callback(conv.in_proj.register_forward_hook(entered).remove)
    hooks.handles.callback(conv.out_proj.register_forward_pre_hook(left).remove)


def _store_normed(
    seen: Seen, name: str, heads: int, _: nn.Module, __: Any, value: Tensor
) -> None:
    """`[B, T, H, d]`, or all heads side by side."""
    seen[name] = value.transpose(1, 2) if value.ndim == 4 else per_head(value, heads)


@contextmanager
def _watch_rotation(model: PreTrainedModel, seen: Seen) -> Iterator[None]:
    """The rotated queries and keys, as the layers' common function returns them, in order."""
    module = sys.modules[type(model).__module__]
    rotate, layer = module.apply_rotary_pos_emb, iter(attending(model))

    def rotated(q: Tensor, k: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        q_rot, k_rot = rotate(q, k, *args, **kwargs)
        name = f"blocks.{next(layer)}.attn"
        seen[f"{name}.q_rot"], seen[f"{name}.k_rot"] = q_rot, k_rot
        return q_rot, k_rot

    with patch.object(module, "apply_rotary_pos_emb", rotated):
        yield


@contextmanager
def _watch_gpt2(model: PreTrainedModel, seen: Seen) -> Iterator[None]:
    hooks, base, heads = _Hooks(seen), model.base_model, model.config.n_head
    hooks.out(base.wte, "embed")
    hooks.out(base.wpe, "pos_embed")

    def split(name: str, _: nn.Module, __: Any, value: Tensor) -> None:
        for part, chunk in zip("qkv", value.chunk(3, dim=-1), strict=True):
            seen[f"{name}.attn.{part}"] = per_head(chunk, heads)

    for i, layer in enumerate(base.h):
        name = f"blocks.{i}"
        hooks.into(layer, f"{name}.resid_pre")
        hooks.out(layer.ln_1, f"{name}.ln1.out")
        handle = layer.attn.c_attn.register_forward_hook(partial(split, name))
        hooks.handles.callback(handle.remove)
        hooks.into(layer.attn.c_proj, f"{name}.attn.z", heads)
        hooks.out(layer.attn, f"{name}.attn_out")
        hooks.into(layer.ln_2, f"{name}.resid_mid")
        hooks.out(layer.ln_2, f"{name}.ln2.out")
        hooks.out(layer.mlp.c_fc, f"{name}.mlp.pre")
        hooks.out(layer.mlp.act, f"{name}.mlp.post")
        hooks.out(layer.mlp, f"{name}.mlp_out")
        hooks.out(layer, f"{name}.resid_post")
    _watch_end(hooks, base.ln_f, model)
    with hooks.handles:
        yield


def _watch_end(hooks: _Hooks, norm: nn.Module, model: PreTrainedModel) -> None:
    hooks.out(norm, "ln_final.out")
    hooks.out(model.lm_head, "logits_raw")
    hooks.out(model.lm_head, "logits")

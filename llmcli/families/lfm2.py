"""LFM2 (Liquid AI 2025, arXiv 2511.23404): gated short convolutions, attention in some layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from llmcli.config import ModelConfig, sequential
from llmcli.families import llama
from llmcli.families.family import Family
from llmcli.families.read import gguf_header, hf_head
from llmcli.families.rules import Rename, Reshape, Rows, Rule
from llmcli.families.values import MOST, Values
from llmcli.parts.conv.config import ShortConvConfig

if TYPE_CHECKING:
    from llmcli.checkpoints import TensorInfo

_NAMES = (  # transformers', llama.cpp's, ours
    ("operator_norm", "attn_norm", "ln1.w"),
    ("ffn_norm", "ffn_norm", "ln2.w"),
    *((f"self_attn.{one}_layernorm", f"attn_{one}_norm", f"attn.{one}_norm.w") for one in "qk"),
    *((f"self_attn.{one}_proj", f"attn_{one}", f"attn.W_{one}") for one in "qkv"),
    ("self_attn.out_proj", "attn_output", "attn.W_o"),
    *((f"feed_forward.w{n}", f"ffn_{one}", f"mlp.W_{one}")
      for n, one in ((1, "gate"), (3, "up"), (2, "down"))),
    ("conv.out_proj", "shortconv.out_proj", "conv.W_out"),
)


# what `Lfm2Config` sets where LlamaConfig sets something else, and what it does not read
_DEFAULTS = {
    "rope_theta": 1e6, "num_key_value_heads": 8, "max_position_embeddings": 128_000,
    "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_LLAMA_ONLY = {
    "model_type": "llama", "hidden_act": "silu", "mlp_bias": False, "attention_bias": False,
}  # fmt: skip


def from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """config.json → ModelConfig; names of the first releases come before later ones."""
    first = {"tie_embedding": "tie_word_embeddings", "block_ff_dim": "intermediate_size"}
    renamed = {new: config[old] for old, new in first.items() if config.get(old) is not None}
    values = Values({**_DEFAULTS, **config, **renamed})
    own = {"rms_norm_eps": values.number("norm_eps", 1e-5, above=False),
           "intermediate_size": _hidden(values)}  # fmt: skip
    model = llama.from_hf({**_DEFAULTS, **config, **renamed, **own, **_LLAMA_ONLY})
    conv = ShortConvConfig(
        length=values.integer("conv_L_cache", 3, least=2, most=64),
        bias=values.flag("conv_bias", False),
    )
    return _with_convolutions(model, _attends(values, len(model.layers)), conv)


def from_gguf(metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> ModelConfig:
    """GGUF metadata → ModelConfig: a layer without key/value heads is a convolution."""
    header = gguf_header(metadata, tensors)
    key, values = "attention.head_count_kv", header.values
    heads = values.integer("attention.head_count", most=MOST["heads"])
    listed = values.raw(key)
    if not isinstance(listed, list) or len(listed) != header.layers:
        raise values.wrong(key, f"numbers for {header.layers} layers")
    attends = [Values({key: n}).integer(key, least=0, most=heads) > 0 for n in listed]
    filled = {f"{header.arch}.{key}": [n or heads for n in listed]}
    model = llama.from_gguf({**metadata, **filled}, tensors)
    conv = ShortConvConfig(length=values.integer("shortconv.l_cache", least=2, most=64))
    return _with_convolutions(model, attends, conv)


def _with_convolutions(
    model: ModelConfig, attends: Sequence[bool], conv: ShortConvConfig
) -> ModelConfig:
    norm, layers = model.final_norm, []
    for layer, has in zip(model.layers, attends, strict=True):
        attention, mlp = layer.attention, layer.parts[-1]
        assert attention is not None
        mixer = replace(attention, qk_norm=norm) if has else conv
        layers.append(sequential(mixer, mlp, norm=norm))
    return replace(model, family="lfm2", model_type="lfm2", layers=tuple(layers))


def _hidden(values: Values) -> int:
    """Two thirds of what is written, times a factor, up to the next multiple, where it says so."""
    hidden = values.integer("intermediate_size", most=MOST["hidden"])
    if not values.flag("block_auto_adjust_ff_dim", True):
        return hidden
    hidden = int(values.number("block_ffn_dim_multiplier", 1.0) * int(2 * hidden / 3))
    multiple = values.integer("block_multiple_of", 256, most=MOST["hidden"])
    return -(-hidden // multiple) * multiple


def _attends(values: Values, layers: int) -> list[bool]:
    kinds, listed = values.raw("layer_types"), values.raw("full_attn_idxs")
    if kinds is None:  # the first releases: the numbers of those that attend
        return [not isinstance(listed, list) or i in listed for i in range(layers)]
    types = values.layer_types(layers, ("conv", "full_attention"))
    return [kind == "full_attention" for kind in types]


def rules_hf(config: ModelConfig) -> tuple[Rule, ...]:
    """transformers' names, with `model.` before them or (a bare decoder) without."""
    names = ("embed_tokens", "embedding_norm", "layers.{layer}.", "conv")
    both = (_rules(config, 0, prefix, names) for prefix in ("model.", ""))
    return (hf_head(config), *chain.from_iterable(both))


def rules_gguf(config: ModelConfig) -> tuple[Rule, ...]:
    """llama.cpp's names; rows of queries and keys lie as we rotate them."""
    head = () if config.head.tied else (Rename("output.weight", "head.W"),)
    names = ("token_embd", "token_embd_norm", "blk.{layer}.", "shortconv")
    return (*head, *_rules(config, 1, "", names))


def _rules(
    config: ModelConfig, theirs: int, prefix: str, names: tuple[str, str, str, str]
) -> Iterator[Rule]:
    table, last, layer, conv = names
    h = prefix + layer
    b, d = "blocks.{layer}", config.width
    yield Rename(f"{prefix}{table}.weight", "embed.W")
    yield Rename(f"{prefix}{last}.weight", "ln_final.w")
    for row in _NAMES:
        yield Rename(f"{h}{row[theirs]}.weight", f"{b}.{row[2]}")
        if "W_" in row[2]:
            yield Rename(f"{h}{row[theirs]}.bias", f"{b}.{row[2].replace('W_', 'b_')}")
    for at, part in enumerate(("B", "gate", "x")):
        rows = Rows(at * d, (at + 1) * d)
        yield Rename(f"{h}{conv}.in_proj.weight", f"{b}.conv.W_{part}", rows)
        yield Rename(f"{h}{conv}.in_proj.bias", f"{b}.conv.b_{part}", rows)
    parts = (part for layer in config.layers for part in layer.parts)
    for taps in {part.length for part in parts if isinstance(part, ShortConvConfig)}:
        yield Rename(f"{h}{conv}.conv.weight", f"{b}.conv.w", Reshape((d, taps)))
    yield Rename(f"{h}{conv}.conv.bias", f"{b}.conv.b")


FAMILIES = (Family(
    name="lfm2", words="gated short convolutions, attention as in qwen3 in some layers",
    hf_types=("lfm2",), gguf_archs=("lfm2",), from_hf=from_hf, from_gguf=from_gguf,
    rules_hf=rules_hf, rules_gguf=rules_gguf, mixers=("short convolution", "attention"),
),)  # fmt: skip

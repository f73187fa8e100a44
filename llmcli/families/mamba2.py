"""Mamba-2 (Dao & Gu 2024, arXiv 2405.21060): blocks of one norm and one state-space mixer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from llmcli.config import ModelConfig, sequential
from llmcli.families import mamba2_mixer
from llmcli.families.family import Family
from llmcli.families.names import Names
from llmcli.families.read import end_ids, gguf_header
from llmcli.families.values import MOST, Values
from llmcli.parts.embedding.config import EmbeddingConfig, HeadConfig
from llmcli.parts.norm.config import NormConfig

if TYPE_CHECKING:
    from llmcli.checkpoints import TensorInfo

_DEFAULTS = {  # `Mamba2Config`'s
    "num_heads": 128, "head_dim": 64, "state_size": 128, "n_groups": 8, "conv_kernel": 4,
}  # fmt: skip
_KEYS = mamba2_mixer.Keys(
    heads="num_heads", head_dim="head_dim", groups="n_groups", state="state_size",
    length="conv_kernel", bias="use_bias", conv_bias="use_conv_bias", function="hidden_act",
)  # fmt: skip
# `embedding` in the checkpoints of state-spaces
_NAMES = Names(rows=(), buffers=(), rotary=False, prefixes=("backbone.", "")).but(f"""
    embed     embeddings  token_embd
    embed     embedding
    ln_final  norm_f      output_norm
    head      lm_head     output
    ln1       norm        attn_norm
    {mamba2_mixer.MIXER}
""")


def from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """config.json → ModelConfig."""
    values = Values({**_DEFAULTS, **config})
    vocab = values.integer("vocab_size", most=MOST["vocab"])
    width = values.integer("hidden_size", most=MOST["width"])
    norm = NormConfig(kind="rms", eps=values.number("layer_norm_epsilon", 1e-5, above=False))
    ssm = mamba2_mixer.from_hf(
        values, _KEYS, norm.eps, mamba2_mixer.bounds(values),
        inner=int(values.number("expand", 2.0) * width),
    )  # fmt: skip
    bos, eos = end_ids(values, vocab, bos=0, eos=2)
    return ModelConfig(
        family="mamba2", model_type="mamba2", vocab=vocab, width=width,
        context=mamba2_mixer.LONGEST,
        layers=(sequential(ssm, norm=norm),)
        * values.integer("num_hidden_layers", most=MOST["layers"]),
        embedding=EmbeddingConfig(), final_norm=norm,
        head=HeadConfig(tied=values.flag("tie_word_embeddings", False)), bos=bos, eos=eos,
    )  # fmt: skip


def from_gguf(metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> ModelConfig:
    """GGUF metadata → ModelConfig."""
    header = gguf_header(metadata, tensors)
    eps = header.values.number("attention.layer_norm_rms_epsilon", above=False)
    norm = NormConfig(kind="rms", eps=eps)
    return ModelConfig(
        family="mamba2", model_type=header.arch, vocab=header.vocab, width=header.width,
        context=header.context,
        layers=tuple(
            sequential(mamba2_mixer.from_gguf(header.values, tensors, i, eps), norm=norm)
            for i in range(header.layers)
        ),
        embedding=EmbeddingConfig(), final_norm=norm, head=HeadConfig(tied=header.tied),
        bos=header.bos, eos=header.eos,
    )  # fmt: skip


FAMILIES = (Family(
    name="mamba2", words="blocks of a Mamba-2 mixer alone, without attention and feed-forwards",
    hf_types=("mamba2",), gguf_archs=("mamba2",), from_hf=from_hf, from_gguf=from_gguf,
    rules_hf=_NAMES.hf, rules_gguf=_NAMES.gguf, mixers=("Mamba-2",), feed_forwards=(),
),)  # fmt: skip

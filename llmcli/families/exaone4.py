"""EXAONE 4 (LG AI Research 2025, arXiv 2507.11407): post-norms and per-head q/k norms.

In models with sliding windows, only the windowed layers use RoPE.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from llmcli.config import LayerConfig, ModelConfig, sequential
from llmcli.families import llama, olmo2
from llmcli.families.family import Family
from llmcli.families.read import GGUF_WINDOWS, gguf_windows, hf_windows
from llmcli.families.values import Values
from llmcli.parts.attention.config import AttentionConfig
from llmcli.parts.mlp.config import MlpConfig

if TYPE_CHECKING:
    from llmcli.checkpoints import TensorInfo

# defaults of `Exaone4Config` that differ from LlamaConfig's
_DEFAULTS = {
    "num_key_value_heads": 32, "rms_norm_eps": 1e-5, "bos_token_id": 0, "eos_token_id": 2,
    "sliding_window": 4096,
}  # fmt: skip
_LLAMA_ONLY = {"model_type": "llama", "attention_bias": False, "mlp_bias": False}
_PERIOD = 4  # layers; the last of each period has no window


def from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """config.json → ModelConfig."""
    settings = {**_DEFAULTS, **config}
    model, values = llama.from_hf(settings | _LLAMA_ONLY), Values(settings)
    windows: list[int | None] = [None] * len(model.layers)
    if values.has("sliding_window"):
        windows = hf_windows(values, len(model.layers), period=_PERIOD, window=None)
    return _exaone4(model, windows, windowed=values.has("sliding_window"))


def from_gguf(metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> ModelConfig:
    """GGUF metadata → ModelConfig."""
    model, values = llama.from_gguf(metadata, tensors), Values(metadata, prefix="exaone4.")
    windows = gguf_windows(values, len(model.layers), period=_PERIOD, window=None)
    return _exaone4(model, windows, windowed=any(windows))


def _exaone4(
    model: ModelConfig, windows: Sequence[int | None], *, windowed: bool
) -> ModelConfig:
    norm = model.final_norm

    def block(number: int, attention: AttentionConfig, mlp: MlpConfig) -> LayerConfig:
        window = windows[number]
        rope = None if windowed and window is None else attention.rope
        attention = replace(attention, qk_norm=norm, window=window, rope=rope)
        return sequential(attention, mlp, norm=None, after=norm)

    return llama.rebuilt(model, block, family="exaone4", model_type="exaone4")


FAMILIES = (
    Family(
        name="exaone4",
        words="norms after the parts, normalized queries and keys; windows in three of four "
        "layers, which alone have rotary positions",
        hf_types=("exaone4",),
        gguf_archs=("exaone4",),
        gguf_reads=GGUF_WINDOWS,
        from_hf=from_hf,
        from_gguf=from_gguf,
        rules_hf=olmo2.rules_hf,
        rules_gguf=olmo2.rules_gguf,
    ),
)

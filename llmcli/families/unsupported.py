"""Architectures that are not supported yet, by their missing parts. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

Kind = Literal["safetensors", "gguf"]

# Missing part, `model_type`s of config.json that need it, GGUF architectures that need it. A type
# that needs several parts is in several rows.
_NEEDED_BY = (
    ("a translation of its settings and tensor names",
     "bamba codegen cohere dbrx dots1 ernie4_5 ernie4_5_moe falcon gptj granitemoe minicpm3 "
     "minimax_m2 mpt phi phimoe",
     "command-r dbrx deepseek dots1 ernie4_5 ernie4_5-moe falcon gptj granitemoe minicpm "
     "minicpm3 minimax-m2 mpt phi2 phimoe"),
    ("a decay of each channel", "kimi_linear", "kimi-linear"),
    ("a delta rule that overwrites twice", "olmo_hybrid", ""),
    ("Mamba-2 with multipliers of its own", "falcon_h1", "falcon-h1"),
    ("blocks that several layers share", "zamba2", ""),
    ("Mamba", "falcon_mamba jamba mamba zamba", "jamba mamba"),
    ("a recurrence of its own", "recurrent_gemma rwkv xlstm", "rwkv6 rwkv7"),
    ("sparse attention", "deepseek_v32 deepseek_v4 glm_moe_dsa", "glm-dsa"),
    ("four residual streams", "gemma3n gemma3n_text", "gemma3n"),
    ("rotary positions in sections", "", "qwen3vlmoe"),
    ("an MLP without a gate", "nemotron", "nemotron"),
    ("ternary weights", "bitnet", "bitnet"),
    ("bidirectional attention",
     "bert distilbert eurobert modernbert nomic_bert roberta xlm-roberta",
     "bert eurobert gemma-embedding llama-embed modern-bert nomic-bert nomic-bert-moe"),
    ("an encoder beside the decoder",
     "bart mbart mt5 t5 t5gemma whisper", "t5"),
    ("the text model of a multimodal checkpoint",
     "gemma3n idefics3 internvl llava llava_next mllama paligemma "
     "phi4_multimodal qwen2_5_omni qwen3_vl_moe smolvlm",
     ""),
)  # fmt: skip

# Types that are not planned → a supported model of similar size.
_INSTEAD = {
    **dict.fromkeys(("gemma3n", "gemma3n_text"), "qwen3-4b"),
    "bitnet": "smollm2-1.7b",
    **dict.fromkeys(("deepseek_v32", "deepseek_v4"), "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B"),
    **dict.fromkeys(("glm-dsa", "glm_moe_dsa"), "Qwen/Qwen3-8B"),
}


def needed_parts(model_type: str, kind: Kind) -> list[str]:
    """The missing parts of a model type; empty for a type that is not listed."""
    return [
        part
        for part, hf_types, gguf_archs in _NEEDED_BY
        if model_type in (hf_types if kind == "safetensors" else gguf_archs).split()
    ]


def needs(parts: Sequence[str]) -> str:
    """The end of a message, ``: it needs `a`, `b` and `c` ``; empty without parts."""
    named = [f"`{part}`" for part in parts]
    listed = " and ".join(filter(None, [", ".join(named[:-1]), *named[-1:]]))
    return listed and f": it needs {listed}"


def run_instead(model_type: str) -> str | None:
    """A replacement (value of `-m`) for a model type that is not planned."""
    return _INSTEAD.get(model_type)


def meant(model_type: str, known: Iterable[str]) -> str | None:
    """The name in `known` that is one typing error away.

    An error is one letter inserted, deleted or replaced, or two adjacent ones swapped. Digits do
    not count: `qwen4` is not `qwen3`. Nor does a replaced one of three letters: `gpt` is not `opt`.
    """
    return next((name for name in known if _is_typo(model_type, name)), None)


def _is_typo(one: str, other: str) -> bool:
    short = len(one) == len(other) <= 3
    start = _alike(one, other)
    one, other = one[start:], other[start:]
    end = _alike(one[::-1], other[::-1])
    one, other = one[: len(one) - end], other[: len(other) - end]
    swapped = len(one) == 2 and one == other[::-1]
    single = max(len(one), len(other)) == 1 and not (one + other).isdigit()
    return swapped or (single and not short)


def _alike(one: str, other: str) -> int:
    """Length of the common prefix."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))

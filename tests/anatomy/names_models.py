"""One configuration of every family, as its `config.json` says it."""

from llmcli.config import ModelConfig
from llmcli.families import find

LLAMA = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip
GPT2 = {"vocab_size": 53, "n_positions": 32, "n_embd": 16, "n_layer": 3, "n_head": 2}
SETTINGS = {
    "gpt2": GPT2,
    "gpt2-untied": GPT2 | {"tie_word_embeddings": False},
    "llama": LLAMA,
    "llama-tied-biased": LLAMA
    | {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    "mistral": LLAMA | {"sliding_window": 8},
    "qwen2": LLAMA,
    "qwen3": LLAMA | {"head_dim": 8},
}


def model(name: str) -> ModelConfig:
    """The configuration of that name in `SETTINGS`."""
    kind = name.partition("-")[0]
    return find(kind, "safetensors").from_hf(SETTINGS[name] | {"model_type": kind})

"""The small model of these tests, written to a directory: configuration and tokenizer."""

import json
from pathlib import Path
from typing import Any

from byte_tokenizer import byte_tokenizer

TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{{ lead }}{% endif %}"
)


def write_tiny(
    folder: Path,
    *,
    template: str = TEMPLATE,
    weights: bool = False,
    special: tuple[str, ...] = (),
    eos: str = "<|end|>",
    **config: Any,
) -> Path:
    """A Llama of 2 layers over the 256 bytes and 5 special tokens, with or without weights.

    `special`: further special tokens.
    """
    specials = ["<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|begin|>", *special]
    tokenizer = byte_tokenizer(specials)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos, "bos_token": "<|begin|>",
    } | ({"chat_template": template} if template else {})  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    values = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama",
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True,
        "hidden_act": "silu", "eos_token_id": 0, "bos_token_id": 4,
    }
    values |= config
    (folder / "config.json").write_text(json.dumps(values))
    if weights:
        _write_weights(folder, values)
    return folder


def write_mixture(folder: Path) -> Path:
    """One of 3 layers without weights: a dense one, then 8 experts in groups and a shared one."""
    return write_tiny(
        folder, architectures=["Glm4MoeForCausalLM"], model_type="glm4_moe", num_hidden_layers=3,
        head_dim=8, n_routed_experts=8, num_experts_per_tok=3, n_shared_experts=1, n_group=4,
        topk_group=2, first_k_dense_replace=1, moe_intermediate_size=24,
        routed_scaling_factor=1.5, max_position_embeddings=2048,
    )  # fmt: skip


def _write_weights(folder: Path, config: dict[str, Any]) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    draw = np.random.default_rng(0)
    width, hidden = config["hidden_size"], config["intermediate_size"]
    kv = width // config["num_attention_heads"] * config["num_key_value_heads"]
    rows = {"q": width, "k": kv, "v": kv, "o": width}
    layer = {
        **{f"self_attn.{part}_proj": (count, width) for part, count in rows.items()},
        **{f"mlp.{part}_proj": (hidden, width) for part in ("gate", "up")},
        "mlp.down_proj": (width, hidden),
        **{f"{name}_layernorm": (width,) for name in ("input", "post_attention")},
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (config["vocab_size"], width)}
    for at in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{at}.{name}": shape for name, shape in layer.items()}
    shapes["model.norm"] = (width,)
    tensors = {
        f"{name}.weight": draw.normal(0, 0.3, shape) if len(shape) > 1 else np.ones(shape)
        for name, shape in shapes.items()
    }
    tensors = {name: one.astype(np.float32) for name, one in tensors.items()}
    save_file(tensors, folder / "model.safetensors")

"""Tiny checkpoints with random weights, written as Hugging Face and llama.cpp write them."""

import json

import torch
from safetensors.torch import save_file

from llmcli.checkpoints import open_checkpoint
from llmcli.loading.load import load_checkpoint


def loaded(folder, **options):
    """The model in a folder or a file."""
    return load_checkpoint(open_checkpoint(folder), device="cpu", **options)


def in_chunks(monkeypatch, nbytes):
    """Weights are read, converted and moved so many bytes at a time."""
    monkeypatch.setattr("llmcli.loading.filling._CHUNK_BYTES", nbytes)


LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 97,
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def llama_tensors(dtype=torch.float32):
    g = torch.Generator().manual_seed(0)

    def normal(*shape):
        return (torch.randn(*shape, generator=g) * 0.3).to(dtype)

    tensors = {
        "model.embed_tokens.weight": normal(97, 32),
        "model.norm.weight": normal(32) + 1,
        "lm_head.weight": normal(97, 32),
    }
    for i in range(2):
        layer = f"model.layers.{i}"
        tensors |= {
            f"{layer}.input_layernorm.weight": normal(32) + 1,
            f"{layer}.self_attn.q_proj.weight": normal(32, 32),
            f"{layer}.self_attn.k_proj.weight": normal(16, 32),
            f"{layer}.self_attn.v_proj.weight": normal(16, 32),
            f"{layer}.self_attn.o_proj.weight": normal(32, 32),
            f"{layer}.post_attention_layernorm.weight": normal(32) + 1,
            f"{layer}.mlp.gate_proj.weight": normal(48, 32),
            f"{layer}.mlp.up_proj.weight": normal(48, 32),
            f"{layer}.mlp.down_proj.weight": normal(32, 48),
        }
    return tensors


def write_llama(folder, tensors=None, **config):
    """A directory with config.json and model.safetensors; `config` overrides keys."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(LLAMA | config))
    save_file(llama_tensors() if tensors is None else tensors, folder / "model.safetensors")
    return folder


GPT2 = {
    "model_type": "gpt2", "vocab_size": 53, "n_positions": 32, "n_embd": 16, "n_layer": 1,
    "n_head": 2, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip


def gpt2_tensors(d=16):
    """Of that width; `write_gpt2` has to be told another one, too."""
    g = torch.Generator().manual_seed(0)
    shapes = {
        "wte.weight": (53, d), "wpe.weight": (32, d), "ln_f.weight": (d,), "ln_f.bias": (d,),
        "h.0.ln_1.weight": (d,), "h.0.ln_1.bias": (d,), "h.0.ln_2.weight": (d,),
        "h.0.ln_2.bias": (d,), "h.0.attn.c_attn.weight": (d, 3 * d),
        "h.0.attn.c_attn.bias": (3 * d,), "h.0.attn.c_proj.weight": (d, d),
        "h.0.attn.c_proj.bias": (d,), "h.0.mlp.c_fc.weight": (d, 4 * d),
        "h.0.mlp.c_fc.bias": (4 * d,), "h.0.mlp.c_proj.weight": (4 * d, d),
        "h.0.mlp.c_proj.bias": (d,),
    }  # fmt: skip
    return {name: torch.randn(*shape, generator=g) for name, shape in shapes.items()}


def write_gpt2(folder, tensors=None, **config):
    """The same for GPT-2, whose query, key and value weights are one transposed matrix."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(GPT2 | config))
    save_file(gpt2_tensors() if tensors is None else tensors, folder / "model.safetensors")
    return folder

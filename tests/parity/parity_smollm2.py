"""transformers' Llama on the weights of SmolLM2's GGUF, as its own reader decodes them."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint


def transformers_from_gguf(path, dtype=torch.float32):
    """With eager attention. `from_pretrained` alone would need one more package, and read twice."""
    config = LlamaConfig(
        vocab_size=49_152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
        num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=8192,
        rms_norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": 1e5},
        tie_word_embeddings=True,
    )  # fmt: skip
    with torch.device("meta"):
        bare = LlamaForCausalLM(config)
    read = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=bare)
    model = LlamaForCausalLM.from_pretrained(
        None, config=config, state_dict=read["tensors"], dtype=dtype, attn_implementation="eager"
    )
    return model.eval()

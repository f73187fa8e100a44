"""transformers' Llama on the weights of SmolLM2's GGUF, as its own reader decodes them."""

import torch
from transformers import AutoConfig, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint


def transformers_from_gguf(path, dtype=torch.float32):
    """With eager attention. `from_pretrained` alone would need one more package."""
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
    with torch.device("meta"):
        bare = LlamaForCausalLM(config)
    read = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=bare)
    model = LlamaForCausalLM.from_pretrained(
        None, config=config, state_dict=read["tensors"], dtype=dtype, attn_implementation="eager"
    )
    return model.eval()

"""transformers' Llama on the weights of SmolLM2's GGUF, decoded by the gguf package alone."""


import gguf
import torch
from gguf import GGUFReader
from parity_gguf import separate
from transformers import LlamaConfig, LlamaForCausalLM


def transformers_from_gguf(path, dtype=torch.float32):
    """A Llama with a tied head; q and k rows put back into transformers' order."""
    reader = GGUFReader(path)

    def field(name):
        return reader.fields[f"llama.{name}"].contents()

    config = LlamaConfig(
        vocab_size=int(field("vocab_size")),
        hidden_size=int(field("embedding_length")),
        intermediate_size=int(field("feed_forward_length")),
        num_hidden_layers=int(field("block_count")),
        num_attention_heads=int(field("attention.head_count")),
        num_key_value_heads=int(field("attention.head_count_kv")),
        max_position_embeddings=int(field("context_length")),
        rms_norm_eps=field("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": field("rope.freq_base")},
        tie_word_embeddings=True,
        attn_implementation="eager",
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    state = {}
    for name, _ in model.named_parameters():  # the tied head is named once
        stored = names.get_name(name, try_suffixes=(".weight",))
        state[name] = _values(tensors.pop(stored), config)
    assert not tensors, f"tensors that no parameter wants: {list(tensors)}"
    model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    assert not [name for name, value in model.named_parameters() if value.is_meta]
    return model.to(dtype).eval()


def _values(tensor, config):
    values = torch.tensor(gguf.quants.dequantize(tensor.data, tensor.tensor_type)).float()
    values = values.reshape([int(size) for size in reversed(tensor.shape)])
    if ".attn_q." in tensor.name:
        return separate(values, config.num_attention_heads)
    if ".attn_k." in tensor.name:
        return separate(values, config.num_key_value_heads)
    return values

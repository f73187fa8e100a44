"""Random transformers models written as GGUF, the way llama.cpp's converter writes them.

Names come from the gguf package's own map. Arch `llama` interleaves the rows of q and k, GPT-2's
Conv1D weights are transposed, norms and biases stay in float32.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import parity_gguf_hybrid as hybrid
import torch
from gguf import GGMLQuantizationType as Type
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from zoo import TYPES

from llmcli.ops.quant import FORMATS

WINDOWED = ("gemma2", "gemma3_text", "phi3", "cohere2", "exaone4", "gpt_oss")
LAYER_NORM = {"starcoder2": "norm_epsilon", "cohere2": "layer_norm_eps",
              "gpt_neox": "layer_norm_eps"}  # fmt: skip
BY_HEAD = True  # keys and values of latents are two tensors
GATE_UP = False  # gates and neurons of experts are one (`--fuse-gate-up-exps`)
KEY_HEADS = False  # what belongs to one key head of Qwen3-Next is together, as in the first files
QKV = False  # queries with their gates, keys and values of Qwen3-Next are one (`--fuse-qkv`)
# rows of queries and keys, by the converter
PERMUTED = ("llama", "granite", "smollm3", "ministral3", "mixtral", "granitemoehybrid",
            "nemotron_h")
DELTA = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
TILED = DELTA[1:]  # value heads of one key head are apart in files
# of transformers; in files gate and up are two tensors
FUSED = (".mlp.experts.gate_up_proj", ".feed_forward.experts.gate_up_proj")


def interleave(rows: Tensor, heads: int) -> Tensor:
    """llama.cpp's order of a head's rows: number i beside number i + d/2 (`permute` there)."""
    split = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return split.swapaxes(1, 2).reshape(rows.shape)


def separate(rows: Tensor, heads: int) -> Tensor:
    """Undoes `interleave`."""
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def write_gguf(
    model: PreTrainedModel, path: Path, format: str, *, head: bool = True, tokenizer: str = ""
) -> None:
    """Write `model` to `path`; matrices in `format`. `head=False` leaves a tied head out.

    `tokenizer`: its kind; llama.cpp runs a file without one where it is `none`.
    The model's own parameters become what the file says they are: quantized and back.
    """
    config = model.config
    config.allow_global_per_layer_attribute_access = True  # Gemma 4's sizes differ by layer
    arch = hybrid.architecture(config) or gguf.MODEL_ARCH[TYPES[config.model_type].arch]
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    _write_metadata(writer, model)
    if tokenizer:
        writer.add_tokenizer_model(tokenizer)
    drawn = {name: parameter.float().clone() for name, parameter in model.state_dict().items()}
    for name, parameter in model.state_dict().items():  # a tied head is what the embedding became
        has_head = gguf.MODEL_TENSOR.OUTPUT in gguf.MODEL_TENSORS[arch]
        if name == "lm_head.weight" and not (head and has_head):
            continue
        if name.endswith(".kv_b_proj.weight") and BY_HEAD:
            k_Hcn, v_Hec = (
                _add(writer, names, name.replace(".kv_b_", f".{one}_b_"), part, format)
                for one, part in zip("kv", _by_head(drawn[name], model), strict=True)
            )
            parameter.copy_(torch.cat((k_Hcn.mT, v_Hec), 1).flatten(0, 1))
            continue
        if name.endswith(".in_proj_qkvz.weight") and not KEY_HEADS:
            parameter.copy_(_by_key_head(writer, names, name, drawn[name], model, format))
            continue
        if config.model_type in DELTA and QKV and ".self_attn." in name and "_proj" in name[-13:]:
            if ".q_proj." in name:
                _write_qkv(writer, model, name, drawn, format)
            if ".o_proj." not in name:
                continue
        if name.endswith("A_log"):  # a float32 number there, of which the logarithm is none here
            found = _written(writer, names, name, drawn[name], format, model)
            model.get_parameter(name).data = found
            continue
        if config.model_type == "gpt_oss" and ".experts." in name:
            parameter.copy_(_in_turns(writer, names, name, drawn[name], format))
            continue
        parts = [(name, drawn[name])]
        if name.endswith(FUSED) and not GATE_UP:
            each = (name.replace("gate_up", one) for one in ("gate", "up"))
            parts = [*zip(each, drawn[name].chunk(2, 1), strict=True)]
        axis = 1
        if (each := hybrid.halves(name, config)) is not None:
            axis = drawn[name].ndim - 2
            parts = [*zip(each, drawn[name].chunk(2, axis), strict=True)]
        found = [_written(writer, names, one, value, format, model) for one, value in parts]
        whole = torch.cat(found, axis).view(parameter.shape) if len(found) > 1 else found[0]
        parameter.copy_(whole)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _in_turns(
    writer: gguf.GGUFWriter, names: gguf.TensorNameMap, name: str, values: Tensor, format: str
) -> Tensor:
    """gpt-oss' experts, stored `[in, out]`; gate and up are every other number of the last axis."""
    parts = {name: values}
    if "gate_up" in name:
        each = [name.replace("gate_up", one) for one in ("gate", "up")]
        parts = {one: values[..., at::2] for at, one in enumerate(each)}
    found = []
    for one, value in parts.items():
        value = value.mT if value.ndim == 3 else value
        decoded = _add(writer, names, one, value.contiguous(), format)
        found.append(decoded.mT if value.ndim == 3 else decoded)
    return torch.stack(found, -1).flatten(-2)


def _by_key_head(
    writer: gguf.GGUFWriter, names: gguf.TensorNameMap, name: str, values: Tensor,
    model: PreTrainedModel, format: str,
) -> Tensor:  # fmt: skip
    """Queries, keys and values of all heads in one tensor, and the gates in another."""
    config = model.config
    each = config.linear_num_value_heads // config.linear_num_key_heads * (
        config.linear_value_head_dim
    )
    sizes = [config.linear_key_head_dim] * 2 + [each] * 2
    parts = values.unflatten(0, (config.linear_num_key_heads, -1)).split(sizes, 1)
    qkv = torch.cat([part.flatten(0, 1) for part in parts[:3]])
    layer, found = name.split(".")[2], []
    for target, part in ("attn_qkv", qkv), ("attn_gate", parts[3].flatten(0, 1)):
        found.append(_add_as(writer, f"blk.{layer}.{target}", part.contiguous(), format))
    rows = [part.shape[0] * part.shape[1] for part in parts]
    every = torch.cat(found).split(rows)
    return torch.cat(
        [one.view(part.shape) for one, part in zip(every, parts, strict=True)], 1
    ).flatten(0, 1)


def _write_qkv(
    writer: gguf.GGUFWriter, model: PreTrainedModel, name: str, drawn: Mapping[str, Tensor],
    format: str,
) -> None:  # fmt: skip
    sources = [name.replace("q_proj", f"{one}_proj") for one in "qkv"]
    rows = [len(drawn[source]) for source in sources]
    target = f"blk.{name.split('.')[2]}.attn_qkv"
    decoded = _add_as(writer, target, torch.cat([drawn[source] for source in sources]), format)
    for source, part in zip(sources, decoded.split(rows), strict=True):
        model.get_parameter(source).copy_(part)


def _tiled(values: Tensor, heads: tuple[int, int], size: int, *, back: bool = False) -> Tensor:
    """Rows of value heads, first the first of every key head, of `heads` key and value heads."""
    split = (heads[1] // heads[0], heads[0]) if back else (heads[0], heads[1] // heads[0])
    return values.unflatten(0, (*split, size)).swapaxes(0, 1).reshape(values.shape)


def _reordered(name: str, values: Tensor, config: PretrainedConfig, *, back: bool) -> Tensor:
    """What belongs to value heads, in llama.cpp's order of them or (`back`) transformers'."""
    heads = config.linear_num_key_heads, config.linear_num_value_heads
    size, keys = config.linear_value_head_dim, 2 * heads[0] * config.linear_key_head_dim
    if "in_proj_qkv" in name or "conv1d" in name:
        rest = _tiled(values[keys:], heads, size, back=back)
        return torch.cat((values[:keys], rest))
    if "in_proj_z" in name:
        return _tiled(values, heads, size, back=back)
    if name.endswith((".in_proj_a.weight", ".in_proj_b.weight", ".A_log", ".dt_bias")):
        return _tiled(values, heads, 1, back=back)
    if "out_proj" in name:  # columns
        return _tiled(values.T, heads, size, back=back).T.contiguous()
    return values


def _written(
    writer: gguf.GGUFWriter, names: gguf.TensorNameMap, name: str, value: Tensor, format: str,
    model: PreTrainedModel,
) -> Tensor:  # fmt: skip
    """Adds a tensor under llama.cpp's name; returns what it says then, in transformers' shape."""
    called = hybrid.published(name, model.config)
    decoded = _add(writer, names, called, _as_stored(name, value, model), format)
    return _as_read(name, decoded, model).view(value.shape)


def _add(
    writer: gguf.GGUFWriter, names: gguf.TensorNameMap, name: str, values: Tensor, format: str
) -> Tensor:
    """Writes it and returns what the file then says; what has no whole blocks stays in float32."""
    if (found := re.fullmatch(r"model\.layers\.(\d+)\.router\.(\w*scale)", name)) is not None:
        which = {"scale": "ffn_gate_inp", "per_expert_scale": "ffn_down_exps"}[found[2]]
        writer.add_tensor(f"blk.{found[1]}.{which}.scale", values.numpy())
        return values
    target = names.get_name(_stem(name), try_suffixes=(".weight", ".bias"))
    target = target or names.get_name(name) or (name if name.startswith("blk.") else None)
    if name.endswith(FUSED):
        target = f"blk.{name.split('.')[2]}.ffn_gate_up_exps"
    assert target is not None, name
    if target.endswith(("_exps", "attn_sinks")) or name.endswith("layer_scalar"):
        target += ".weight"
    return _add_as(writer, target, values, format)


def _add_as(writer: gguf.GGUFWriter, target: str, values: Tensor, format: str) -> Tensor:
    """The same under that name."""
    target += ".weight" if target.endswith(("attn_qkv", "attn_gate")) else ""
    plain = "position" in target or ".conv." in target or "_inp" in target or values.ndim == 1
    plain = plain or target.endswith(("_exps.bias", *hybrid.IN_FLOAT32)) or "ssm_conv1d" in target
    block = 1 if format not in FORMATS else FORMATS[format][0]
    kept = "F32" if plain or (values.ndim == 3 and values.shape[-1] % block) else format
    data = _encode(values, kept)
    writer.add_tensor(target, data, raw_dtype=Type[kept])
    decoded = data if kept == "F64" else gguf.quants.dequantize(data, Type[kept])
    return torch.from_numpy(decoded).reshape(values.shape)


def _stem(name: str) -> str:
    """As checkpoints name it: a bias is one of the module before it."""
    name = name.replace("e_score_correction_bias", "e_score_correction.bias")
    name = name.replace("expert_bias", "expert_bias.bias").replace("dt_bias", "dt_proj.bias")
    return name.replace("_proj_bias", "_proj.bias")


def _by_head(values: Tensor, model: PreTrainedModel) -> tuple[Tensor, Tensor]:
    """Rows of each head's keys from latents, turned, `[H, c, n]`, and its values' `[H, e, c]`."""
    config = model.config
    heads = values.view(config.num_attention_heads, -1, config.kv_lora_rank)
    k_Hnc, v_Hec = heads.split([config.qk_nope_head_dim, config.v_head_dim], 1)
    return k_Hnc.mT.contiguous(), v_Hec.contiguous()


def _as_stored(name: str, values: Tensor, model: PreTrainedModel) -> Tensor:
    config = model.config
    if config.model_type == "gpt2" and values.ndim == 2 and ".c_" in name:
        return values.T.contiguous()
    if config.model_type in PERMUTED and ".q_proj." in name:
        return interleave(values, config.num_attention_heads)
    if config.model_type in PERMUTED and ".k_proj." in name:
        return interleave(values, config.num_key_value_heads)
    if "query_key_value" in name:  # by head there, all queries first here
        heads = config.num_attention_heads
        return values.unflatten(0, (heads, 3, -1)).swapaxes(0, 1).flatten(0, 2)
    if _centred(config) and name.endswith("norm.weight") and "linear_attn" not in name:
        return (values * 2**20).round() / 2**20 + 1  # both are float32 numbers
    if config.model_type in hybrid.HYBRID:
        return hybrid.stored(name, values, config)
    if config.model_type in TILED and ".linear_attn." in name:
        values = _reordered(name, values, config, back=False)
    if name.endswith("A_log"):
        return -values.exp()
    return values.squeeze(1) if name.endswith((".conv.weight", ".conv1d.weight")) else values


def _as_read(name: str, values: Tensor, model: PreTrainedModel) -> Tensor:
    config = model.config
    if config.model_type == "gpt2" and values.ndim == 2 and ".c_" in name:
        return values.T
    if config.model_type in PERMUTED and ".q_proj." in name:
        return separate(values, config.num_attention_heads)
    if config.model_type in PERMUTED and ".k_proj." in name:
        return separate(values, config.num_key_value_heads)
    if "query_key_value" in name:
        heads = config.num_attention_heads
        return values.unflatten(0, (3, heads, -1)).swapaxes(0, 1).flatten(0, 2)
    if _centred(config) and name.endswith("norm.weight") and "linear_attn" not in name:
        return values - 1
    if config.model_type in hybrid.HYBRID:
        return hybrid.read(name, values)
    if name.endswith("A_log"):
        values = values.double().neg().log()
    if config.model_type in TILED and ".linear_attn." in name:
        return _reordered(name, values, config, back=True)
    return values


def _centred(config: PretrainedConfig) -> bool:
    """Whether the file's norms are the checkpoint's + 1."""
    gemma = config.model_type.startswith("gemma") and not config.model_type.startswith("gemma4")
    return gemma or config.model_type in DELTA


def _encode(values: Tensor, format: str) -> np.ndarray:
    if format.endswith("_K") or format.startswith("IQ") or format == "NVFP4":
        return random_blocks(values, format)
    if format == "F64":  # the gguf package neither reads nor writes it
        return values.contiguous().double().numpy()
    return gguf.quants.quantize(values.contiguous().numpy(), Type[format])


# Where a block has its scale, or its scale and its minimum; at its beginning if it is not here.
_SCALES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
_MIDDLES = {"Q2_K": 1.5, "Q4_K": 7.5, "Q5_K": 15.5}  # of the codes that a minimum is taken off


def random_blocks(values: Tensor, format: str) -> np.ndarray:
    """Random blocks, others for other `values`: the gguf package can read but not write them.

    Their numbers are about 0.05, and as often below 0 as above.
    """
    elements, size = FORMATS[format]
    *stack, columns = values.shape
    rows, seed = math.prod(stack), zlib.crc32(values.contiguous().numpy().tobytes())
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (rows, columns // elements, size), dtype=np.uint8)
    _set_scales(blocks, format, np.ones(blocks.shape[:2]))
    deviation = gguf.quants.dequantize(blocks, Type[format]).std()
    _set_scales(blocks, format, 0.05 / deviation * rng.uniform(0.5, 1.5, blocks.shape[:2]))
    return blocks.reshape(*stack, -1)


def _set_scales(blocks: np.ndarray, format: str, scales: np.ndarray) -> None:
    """Writes half-precision scales into blocks `[rows, n, bytes]`."""
    halves = _halves(scales)
    if format == "NVFP4":  # four of eight bits: 2^-7 and up to twice as much
        blocks[..., :4] = blocks[..., :4] & 7 | 8
        return
    if format == "IQ1_M":  # in the upper nibbles of four pairs of bytes
        for k in range(4):
            nibble = halves[..., k // 2] >> 4 * (k % 2) & 15
            blocks[..., 49 + 2 * k] = blocks[..., 49 + 2 * k] & 15 | nibble << 4
        return
    scale, *minimum = _SCALES.get(format, (0,))
    blocks[..., scale : scale + 2] = halves
    for at in minimum:
        blocks[..., at : at + 2] = _halves(scales * _MIDDLES[format])


def _halves(scales: np.ndarray) -> np.ndarray:
    return scales.astype(np.float16).view(np.uint8).reshape(*scales.shape, 2)


def _write_metadata(writer: gguf.GGUFWriter, model: PreTrainedModel) -> None:
    config = model.config
    if config.model_type in hybrid.HYBRID:
        hybrid.write_metadata(writer, config)
        return
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)
    if config.model_type == "gpt2":
        writer.add_feed_forward_length(config.n_inner or 4 * config.n_embd)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
        return
    if config.model_type.startswith("lfm2"):
        writer.add_feed_forward_length(model.model.layers[0].feed_forward.w1.out_features)
        attends = [kind != "conv" for kind in config.layer_types]
        writer.add_head_count_kv([config.num_key_value_heads * one for one in attends])
        writer.add_layer_norm_rms_eps(config.norm_eps)
        writer.add_shortconv_l_cache(config.conv_L_cache)
    else:
        if config.model_type != "gemma4_text":  # where they differ by layer
            if hasattr(config, "intermediate_size"):
                writer.add_feed_forward_length(config.intermediate_size)
            shared = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
            writer.add_head_count_kv(1 if hasattr(config, "kv_lora_rank") else shared)
        if config.model_type in LAYER_NORM:
            writer.add_layer_norm_eps(getattr(config, LAYER_NORM[config.model_type]))
        else:
            writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    _write_own(writer, config)
    if hasattr(config, "kv_lora_rank"):
        _write_latent(writer, config)
        return
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if config.model_type == "gemma4_text":
        _write_gemma4(writer, config)
        return
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    rope = config.rope_parameters
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    _write_rope(writer, rope.get("full_attention", rope), head_dim)


def _write_experts(writer: gguf.GGUFWriter, config: PretrainedConfig) -> None:
    """What the converters write of mixtures."""
    shares = config.model_type in ("qwen2_moe", *DELTA)
    grouped = hasattr(config, "n_routed_experts")
    named = shares or config.model_type == "lfm2_moe"
    count = "n_routed_experts" if grouped else "num_experts" if named else "num_local_experts"
    writer.add_expert_count(getattr(config, count))
    writer.add_expert_used_count(config.num_experts_per_tok)
    if shares or config.model_type == "qwen3_moe" or grouped:
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if config.model_type == "lfm2_moe":
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_leading_dense_block_count(config.num_dense_layers)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if config.model_type == "gpt_oss":
        writer.add_expert_feed_forward_length(config.intermediate_size)
    if shares:
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if grouped:
        second = config.model_type == "deepseek_v2"
        gating = gguf.ExpertGatingFuncType.SOFTMAX if second else gguf.ExpertGatingFuncType.SIGMOID
        writer.add_expert_gating_func(gating)
        writer.add_expert_shared_count(config.n_shared_experts)
        kinds = getattr(config, "mlp_layer_types", None)
        dense = kinds.count("dense") if kinds else config.first_k_dense_replace
        writer.add_leading_dense_block_count(min(dense, config.num_hidden_layers))
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)


def _write_latent(writer: gguf.GGUFWriter, config: PretrainedConfig) -> None:
    """Lengths of what is kept, and (`mla`) of a head's keys and values."""
    rope, rotated, rank = config.rope_parameters, config.qk_rope_head_dim, config.kv_lora_rank
    head_dim = config.qk_nope_head_dim + rotated
    writer.add_key_length(rank + rotated if BY_HEAD else head_dim)
    writer.add_value_length(rank if BY_HEAD else config.v_head_dim)
    if BY_HEAD:
        writer.add_key_length_mla(head_dim)
        writer.add_value_length_mla(config.v_head_dim)
    writer.add_kv_lora_rank(rank)
    if config.q_lora_rank is not None:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_rope_dimension_count(rotated)
    if rope.get("mscale_all_dim"):
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])
    _write_rope(writer, rope, rotated)


def _write_own(writer: gguf.GGUFWriter, config: PretrainedConfig) -> None:
    """What only some architectures write."""
    if config.model_type in DELTA:
        _write_delta(writer, config)
    if hasattr(config, "num_experts_per_tok"):
        _write_experts(writer, config)
    if config.model_type in ("gemma2", "gemma3_text"):
        writer.add_final_logit_softcapping(config.final_logit_softcapping or 0.0)
    if config.model_type == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    if config.model_type == "gemma3_text":
        slides = [kind == "sliding_attention" for kind in config.layer_types]
        writer.add_sliding_window_pattern(slides)
    if config.model_type == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if config.model_type == "cohere2":
        writer.add_logit_scale(config.logit_scale)
    if config.model_type == "gpt_neox":
        writer.add_parallel_residual(config.use_parallel_residual)
    if config.model_type == "ministral3":
        rope = config.rope_parameters
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        if "beta_fast" in rope:
            writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
            writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
    if config.model_type in WINDOWED and config.sliding_window:
        writer.add_sliding_window(config.sliding_window)
    if config.model_type == "exaone4":
        kinds = [kind == "sliding_attention" for kind in config.layer_types]
        writer.add_sliding_window_pattern(kinds)


def _write_delta(writer: gguf.GGUFWriter, config: PretrainedConfig) -> None:
    """Sizes of gated DeltaNet; the last layer of each period attends."""
    kinds = config.layer_types
    period = kinds.index("full_attention") + 1
    assert [kind == "full_attention" for kind in kinds] == [
        (i + 1) % period == 0 for i in range(len(kinds))
    ]
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
    if period != 4:  # which need not be said
        writer.add_full_attention_interval(period)
    if config.model_type in TILED:
        writer.add_rope_dimension_sections([1, 1, 0, 0])


def _write_gemma4(writer: gguf.GGUFWriter, config: PretrainedConfig) -> None:
    """Sizes by type of layer; frequencies that are not turned are divided by 1e30."""
    slides = [kind == "sliding_attention" for kind in config.layer_types]
    layers = [config.per_layer_config[i] for i in range(len(slides))]
    first = len(slides) - config.num_kv_shared_layers
    wide = [1 + (config.use_double_wide_mlp and i >= first) for i in range(len(slides))]
    writer.add_shared_kv_layers(config.num_kv_shared_layers)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input or 0)
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern(slides)
    writer.add_feed_forward_length([config.intermediate_size * times for times in wide])
    writer.add_head_count_kv([layer.num_key_value_heads for layer in layers])
    if config.final_logit_softcapping:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    whole, near = layers[slides.index(False)].head_dim, layers[slides.index(True)].head_dim
    writer.add_key_length(whole)
    writer.add_value_length(whole)
    writer.add_key_length_swa(near)
    writer.add_value_length_swa(near)
    writer.add_rope_dimension_count(whole)
    writer.add_rope_dimension_count_swa(near)
    full = config.rope_parameters["full_attention"]
    writer.add_rope_freq_base(full["rope_theta"])
    writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
    if config.enable_moe_block:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.top_k_experts)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    turned = int(whole * full["partial_rotary_factor"] / 2)
    factors = [1.0] * turned + [1e30] * (whole // 2 - turned)
    writer.add_tensor("rope_freqs.weight", np.array(factors, dtype=np.float32))


def _write_rope(writer: gguf.GGUFWriter, rope: Mapping[str, float], head_dim: int) -> None:
    writer.add_rope_freq_base(rope["rope_theta"])
    match rope["rope_type"]:
        case "linear":
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(rope["factor"])
        case "yarn":
            writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            writer.add_rope_scaling_factor(rope["factor"])
            writer.add_rope_scaling_orig_ctx_len(int(rope["original_max_position_embeddings"]))
        case "longrope":
            original = int(rope["original_max_position_embeddings"])
            factor = rope["factor"]
            writer.add_rope_scaling_orig_ctx_len(original)
            writer.add_rope_scaling_attn_factors(
                math.sqrt(1 + math.log(factor) / math.log(original))
            )
            for kind in ("long", "short"):
                factors = np.array(rope[f"{kind}_factor"], dtype=np.float32)
                writer.add_tensor(f"rope_factors_{kind}.weight", factors)
        case "llama3":
            writer.add_tensor("rope_freqs.weight", llama3_factors(rope, head_dim))


def llama3_factors(rope: Mapping[str, float], head_dim: int) -> np.ndarray:
    """One divisor per frequency: how the converter stores Llama 3's scaling, float32."""
    factors = []
    old = rope["original_max_position_embeddings"]
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (i / head_dim)
        if wavelength < old / high:
            factors.append(1.0)
        elif wavelength > old / low:
            factors.append(factor)
        else:
            smooth = (old / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, dtype=np.float32)

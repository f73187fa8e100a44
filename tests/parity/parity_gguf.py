"""Random transformers models written as GGUF, the way llama.cpp's converter writes them.

Names come from the gguf package's own map. Arch `llama` interleaves the rows of q and k, GPT-2's
Conv1D weights are transposed, norms and biases stay in float32. What is different where a model has
Mamba-2 is in `parity_gguf_hybrid`.
"""

import math
import re
import zlib
from functools import partial
from typing import Any

import gguf
import numpy as np
import parity_gguf_hybrid as hybrid
import torch
from gguf import GGMLQuantizationType as Type
from tensors import HALVES
from zoo import TYPES

from llmcli.ops.quant import FORMATS

WINDOWED = ("gemma2", "gemma3_text", "phi3", "cohere2", "exaone4", "gpt_oss")
DELTA = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
TILED = DELTA[1:]  # value heads of one key head are apart in files
# of transformers; in files gate and up are two tensors
FUSED = (".mlp.experts.gate_up_proj", ".feed_forward.experts.gate_up_proj")
# Other ways to write the same: keys and values of latents in one tensor, as before llama.cpp kept
# latents; gates and neurons of experts in one (`--fuse-gate-up-exps`); of Qwen3-Next what belongs
# to one key head together, as in the first files; queries with their gates, keys and values in one
# (`--fuse-qkv`); rows of queries and keys in transformers' order, which is wrong.
WAYS = ("joined latents", "fused gates", "by key head", "fused qkv", "rows not interleaved")


def interleave(rows, heads):
    """llama.cpp's order of a head's rows: number i beside number i + d/2 (`permute` there)."""
    split = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return split.swapaxes(1, 2).reshape(rows.shape)


def write_gguf(model, path, format, *, head=True, tokenizer="", ways=()):
    """Write `model` to `path`; matrices in `format`. `head=False` leaves a tied head out.

    `tokenizer`: its kind; llama.cpp runs a file without one where it is `none`. `ways`: of `WAYS`.
    The model's own parameters become what the file says they are: quantized and back.
    """
    assert {*ways} <= {*WAYS}
    Converter(model, path, format, ways).write(head=head, tokenizer=tokenizer)


class Converter:
    """Writes one file."""

    def __init__(self, model, path, format, ways):
        self.model, self.format, self.ways = model, format, ways
        self.config: Any = model.config
        self.config.allow_global_per_layer_attribute_access = True  # Gemma 4's differ by layer
        self.kind: str = self.config.model_type
        self.arch = hybrid.architecture(self.config) or gguf.MODEL_ARCH[TYPES[self.kind].arch]
        self.names = gguf.get_tensor_name_map(self.arch, self.config.num_hidden_layers)
        self.writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[self.arch])

    def write(self, *, head, tokenizer):
        """See `write_gguf`."""
        self._metadata()
        if tokenizer:
            self.writer.add_tokenizer_model(tokenizer)
        head = head and gguf.MODEL_TENSOR.OUTPUT in gguf.MODEL_TENSORS[self.arch]
        state = self.model.state_dict()
        self.drawn = {name: parameter.float().clone() for name, parameter in state.items()}
        for name, parameter in state.items():  # a tied head is what the embedding became
            if (head or name != "lm_head.weight") and (found := self._tensor(name)) is not None:
                if name.endswith("A_log"):  # a float32 there, of which the logarithm is none here
                    self.model.get_parameter(name).data = found
                else:
                    parameter.copy_(found)
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()

    def _tensor(self, name):
        """Writes a tensor; what the file then says, None where another one says it."""
        fused = self.kind in DELTA and "fused qkv" in self.ways
        if fused and ".self_attn." in name and "_proj" in name[-13:] and ".o_proj." not in name:
            if ".q_proj." in name:
                self._qkv(name)
            return None
        norms, found, _ = name.partition(".norms.")
        if found:  # of all heads in one tensor
            if ".norms.0." in name:
                heads = [one for key, one in self.drawn.items() if key.startswith(norms)]
                self._add(f"{norms}.weight", torch.stack(heads))
            return None
        values = self.drawn[name]
        pieces = self._pieces(name, values)
        places = self._pieces(name, torch.arange(values.numel()).view(values.shape))
        found = torch.empty(values.numel(), dtype=torch.float64)
        for target, piece in pieces.items():
            decoded = self._add(target, self._numbers(name, piece))
            found[places[target].flatten()] = self._said(name, decoded).flatten().double()
        return found.view(values.shape)

    def _qkv(self, name):
        """All of attention's projections but the last one in one tensor."""
        sources = [name.replace("q_proj", f"{one}_proj") for one in "qkv"]
        rows = [len(self.drawn[source]) for source in sources]
        target = f"blk.{name.split('.')[2]}.attn_qkv"
        decoded = self._add_as(target, torch.cat([self.drawn[source] for source in sources]))
        for source, part in zip(sources, decoded.split(rows), strict=True):
            self.model.get_parameter(source).copy_(part)

    def _pieces(self, name, x):
        """In which tensors the file has the numbers of one, by names that `_add` knows."""
        config, layer = self.config, name.split(".")[2:3]
        if name.endswith(".kv_b_proj.weight") and "joined latents" not in self.ways:
            # rows of each head's keys, turned, `[H, c, n]`, and of its values, `[H, e, c]`
            heads = x.view(config.num_attention_heads, -1, config.kv_lora_rank)
            k_Hnc, v_Hec = heads.split([config.qk_nope_head_dim, config.v_head_dim], 1)
            names = (name.replace(".kv_b_", f".{one}_b_") for one in "kv")
            return dict(zip(names, (k_Hnc.mT, v_Hec), strict=True))
        if name.endswith(".in_proj_qkvz.weight") and "by key head" not in self.ways:
            keys = config.linear_num_key_heads
            each = config.linear_num_value_heads // keys * config.linear_value_head_dim
            sizes = [config.linear_key_head_dim] * 2 + [each] * 2
            *qkv, gate = (part.flatten(0, 1) for part in x.unflatten(0, (keys, -1)).split(sizes, 1))
            return {f"blk.{layer[0]}.attn_qkv": torch.cat(qkv), f"blk.{layer[0]}.attn_gate": gate}
        if self.kind == "gpt_oss" and ".experts." in name:  # stored `[in, out]`, in turns
            x = x.mT if x.ndim == 3 else x
            turns = (x[:, 0::2], x[:, 1::2])
            each = [name.replace("gate_up", one) for one in ("gate", "up")]
            return dict(zip(each, turns, strict=True)) if "gate_up" in name else {name: x}
        x = x.mT if self.kind == "llama4_text" and ".experts." in name else x
        halves, axis = hybrid.halves(name, config), x.ndim - 2
        if name.endswith(FUSED) and "fused gates" not in self.ways:
            halves, axis = [name.replace("gate_up", one) for one in ("gate", "up")], 1
        if halves is not None:
            return dict(zip(halves, x.chunk(2, axis), strict=True))
        return {hybrid.published(name, config): self._moved(name, x)}

    def _moved(self, name, x):
        """In the file's order and shape."""
        config = self.config
        heads = {".q_proj.": "num_attention_heads", ".k_proj.": "num_key_value_heads"}
        if TYPES[self.kind].permuted and "rows not interleaved" not in self.ways:
            for part in [part for part in heads if part in name]:
                return interleave(x, getattr(config, heads[part]))
        if self.kind == "gpt2" and x.ndim == 2 and ".c_" in name:
            return x.T
        if "query_key_value" in name:  # by head there, all queries first here
            return x.unflatten(0, (config.num_attention_heads, 3, -1)).swapaxes(0, 1).flatten(0, 2)
        if self.kind in hybrid.HYBRID:
            return hybrid.moved(name, x, config)
        if self.kind in TILED and ".linear_attn." in name:
            x = self._tiled(name, x)
        return x.squeeze(1) if name.endswith((".conv.weight", ".conv1d.weight")) else x

    def _tiled(self, name, x):
        """What belongs to value heads, first that of the first head of every key head."""
        config = self.config
        keys, values = config.linear_num_key_heads, config.linear_num_value_heads
        size, before = config.linear_value_head_dim, 2 * keys * config.linear_key_head_dim

        def in_turns(rows, size):
            heads = rows.unflatten(0, (keys, values // keys, size))
            return heads.swapaxes(0, 1).reshape(rows.shape)

        if "in_proj_qkv" in name or "conv1d" in name:
            return torch.cat((x[:before], in_turns(x[before:], size)))
        if "in_proj_z" in name:
            return in_turns(x, size)
        if name.endswith((".in_proj_a.weight", ".in_proj_b.weight", ".A_log", ".dt_bias")):
            return in_turns(x, 1)
        return in_turns(x.T, size).T if "out_proj" in name else x  # columns

    def _centred(self, name):
        """Whether the file's norm is the checkpoint's + 1."""
        gemma = self.kind.startswith("gemma") and not self.kind.startswith("gemma4")
        norm = name.endswith("norm.weight") and "linear_attn" not in name
        return norm and (gemma or self.kind in DELTA)

    def _numbers(self, name, x):
        """What the file has in place of the numbers; `_said` is what these are again."""
        if self._centred(name):
            return (x * 2**20).round() / 2**20 + 1  # both are float32 numbers
        if name.endswith("A_log"):
            return hybrid.decays(x) if self.kind in hybrid.HYBRID else -x.exp()
        return x

    def _said(self, name, x):
        if self._centred(name):
            return x - 1
        if name.endswith("A_log"):
            x = x.double().neg().log()
            return x.float() if self.kind in hybrid.HYBRID else x
        return x

    def _add(self, name, values):
        """Writes it and returns what the file then says."""
        if found := re.fullmatch(r"model\.layers\.(\d+)\.router\.(\w*scale)", name):
            which = {"scale": "ffn_gate_inp", "per_expert_scale": "ffn_down_exps"}[found[2]]
            self.writer.add_tensor(f"blk.{found[1]}.{which}.scale", values.numpy())
            return values
        target = self.names.get_name(_stem(name), try_suffixes=(".weight", ".bias"))
        target = target or self.names.get_name(
            name.removeprefix("transformer."), try_suffixes=(".weight", ".bias")
        )
        target = target or self.names.get_name(name) or (name if name.startswith("blk.") else None)
        if name.endswith(FUSED):
            target = f"blk.{name.split('.')[2]}.ffn_gate_up_exps"
        assert target is not None, name
        if target.endswith(("_exps", "attn_sinks")) or name.endswith("layer_scalar"):
            target += ".weight"
        return self._add_as(target, values)

    def _add_as(self, target, values):
        """The same under that name; what has no whole blocks stays in float32."""
        target += ".weight" if target.endswith(("attn_qkv", "attn_gate")) else ""
        kept = ("position", ".conv.", "_inp", "ssm_conv1d", "_norm")
        plain = any(part in target for part in kept)
        plain = plain or values.ndim == 1 or target.endswith(("_exps.bias", *hybrid.IN_FLOAT32))
        values = values.contiguous()
        block = 1 if self.format not in FORMATS else FORMATS[self.format][0]
        cut = values.ndim == 3 and values.shape[-1] % block
        kept = "F32" if plain or cut else self.format
        data = _encode(values, kept)
        self.writer.add_tensor(target, data, raw_dtype=Type[kept])
        decoded = data if kept == "F64" else gguf.quants.dequantize(data, Type[kept])
        return torch.from_numpy(decoded).reshape(values.shape)

    def _say(self, **values):
        """`writer.add_KEY(value)` for each; what is None is not said."""
        for key, value in values.items():
            if value is not None:
                getattr(self.writer, f"add_{key}")(value)

    def _metadata(self):
        config, kind = self.config, self.kind
        if kind in hybrid.HYBRID:
            self._say(**hybrid.metadata(config))
            return
        latent, of = hasattr(config, "kv_lora_rank"), partial(hybrid.of, config)
        hidden = of("n_inner", "intermediate_size_mlp", "intermediate_size")
        heads = of("num_key_value_heads", "num_attention_heads")
        if kind in ("gpt2", "bloom"):
            hidden, heads = hidden or 4 * config.hidden_size, None if kind == "gpt2" else heads
        if kind.startswith("lfm2"):
            hidden = self.model.model.layers[0].feed_forward.w1.out_features
            heads = [heads * (layer != "conv") for layer in config.layer_types]
            self._say(shortconv_l_cache=config.conv_L_cache)
        rms = of("rms_norm_eps", "norm_eps")
        other = of("norm_epsilon", "layer_norm_eps", "layer_norm_epsilon") or 1e-5
        self._say(
            context_length=of("max_position_embeddings", "seq_length"),
            vocab_size=config.vocab_size, embedding_length=config.hidden_size,
            block_count=config.num_hidden_layers, head_count=config.num_attention_heads,
            layer_norm_rms_eps=rms, layer_norm_eps=None if rms else other,
        )  # fmt: skip
        if kind != "gemma4_text":  # where they differ by layer
            self._say(feed_forward_length=hidden, head_count_kv=1 if latent else heads)
        self._own()
        if latent:
            self._latent()
        elif kind == "gemma4_text":
            self._gemma4()
        elif hasattr(config, "rope_parameters"):
            size = of("head_dim") or config.hidden_size // config.num_attention_heads
            rope = config.rope_parameters
            self._say(
                key_length=size, value_length=size,
                rope_dimension_count=int(size * rope.get("partial_rotary_factor", 1.0)),
            )  # fmt: skip
            self._rope(rope.get("full_attention", rope), size)

    def _own(self):
        """What only some architectures write."""
        config, kind = self.config, self.kind
        own = TYPES[kind].metadata
        self._say(**{key: getattr(config, setting) for key, setting in own.items()})
        if kind in DELTA:
            self._delta()
        if hasattr(config, "num_experts_per_tok"):
            self._experts()
        if kind in ("gemma2", "gemma3_text"):
            self._say(final_logit_softcapping=config.final_logit_softcapping or 0.0)
        if kind in ("gemma3_text", "exaone4"):
            slides = [layer == "sliding_attention" for layer in config.layer_types]
            self._say(sliding_window_pattern=slides)
        if kind == "ministral3":
            rope = config.rope_parameters
            self._say(
                attn_temperature_scale=rope["llama_4_scaling_beta"],
                rope_scaling_yarn_log_mul=rope["mscale_all_dim"],
                rope_scaling_yarn_beta_fast=rope.get("beta_fast"),
                rope_scaling_yarn_beta_slow=rope.get("beta_slow"),
            )
        if kind in WINDOWED and config.sliding_window:
            self._say(sliding_window=config.sliding_window)

    def _experts(self):
        """What the converters write of mixtures."""
        config, kind, of = self.config, self.kind, partial(hybrid.of, self.config)
        prefix = "" if kind in ("gpt_oss", "llama4_text") else "moe_"
        self._say(
            expert_count=of("n_routed_experts", "num_experts", "num_local_experts"),
            expert_used_count=config.num_experts_per_tok,
            expert_feed_forward_length=of(f"{prefix}intermediate_size"),
            expert_shared_feed_forward_length=of("shared_expert_intermediate_size"),
        )
        softmax, sigmoid = gguf.ExpertGatingFuncType.SOFTMAX, gguf.ExpertGatingFuncType.SIGMOID
        if kind == "lfm2_moe":
            self._say(leading_dense_block_count=config.num_dense_layers, expert_gating_func=sigmoid)
        if hasattr(config, "n_routed_experts"):
            kinds = of("mlp_layer_types")
            dense = kinds.count("dense") if kinds else config.first_k_dense_replace
            self._say(
                expert_gating_func=softmax if kind == "deepseek_v2" else sigmoid,
                expert_shared_count=config.n_shared_experts,
                leading_dense_block_count=min(dense, config.num_hidden_layers),
                expert_weights_scale=config.routed_scaling_factor,
                expert_weights_norm=config.norm_topk_prob, expert_group_count=config.n_group,
                expert_group_used_count=config.topk_group,
            )  # fmt: skip

    def _latent(self):
        """Lengths of what is kept, and (`mla`) of a head's keys and values."""
        config, rotated, rank = self.config, self.config.qk_rope_head_dim, self.config.kv_lora_rank
        size, values = config.qk_nope_head_dim + rotated, config.v_head_dim
        joined = "joined latents" in self.ways
        all_dims = config.rope_parameters.get("mscale_all_dim")
        self._say(
            key_length=size if joined else rank + rotated, value_length=values if joined else rank,
            key_length_mla=None if joined else size, value_length_mla=None if joined else values,
            kv_lora_rank=rank, q_lora_rank=config.q_lora_rank, rope_dimension_count=rotated,
            rope_scaling_yarn_log_mul=0.1 * all_dims if all_dims else None,
        )  # fmt: skip
        self._rope(config.rope_parameters, rotated)

    def _delta(self):
        """Sizes of gated DeltaNet; the last layer of each period attends."""
        config, kinds = self.config, self.config.layer_types
        period = kinds.index("full_attention") + 1
        assert [kind == "full_attention" for kind in kinds] == [
            (i + 1) % period == 0 for i in range(len(kinds))
        ]
        self._say(
            ssm_conv_kernel=config.linear_conv_kernel_dim,
            ssm_state_size=config.linear_key_head_dim,
            ssm_group_count=config.linear_num_key_heads,
            ssm_time_step_rank=config.linear_num_value_heads,
            ssm_inner_size=config.linear_value_head_dim * config.linear_num_value_heads,
            full_attention_interval=period if period != 4 else None,  # which need not be said
            rope_dimension_sections=[1, 1, 0, 0] if self.kind in TILED else None,
        )  # fmt: skip

    def _gemma4(self):
        """Sizes by type of layer; frequencies that are not turned are divided by 1e30."""
        config = self.config
        slides = [kind == "sliding_attention" for kind in config.layer_types]
        layers = [config.per_layer_config[i] for i in range(len(slides))]
        first = len(slides) - config.num_kv_shared_layers
        wide = [1 + (config.use_double_wide_mlp and i >= first) for i in range(len(slides))]
        whole, near = layers[slides.index(False)].head_dim, layers[slides.index(True)].head_dim
        ropes, experts = config.rope_parameters, config.enable_moe_block
        self._say(
            shared_kv_layers=config.num_kv_shared_layers,
            embedding_length_per_layer_input=config.hidden_size_per_layer_input or 0,
            sliding_window=config.sliding_window, sliding_window_pattern=slides,
            feed_forward_length=[config.intermediate_size * times for times in wide],
            head_count_kv=[layer.num_key_value_heads for layer in layers],
            final_logit_softcapping=config.final_logit_softcapping or None,
            key_length=whole, value_length=whole, key_length_swa=near, value_length_swa=near,
            rope_dimension_count=whole, rope_dimension_count_swa=near,
            rope_freq_base=ropes["full_attention"]["rope_theta"],
            rope_freq_base_swa=ropes["sliding_attention"]["rope_theta"],
            expert_count=config.num_experts if experts else None,
            expert_used_count=config.top_k_experts if experts else None,
            expert_feed_forward_length=config.moe_intermediate_size if experts else None,
        )  # fmt: skip
        turned = int(whole * ropes["full_attention"]["partial_rotary_factor"] / 2)
        self._factors("rope_freqs", [1.0] * turned + [1e30] * (whole // 2 - turned))

    def _rope(self, rope, head_dim):
        self._say(rope_freq_base=rope["rope_theta"])
        kind, original = rope["rope_type"], rope.get("original_max_position_embeddings")
        if kind in ("linear", "yarn"):
            self._say(
                rope_scaling_type=gguf.RopeScalingType[kind.upper()],
                rope_scaling_factor=rope["factor"],
                rope_scaling_orig_ctx_len=int(original) if kind == "yarn" else None,
            )
        if kind == "longrope":
            self._say(
                rope_scaling_orig_ctx_len=int(original),
                rope_scaling_attn_factors=math.sqrt(1 + math.log(rope["factor"], original)),
            )
            for which in ("long", "short"):
                self._factors(f"rope_factors_{which}", rope[f"{which}_factor"])
        if kind == "llama3":
            self._factors("rope_freqs", llama3_factors(rope, head_dim))

    def _factors(self, name, factors):
        """One divisor per frequency, float32."""
        self.writer.add_tensor(f"{name}.weight", np.array(factors, dtype=np.float32))


def llama3_factors(rope, head_dim):
    """How the converter stores Llama 3's scaling."""
    factors = []
    old = rope["original_max_position_embeddings"]
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (i / head_dim)
        smooth = min(max((old / wavelength - low) / (high - low), 0.0), 1.0)
        factors.append(1 / ((1 - smooth) / factor + smooth))
    return factors


def _stem(name):
    """As checkpoints name it: a bias is one of the module before it."""
    name = name.replace("e_score_correction_bias", "e_score_correction.bias")
    name = name.replace("expert_bias", "expert_bias.bias").replace("dt_bias", "dt_proj.bias")
    return name.replace("_proj_bias", "_proj.bias")


def _encode(values, format):
    if format.endswith("_K") or format.startswith("IQ") or format == "NVFP4":
        return random_blocks(values, format)
    if format == "F64":  # the gguf package neither reads nor writes it
        return values.contiguous().double().numpy()
    return gguf.quants.quantize(values.contiguous().numpy(), Type[format])


_MIDDLES = {"Q2_K": 1.5, "Q4_K": 7.5, "Q5_K": 15.5}  # of the codes that a minimum is taken off


def random_blocks(values, format):
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


def _set_scales(blocks, format, scales):
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
    scale, *minimum = HALVES[format]
    blocks[..., scale : scale + 2] = halves
    for at in minimum:
        blocks[..., at : at + 2] = _halves(scales * _MIDDLES[format])


def _halves(scales):
    return scales.astype(np.float16).view(np.uint8).reshape(*scales.shape, 2)

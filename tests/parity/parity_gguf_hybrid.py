"""Models with Mamba-2 as llama.cpp's converter writes them: names, shapes, values and metadata.

`ssm_a` is −exp(A_log), it and `ssm_d` are columns, the norm is a row for each group. Where blocks
have one part, the number of key/value heads, or of neurons, says which.
"""

import gguf
import torch
from zoo import GRANITE_SCALES

HYBRID = ("mamba2", "granitemoehybrid", "nemotron_h")
IN_FLOAT32 = (".ssm_a", ".ssm_d", ".ssm_norm.weight")  # of matrices


def architecture(config):
    """That of the file, where the configuration says more than its type does."""
    if config.model_type == "nemotron_h" and "moe" in config.layer_types:
        return gguf.MODEL_ARCH.NEMOTRON_H_MOE
    if config.model_type == "granitemoehybrid" and "linear_attention" not in config.layer_types:
        return gguf.MODEL_ARCH.GRANITE
    return None


def published(name, config):
    """What the converter finds in a published file, in place of transformers' own name."""
    if config.model_type == "nemotron_h":
        name = name.replace("model.", "backbone.", 1) if name.startswith("model.") else name
        name = name.replace("e_score_correction_bias", "e_score_correction.bias")
        if ".mixer.experts." in name:  # merged there, under another name
            name = name.replace("backbone.", "model.").replace(".mixer.", ".mlp.")
    if config.model_type == "granitemoehybrid":
        name = name.replace(".router.weight", ".router.layer.weight")
        name = name.replace(".experts.down_proj", ".output_linear.weight")
        if not config.num_local_experts:
            name = name.replace("shared_mlp.output_linear", "mlp.down_proj")
    return name.replace(".dt_bias", ".dt_proj.bias")


def halves(name, config):
    """llama.cpp's names of the gates and of the neurons, where a tensor has the rows of both."""
    kind = ""
    if name.endswith("block_sparse_moe.experts.gate_up_proj"):
        kind = "_exps"
    elif not name.endswith("shared_mlp.input_linear.weight"):
        return None
    elif config.num_local_experts:
        kind = "_shexp"
    return [f"blk.{name.split('.')[2]}.ffn_{one}{kind}.weight" for one in ("gate", "up")]


def moved(name, values, config):
    """A tensor in the file's shape."""
    if name.endswith((".A_log", ".mixer.D", ".mamba.D")):
        return values[:, None]
    if name.endswith((".mixer.norm.weight", ".mamba.norm.weight")):
        groups = "mamba_n_groups" if config.model_type == "granitemoehybrid" else "n_groups"
        return values.view(getattr(config, groups), -1)
    return values.squeeze(1) if name.endswith("conv1d.weight") else values


def decays(A_log_H1):
    """What the file has of them."""
    return -_told(A_log_H1[:, 0]).double().exp().float()[:, None]


def _told(values):
    """The nearest numbers of float32 whose exponential is one, too, to ten digits.

    Others would not be what a file says: that is off by a rounding of float32.
    """
    steps = torch.arange(-(2**14), 2**14)
    steps = steps[steps.abs().argsort(stable=True)]
    ulp = torch.finfo(torch.float32).eps * values.abs()[:, None]
    near = (values[:, None] + ulp * steps).float()
    off = (near.double().exp().float().double().log() - near.double()).abs()
    assert (off < 1e-10).any(1).all()
    first = (off < 1e-10).int().argmax(1, keepdim=True)
    return near.gather(1, first)[:, 0]


def of(config, *names):
    """The first of these settings that it has and that is not 0."""
    return next(filter(None, (getattr(config, name, None) for name in names)), None)


def metadata(config):
    """Sizes of the model, of mixers, of attention, and what is multiplied: KEY of `add_KEY`."""
    own = {"mamba2": _mamba2, "granitemoehybrid": _granite, "nemotron_h": _nemotron}
    heads = of(config, "mamba_num_heads", "mamba_n_heads", "num_heads")
    return dict(
        embedding_length=config.hidden_size, block_count=config.num_hidden_layers,
        vocab_size=config.vocab_size, context_length=2**20,
        layer_norm_rms_eps=of(config, "layer_norm_epsilon", "rms_norm_eps"),
        ssm_conv_kernel=of(config, "conv_kernel", "mamba_d_conv"), ssm_time_step_rank=heads,
        ssm_state_size=of(config, "ssm_state_size", "mamba_d_state", "state_size"),
        ssm_inner_size=heads * of(config, "mamba_head_dim", "mamba_d_head", "head_dim"),
        ssm_group_count=of(config, "mamba_n_groups", "n_groups"),
    ) | own[config.model_type](config)  # fmt: skip


def _mamba2(config):
    return {"feed_forward_length": 0, "head_count": 0}


def _attention(config):
    """Of the layers that have some."""
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    attends = [kind == "full_attention" for kind in config.layer_types]
    return dict(head_count=heads, head_count_kv=[kv_heads * one for one in attends],
        rope_dimension_count=config.hidden_size // heads, rope_scaling_finetuned=all(attends))


def _granite(config):
    found = _attention(config) | dict(
        feed_forward_length=config.intermediate_size, expert_count=config.num_local_experts,
        expert_used_count=config.num_experts_per_tok,
        expert_shared_feed_forward_length=config.shared_intermediate_size,
        rope_freq_base=config.rope_parameters["rope_theta"],
        **{key: getattr(config, setting) for key, setting in GRANITE_SCALES.items()},
    )  # fmt: skip
    if found["rope_scaling_finetuned"]:
        found["context_length"] = config.max_position_embeddings
    return found


def _nemotron(config):
    kinds = config.layer_types
    experts = "moe" in kinds
    size = config.moe_intermediate_size if experts else config.intermediate_size
    found = _attention(config) | dict(
        layer_norm_eps=config.layer_norm_epsilon,  # which llama.cpp asks for, too
        key_length=config.head_dim, value_length=config.head_dim,
        feed_forward_length=[size * (kind in ("mlp", "moe")) for kind in kinds],
    )  # fmt: skip
    if experts:
        found |= dict(
            expert_count=config.n_routed_experts, expert_used_count=config.num_experts_per_tok,
            expert_feed_forward_length=size, expert_shared_count=config.n_shared_experts,
            expert_shared_feed_forward_length=config.moe_shared_expert_intermediate_size,
            expert_weights_norm=config.norm_topk_prob,
            expert_weights_scale=config.routed_scaling_factor, expert_group_count=config.n_group,
        )  # fmt: skip
        if config.n_group > 1:  # which no published model has, and the converter does not write
            found["expert_group_used_count"] = config.topk_group
    return found

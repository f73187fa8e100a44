"""What transformers computes inside, under our names, read with hooks on its own modules."""

import sys
from contextlib import ExitStack, contextmanager
from functools import partial
from unittest.mock import patch

import torch
from parity_reference import fresh_rope, precision
from torch import nn
from zoo import TYPES

ENDS = ("embed", "embed_norm.out", "embed_proj", "pos_embed", "ln_final.out", "head_proj")
LAYERS = ("ple.embed", "ple.proj", "ple.proj_norm")  # of all layers side by side
PAIRED = ("attn.q", "attn.k", "attn.q_rot", "attn.k_rot")
KEYS = ("attn.k", "attn.k_norm", "attn.v", "attn.v_norm")


@torch.no_grad()
def record(model, ids):
    """Our name → tensor, for one whole pass over `ids` `[B, T]`."""
    seen = {}
    layers = next(part for part in model.base_model.modules() if isinstance(part, nn.ModuleList))
    latent = hasattr(model.config, "kv_lora_rank")
    with precision(model), ExitStack() as hooks:
        for ours, theirs in TYPES[model.config.model_type].modules.items():
            if ours in (*ENDS, *LAYERS):
                _watch(hooks, model.base_model, theirs, partial(seen.__setitem__, ours))
                continue
            for i, layer in enumerate(layers):
                heads = _heads(model, ours, i)
                put = partial(_put, seen, f"blocks.{i}.{ours}", heads, len(ids))
                _watch(hooks, layer, theirs, put)
        for i, layer in enumerate(layers):
            _watch(hooks, layer, "<", partial(seen.__setitem__, f"blocks.{i}.resid_pre"))
            _watch(hooks, layer, ".", partial(seen.__setitem__, f"blocks.{i}.resid_post"))
        beside = _inputs_beside(hooks, layers)
        _watch(hooks, model, "lm_head|embed_out", partial(seen.__setitem__, "logits_raw"))
        hooks.enter_context(_watch_recurrence(model, seen))
        watch = _watch_heads if latent else _watch_rotation
        hooks.enter_context(watch(model, seen))
        hooks.enter_context(_watch_scans(model, seen, layers))
        fresh_rope(model)
        out = model(ids, use_cache=False, output_attentions=True)
    patterns = out.attentions if attending_layers(model) else ()
    for i, pattern in zip(attending_layers(model), patterns, strict=True):
        seen[f"blocks.{i}.attn.pattern"] = pattern
    if model.config.model_type == "stablelm":  # whose function takes only what it rotates
        for name in [name for name in seen if name.endswith("_rot")]:
            before = name.removesuffix("_rot")
            whole = seen.get(f"{before}_norm", seen[before])
            seen[name] = torch.cat((seen[name], whole[..., seen[name].shape[-1] :]), -1)
    if "pos_embed" in seen:  # computed once for all rows
        seen["pos_embed"] = seen["pos_embed"].expand(len(ids), -1, -1)
    if not getattr(model.config, "do_layer_norm_before", True):
        _post_norm(seen, len(layers))
    seen["logits"] = out.logits
    if beside:
        seen["ple.in"] = torch.stack(beside, 1)
    for name in seen.keys() & {*LAYERS}:
        seen[name] = seen[name].flatten(2).unflatten(-1, (len(layers), -1)).transpose(1, 2)
    for name in [name for name in seen if name.endswith(PAIRED) and not latent]:
        order = numbers_of_a_head(model, int(name.split(".")[1]), seen[name].shape[-1])
        seen[name] = seen[name][..., order]
    if hasattr(model.config, "n_routed_experts"):
        _in_order(model, seen)
    for at in [name.removesuffix("gated") for name in seen if name.endswith(".attn.gated")]:
        size = seen[f"{at}gated"].shape[-1]  # gates lie behind each head's queries
        seen[f"{at}q"], seen[f"{at}gate"] = seen[f"{at}q"].split(size, -1)
        seen[f"{at}gate_act"] = seen[f"{at}gate"].sigmoid()
        seen[f"{at}z"] = seen[f"{at}gated"] / seen[f"{at}gate_act"]
    for at in [name.removesuffix("out") for name in seen if name.endswith(".conv.out")]:
        seen[f"{at}in"] = seen[f"{at}B"] * seen[f"{at}x"]
        seen[f"{at}conv"] = seen[f"{at}out"] / seen[f"{at}gate"]
    return seen


def _post_norm(seen, count):
    """Post-norm blocks as ours: the stream is before a norm, which is at the start of the next."""
    normed = [seen.pop(f"blocks.{i}.ln2.out") for i in range(count)]
    stream, residual = seen["blocks.0.resid_pre"], seen["blocks.0.resid_pre"]
    for i in range(count):
        block = f"blocks.{i}"
        seen[f"{block}.ln2.out"] = seen.pop(f"{block}.ln1.out")
        if i:
            seen[f"{block}.ln1.out"] = residual = normed[i - 1]
        seen[f"{block}.resid_pre"], stream = stream, seen[f"{block}.resid_mid"]
        seen[f"{block}.resid_mid"] = residual + seen[f"{block}.attn_out"]
        seen[f"{block}.resid_post"] = stream
    seen["ln_final.out"] = normed[-1]


def _in_order(model, seen):
    """The chosen experts by what they were chosen by, the largest first: there in any order."""
    for name in [name for name in seen if name.endswith(".expert_idx")]:
        moe, layer = name.removesuffix("expert_idx"), int(name.split(".")[1])
        scores = seen[f"{moe}router_logits"].sigmoid()
        block = model.base_model.layers[layer]
        gate = (block.mixer if hasattr(block, "mixer") else block.mlp).gate
        if hasattr(gate, "e_score_correction_bias"):
            scores = scores + gate.e_score_correction_bias
        order = scores.gather(-1, seen[name]).argsort(-1, descending=True)
        for one in (name, f"{moe}expert_weight"):
            seen[one] = seen[one].gather(-1, order)


def _inputs_beside(hooks, layers):
    """What enters every layer beside the residual stream, where something does."""
    found = []

    def takes(_, args, kwargs):
        if len(args) > 1 and args[1] is not None:
            found.append(args[1])

    for layer in layers:
        hooks.callback(layer.register_forward_pre_hook(takes, with_kwargs=True).remove)
    return found


def numbers_of_a_head(model, layer, size):
    """Which number of a head each of ours is: where neighbours are rotated we have them apart."""
    config = model.config
    dims = 0
    if config.model_type in ("glm", "glm4"):
        dims = int(size * config.rope_parameters["partial_rotary_factor"])
    if config.model_type == "cohere2" and config.layer_types[layer] == "sliding_attention":
        dims = size
    if config.model_type == "llama4_text" and config.no_rope_layers[layer]:
        dims = size
    return [*range(0, dims, 2), *range(1, dims, 2), *range(dims, size)]


def attending_layers(model):
    """The layers that have softmax attention."""
    config = model.config
    kinds = getattr(config, "layer_types", None) or ["attention"] * config.num_hidden_layers
    return [
        layer for layer, kind in enumerate(kinds)
        if "attention" in kind and kind != "linear_attention"
    ]  # fmt: skip


def rotating_layers(model):
    """The layers that rotate queries and keys."""
    config, layers = model.config, attending_layers(model)
    if config.model_type in ("smollm3", "llama4_text"):
        return [layer for layer in layers if config.no_rope_layers[layer]]
    windows = config.model_type == "cohere2" or getattr(config, "sliding_window", None)
    if config.model_type in ("cohere2", "exaone4") and windows:
        return [layer for layer in layers if config.layer_types[layer] == "sliding_attention"]
    return layers


def _heads(model, ours, layer):
    """Into how many heads that activation is split; 0 where it is a row for each token."""
    if ours in ("linattn.gate", "linattn.z", "linattn.out"):
        return int(model.config.linear_num_value_heads)
    if not ours.startswith("attn.") or ours == "attn.out":
        return 0
    if "latent" in ours:
        return 0
    config = model.config.per_layer_config[layer]
    heads = config.num_attention_heads
    return getattr(config, "num_key_value_heads", heads) if ours in KEYS else heads


def _put(seen, name, heads, batch, value):
    """`[B, T, H·d]` and `[B, T, H, d]` → `[B, H, T, d]`, where there are heads (T is not H).

    `[B · T, d]`, as mixtures of experts have it, → `[B, T, d]`.
    """
    if value.ndim == 2:  # or `[B · T · H, d]`
        value = value.unflatten(0, (batch, -1, heads) if heads else (batch, -1))
    if heads:
        value = value if value.ndim == 4 else value.unflatten(-1, (heads, -1))
        value = value if value.shape[1] == heads else value.transpose(1, 2)
    seen[name] = value


def _watch(hooks, of, path, put):
    """Hands on what the module at `path` puts out or (`<`) takes, where `of` has it."""
    name, _, item = path.strip("<.").partition("#")
    name, _, third = name.partition("/")
    there = dict(of.named_modules())
    module = next((there[one] for one in _whichever(name, there)), None)
    if module is None or not path:
        return

    def takes(_, args, kwargs):
        put(args[0] if args else kwargs["hidden_states"])

    def gives(_, __, value):
        value = value[int(item or 0)] if isinstance(value, tuple) else value
        if path.endswith("shared_expert"):  # to which Llama 4 adds in place
            value = value.clone()
        put(value.chunk(3, dim=-1)[int(third)] if third else value)

    if path.endswith("<"):
        handle = module.register_forward_pre_hook(takes, with_kwargs=True)
    else:
        handle = module.register_forward_hook(gives)
    hooks.callback(handle.remove)


def _whichever(name, there):
    """Those of the modules `a|b&c|d&!e` that are there, beside (or without) the other one."""
    for one in name.split("|"):
        module, _, other = one.partition("&")
        without = other.startswith("!")
        if module in there and (not other or (other.lstrip("!") in there) != without):
            yield module


def _looking(right, look):
    """A function that does the same, and shows what it returns and took."""

    def call(*args, **kwargs):
        out = right(*args, **kwargs)
        look(out, *args, **kwargs)
        return out

    return call


@contextmanager
def _observed(model, **looks):
    """Looks at calls of functions of the model's module, by name, where it has them."""
    module = sys.modules[type(model).__module__]
    with ExitStack() as patches:
        for name, look in looks.items():
            if (right := getattr(module, name, None)) is not None:
                patches.enter_context(patch.object(module, name, _looking(right, look)))
        yield


@contextmanager
def _watch_scans(model, seen, layers):
    """What Mamba-2 mixers convolve, scan and normalize, as their functions take and return it."""
    mixers = {
        f"blocks.{i}.ssm": mixer for i, layer in enumerate(layers)
        if hasattr(mixer := getattr(layer, "mamba", None) or getattr(layer, "mixer", None), "A_log")
    }  # fmt: skip
    scans, convolutions = iter(mixers), iter(mixers)

    def convolved(out, x, *rest, **more):
        if mixers:  # those of gated DeltaNet are another thing
            name = next(convolutions)
            seen[f"{name}.in"], seen[f"{name}.act"] = x.mT, out.mT

    def scanned(out, x, dt, A, B, C, **more):
        name = next(scans)
        seen[f"{name}.dt_in"] = dt
        for leaf, value in (("x", x), ("B", B), ("C", C), ("skip", out)):
            seen[f"{name}.{leaf}"] = value.transpose(1, 2)

    def normed(name, _, args, out):
        for leaf, value in (("gate", args[1]), ("out", out)):
            split = value.unflatten(-1, (mixers[name].num_heads, -1))
            seen[f"{name}.{leaf}"] = split.transpose(1, 2)

    with ExitStack() as hooks:
        for name, mixer in mixers.items():
            hooks.callback(mixer.norm.register_forward_hook(partial(normed, name)).remove)
        hooks.enter_context(_observed(model, mamba2_chunk_scan=scanned, causal_conv1d_fn=convolved))
        yield


def _watch_heads(model, seen):
    """Queries, keys and values of latent attention, as they enter the scores, in order.

    What is rotated is behind the content: halves in all types but the first, which has neighbours.
    """
    config = model.config
    content, rotated = config.qk_nope_head_dim, config.qk_rope_head_dim
    layer, order = iter(range(config.num_hidden_layers)), [*range(content + rotated)]
    if config.model_type == "deepseek_v2":
        order[content:] = [*order[content::2], *order[content + 1 :: 2]]

    def attended(_, module, q, k, v, *rest, **more):
        name = f"blocks.{next(layer)}.attn"
        q_rot, k_rot = q[..., order], k[..., order]
        seen[f"{name}.q_rot"], seen[f"{name}.k_rot"], seen[f"{name}.v"] = q_rot, k_rot, v
        seen[f"{name}.q"], seen[f"{name}.k"] = q_rot[..., :content], k_rot[..., :content]
        seen[f"{name}.q_pe_rot"] = q_rot[..., content:]
        seen[f"{name}.k_pe_rot"] = k_rot[:, 0, :, content:]

    return _observed(model, eager_attention_forward=attended)


def _watch_recurrence(model, seen):
    """What enters gated DeltaNet behind the convolution, and its gates, in order."""
    kinds = getattr(model.config, "layer_types", None) or ()
    layers = (layer for layer, kind in enumerate(kinds) if kind == "linear_attention")

    def entered(_, q, k, v, *, g, beta, **more):
        at = f"blocks.{next(layers)}.linattn"
        seen[f"{at}.act"] = torch.cat([one.flatten(2) for one in (q, k, v)], -1)
        seen[f"{at}.v"] = v.transpose(1, 2)
        seen[f"{at}.beta"], seen[f"{at}.log_decay"] = beta, g

    return _observed(model, torch_chunk_gated_delta_rule=entered)


def _watch_rotation(model, seen):
    """The rotated queries and keys, as the layers' common function returns them, in order."""
    first = model.config.num_hidden_layers - getattr(model.config, "num_kv_shared_layers", 0)
    names = iter([  # without keys of layers that read another's
        f"blocks.{layer}.attn.{one}_rot" for layer in rotating_layers(model)
        for one in "qk"[: 1 + (layer < first)]
    ])  # fmt: skip
    alone = model.config.model_type == "gemma4_text"  # there queries and keys in calls of their own

    def rotated(out, *rest, **more):
        for x_rot in [out.transpose(1, 2)] if alone else out:
            seen[next(names)] = x_rot

    def rotated_first(out, *rest, **more):  # Llama 4 normalizes behind the rotation
        for x_rot in out:
            name = next(names)
            mixer = model.base_model.layers[int(name.split(".")[1])].self_attn
            x_rot = mixer.qk_norm(x_rot) if model.config.use_qk_norm else x_rot
            seen[name] = x_rot.transpose(1, 2)

    return _observed(model, apply_rotary_pos_emb=rotated, apply_rotary_emb=rotated_first)

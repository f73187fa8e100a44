"""Tiny random checkpoints of the zoo's variants, as transformers writes them."""


import torch
from tiny_checkpoints import loaded
from transformers import AutoConfig, AutoModelForCausalLM

PROMPT = 330  # tokens of the long prompt; every model's context is longer, unless it is scaled


def randomize(model, seed):
    """Random weights with enough spread that a wrong part shows.

    Attention is far from uniform, no norm weight is 1 and no bias 0. Much more spread would only
    amplify rounding: as it is, transformers moves by up to 5e-6 between float32 and float64.
    """
    generator = torch.Generator().manual_seed(seed)
    kind = model.config.model_type  # what norms multiply by is about 1
    centred = kind.startswith(("gemma", "qwen3_next", "qwen3_5"))
    centred = centred and not kind.startswith("gemma4")
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.copy_(1 + 0.3 * torch.randn(1, generator=generator))
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("dt_bias"):  # states that remember some ten tokens
                parameter.copy_(noise - 3)
            elif parameter.ndim == 1 and name.endswith("weight"):
                around_0 = centred and not name.endswith("linear_attn.norm.weight")
                parameter.copy_((0 if around_0 else 1) + 0.3 * noise)
                if kind.startswith("gemma4") and name.endswith("q_norm.weight"):
                    parameter.mul_(0.4)  # scores are not divided by the root of a head's size
            elif name.endswith(("router.scale", "per_expert_scale")):
                parameter.copy_(1 + 0.3 * noise)
            elif parameter.ndim == 1 or name.endswith("_bias"):
                parameter.copy_(0.3 * noise)
            elif "embed" in name or "wte" in name or "wpe" in name:
                parameter.copy_(0.15 * noise)
            else:
                fan_in = parameter.shape[0 if model.config.model_type == "gpt2" else -1]
                gain = 0.9 if any(part in name for part in ("q_proj", "k_proj", "c_attn")) else 0.6
                # a router's: choices that rounding cannot turn
                if name.endswith((".gate.weight", ".router.weight")):
                    gain = 3.0
                if name.endswith("router.proj.weight"):  # its rows are divided by the root of D
                    gain = 3.0 * fan_in**0.5
                parameter.copy_(gain * noise / fan_in**0.5)
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))


def build(one, seed=0):
    """A random model of the variant in its own dtype."""
    config = AutoConfig.for_model(**one.settings)
    model = AutoModelForCausalLM.from_config(config)
    randomize(model, seed)
    return model.to(one.dtype)


def write(one, folder):
    """Write the variant's checkpoint into `folder`, as transformers does."""
    path = folder / one.name
    build(one).save_pretrained(path, max_shard_size=one.shard)
    if one.edit is not None:
        one.edit(path)
    return path


def opened(path, dtype="auto", **options):
    """Our model of a folder or a file."""
    return loaded(path, dtype=dtype, text=False, **options)


def without_room(monkeypatch):
    """From here on no weights fit into memory: they stay in the mapped file."""
    monkeypatch.setattr("llmcli.devices.available_bytes", lambda device: 1)
    monkeypatch.setattr("llmcli.devices.require_memory", lambda *args: None)


def prompt(batch=1, tokens=PROMPT, vocab=211, seed=7):
    """Random ids `[batch, tokens]`; one row is the beginning of every longer one."""
    return torch.randint(vocab, (batch, tokens), generator=torch.Generator().manual_seed(seed))


ROWS = prompt(batch=3, tokens=PROMPT - 26)

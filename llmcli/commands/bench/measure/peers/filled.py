"""A model of transformers with the weights of ours.

A directory of safetensors is read by transformers itself. From any other source (a GGUF file, a
single safetensors file, random weights) its model is built from our configuration and filled with
copies of our parameters: reading GGUF on its own needs one more package, and drops what a file
says of rotary frequencies.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from llmcli.errors import UsageError
from llmcli.families.rules import Load, Multiply, PerExpert, Rows, Transpose
from llmcli.families.to_transformers import hub_config, hub_loads, transposed
from llmcli.loading.filling import row_order
from llmcli.model import Model
from llmcli.parts.attention.config import FrequencyFactors


def reads_itself(ours: Model) -> bool:
    """A directory whose weights are in use; no pickle is ever given to it."""
    checkpoint = ours.checkpoint
    stored = checkpoint.kind == "safetensors" and checkpoint.path.is_dir()
    return stored and ours.random_seed is None


def read_model(ours: Model) -> Any:
    """As transformers reads the directory."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        str(ours.checkpoint.path),
        dtype=ours.dtype,
        local_files_only=True,
        use_safetensors=True,
        trust_remote_code=False,
    )
    return model.to(ours.device).eval()


def without_weights(ours: Model) -> Any:
    """Parameters on the meta device; it imports the model's own code, which is no loading."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if reads_itself(ours):
        config = AutoConfig.from_pretrained(
            str(ours.checkpoint.path), local_files_only=True, trust_remote_code=False
        )
    else:
        config = AutoConfig.for_model(**hub_config(ours.config))
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=ours.dtype)


def filled(model: Any, ours: Model) -> Any:
    """Our parameters in place of those on the meta device, and rotary tables computed for real."""
    names = [name for name, _ in model.named_parameters()]  # a tied head is named once
    stored = model.state_dict()
    names += [name for name, _ in model.named_buffers() if name in stored]
    model.load_state_dict(_state(ours, names), strict=False, assign=True)
    model.tie_weights()
    for name, part in list(model.named_modules()):
        if name.endswith(("rotary_emb", "pos_emb")):
            with torch.device(ours.device):
                fresh = type(part)(model.config)
            _divide(fresh, ours)
            model.set_submodule(name, fresh)
    for part in model.modules():
        if hasattr(part, "scalar_embed_scale"):  # Gemma's embeddings
            factor = torch.tensor(part.scalar_embed_scale, dtype=part.weight.dtype)
            part.embed_scale = factor.to(ours.device)
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        if value.is_meta:
            raise UsageError(
                f"transformers keeps `{name}` in its model, and nothing of ours fills it",
                hint="leave out `--against`",
            )
    return model.eval()


def _state(ours: Model, names: Sequence[str]) -> dict[str, Tensor]:
    """Copies of our parameters under transformers' names, laid out as it lays them out."""
    loads = defaultdict(list)
    for load in hub_loads(ours.config, names):
        loads[load.source].append(load)
    state = {}
    for name, parts in loads.items():
        pieces = [_as_stored(ours, part) for part in parts]
        if any(isinstance(op, PerExpert) for op in parts[0].ops):  # rows of each expert
            state[name] = _experts(parts, pieces)
            continue
        value = torch.cat(pieces)
        orders = [row_order(part.ops, (len(value),), name) for part in parts]
        if all(len(order) == len(piece) for order, piece in zip(orders, pieces, strict=True)):
            value[torch.cat(orders).to(value.device)] = torch.cat(pieces)
        state[name] = value.t().contiguous() if transposed(parts[0]) and value.ndim == 2 else value
    return state


def _as_stored(ours: Model, load: Load) -> Tensor:
    """Our parameter without the factor that it was multiplied by when it was read."""
    weight = ours.decoder.weight(load.target)
    factor = math.prod(op.value for op in load.ops if isinstance(op, Multiply))
    return weight.dense(ours.dtype) if factor == 1 else (weight.dense() / factor).to(ours.dtype)


def _experts(parts: Sequence[Load], pieces: Sequence[Tensor]) -> Tensor:
    """The matrices or biases of all experts in one tensor: one piece behind another, or in turns;
    `[in, out]` where the rule says so.
    """
    ops = [op.op for op in parts[0].ops if isinstance(op, PerExpert)]
    in_turns = any(isinstance(op, Rows) and op.groups > 1 for op in ops)
    value = torch.stack(list(pieces), 2).flatten(1, 2) if in_turns else torch.cat(list(pieces), 1)
    return value.mT.contiguous() if Transpose() in ops else value


def _divide(rotary: Any, ours: Model) -> None:
    """Divides the frequencies by those that a GGUF file gives one by one."""
    attention = ours.config.layers[0].attention
    rope = None if attention is None else attention.rope
    if rope is None or not isinstance(rope.scaling, FrequencyFactors):
        return
    factors = rope.scaling.factors
    assert math.prod(rotary.inv_freq.shape) == len(factors)
    rotary.inv_freq.div_(torch.tensor(factors, device=rotary.inv_freq.device))

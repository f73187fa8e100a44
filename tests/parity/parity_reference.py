"""transformers as the reference, in float32 as it is and in a float64 that really is float64.

Even for a float64 model transformers computes RMSNorm, the rotary tables and the softmax of
attention in float32. Its code asks for `torch.float32`, `torch.float` and `.float()` by name at
every call, so inside `really_float64` those names mean float64; `OnlyFloat64` proves it, operation
by operation.
"""

from contextlib import contextmanager, nullcontext
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, DynamicCache


@contextmanager
def really_float64():
    """Where Python code asks for float32 by name or by default, it gets float64."""
    torch.set_default_dtype(torch.float64)  # an int64 tensor times a Python float takes it
    try:
        with (
            patch.object(torch, "float32", torch.float64),
            patch.object(torch, "float", torch.float64),
            patch.object(torch.Tensor, "float", torch.Tensor.double),
        ):
            yield
    finally:
        torch.set_default_dtype(torch.float32)


class OnlyFloat64(TorchDispatchMode):
    """Notes every operation that returns a floating-point tensor of another type than float64."""

    def __init__(self):
        super().__init__()
        self.offenders: list[str] = []
        self.seen = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                self.seen += 1
                if leaf.dtype != torch.double:
                    self.offenders.append(f"{func} -> {leaf.dtype}")
        return out


def load_reference(path, dtype):
    """The checkpoint in `path` as transformers reads it, parameters in `dtype`.

    Attention and experts are eager: the latter's other kernels have no float64.
    """
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    )
    if model.base_model is model:  # Llama 4's own prefix is that of the multimodal one
        model.base_model_prefix = "model"
    return model.eval()


def precision(model):
    """The context in which `model` must run for its own dtype to be what is computed in."""
    return really_float64() if model.dtype == torch.double else nullcontext()


def fresh_rope(model):
    """Rebuild the rotary tables in the precision in force; dynamic kinds also keep a history."""
    name = "pos_emb" if hasattr(model.base_model, "pos_emb") else "rotary_emb"
    rope = getattr(model.base_model, name, None)
    if rope is not None:
        setattr(model.base_model, name, type(rope)(model.config))


@torch.no_grad()
def reference_logprobs(model, ids, chunks=None):
    """Log-probabilities `[B, T, V]` of every next token, for equal rows `ids` `[B, T]`.

    `chunks` (lengths that add up to T) feeds the rows piece by piece through transformers' own
    cache; None is one pass without a cache.
    """
    with precision(model):
        fresh_rope(model)
        if chunks is None:
            return model(ids, use_cache=False).logits.log_softmax(-1)
        cache, pieces = DynamicCache(config=model.config), []
        for piece in ids.split(list(chunks), dim=1):
            pieces.append(model(piece, past_key_values=cache, use_cache=True).logits)
        return torch.cat(pieces, dim=1).log_softmax(-1)


def last_norms(model):
    """OPT's modules that are our final norm, and in post-norm blocks each block's last one."""
    decoder = model.base_model.decoder
    before = decoder.final_layer_norm
    return [layer.final_layer_norm for layer in decoder.layers] if before is None else [before]


@contextmanager
def _last_norms(model):
    """What each of them takes and puts out; nothing of another type."""
    seen = []
    norms = last_norms(model) if model.config.model_type == "opt" else []
    hooks = [norm.register_forward_hook(lambda _, x, y: seen.append((x[0], y))) for norm in norms]
    yield seen
    for hook in hooks:
        hook.remove()


@torch.no_grad()
def reference_inside(model, ids):
    """The residual stream `[B, T, D]` before every block, and last the final norm's output; and
    the attention pattern `[B, H, T, T]` of every layer that attends.
    """
    with precision(model), _last_norms(model) as seen:
        fresh_rope(model)
        out = model(ids, use_cache=False, output_hidden_states=True, output_attentions=True)
        hidden = tuple(out.hidden_states)
        if seen:  # transformers has OPT's behind norms and projections
            before = hidden[1:-1] if len(seen) == 1 else tuple(x for x, _ in seen[:-1])
            hidden = (hidden[0], *before, seen[-1][1])
        if not hasattr(out, "attentions"):  # Mamba-2's begin behind the first block
            return (model.get_input_embeddings()(ids), *hidden[:-2], hidden[-1]), ()
        return hidden, tuple(out.attentions)

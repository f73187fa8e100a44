"""transformers' names of its modules are accepted, and mean what they say.

Every module of every case is watched. The name of each is given to `Names`; what it is called
here must hold the very numbers that the module put out.
"""

import re

import pytest
import torch
from covers import typed
from parity_models import prompt
from parity_recorder import PAIRED, numbers_of_a_head
from parity_reference import fresh_rope, precision
from zoo import TYPES, ZOO, variant

from llmcli.errors import UsageError
from llmcli.families.sources import sources
from llmcli.graph import aliases
from llmcli.graph.names import Names

# modules without a tensor of their own here: the whole model and its decoder, what only passes on
# (of experts, each with some of the tokens, too), experts without the shared one, and a norm
# without a parameter, which no rule of a family names
UNNAMED = (
    r"|model(\.decoder)?|transformer|gpt_neox|backbone"
    r"|.*(rotary_emb|pos_emb|dropout|drop|experts(\.act_fn)?"
    r"|fc[12]_latent_proj|block_sparse_moe|feed_forward\.router)"
)


# LFM2 calls the activation function itself; its module has the usual name
WITHOUT_A_MODULE = r"model\.layers\.\d+\.feed_forward\.act_fn"


def outputs(model, ids):
    """Path of a module → the tensor that it put out, in one whole pass."""
    seen = {}

    def watch(path, module):
        def hook(_, __, value):
            value = value[0] if isinstance(value, tuple) else value
            added_to = "feed_forward.shared_expert" in path  # in place, by Llama 4
            seen[path] = value.clone() if added_to else value

        return module.register_forward_hook(hook)

    handles = [watch(path, module) for path, module in model.named_modules()]
    try:
        with torch.no_grad(), precision(model):
            fresh_rope(model)
            model(ids, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return seen


def flat(tensor):
    """Heads side by side, as a projection puts them out: `[B, H, T, d]` → `[B, T, H·d]`."""
    return tensor.transpose(1, 2).flatten(2) if tensor.ndim == 4 else tensor


@pytest.mark.parametrize("name", typed(one.name for one in ZOO))
def test_a_modules_name_means_its_output(name, models, references):
    ids = prompt(batch=2, tokens=20)
    model = models(name, "float64")
    ours = {}
    model.decoder(ids, tap=ours.__setitem__)
    names = Names(model.config, sources(model.config))
    theirs = outputs(references(name, "float64"), ids)
    modules = TYPES[variant(name).model_type].modules.values()
    fused = tuple(module.partition("/")[0] for module in modules if "/" in module)
    fused += ("qkv_proj", "gate_up_proj", "query_key_value", "in_proj", "input_linear")
    if "kv_lora_rank" in variant(name).settings:
        fused += ("q_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
    if "linear_num_key_heads" in variant(name).settings:  # gates of attention with its queries
        fused += ("q_proj", "in_proj_qkvz", "in_proj_ba")
    compared = 0
    for path, value in theirs.items():
        if re.fullmatch(UNNAMED, path) and not path.endswith(".shared_experts"):
            continue
        module = references(name, "float64").get_submodule(path)
        if path.endswith("norm") and not [*module.parameters()]:
            continue
        if path.endswith(fused):
            with pytest.raises(UsageError, match="several tensors in one"):
                names.canonical(path)
            continue
        meant = names.canonical(path)
        assert meant is not None, path
        if meant == "embed" and variant(name).model_type.startswith("granite"):
            value = value * model.config.embedding.scale  # which its module does not
        # heads of their own are normalized as `[B, T, H, d]`
        here = flat(ours[meant])
        there = value.reshape(here.shape) if value.ndim == 2 else value
        if value.ndim == 4:  # or, in Gemma 3 and EXAONE 4, as `[B, H, T, d]`
            heads_first = value.shape[1] == ours[meant].shape[1]
            there = flat(value) if heads_first else value.flatten(2)
        if meant.endswith(PAIRED):
            layer, size = int(meant.split(".")[1]), ours[meant].shape[-1]
            order = numbers_of_a_head(references(name, "float64"), layer, size)
            there = there.unflatten(-1, (-1, len(order)))[..., order].flatten(-2)
        there = there.expand_as(here)  # positions are looked up once for all rows
        near = TYPES[variant(name).model_type].near
        assert (here - there).abs().max() <= near * (1 + there.abs().max()), (path, meant)
        compared += 1
    assert compared >= sum(1 + 4 * len(layer.sublayers) for layer in model.config.layers)


@pytest.mark.parametrize("name", typed(one.name for one in ZOO))
def test_an_activation_function_has_the_name_of_its_module(name, models, references):
    config = models(name, "float64").config
    known, theirs = Names(config).known, dict(references(name, "float64").named_modules())
    rules = sources(config)
    for path, made in aliases.modules(config, rules):
        function = re.search(r"\.(act|post)$", made[0]) and f"{path}.weight" not in rules
        beside = path.rpartition(".")[0] in theirs  # not in another form of the checkpoint
        if not function or not beside or made[0] not in known:
            continue
        if variant(name).model_type.startswith("lfm2"):
            assert re.fullmatch(WITHOUT_A_MODULE, path)
        else:
            assert path in theirs

"""What the taps show is what transformers computes, and looking changes nothing.

Every emitted activation, the residual stream among them, equals transformers' own to 1e-11 in
float64; outputs with and without a tap are equal bit for bit. Maps of what comes from a cache are
compared in `test_views_parity`. And the names that transformers has for its modules.
"""

import re
from contextlib import ExitStack
from functools import cache, partial

import numpy as np
import pytest
import torch
from covers import crossed, once, typed
from parity_models import prompt
from parity_recorder import PAIRED, numbers_of_a_head, record
from parity_reference import fresh_rope, precision, reference_inside
from zoo import TYPES, ZOO, attending, recurring, variant

from llmcli.commands.attention.measure.layers import measure_attention
from llmcli.errors import UsageError
from llmcli.families.sources import sources
from llmcli.graph import aliases
from llmcli.graph.names import Names
from llmcli.inspect.passes import Passes

ALL = [one.name for one in ZOO]


def tapped(decoder, ids):
    """Everything that one whole pass emits, in order."""
    seen = {}

    def tap(name, tensor):
        assert name not in seen, f"{name} was emitted twice"
        seen[name] = tensor

    decoder(ids, tap=tap)
    return seen


def far(a, b):
    """Largest difference relative to the size of the tensor's largest number."""
    assert a.shape == b.shape, (a.shape, b.shape)
    return ((a - b).abs().nan_to_num(torch.inf).max() / (1 + b.abs().max())).item()


@pytest.mark.parametrize("name", typed(ALL))
def test_every_activation_is_transformers_own(name, models, references):
    ids = prompt(batch=2, tokens=150)
    ours = tapped(models(name, "float64").decoder, ids)
    theirs = record(references(name, "float64"), ids)
    modules = TYPES[variant(name).model_type].modules
    unseen = tuple(key for key, module in modules.items() if not module)
    known = {key for key in ours if not key.endswith((".scale", *unseen))}
    # not in every variant of a type: a multiplier of 1, a feed-forward beside the attention, …
    optional = tuple(f".{one}" for one in (
        "attn.out", "mlp.out", "resid_mid", "ln3_post.out", "ln4_post.out", "branch_sum",
        "sum_norm.out", "router_norm.out",
    ))  # fmt: skip
    expected = {key for key in theirs if key in ours or not key.endswith(optional)}
    assert known == {key for key in expected if not key.endswith("attn.pattern")}
    wrong = {key: far(ours[key], theirs[key]) for key in known}
    near = TYPES[variant(name).model_type].near
    assert {key: value for key, value in wrong.items() if value > near} == {}


@pytest.mark.parametrize(("name", "dtype"), once(crossed(ALL), ["float32", "bfloat16"]))
def test_looking_changes_no_bit(name, dtype, models):
    """Whole, in pieces, token by token, and in unequal rows: equal bit for bit under a tap."""
    decoder = models(name, dtype).decoder

    def outputs(look):
        seen = []
        tap = (lambda key, value: seen.append(key)) if look else None
        ids = prompt(batch=3, tokens=75)
        state = decoder.new_state(3, 100)
        out = [decoder(ids, tap=tap), decoder(ids, tap=tap, logits="last")]
        for piece in ids.split((40, 33, 1, 1), dim=1):
            out.append(decoder(piece, state, tap=tap))
        out.append(decoder(ids[:, :9], state, lengths=[9, 2, 5], tap=tap))
        out.append(decoder(ids[:, 9:10], state, tap=tap))
        assert bool(seen) == look
        return out

    for plain, watched in zip(outputs(look=False), outputs(look=True), strict=True):
        assert torch.equal(plain, watched)


@pytest.mark.parametrize("name", crossed(ALL))
def test_every_layer_and_head(name, models, references):
    """The matrices that `measure_attention` hands on are transformers' eager attentions."""
    ids = prompt(tokens=70)
    found = {}
    passes = Passes(models(name, "float32"), ids[0].tolist())
    report = measure_attention(passes, on_matrix=found.__setitem__, block_rows=32)
    assert report.ok, report.checks
    patterns = cache(lambda dtype: reference_inside(references(name, dtype), ids)[1])
    config = variant(name).config()
    layers = attending(config)
    assert list(found) == sorted(layers + recurring(config))
    assert len(patterns("float32")) == len(layers)
    reports = {layer.layer: layer for layer in report.layers}
    for at, layer in enumerate(layers):
        pattern = patterns("float32")[at]
        assert found[layer].shape == pattern.shape[1:]
        off = np.abs(found[layer] - pattern[0].numpy()).max()
        # or at most five times what theirs moves between float32 and float64
        assert off < 1e-5 or off < 5 * (pattern - patterns("float64")[at]).abs().max()
        if reports[layer].sinks:
            taken = 1 - patterns("float64")[at][0].sum(-1).mean(-1)
            assert taken.max() > 0.05
            shown = [head.metrics["learned_sink"] for head in reports[layer].heads]
            assert shown == pytest.approx(taken.tolist(), abs=1e-5)


# transformers' names of its modules are accepted, and mean what they say:
# modules without a tensor of their own here: the whole model and its decoder, what only passes on
# (of experts, each with some of the tokens, too), experts without the shared one, and a norm
# without a parameter, which no rule of a family names, or of one head
UNNAMED = (
    r"|model(\.decoder)?|transformer|gpt_neox|backbone"
    r"|.*(rotary_emb|pos_emb|dropout|drop|experts(\.act_fn)?"
    r"|norms\.\d+|fc[12]_latent_proj|block_sparse_moe|feed_forward\.router)"
)


# LFM2 calls the activation function itself; its module has the usual name
WITHOUT_A_MODULE = r"model\.layers\.\d+\.feed_forward\.act_fn"


def outputs(model, ids):
    """Path of a module → the tensor that it put out, in one whole pass."""
    seen = {}

    def put(path, _, __, value):
        value = value[0] if isinstance(value, tuple) else value
        added_to = "feed_forward.shared_expert" in path  # in place, by Llama 4
        seen[path] = value.clone() if added_to else value

    with ExitStack() as hooks, torch.no_grad(), precision(model):
        for path, module in model.named_modules():
            hooks.callback(module.register_forward_hook(partial(put, path)).remove)
        fresh_rope(model)
        model(ids, use_cache=False)
    return seen


def flat(tensor):
    """Heads side by side, as a projection puts them out: `[B, H, T, d]` → `[B, T, H·d]`."""
    return tensor.transpose(1, 2).flatten(2) if tensor.ndim == 4 else tensor


@pytest.mark.parametrize("name", typed(ALL))
def test_a_modules_name_means_its_output(name, models, references):
    """Of every module: what it is called here holds the very numbers that the module puts out."""
    ids = prompt(batch=2, tokens=20)
    model = models(name, "float64")
    ours = tapped(model.decoder, ids)
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


@pytest.mark.parametrize("name", typed(ALL))
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

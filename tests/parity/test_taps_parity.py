"""What the taps show is what transformers computes, and looking changes nothing.

Every emitted activation, the residual stream among them, equals transformers' own to 1e-11 in
float64; outputs with and without a tap are equal bit for bit. Maps of what comes from a cache are
compared in `test_views_parity`.
"""

from functools import cache

import numpy as np
import pytest
import torch
from covers import crossed, once, typed
from parity_models import prompt
from parity_recorder import record
from parity_reference import reference_inside
from zoo import TYPES, ZOO, attending, recurring, variant

from llmcli.commands.attention.measure.layers import measure_attention
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

"""Views and copies: tensors share a storage exactly where their specs say so."""

from dataclasses import replace

import pytest
import torch
from anatomy_configs import QWEN, models
from decoder_parameters import parameters_of
from hypothesis import given, settings
from hypothesis import strategies as st
from planned import partition, roots, storages

from llmcli.anatomy import parameters, plan
from llmcli.graph.spec import Call
from llmcli.nn.decoder import Decoder

DTYPES = {name: getattr(torch, name) for name in ("float32", "float64", "bfloat16")}
calls = st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(0, 3))


def emitted(decoder, batch, tokens, past):
    seen = {}
    state = decoder.new_state(batch, past + tokens)
    ids = torch.zeros(batch, tokens, dtype=torch.long)
    if past:
        decoder(ids.new_zeros(batch, past), state)
    decoder(ids, state, tap=seen.__setitem__)
    return seen


@settings(max_examples=60, deadline=None)
@given(models(), calls, st.sampled_from(sorted(DTYPES)))
def test_activations_share_memory_exactly_where_their_specs_say(config, call, dtype):
    batch, tokens, past = call
    seen = emitted(Decoder(config, device="cpu", dtype=DTYPES[dtype]), *call)
    asked = Call(batch=batch, tokens=tokens, past=past, phase="prefill", dtype=dtype)
    specs = plan(config, asked).written
    assert partition(roots(specs)) == partition(storages(seen))
    for spec in specs:  # a view of a named tensor is that tensor, as far as it goes
        if spec.shares in seen:
            assert seen[spec.name].data_ptr() == seen[spec.shares].data_ptr()


@settings(max_examples=40, deadline=None)
@given(models(), st.sampled_from(sorted(DTYPES)))
def test_parameters_share_memory_exactly_where_their_specs_say(config, dtype):
    slots = parameters_of(Decoder(config, device="cpu", dtype=DTYPES[dtype]))
    assert partition(roots(parameters(config))) == partition(storages(slots))


@settings(max_examples=30, deadline=None)
@given(models(), calls)
def test_what_is_never_written_is_derived_from_what_is(config, call):
    """Shapes and dtypes of what is `derived` are those of the rows that the mixer derives."""
    batch, tokens, past = call
    decoder = Decoder(config, device="cpu", dtype=torch.float32)
    state = decoder.new_state(batch, past + tokens)
    if past:
        decoder(torch.zeros(batch, past, dtype=torch.long), state)
    seen = {}
    decoder(torch.zeros(batch, tokens, dtype=torch.long), state, tap=seen.__setitem__)
    given = {"batch": batch, "tokens": tokens, "past": past, "phase": "prefill"}
    specs = {spec.name: spec for spec in plan(config, Call(dtype="float32", **given)).derived}
    assert len(specs) == 3 * len(config.layers)
    for i, block in enumerate(decoder.blocks):
        mixer = config.layers[i].attention
        q = seen[f"blocks.{i}.attn.q" if mixer.rope is None else f"blocks.{i}.attn.q_rot"]
        rows = block.mixers[0].score_rows(q, state.layers[i].k, past)
        for name in ("scores", "pattern"):
            spec = specs[f"blocks.{i}.attn.{name}"]
            assert (spec.shape, spec.dtype) == (tuple(rows.shape), "float32")
        W_o = parameters_of(decoder)[f"blocks.{i}.attn.W_o"].T.unflatten(0, (mixer.heads, -1))
        result = seen[f"blocks.{i}.attn.z"] @ W_o
        assert specs[f"blocks.{i}.attn.result"].shape == tuple(result.shape)


@pytest.mark.parametrize("name", ["blocks.0.attn.q", "blocks.0.attn.v", "logits"])
def test_a_planted_fault_is_seen(name):
    specs = plan(QWEN, Call(batch=1, tokens=3, past=0, phase="prefill", dtype="float32")).written
    seen = emitted(Decoder(QWEN, device="cpu", dtype=torch.float32), 1, 3, 0)
    assert partition(roots(specs)) == partition(storages(seen))
    wrong = [replace(spec, shares=None) if spec.name == name else spec for spec in specs]
    assert partition(roots(wrong)) != partition(storages(seen))

"""The specs say what the decoder does: names, order, shapes, dtypes, FLOPs, storage."""

from dataclasses import replace

import torch
from anatomy_configs import models
from decoder_parameters import parameters_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from llmcli.anatomy import parameters, plan, states
from llmcli.anatomy.graph import graph
from llmcli.graph.spec import Call
from llmcli.nn.decoder import Decoder

DTYPES = {name: getattr(torch, name) for name in ("float32", "float64", "bfloat16")}
calls = st.tuples(st.integers(1, 3), st.integers(1, 7), st.integers(0, 9))


def run(decoder, batch, tokens, past, logits="all"):
    """Everything that one call emits, as (name, shape, dtype), and the state after it."""
    seen = []

    def tap(name, tensor):
        seen.append((name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")))

    state = decoder.new_state(batch, past + tokens)
    ids = torch.zeros(batch, tokens, dtype=torch.long, device=decoder.device)
    if past:
        decoder(ids.new_zeros(batch, past), state)
    decoder(ids, state, tap=tap, logits=logits)
    return seen, state


def expected(specs):
    return [(spec.name, spec.shape, spec.dtype) for spec in specs]


@settings(max_examples=60, deadline=None)
@given(models(), calls, st.sampled_from(sorted(DTYPES)), st.sampled_from(["all", "last"]))
def test_a_meta_forward_emits_what_the_specs_say(config, call, dtype, logits):
    batch, tokens, past = call
    decoder = Decoder(config, device="meta", dtype=DTYPES[dtype])
    seen, state = run(decoder, batch, tokens, past, logits)
    phase = "decode" if tokens == 1 and past else "prefill"
    call = Call(batch=batch, tokens=tokens, past=past, phase=phase, dtype=dtype)
    specs = plan(config, call, logits=logits).written
    assert expected(specs) == seen
    assert {spec.phase for spec in specs} == {phase}

    kept = states(config, batch=batch, capacity=past + tokens, dtype=dtype)
    caches = {
        f"cache.{i}.{name}": cache
        for i, layer in enumerate(state.layers)
        for name, cache in (("k", layer.k), ("v", layer.v))
    }
    assert {spec.name: spec.shape for spec in kept} == {
        n: tuple(t.shape) for n, t in caches.items()
    }
    assert sum(spec.bytes for spec in kept) == state.nbytes


@settings(max_examples=30, deadline=None)
@given(models())
def test_every_parameter_is_stored_as_its_spec_says(config):
    slots = parameters_of(Decoder(config, device="meta", dtype=torch.float32))
    specs = parameters(config)
    assert {spec.name: spec.stored_shape for spec in specs} == {
        name: tuple(slot.shape) for name, slot in slots.items()
    }
    assert len({spec.name for spec in specs}) == len(specs)
    for spec in specs:
        turned = ".W_" in spec.name or spec.name == "head.W"
        assert spec.stored_shape == (spec.shape[::-1] if turned else spec.shape)


@settings(max_examples=30, deadline=None)
@given(models(), calls)
def test_flops_are_those_that_torch_counts(config, call):
    batch, tokens, _ = call
    decoder = Decoder(config, device="meta", dtype=torch.float32)
    ids = torch.zeros(batch, tokens, dtype=torch.long, device="meta")
    with FlopCounterMode(display=False) as counter:
        decoder(ids)
    specs = plan(config, Call(batch=batch, tokens=tokens, past=0, phase="prefill")).written
    assert sum(spec.flops for spec in specs) == counter.get_total_flops()


@settings(max_examples=10, deadline=None)
@given(models())
def test_a_planted_fault_is_seen(config):
    """A decoder that is one number wider than its specs emits something else."""
    wider = replace(config, width=config.width + 1)
    seen, _ = run(Decoder(wider, device="meta", dtype=torch.float32), 2, 3, 0)
    specs = plan(config, Call(batch=2, tokens=3, past=0, phase="prefill", dtype="float32")).written
    assert [name for name, *_ in seen] == [spec.name for spec in specs]
    assert expected(specs) != seen


@settings(max_examples=40, deadline=None)
@given(models())
def test_the_last_form_that_the_configuration_makes(config):
    found = graph(config)
    for number, layer in enumerate(config.layers):
        mixer, prefix = layer.attention, f"blocks.{number}.attn"
        form = "_rot" if mixer.rope else "_norm" if mixer.qk_norm else ""
        assert found.entering(number) == (f"{prefix}.q{form}", f"{prefix}.k{form}")
        assert found.states[f"cache.{number}.k"].holds == f"{prefix}.k{form}"
        assert found.states[f"cache.{number}.v"].holds == f"{prefix}.v"

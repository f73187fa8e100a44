"""The specs say what the decoder does: names, order, shapes, dtypes, storage, views, FLOPs."""

from dataclasses import replace

import pytest
import torch
from anatomy_configs import QWEN, models
from decoder_parameters import parameters_of
from hypothesis import given, settings
from hypothesis import strategies as st
from planned import partition, roots, storages
from torch.utils.flop_counter import FlopCounterMode

from llmcli.decoder.decoder import Decoder
from llmcli.graph.arithmetic import Arithmetic
from llmcli.graph.graph import graph
from llmcli.graph.plan import parameters, plan, states
from llmcli.graph.spec import Call

DTYPES = {name: getattr(torch, name) for name in ("float32", "float64", "bfloat16")}
calls = st.tuples(st.integers(1, 3), st.integers(1, 7), st.integers(0, 9))


def run(decoder, batch, tokens, past, logits="all"):
    """Everything that one call emits, in order, and the state after it."""
    seen = []
    state = decoder.new_state(batch, past + tokens)
    ids = torch.zeros(batch, tokens, dtype=torch.long)
    if past:
        decoder(ids.new_zeros(batch, past), state)
    decoder(ids, state, tap=lambda *emitted: seen.append(emitted), logits=logits)
    tensors = dict(seen)
    assert len(tensors) == len(seen)
    return tensors, state


def said(seen):
    return [
        (name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        for name, tensor in seen.items()
    ]


def expected(specs):
    return [(spec.name, spec.shape, spec.dtype) for spec in specs]


@settings(max_examples=60, deadline=None)
@given(models(), calls, st.sampled_from(sorted(DTYPES)), st.sampled_from(["all", "last"]))
def test_a_call_emits_and_keeps_what_the_specs_say(config, call, dtype, logits):
    """Views of a named tensor are that tensor, as far as they go; all else has its own memory."""
    batch, tokens, past = call
    decoder = Decoder(config, Arithmetic.of(dtype), device="cpu")
    seen, state = run(decoder, batch, tokens, past, logits)
    phase = "decode" if tokens == 1 and past else "prefill"
    call = Call(batch=batch, tokens=tokens, past=past, phase=phase, dtype=dtype)
    specs = plan(config, call, logits=logits).written
    assert expected(specs) == said(seen)
    assert {spec.phase for spec in specs} == {phase}
    assert partition(roots(specs)) == partition(storages(seen))
    for spec in specs:
        if spec.shares in seen and seen[spec.name].shape[1] == seen[spec.shares].shape[1]:
            assert seen[spec.name].data_ptr() == seen[spec.shares].data_ptr()

    kept = states(config, batch=batch, capacity=past + tokens, dtype=dtype)
    assert {spec.name: spec.shape for spec in kept} == {
        n: tuple(t.shape) for n, t in state.tensors().items()
    }
    assert sum(spec.bytes for spec in kept) == state.nbytes


@settings(max_examples=40, deadline=None)
@given(models(), st.sampled_from(sorted(DTYPES)))
def test_every_parameter_is_stored_as_its_spec_says(config, dtype):
    slots = parameters_of(Decoder(config, Arithmetic.of(dtype), device="cpu"))
    specs = parameters(config)
    assert {spec.name: spec.stored_shape for spec in specs} == {
        name: tuple(slot.shape) for name, slot in slots.items()
    }
    assert len({spec.name for spec in specs}) == len(specs)
    for spec in specs:
        turned = ".W_" in spec.name or spec.name == "head.W"
        assert spec.stored_shape == (spec.shape[::-1] if turned else spec.shape)
    assert partition(roots(specs)) == partition(storages(slots))


@settings(max_examples=30, deadline=None)
@given(models(), calls)
def test_flops_are_those_that_torch_counts(config, call):
    batch, tokens, _ = call
    decoder = Decoder(config, Arithmetic.of("float32"), device="meta")
    ids = torch.zeros(batch, tokens, dtype=torch.long, device="meta")
    with FlopCounterMode(display=False) as counter:
        decoder(ids)
    specs = plan(config, Call(batch=batch, tokens=tokens, past=0, phase="prefill")).written
    assert sum(spec.flops_full for spec in specs) == counter.get_total_flops()


@settings(max_examples=30, deadline=None)
@given(models(), calls)
def test_what_is_never_written_is_derived_from_what_is(config, call):
    """Shapes and dtypes of what is `derived` are those of the rows that the mixer derives."""
    batch, tokens, past = call
    decoder = Decoder(config, Arithmetic.of("float32"), device="cpu")
    seen, state = run(decoder, batch, tokens, past)
    given = {"batch": batch, "tokens": tokens, "past": past, "phase": "prefill"}
    specs = {spec.name: spec for spec in plan(config, Call(dtype="float32", **given)).derived}
    assert len(specs) == 3 * len(config.layers)
    for i, block in enumerate(decoder.blocks):
        mixer = config.layers[i].attention
        q = seen[f"blocks.{i}.attn.q" if mixer.rope is None else f"blocks.{i}.attn.q_rot"]
        rows = block.mixers[0].score_rows(q, state.layers[i]["k"], past)
        for name in ("scores", "pattern"):
            spec = specs[f"blocks.{i}.attn.{name}"]
            assert (spec.shape, spec.dtype) == (tuple(rows.shape), "float32")
        W_o = parameters_of(decoder)[f"blocks.{i}.attn.W_o"].T.unflatten(0, (mixer.heads, -1))
        result = seen[f"blocks.{i}.attn.z"] @ W_o
        assert specs[f"blocks.{i}.attn.result"].shape == tuple(result.shape)


@pytest.mark.parametrize("name", ["blocks.0.attn.q", "blocks.0.attn.v", "logits"])
def test_planted_faults_are_seen(name):
    """A decoder that is one number wider emits something else, and no view can be left out."""
    specs = plan(QWEN, Call(batch=1, tokens=3, past=0, phase="prefill", dtype="float32")).written
    numbers = Arithmetic.of("float32")
    wide, _ = run(Decoder(replace(QWEN, width=QWEN.width + 1), numbers, device="cpu"), 1, 3, 0)
    assert [*wide] == [spec.name for spec in specs]
    assert expected(specs) != said(wide)
    seen, _ = run(Decoder(QWEN, numbers, device="cpu"), 1, 3, 0)
    assert partition(roots(specs)) == partition(storages(seen))
    wrong = [replace(spec, shares=None) if spec.name == name else spec for spec in specs]
    assert partition(roots(wrong)) != partition(storages(seen))


@settings(max_examples=40, deadline=None)
@given(models())
def test_the_last_form_that_the_configuration_makes(config):
    found = graph(config)
    for number, layer in enumerate(config.layers):
        mixer, prefix = layer.attention, f"blocks.{number}.attn"
        form = "_rot" if mixer.rope else "_norm" if mixer.qk_norm else ""
        assert found[f"{prefix}.scores"].op.inputs == (f"{prefix}.q{form}", f"{prefix}.k{form}")
        assert found.states[f"cache.{number}.k"].holds == f"{prefix}.k{form}"
        assert found.states[f"cache.{number}.v"].holds == f"{prefix}.v"

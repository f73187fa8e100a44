"""What parts cost: by what PyTorch counts, step by step, by what lies in memory."""

from dataclasses import replace

import pytest
import torch
from anatomy_configs import models
from covers import cover, features, in_turn
from decoder_parameters import decoder_in, packed_in, parameters_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode
from zoo import BLOCKS, MODELS, ZOO, Variant, variant

from llmcli.commands.ladder.measure.record import count
from llmcli.config.attention import first_key
from llmcli.config.delta import DeltaConfig
from llmcli.config.experts import ExpertsConfig
from llmcli.config.latent import LatentConfig
from llmcli.config.ssm import SsmConfig
from llmcli.decoder.decoder import Decoder
from llmcli.engine.session import Session
from llmcli.graph.cost import (
    cost_by_part,
    count_parameters,
    decode_calls,
    prompt_calls,
    total,
    total_cost,
)
from llmcli.graph.graph import graph
from llmcli.graph.plan import plan
from llmcli.graph.precision import Precision
from llmcli.graph.spec import Call
from llmcli.records.work import Cost

FLOAT32 = Precision.of("float32")
BFLOAT16 = Precision.of("bfloat16")

CALLS = [(1, 9, 0), (2, 5, 11), (1, 1, 0), (1, 1, 12), (3, 1, 20), (1, 3, 6)]
# the first variant of every type, one of them under a narrow window
EVERY = {one.model_type: one.config() for one in reversed(ZOO)} | {
    "mistral": Variant("mistral", "mistral", {"sliding_window": 7, "head_dim": 10}).config(),
    "qwen2": variant("qwen2-tied").config(),
    "qwen3": variant("qwen3-tied-bf16").config(),
}


def has(config, *kinds):
    return any(isinstance(part, kinds) for layer in config.layers for part in layer.parts)


def alike(config):
    """Whether all layers have one kind of attention, computed by the fused kernel."""
    scores = [one.attention.scores for one in config.layers if one.attention is not None]
    kinds = {(one.window, one.cap, one.slopes) for one in scores}
    return len(scores) == len(config.layers) and kinds == {(scores[0].window, None, ())}


MIXTURES = {name: one for name, one in EVERY.items() if has(one, ExpertsConfig)}
FAMILIES = {name: one for name, one in EVERY.items() if name not in MIXTURES and alike(one)}
BIASES = ("moe.b_gate", "moe.b_up", "moe.b_down")
# those whose products PyTorch counts: a recurrence is computed in chunks, and not counted so
COUNTED = [name for name, one in EVERY.items() if not has(one, DeltaConfig, SsmConfig)]


def without_window(config):
    """The same model, every query seeing all keys before it."""
    return replace(config, layers=tuple(
        one if one.attention is None else one.with_attention(one.attention.changed(window=None))
        for one in config.layers
    ))  # fmt: skip


every_family = pytest.mark.parametrize("name", FAMILIES)


def a_call(batch, tokens, past):
    phase = "decode" if tokens == 1 and past else "prefill"
    return Call(batch=batch, tokens=tokens, past=past, phase=phase)


def ready(config, batch, tokens, past, device="meta"):
    """A decoder with `past` tokens in its state, and the ids that come next."""
    decoder = Decoder(config, Precision.of("float32"), device=device)
    state = decoder.new_state(batch, past + tokens)
    state.lengths = [past] * batch
    return decoder, state, torch.zeros(batch, tokens, dtype=torch.long, device=device)


def counted(config, batch, tokens, past, device="meta", logits="last"):
    decoder, state, ids = ready(config, batch, tokens, past, device)
    with FlopCounterMode(display=False) as counter:
        decoder(ids, state, logits=logits)
    return counter.get_total_flops()


def cost_of(config, calls, **given):
    return cost_by_part(config, calls, **{"precision": FLOAT32} | given)


def parts_of(config, *shape, logits="last", **given):
    return cost_of(config, [(a_call(*shape), logits)], **given)


# types that together have every value meet every call, the others one
VALUES = cover({
    name: features(replace(EVERY[name], family="", model_type="")) for name in COUNTED
})  # fmt: skip
OTHERS = [(name, CALLS[at % 6], "last") for at, name in enumerate(COUNTED) if name not in VALUES]
EXPANDED = pytest.param("deepseek_v2", (1, 9, 0), "all", id="latents of a prompt")  # else absorbed


@pytest.mark.parametrize(
    ("name", "shape", "logits"), [*in_turn(VALUES, CALLS, ["last", "all"]), *OTHERS, EXPANDED]
)
def test_the_full_square_is_what_pytorch_counts(name, shape, logits):
    """Of mixtures that of the experts that run."""
    config = EVERY[name]
    work = total_cost(config, a_call(*shape), precision=FLOAT32, logits=logits)
    planned = plan(config, a_call(*shape), logits=logits).written
    if logits == "all" or graph(config).readers == len(config.layers):  # a plan narrows the ends
        assert work.flops_full == sum(spec.flops_full for spec in planned)
        assert work.flops == sum(spec.flops for spec in planned)
    assert work.flops_full == counted(without_window(config), *shape, logits=logits)
    if name in FAMILIES:  # the decoder leaves out the rows and keys that nobody sees, too
        assert work.flops <= counted(config, *shape, logits=logits) <= work.flops_full


@pytest.mark.parametrize("name", MODELS)
def test_what_a_mask_leaves_of_a_prompt_is_the_sum_of_its_tokens(name):
    """A token alone sees every key of the square, or as many as its window has."""
    config, precision, sums = MODELS[name], FLOAT32, {}
    prompt = cost_by_part(config, [(a_call(2, 9, 3), "all")], precision=precision)
    for call, logits in decode_calls(batch=2, tokens=9, past=3):
        for place, cost in cost_by_part(config, [(call, logits)], precision=precision).items():
            layer = config.layers[place[1] or 0]
            if place[0] == "attention" and layer.window is not None:
                window = layer.attention.scores.window
                seen = call.keys - max(0, first_key(call.keys - 1, window))
                assert cost.flops * call.keys == cost.flops_full * seen
            else:
                assert cost.flops == cost.flops_full
            sums[place] = sums.get(place, Cost()) + cost
    assert [*sums] == [*prompt]
    for place, cost in prompt.items():  # latents are expanded for a prompt
        if place[0] != "attention" or not has(config, LatentConfig):
            assert sums[place].flops == cost.flops, place


@pytest.mark.parametrize(
    ("name", "dtype"), in_turn([*FAMILIES, *MIXTURES], ["float32", "bfloat16"])
)
def test_a_token_reads_weights_as_they_lie_in_memory_chosen_experts_and_the_cache(name, dtype):
    config, precision, past = EVERY[name], Precision.of(dtype), 20
    decoder = Decoder(config, precision, device="meta")
    idle = read = 0
    for key, slot in parameters_of(decoder).items():
        share = 1.0
        if name in MIXTURES and (slot.ndim == 3 or key.endswith(BIASES)):
            share = config.layers[int(key.split(".")[1])].parts[-1].routing.chosen / len(slot)
        idle += slot.numel() * (1 - share)
        if key == "pos_embed.W" or (key == "embed.W" and not config.head.tied):
            share = 1 / len(slot)  # the row that is looked up
        read += slot.nbytes * share
    work = total_cost(config, a_call(1, 1, past), precision=precision)
    counts = count_parameters(config)
    assert work.weights == round(read)
    assert counts.total - counts.active == round(idle)
    assert (idle > 0) is (name in MIXTURES)
    if name in FAMILIES:
        window = config.layers[0].window or config.context
        assert work.cache == decoder.new_state(1, min(past + 1, window)).nbytes


def test_of_experts_those_count_that_ran():
    config = MIXTURES["glm4_moe"]
    call = a_call(1, 9, 0), "last"
    least, more = (cost_of(config, [call], ran=ran) for ran in (None, {1: 8, 2: 5}))
    each = 3 * 4 * 48 * 24
    assert [least["experts", i].weights for i in (1, 2)] == [3 * each, 3 * each]
    assert [more["experts", i].weights for i in (1, 2)] == [8 * each, 5 * each]
    assert ("experts", 0) not in more
    for place in more:
        if place[0] != "experts":
            assert more[place] == least[place]


@pytest.mark.parametrize("name", ["gpt2", "mistral", "qwen3"])  # of the calls alone: above
def test_a_prompt_in_pieces_and_the_steps_after_it_are_what_pytorch_counts(name):
    config = FAMILIES[name]
    decoder = Decoder(without_window(config), Precision.of("float32"), device="meta")
    session = Session(decoder, 2, 40)
    with FlopCounterMode(display=False) as counter:
        session.prefill([[0] * 17] * 2, chunk=7)
    read = total(cost_of(config, prompt_calls(batch=2, tokens=17, chunk=7)))
    assert read.flops_full == counter.get_total_flops()
    with FlopCounterMode(display=False) as counter:
        for _ in range(2):
            session.extend(torch.zeros(2, 1, dtype=torch.long, device="meta"))
    written = total(cost_of(config, decode_calls(batch=2, tokens=2, past=17)))
    assert written.flops_full == counter.get_total_flops()


@every_family
def test_only_the_last_call_of_a_prompt_has_final_norm_and_head(name):
    config = FAMILIES[name]
    whole, pieces = (cost_of(config, prompt_calls(batch=2, tokens=17, chunk=n)) for n in (17, 5))
    for place in (("norm", None), ("head", None)):
        assert pieces[place] == whole[place] != Cost()
    assert pieces["head", None].gemm == 1
    assert pieces["qkv", 0].weights == 4 * whole["qkv", 0].weights
    assert pieces["norm", 0].weights == 4 * whole["norm", 0].weights
    calls = list(prompt_calls(batch=2, tokens=17, past=3, chunk=5))
    assert [(call.past, call.tokens) for call, _ in calls] == [(3, 5), (8, 5), (13, 5), (18, 2)]
    assert [logits for _, logits in calls] == ["none", "none", "none", "last"]
    before = cost_of(config, calls[:-1])
    assert {part for part, layer in before if layer is None} == {"embed"}


@pytest.mark.parametrize(
    ("name", "shape"), [(name, CALLS[at % 6]) for at, name in enumerate(FAMILIES)]
)
def test_products_with_weights_are_the_kernels_that_run(name, shape):
    config, (_, tokens, _) = FAMILIES[name], shape
    decoder, state, ids = ready(config, *shape)
    ran = count(lambda: decoder(ids, state, logits="last"))
    work = total_cost(config, a_call(*shape), precision=FLOAT32)
    # beside them each layer has one attention: a group's heads are rows of a single query
    mixer, layers = config.layers[0].attention, len(config.layers)
    single = (mixer.heads // mixer.kv_heads if tokens == 1 else tokens) == 1
    assert ran.gemv == work.gemv + (layers if single else 0)
    assert ran.gemm == work.gemm + (0 if single else layers)
    assert work.gemv + work.gemm == 4 * layers + 1
    assert ran.flops == work.flops_full


@every_family
def test_packed_weights_are_read_in_their_blocks_and_keys_as_they_are_kept(name):
    config, past = FAMILIES[name], 20
    precision = packed_in(config, "Q8_0")
    mixed = dict(precision.formats) | {"blocks.0.mlp.W_down": "Q4_1"}
    precision = replace(precision, formats=mixed)
    decoder = decoder_in(config, precision, "meta")
    held = {name: decoder.weight(name).nbytes for name in decoder.weight_names}
    parts = parts_of(config, 1, 1, past, precision=precision)
    found = {place: work.weights for place, work in parts.items()}
    ends = ("W_q", "W_k", "W_v", "b_q", "b_k", "b_v")
    qkv = (held[key] for key in held if key.startswith("blocks.1.attn.") and key.endswith(ends))
    assert found["qkv", 1] == sum(qkv)
    assert found["ffn_down", 0] < found["ffn_down", 1]
    looked_up = 0 if config.head.tied else held["embed.W"] // config.vocab
    if config.embedding.positions:
        looked_up += held["pos_embed.W"] // config.context
    assert found["embed", None] == looked_up
    assert found["head", None] == held["embed.W" if config.head.tied else "head.W"]
    dense = total_cost(config, a_call(1, 1, past), precision=FLOAT32)
    narrow = total_cost(config, a_call(1, 1, past), precision=precision)
    assert 2 * narrow.cache == dense.cache
    assert (narrow.flops, narrow.gemv) == (dense.flops, dense.gemv)


def test_a_tied_head_counts_once_among_the_parameters_and_once_in_what_is_computed():
    tied = FAMILIES["qwen2"]
    apart = replace(tied, head=replace(tied.head, tied=False))
    table = tied.vocab * tied.width
    assert count_parameters(apart).total - count_parameters(tied).total == table
    works = [parts_of(c, 1, 1, 5) for c in (tied, apart)]
    for work in works:
        assert work["head", None].flops == 2 * table
        assert work["head", None].weights == 4 * table
    # the row that is looked up is one of those that the head reads: not two times a weight
    row = 4 * tied.width
    assert [work["embed", None].weights for work in works] == [0, row]
    assert works[0]["embed", None].bytes == works[1]["embed", None].bytes


def test_keys_are_read_once_a_call_and_only_those_that_somebody_sees():
    config = FAMILIES["mistral"]  # a window of 7
    layer = 2 * 2 * 10 * 4  # keys and values, kv heads, their size, float32
    for (batch, tokens, past), keys in {
        (1, 1, 3): 4, (1, 1, 6): 7, (1, 1, 50): 7, (2, 3, 50): 9, (1, 20, 0): 20, (1, 5, 4): 9,
    }.items():  # fmt: skip
        parts = parts_of(config, batch, tokens, past)
        assert parts["attention", 1].cache == batch * keys * layer
    assert sum(work.cache for (part, _), work in parts.items() if part != "attention") == 0


def test_a_layer_reads_the_keys_of_another_and_keeps_none():
    config = BLOCKS["keys and values of another layer"]
    parts = parts_of(config, 2, 3, 5, logits="all")
    caches = [parts["attention", layer].cache for layer in range(5)]
    token = 2 * 2 * 2 * 8 * 4  # keys and values, sequences, kv heads, their size, float32
    assert caches == [token * keys for keys in (6, 8, 6, 8, 6)]
    # the first writes what it keeps, and the third is the same but for that
    apart = parts["attention", 0].activations - parts["attention", 2].activations
    assert apart == 2 * 3 * token


@pytest.mark.parametrize(("batch", "tokens", "past"), CALLS)
@pytest.mark.parametrize("logits", ["all", "last", "none"])
def test_last_layers_that_keep_nothing_compute_the_tokens_with_logits(batch, tokens, past, logits):
    config = BLOCKS["keys and values of another layer"]
    assert graph(config).readers == 2
    call, width = a_call(batch, tokens, past), without_window(config)
    works = [cost_of(config, [(call, logits)], whole=whole) for whole in (0, 1)]
    decoder, state, ids = ready(width, batch, tokens, past)
    session = Session(decoder, batch, past + tokens)
    session.state = state
    with FlopCounterMode(display=False) as counter:
        session.extend(ids, logits=logits)
    assert total(works[0]).flops_full == counter.get_total_flops()
    if logits == "all" or (logits == "last" and tokens == 1):
        assert works[0] == works[1]
        return
    narrow, whole = works
    both = cost_of(config, [(call, "none"), (call, "last")])
    for place, work in whole.items():
        part, layer = place
        if layer is not None and layer >= 2 and logits == "last":
            assert both[place].weights == narrow[place].weights  # read in one of the two calls
        if layer is None or layer < 2:
            assert narrow[place] == work
        elif logits == "none":
            assert place not in narrow
        elif part == "qkv":
            assert narrow[place].flops * tokens == work.flops
            assert narrow[place].weights == work.weights
        elif part == "attention":
            seen = min(past + tokens, 4 if layer % 2 == 0 else 99)  # a window, or all
            assert narrow[place].cache == batch * seen * 2 * 2 * 8 * 4


def test_activations_are_written_once_and_read_where_they_are_needed():
    rows, s, w = 2 * 5, 2, 4  # B · T, bytes of a number, and of one of the stream
    config = FAMILIES["qwen3"]
    parts = parts_of(config, 2, 5, 11, precision=BFLOAT16)
    D, F, V, heads, kv, dh = 48, 88, 211, 6, 2, 16
    qk, v = rows * (heads + kv) * dh, rows * kv * dh
    in_each = {
        "norm": (w + s) * (2 * rows * D + qk),  # ln1, ln2, and those of queries and keys
        "qkv": s * rows * D + w * qk + s * v,
        # cos and sin of 5 positions in float32, for queries and once more for keys
        "rope": s * 2 * qk + 2 * w * 2 * 5 * dh,
        "attention": s * (rows * heads * dh * 2 + 2 * 2 * v),
        "out": s * rows * heads * dh + w * rows * D,
        "ffn_up": s * (rows * D + 2 * rows * F),
        "ffn_act": s * 5 * rows * F,
        "ffn_down": s * rows * F + w * rows * D,
        "residual": w * 2 * 3 * rows * D,
    }
    for part, nbytes in in_each.items():
        assert parts[part, 1].activations == nbytes, part
    assert parts["norm", None].activations == (w + s) * 2 * D
    assert parts["head", None].activations == s * 2 * D + w * 2 * V
    assert parts["embed", None].activations == (w + s) * rows * D + 8 * rows
    assert len(parts) == 2 * len(in_each) + 3

    positions = parts_of(FAMILIES["gpt2"], 2, 5, 11)
    # looked up: a row for each token, one for each position; both are added
    assert positions["embed", None].activations == 4 * (4 * rows * D + 2 * 5 * D) + 8 * rows
    assert positions["embed", None].weights == 4 * 5 * D
    apart = parts_of(FAMILIES["llama"], 2, 5, 11)
    assert apart["embed", None].weights == 4 * rows * D  # and the head's matrix is another one
    assert apart["embed", None].activations == 4 * rows * D + 8 * rows
    assert positions["ffn_act", 0].activations == 4 * 2 * rows * 4 * D
    assert positions["head", None].activations == 4 * 2 * (D + V)


@settings(max_examples=40)
@given(models(), st.sampled_from(CALLS), st.sampled_from(["last", "all", "none"]))
def test_parts_come_in_the_order_in_which_a_clock_hears_of_them(config, shape, logits):
    decoder, state, ids = ready(config, *shape)
    heard = []
    if logits == "none":
        decoder(ids, state, until=len(config.layers) - 1, clock=heard.append)
    else:
        decoder(ids, state, logits=logits, clock=heard.append)
    model = graph(config)
    places = dict.fromkeys(model.place(name) for name in heard if name != "step")
    expected = [place for place in places if place[0] != "gaps"]
    parts = parts_of(config, *shape, logits=logits)
    assert [*parts] == expected
    assert {part for part, _ in places} <= {*model.groups, "gaps"}
    assert all(work.bytes for work in parts.values())


@settings(max_examples=40)
@given(models(), st.integers(1, 2), st.integers(1, 12), st.integers(0, 6), st.integers(1, 5))
def test_the_cost_of_calls_is_their_sum(config, batch, tokens, past, chunk):
    for calls in (
        [*prompt_calls(batch=batch, tokens=tokens, past=past, chunk=chunk)],
        [*decode_calls(batch=batch, tokens=tokens, past=past)],
    ):
        sums = {}
        for call in calls:
            for place, cost in cost_of(config, [call]).items():
                sums[place] = sums.get(place, Cost()) + cost
        assert cost_of(config, calls) == sums


@pytest.mark.parametrize("name", ["blocks.0.moe.router", "x", ""])
def test_what_no_part_computes_is_not_guessed(name):
    with pytest.raises(KeyError):
        graph(FAMILIES["gpt2"]).place(name)

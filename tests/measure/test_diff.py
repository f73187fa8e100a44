"""`diff`: planted faults are named, a model beside itself is equal, memory is flat."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from covers import in_turn
from decoder_parameters import Times
from live_tensors import Live
from needs import needs_kernels
from small_models import as_model, ids, random_blocks, random_model
from zoo import IN_BLOCKS, MODELS, VOCAB

from llmcli.commands.diff import measure
from llmcli.commands.diff.measure import Side, align, measure_diff, measure_weights
from llmcli.commands.selftest.measure.arithmetic import copied
from llmcli.config.attention import RopeConfig
from llmcli.errors import NotFinite
from llmcli.inspect import windows
from llmcli.records.numbers import counted
from llmcli.shell.running import edit_requests
from llmcli.weights.dense import writable

PROMPT = ids(1, 9)[0].tolist()


def side(model, tokens=PROMPT):
    return Side(model=model, ids=tokens, spans=[(at, at + 1) for at in tokens])


def diff(a, b, tokens=PROMPT, **rest):
    return measure_diff(side(a, tokens), side(b, tokens), **({"window": 64, "stride": 32} | rest))


def small(name, **changes):
    return random_model(replace(MODELS[name], **changes), torch.float32)


def written(parameter, fault):
    """Plants a fault in the numbers of a parameter."""

    def plant(model):
        fault(writable(model.decoder.weight(parameter)))
        return model

    return plant


def configured(change):
    """Plants another value of the configuration's last layer, with the same weights."""

    def plant(model):
        *layers, last = model.config.layers
        config = replace(model.config, layers=(*layers, change(last)))
        return random_model(config, torch.float32)

    return plant


def exchanged(first, second):
    def fault(rows):
        rows[[first, second]] = rows[[second, first]].clone()

    return fault


def with_parts(layer, **changes):
    """The layer with other values of those of its parts that have them."""
    return replace(layer, sublayers=tuple(
        tuple(
            replace(one, part=replace(one.part, **changes))
            if all(hasattr(one.part, name) for name in changes) else one for one in branches
        )
        for branches in layer.sublayers
    ))  # fmt: skip


# the model, what is planted, and the first activation that differs by itself; then its parameter
FAULTS = {
    "a norm's weight": ("llama", written("blocks.1.ln1.w", lambda w: w[3:4].mul_(1.001)),
                        "blocks.1.ln1.out", "blocks.1.ln1.w"),
    "rows of W_q": ("gpt2", written("blocks.1.attn.W_q", exchanged(2, 5)),
                    "blocks.1.attn.q", "blocks.1.attn.W_q"),
    "the other kv head": (
        "llama", written("blocks.0.attn.W_k", lambda w: w.copy_(w.roll(8, 0).clone())),
        "blocks.0.attn.k", "blocks.0.attn.W_k",
    ),
    "the head's bias": ("head with a bias", written("head.b", lambda b: b[7:8].add_(0.01)),
                        "logits_raw", "head.b"),
    "a sink": ("sinks", written("blocks.1.attn.sink", lambda b: b[1:2].add_(0.1)),
               "blocks.1.attn.z", "blocks.1.attn.sink"),
    "an expert": ("experts", written("blocks.1.moe.W_down", lambda w: w[2].neg_()),
                  "blocks.1.moe.expert_out", "blocks.1.moe.W_down"),
    "a decay": ("gated deltanet", written("blocks.0.linattn.A_log", lambda a: a[1:2].add_(0.1)),
                "blocks.0.linattn.log_decay", "blocks.0.linattn.A_log"),
    "a step": ("mamba-2", written("blocks.1.ssm.dt_bias", lambda b: b[1:2].add_(0.1)),
               "blocks.1.ssm.dt", "blocks.1.ssm.dt_bias"),
    "a latent": ("latent attention",
                 written("blocks.0.attn.W_kv_latent", lambda w: w[:1].mul_(1.01)),
                 "blocks.0.attn.kv_latent", "blocks.0.attn.W_kv_latent"),
    "a token's embedding": ("caps", written("embed.W", lambda w: w[PROMPT[4]].mul_(1.001)),
                            "embed", "embed.W"),
    "the rope's base": (
        "llama", configured(partial(with_parts, rope=RopeConfig(theta=101.0, dims=8))),
        "blocks.1.attn.q_rot", "theta 100.0 → 101.0",
    ),
    "the activation": ("llama", configured(partial(with_parts, activation="gelu")),
                       "blocks.1.mlp.act", "function silu → gelu"),
}  # fmt: skip


def named(report):
    """The first activation that differs by itself, and what of its formula does."""
    first = next(node for node in report.nodes if node.differs)
    return first.name, *(one.name for one in first.parameters), *first.formula


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named(fault):
    name, plant, *expected = FAULTS[fault]
    report = diff(small(name), plant(small(name)))
    assert list(named(report)) == expected
    assert report.ok, "B follows from its own formulas"
    assert report.divergence.max > 0


def test_a_fault_is_named_in_another_arithmetic():
    a, b = small("llama"), small("llama")
    narrow = as_model(copied(b.decoder, "cpu", torch.bfloat16))
    assert not any(node.differs for node in diff(a, narrow).nodes), "rounding explains it"
    plant = written("blocks.1.mlp.W_up", exchanged(0, 1))
    assert named(diff(a, plant(narrow)))[:2] == ("blocks.1.mlp.up", "blocks.1.mlp.W_up")


@needs_kernels
def test_a_bit_of_a_scale_is_named(monkeypatch):
    monkeypatch.setattr(measure, "PART", 1)
    name, generator = "blocks.1.attn.W_q", torch.Generator().manual_seed(0)
    config, formats = IN_BLOCKS["llama"]
    a, b = (random_model(config, formats=formats) for _ in range(2))
    weight = a.decoder.weight(name)
    raw = random_blocks(weight.format, *weight.shape, generator)
    weight.write(torch.arange(len(raw)), raw)
    raw[3, 0] ^= 1  # the last bit of a block's first number
    b.decoder.weight(name).write(torch.arange(len(raw)), raw)
    report = diff(a, b)
    assert named(report) == ("blocks.1.attn.q", name)
    (changed,) = next(node for node in report.nodes if node.differs).parameters
    assert (changed.differing_rows, changed.first_row) == (1, 3)
    differ = [one.name for one in measure_weights(a, b).parameters if one.error != 0]
    assert differ == [name]


@pytest.mark.parametrize(("name", "dtype"), in_turn(MODELS, [torch.float32, torch.float64]))
def test_a_model_beside_itself_is_equal(name, dtype):
    a, b = (random_model(MODELS[name], dtype) for _ in range(2))
    report = diff(a, b)
    assert report.ok
    assert report.nodes
    assert not any(node.differs for node in report.nodes)
    assert {one.error for one in report.streams} == {0.0}
    assert {one.kl for one in report.tokens} == {0.0} == {one.reverse_kl for one in report.tokens}
    assert report.largest_difference == 0
    assert {one.error for one in measure_weights(a, b).parameters} == {0.0}


def test_divergences_are_those_of_the_logits():
    a, b = small("llama"), small("llama", final_norm=replace(MODELS["llama"].final_norm, eps=0.5))
    report = diff(a, b)
    logs = [one.decoder(torch.tensor([PROMPT]))[0].double().numpy() for one in (a, b)]
    p, q = (np.exp(one) / np.exp(one).sum(-1, keepdims=True) for one in logs)
    expected = [float((x * np.log(x / y)).sum()) for x, y in zip(p, q, strict=True)]
    assert [one.kl for one in report.tokens] == pytest.approx(expected, rel=1e-5)
    assert [one.top_b.id for one in report.tokens] == q.argmax(-1).tolist()
    ranks = [1 + int((q[t] > q[t, one.top_a.id]).sum()) for t, one in enumerate(report.tokens)]
    assert [one.top_a_in_b for one in report.tokens] == ranks
    of = report.divergence
    assert (of.mean, of.max) == pytest.approx((np.mean(expected), max(expected)), rel=1e-5)
    assert of.same_top == np.mean(p.argmax(-1) == q.argmax(-1))
    assert of.same_top_low < of.same_top <= of.same_top_high
    logprobs = [np.log(q[t, id]) for t, id in enumerate(PROMPT[1:])]
    assert [one.b for one in report.tokens[:-1]] == pytest.approx(logprobs, rel=1e-5)
    assert report.score_b.mean_logprob == pytest.approx(np.mean(logprobs), rel=1e-5)


def test_memory_is_flat_in_the_length(monkeypatch):
    for module, name in ((windows, "CHUNK"), (measure, "CHUNK"), (measure, "SAMPLE")):
        monkeypatch.setattr(module, name, 8)
    a, b = small("one layer"), small("one layer")
    most = []
    for count in (40, 160):
        tokens = [(7 * at * at + 3 * at) % VOCAB for at in range(count)]
        with Live() as live:
            assert len(diff(a, b, tokens, window=20, stride=10).tokens) == count
        most.append(live.most)
    assert most[1] < 1.05 * most[0]


def test_prompts_are_aligned():
    a, b = [1, 2, 3, 4, 5], [1, 2, 9, 9, 9, 4, 5]
    found, places = align(a, b)
    assert places == [(0, 0), (1, 1), (3, 5), (4, 6)]
    assert found == (2, 2)
    model = small("llama")
    report = measure_diff(side(model, a), side(model, b), window=64, stride=32, aligned=True)
    assert [one.position for one in report.tokens] == [1, 2, 4, 5]
    assert [one.kl > 0 for one in report.tokens] == [False, False, True, True]
    assert [one.id for one in report.tokens] == [2, None, 5, None]
    assert not any(node.differs for node in report.nodes)
    assert report.streams[0].errors.tolist() == [0.0] * 4, "the same tokens"
    assert align(a, a[::-1])[1] == [(at, at) for at in range(5)]


def test_edits_are_those_of_each_prompt():
    a, b = small("llama"), small("llama")
    for model in (a, b):
        model.edits = edit_requests(["blocks.0.mlp_out=mean"], model.config)
    rest = {"window": 64, "stride": 32, "aligned": True}
    alone, both = (
        measure_diff(side(a, [1, 2, 3]), side(one, [1, 2, 3, 9]), **rest)
        for one in (a, b)
    )
    assert alone.tokens == both.tokens
    assert [one.error for one in alone.streams] == [one.error for one in both.streams]
    assert alone.streams[-1].error > 0, "other means"


@pytest.mark.parametrize("count", [1, 2, 40])
def test_activations_are_those_of_the_context(count):
    a, b = small("gpt2"), small("gpt2")
    positions, tokens = a.config.embedding.positions, (PROMPT * 40)[:count]
    report = diff(a, b, tokens, window=8, stride=4)
    assert report.activations == min(8, count) < positions
    assert len(report.tokens) == count
    assert report.score_a.tokens_scored == count - 1
    assert report.checks[0].words.endswith(f" {counted(min(8, count), 'token')}")
    assert report.ok


def test_nan_in_one_side_is_refused():
    b = written("ln_final.w", lambda w: w[3:4].fill_(np.nan))(small("llama"))
    with pytest.raises(NotFinite, match="the logits after token 0"):
        diff(small("llama"), b)


def test_each_side_spells_its_own_tokens(monkeypatch):
    a, b = small("llama"), small("llama")
    monkeypatch.setattr(type(a), "token_text", lambda self, id: "A" if self is a else "B")
    texts = {(one.text, one.top_a.text, one.top_b.text) for one in diff(a, b).tokens[:-1]}
    assert texts == {("A", "A", "B")}


def test_other_tokens_have_scores_alone():
    model = small("llama")
    report = measure_diff(side(model), side(model, PROMPT[1:]), window=64, stride=32)
    assert (report.tokens, report.nodes, report.divergence) == ((), (), None)
    assert report.score_b.tokens_scored == len(PROMPT) - 2


def _negative(a_TV, b_TV):
    return (a_TV.exp() * (b_TV - a_TV)).sum(-1)


@pytest.mark.parametrize(("check", "plant"), [
    ("divergence", lambda patch, b: patch.setattr(measure, "divergences", _negative)),
    ("itself", lambda patch, b: patch.setattr(measure, "chosen", lambda logs, ids, *_: (
        [0.0] * len(ids), [2] * len(ids)))),
    ("formulas", lambda patch, b: patch.setitem(
        b.decoder._weights, "blocks.1.mlp.W_up", Times(b.decoder.weight("blocks.1.mlp.W_up"), 1.1)
    )),
])  # fmt: skip
def test_checks_can_fail(check, plant, monkeypatch):
    a, b = small("llama"), small("llama", final_norm=replace(MODELS["llama"].final_norm, eps=0.5))
    plant(monkeypatch, b)
    assert [one.name for one in diff(a, b).checks if not one.ok] == [check]

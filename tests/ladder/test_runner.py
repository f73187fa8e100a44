"""Every rung agrees with the one below, slow ones are estimated, products are counted."""

import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from decoder_parameters import parameters_of
from small_models import weights as small_weights
from zoo import CONFIGS, GATED, layer, llama

from llmcli.commands.ladder.measure import runner
from llmcli.commands.ladder.measure.loops import multiply_adds
from llmcli.commands.ladder.measure.record import count
from llmcli.commands.ladder.measure.rungs import HeadsAsDimension
from llmcli.commands.ladder.measure.runner import plan_workload, run_ladder
from llmcli.commands.ladder.measure.texts import axis_sizes
from llmcli.commands.ladder.measure.weights import Weights
from llmcli.errors import NotFinite, UnsupportedModel
from llmcli.graph.plan import plan
from llmcli.graph.spec import Call
from llmcli.loading.load import load

IDS = [5, 9, 2, 7]
DTYPES = [("float32", 1e-4), ("float64", 1e-9)]


def random_weights(kind, dtype="float32"):
    return small_weights(CONFIGS[kind], getattr(torch, dtype))


def workload(weights, **options):
    defaults = {"more": 2, "sequences": 3, "rounds": 0}
    return plan_workload(weights, IDS, **(defaults | options))


def test_speed_ups_are_those_of_neighbouring_runs():
    weights = random_weights("gpt2")
    rungs = run_ladder(weights, workload(weights, rounds=3))
    assert len({rung.prompt_s.runs for rung in rungs}) == 1
    assert rungs[0].prompt_s.runs >= 3
    assert {rung.token_s.runs for rung in rungs} == {2 * rungs[0].prompt_s.runs}
    for below, rung in itertools.pairwise(rungs):
        assert rung.prompt_s.lowest <= rung.prompt_s.median <= rung.prompt_s.highest
        least = below.token_s.lowest / rung.token_s.highest
        assert least <= rung.token_speedup <= below.token_s.highest / rung.token_s.lowest
    assert runner._speedup([1.0, 2.0, 9.0], [1.0, 1.0, 3.0]) == 2.0
    assert runner._speedup([6.0], [1.0, 2.0, 9.0]) == 3.0


def test_the_workload_is_what_the_model_says_next():
    weights = random_weights("llama")
    run = workload(weights, more=3)
    assert run.prompts.tolist() == [[5, 9, 2, 7], [9, 2, 7, 5], [2, 7, 5, 9]]
    ids = list(IDS)
    for chosen in run.more.tolist():
        assert weights.decoder(torch.tensor([ids]))[0, -1].argmax() == chosen
        ids.append(chosen)
    short = plan_workload(weights, [5, 9], more=1, sequences=6)
    assert len({tuple(row) for row in short.prompts.tolist()}) == 6, "no two are alike"


def test_a_rung_over_budget_is_estimated_from_block_0_and_still_compared(monkeypatch):
    weights = random_weights("llama")
    rungs = run_ladder(weights, workload(weights, budget=0))
    one, four = "block 0 alone, 1 of the 4 tokens", "block 0 alone, all 4 tokens"
    assert [rung.estimated for rung in rungs] == [one, *[four] * 4, *[None] * 3]
    assert rungs[1].compared == "rows of 1 of 4 tokens after block 0"
    assert rungs[2].compared == "rows of 4 of 4 tokens after block 0"
    assert rungs[6].compared == "logits"
    assert all(rung.ok for rung in rungs)
    monkeypatch.setattr(
        HeadsAsDimension,
        "merge",
        lambda self, c: c.flatten(0, -3).flip(0).transpose(-3, -2).flatten(-2),
    )
    assert not run_ladder(weights, workload(weights, budget=0), numbers=[3, 4])[1].ok


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_an_estimate_counts_what_the_whole_would(kind):
    weights = random_weights(kind)
    whole = run_ladder(weights, workload(weights, more=3))
    estimated = run_ladder(weights, workload(weights, more=3, budget=0))
    for found, counted in zip(estimated, whole, strict=True):
        assert found.prompt_work == counted.prompt_work
        calls = [(work.gemv, work.gemm) for work in (found.token_work, counted.token_work)]
        assert calls[0] == pytest.approx(calls[1])
        # the square of attention is taken halfway, not averaged
        assert found.token_work.flops == pytest.approx(counted.token_work.flops, rel=0.01)


def test_estimates_scale_by_multiply_adds_and_blocks(monkeypatch):
    weights = random_weights("llama")
    monkeypatch.setattr(runner, "timed", lambda device, call: (call(), 1.0))
    loops, matrices = run_ladder(weights, workload(weights, budget=0), numbers=[1, 3])
    adds = [multiply_adds(weights.config, n) for n in (4, 5, 6)]
    part = multiply_adds(weights.config, 1, 0)
    assert loops.prompt_s.median == pytest.approx(adds[0] / part)
    assert loops.token_s.median == pytest.approx((adds[1] + adds[2]) / 2 / part)
    # block and head 1 s, every other block 1 s
    assert matrices.prompt_s.median == len(weights.blocks)


def test_large_logits_are_held_to_a_share_of_the_largest():
    weights = random_weights("gpt2")
    norm = weights.final_norm
    louder = replace(norm, w=norm.w * 40, b=norm.b * 40)
    loud = replace(weights, final_norm=louder)
    rungs = run_ladder(loud, workload(weights), numbers=range(2, 8))
    assert all(rung.ok for rung in rungs)
    assert rungs[1].allowed > 2e-4


def test_a_model_that_is_not_finite_says_so():
    weights = random_weights("gpt2")
    weights.decoder.ln_final.w[3] = torch.nan
    with pytest.raises(NotFinite):
        workload(weights)


def test_nan_is_no_agreement():
    """Only the rungs that are requested are run."""
    weights = random_weights("gpt2")
    run = workload(weights)
    rungs = run_ladder(weights, run, numbers=[6, 3, 8])
    assert [rung.number for rung in rungs] == [3, 6, 8]
    assert rungs[1].ok
    norm = weights.final_norm
    broken = replace(weights, final_norm=replace(norm, w=norm.w * torch.nan))
    assert not run_ladder(broken, run, numbers=[3, 4])[1].ok


@pytest.mark.parametrize(("heads", "letter"), [(2, "d/h"), (4, "d_k")])
def test_a_head_is_called_d_h_only_where_it_is(heads, letter):
    weights = small_weights(llama(layer(GATED, heads=heads)))
    other = {"d/h": "d_k", "d_k": "d/h"}[letter]
    assert letter in dict(axis_sizes(weights.config, tokens=4, sequences=1))
    for rung in run_ladder(weights, workload(weights)):
        assert rung.ok
        assert not any(other in text for text in (*rung.change, rung.idea))


A, B, X = torch.ones(3, 4), torch.ones(4, 5), torch.ones(4)
BIAS, BATCH = torch.ones(5), torch.ones(2, 3, 4)
HEADS = torch.ones(2, 6, 3, 4)  # two sequences, six heads, three tokens


@pytest.mark.parametrize(
    ("call", "gemv", "gemm", "multiply_adds", "numbers"),
    [
        (lambda: A @ B, 0, 1, 3 * 4 * 5, 12 + 20 + 15),
        (lambda: X @ B, 1, 0, 4 * 5, 4 + 20 + 5),
        (lambda: A @ X, 1, 0, 3 * 4, 12 + 4 + 3),
        (lambda: X @ X, 1, 0, 4, 4 + 4 + 1),
        (lambda: A[:1] @ B, 1, 0, 4 * 5, 4 + 20 + 5),
        (lambda: F.linear(A, B.t(), BIAS), 0, 1, 3 * 4 * 5, 12 + 20 + 15 + 5),
        (lambda: F.linear(BATCH, B.t()), 0, 1, 2 * 3 * 4 * 5, 24 + 20 + 30),
        (lambda: BATCH @ BATCH.transpose(1, 2), 0, 1, 2 * 3 * 4 * 3, 24 + 24 + 18),
        (lambda: torch.einsum("bij,jk->bik", BATCH, B), 0, 1, 2 * 3 * 4 * 5, 24 + 20 + 30),
        (lambda: A + A, 0, 0, 0, 0),
    ],
)
def test_products(call, gemv, gemm, multiply_adds, numbers):
    for context in (torch.inference_mode(), torch.no_grad()):
        with context:
            work = count(call)
        assert (work.gemv, work.gemm) == (gemv, gemm)
        assert (work.flops, work.bytes) == (2 * multiply_adds, 4 * numbers)


def test_fused_attention_is_two_products_over_the_square():
    with torch.inference_mode():
        work = count(lambda: F.scaled_dot_product_attention(HEADS, HEADS, HEADS, is_causal=True))
    assert (work.gemv, work.gemm) == (0, 1)
    assert work.flops == 2 * 2 * 6 * 3 * 3 * (4 + 4)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_the_decoder_runs_the_flops_of_the_graph(kind):
    decoder = random_weights(kind).decoder
    ids = torch.tensor([[1, 2, 3, 4, 5]])
    specs = plan(decoder.config, Call(batch=1, tokens=5, past=0, phase="prefill")).written
    assert count(lambda: decoder(ids)).flops == sum(spec.flops_full for spec in specs)
    state = decoder.new_state(1, 8)
    decoder(ids, state)
    step = count(lambda: decoder(ids[:, :1], state))
    products = 4 + 1  # qkv, attention, out, up (with gate), down
    assert (step.gemv + step.gemm) == products * len(decoder.config.layers) + 1


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_nothing_is_copied(kind):
    weights = random_weights(kind)
    slots = parameters_of(weights.decoder)
    assert weights.W_E.data_ptr() == slots["embed.W"].data_ptr()
    _, mlp = weights.blocks[0].parts
    assert torch.equal(mlp.down.W, slots["blocks.0.mlp.W_down"].t())
    assert mlp.down.W.data_ptr() == slots["blocks.0.mlp.W_down"].data_ptr()


def test_a_parameter_without_a_formula_is_refused(monkeypatch):
    decoder = random_weights("gpt2").decoder
    named = [*decoder.weight_names, "blocks.0.attn.temperature"]
    monkeypatch.setattr(decoder, "weight_names", named)
    with pytest.raises(UnsupportedModel, match=r"no formula for `blocks\.0\.attn\.temperature`"):
        Weights.of(decoder)


@pytest.mark.parametrize(("dtype", "allowed"), DTYPES)
def test_every_rung_of_smollm2_with_the_loops_estimated(smollm2_path, dtype, allowed):
    loaded = load(str(smollm2_path), dtype=dtype)
    weights, ids = Weights.of(loaded.decoder), loaded.tokenizer.encode("In the beginning")
    run = plan_workload(weights, ids, more=1, sequences=2, rounds=0, budget=10)
    rungs = run_ladder(weights, run)
    assert rungs[0].estimated.startswith("block 0 alone")
    assert rungs[1].compared.endswith("after block 0")
    assert all(rung.ok for rung in rungs)
    for rung in rungs[3:]:
        assert rung.compared == "logits"
        assert rung.difference <= allowed

"""Every rung computes what the rung below computes, and what the decoder does.

Those that are slow are estimated, and products are counted.
"""

import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from covers import covered, few
from decoder_parameters import parameters_of
from ladder_models import DENSE, NEW_PAIRS, NEW_TYPES, REST, TYPES, each_with, refusal
from small_models import ids, read, weights
from zoo import CONFIGS, GATED, MODELS, block, branch, layer, llama, stretched, variant

from llmcli.commands.ladder.measure import runner
from llmcli.commands.ladder.measure.loops import Loops, multiply_adds
from llmcli.commands.ladder.measure.record import count
from llmcli.commands.ladder.measure.rungs import FusedKernels, HeadsAsDimension, Matrices
from llmcli.commands.ladder.measure.runner import RUNGS, plan_workload, run_ladder
from llmcli.commands.ladder.measure.texts import axis_sizes, first_attention, first_mlp, text_of
from llmcli.commands.ladder.measure.weights import Weights
from llmcli.commands.ladder.report import NAMES
from llmcli.config.attention import DynamicScaling
from llmcli.errors import NotFinite, UnsupportedModel
from llmcli.loading.load import load

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
BY_NAME = dict(zip(NAMES, RUNGS, strict=True))
PROMPT, MORE, IDS = 5, 3, [5, 9, 2, 7]


def difference(one, other):
    return (one.double() - other.double()).abs().max().item()


def run_and_compare(of, tokens, prompt):
    """Every rung against the one below and against the decoder on the whole sequence at once.

    The lower rungs read the first sequence only, those with a cache all.
    """
    whole = of.decoder(tokens)
    assert whole.abs().max() > 0.4  # numbers among which a fault could be seen
    outs = [read(kind(of), tokens if number > 5 else tokens[:1], prompt)
            for number, kind in enumerate(RUNGS, 1)]  # fmt: skip
    allowed = TOLERANCE[of.decoder.dtype]
    for out in outs:
        assert out.shape[1:] == whole.shape[1:]
        assert difference(out, whole[: len(out)]) < allowed
    for below, above in itertools.pairwise(outs):
        assert difference(below, above[: len(below)]) < allowed


@pytest.mark.parametrize(("name", "dtype"), each_with(list(TOLERANCE), *REST))
def test_all_rungs_agree(name, dtype):
    run_and_compare(weights(DENSE[name], dtype), ids(2, PROMPT + MORE), PROMPT)


def test_all_rungs_agree_on_one_token():
    run_and_compare(weights(CONFIGS["llama"]), ids(2, 3), 1)


@pytest.mark.parametrize("model_type", few([*NEW_TYPES, *NEW_PAIRS], len(NEW_TYPES)))
def test_all_rungs_agree_on_dense_model_types(model_type):
    """On those with a value of a part, or two values of one, that no other dense model has."""
    config = TYPES[model_type]
    run_and_compare(weights(config), ids(2, 5) % config.vocab, 3)


def test_what_is_no_dense_model_is_refused_by_the_part():
    messages = [refusal(config) for name, config in MODELS.items() if name not in DENSE]
    for noun in (
        "mixture of experts", "latent attention", "gated DeltaNet", "Mamba-2 mixer",
        "short convolution",
    ):  # fmt: skip
        assert any(noun in message for message in messages), noun
    assert all("which block " in message for message in messages)
    for name, words in (
        ("stablelm-normed-heads", "norms with weights for each head, which block 0 has"),
        ("opt-post-norm", "a normalized residual stream"),
        ("opt-projected", "embeddings of another width"),
    ):
        assert refusal(variant(name).config()) == f"the ladder has no rungs for {words}"
    assert "which block 2 has" in refusal(MODELS["experts without gates, alone in their blocks"])
    alone = llama(block(branch(GATED)))
    assert refusal(alone) == "the ladder has no rungs for a model without attention"


@pytest.mark.parametrize("rung", NAMES)
@pytest.mark.parametrize("name", covered(DENSE))
def test_what_a_rung_says_is_said_of_its_model(rung, name):
    """No gate, rotation, sharing or window is spoken of where the first block has none."""
    text, config = text_of(rung, DENSE[name]), DENSE[name]
    idea = text.idea
    assert text.before != text.here
    assert len(idea.split()) > 40
    words = f"{text.before}\n{text.here}\n{idea}"
    mixer, gated = first_attention(config), first_mlp(config).gated
    shared, window = mixer.kv_heads < mixer.heads, mixer.scores.window
    spoken_of = {
        "rotat": mixer.rope is not None, "NTK": mixer.rope is not None, "gate": gated,
        "h_kv": shared, "share a key": shared, "narrower": shared,
        "window": window is not None, "√(d/h)": mixer.scores.scale == mixer.head_dim**-0.5,
    }  # fmt: skip
    for word, applies in spoken_of.items():
        assert applies or word not in words
    if rung in ("loops", "matrices") and mixer.rope is not None:
        assert "R(position)" in words
    assert ("kept rotated" in idea) is (rung in ("cache", "batch") and mixer.rope is not None)
    assert ("reads the last W" in idea) is (rung in ("cache", "batch") and window is not None)


@pytest.mark.parametrize("kind", RUNGS, ids=NAMES)
@pytest.mark.parametrize("name", ["gpt2", "layers that differ"])
def test_until_stops_after_a_layer(kind, name):
    of = weights(CONFIGS[name])
    tokens = ids(2, 5)
    prompt = tokens if kind.batched else tokens[0]
    layers = [kind(of).forward(prompt, until=i) for i in range(len(of.blocks))]
    for i, rows in enumerate(layers):
        expected = of.decoder(tokens, until=i)
        assert difference(rows, expected if kind.batched else expected[0]) < 1e-9
    assert all(difference(a, b) > 0.1 for a, b in itertools.pairwise(layers))


@pytest.mark.parametrize("name", ["cache", "batch", "fused"])
def test_a_cache_outgrows_its_slots(name):
    of = weights(CONFIGS["window"])
    tokens = ids(2, 40)
    rung = BY_NAME[name](of)
    assert difference(read(rung, tokens, 3), of.decoder(tokens)) < 1e-9
    if name != "fused":
        assert rung.caches[0].keys.shape[-2] == 64


@pytest.mark.parametrize("kind", RUNGS, ids=NAMES)
def test_a_prompt_starts_anew(kind):
    of = weights(CONFIGS["gpt2"])
    rung = kind(of)
    first, second = ids(1, 6), ids(1, 4, seed=9)
    read(rung, first, 4)
    assert torch.equal(read(rung, second, 3), read(kind(of), second, 3))


def test_without_a_whole_prompt_there_is_nothing_to_extend():
    of, tokens = weights(CONFIGS["llama"]), ids(2, 4)
    for name in ("cache", "batch"):
        rung = BY_NAME[name](of)
        prompt = tokens if rung.batched else tokens[0]
        rung.start(prompt)
        rung.forward(prompt, until=0)  # a pass that stopped early
        with pytest.raises(ValueError, match="nothing to extend"):
            rung.extend(prompt[..., 0])
    with pytest.raises(ValueError, match="no prompt"):
        FusedKernels(of).extend(torch.tensor([3]))


def test_kept_keys_are_those_of_a_shorter_sequence_where_the_rotation_grows():
    """What rung 6 says of dynamic NTK: caching is no longer the same computation."""
    of = weights(stretched(DynamicScaling(factor=2.0, original=6)))
    tokens = ids(1, 10)
    again, kept, together, fused = (
        read(BY_NAME[name](of), tokens, 7) for name in ("combined", "cache", "batch", "fused")
    )
    assert difference(again[:, :7], kept[:, :7]) < 1e-9
    assert difference(again[:, 7:], kept[:, 7:]) > 1e-3
    assert difference(kept, together) < 1e-9
    assert difference(kept, fused) < 1e-9


def test_the_loops_are_float64_whatever_the_model_is():
    narrow = weights(CONFIGS["llama"], torch.float32)
    wide = weights(CONFIGS["llama"], torch.float64)
    for name, slot in parameters_of(narrow.decoder).items():
        parameters_of(wide.decoder)[name].copy_(slot)
    tokens = ids(1, 4)[0]
    out = Loops(narrow).start(tokens)
    assert out.dtype == torch.float64
    assert torch.equal(out, Loops(wide).start(tokens))
    assert Matrices(narrow).start(tokens).dtype == torch.float32


def test_one_matrix_of_our_own_from_rung_four_on():
    """Rungs 1 to 3 and 8 read the decoder's own weights, 4 to 7 concatenate theirs once."""
    of = weights(CONFIGS["llama"])
    tokens = ids(1, 4)
    rungs = [kind(of) for kind in RUNGS]
    before = [read(rung, tokens, 4) for rung in rungs]
    next(of.blocks[0].matrices).W.mul_(2)  # of the queries
    changed = [difference(read(r, tokens, 4), b) > 1e-3 for r, b in zip(rungs, before, strict=True)]
    assert changed == [False, True, True, False, False, False, False, True]


# runs, estimates and counts


def narrow(kind):
    return weights(CONFIGS[kind], torch.float32)


def workload(of, **options):
    return plan_workload(of, IDS, **({"more": 2, "sequences": 3, "rounds": 0} | options))


def test_speed_ups_are_those_of_neighbouring_runs():
    of = narrow("gpt2")
    rungs = run_ladder(of, workload(of, rounds=3))
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
    of = narrow("llama")
    run = workload(of, more=3)
    assert run.prompts.tolist() == [[5, 9, 2, 7], [9, 2, 7, 5], [2, 7, 5, 9]]
    ids = list(IDS)
    for chosen in run.more.tolist():
        assert of.decoder(torch.tensor([ids]))[0, -1].argmax() == chosen
        ids.append(chosen)
    short = plan_workload(of, [5, 9], more=1, sequences=6)
    assert len({tuple(row) for row in short.prompts.tolist()}) == 6, "no two are alike"


def test_a_rung_over_budget_is_estimated_from_block_0_and_still_compared(monkeypatch):
    of = narrow("llama")
    rungs = run_ladder(of, workload(of, budget=0))
    one, four = "block 0 alone, 1 of the 4 tokens", "block 0 alone, all 4 tokens"
    assert [rung.estimated for rung in rungs] == [one, *[four] * 4, *[None] * 3]
    assert rungs[1].compared == "rows of 1 of 4 tokens after block 0"
    assert rungs[2].compared == "rows of 4 of 4 tokens after block 0"
    assert rungs[6].compared == "logits"
    assert all(rung.ok for rung in rungs)

    def wrong(self, c):
        return c.flatten(0, -3).flip(0).transpose(-3, -2).flatten(-2)

    monkeypatch.setattr(HeadsAsDimension, "merge", wrong)
    assert not run_ladder(of, workload(of, budget=0), numbers=[3, 4])[1].ok


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_an_estimate_counts_what_the_whole_would(kind):
    of = narrow(kind)
    whole = run_ladder(of, workload(of, more=3))
    estimated = run_ladder(of, workload(of, more=3, budget=0))
    for found, counted in zip(estimated, whole, strict=True):
        assert found.prompt_work == counted.prompt_work
        calls = [(work.gemv, work.gemm) for work in (found.token_work, counted.token_work)]
        assert calls[0] == pytest.approx(calls[1])
        # the square of attention is taken halfway, not averaged
        assert found.token_work.flops == pytest.approx(counted.token_work.flops, rel=0.01)


def test_estimates_scale_by_multiply_adds_and_blocks(monkeypatch):
    of = narrow("llama")
    monkeypatch.setattr(runner, "timed", lambda device, call: (call(), 1.0))
    loops, matrices = run_ladder(of, workload(of, budget=0), numbers=[1, 3])
    adds = [multiply_adds(of.config, n) for n in (4, 5, 6)]
    part = multiply_adds(of.config, 1, 0)
    assert loops.prompt_s.median == pytest.approx(adds[0] / part)
    assert loops.token_s.median == pytest.approx((adds[1] + adds[2]) / 2 / part)
    # block and head 1 s, every other block 1 s
    assert matrices.prompt_s.median == len(of.blocks)


def test_a_first_run_that_is_slow_is_no_reason_to_estimate(monkeypatch):
    of, seconds = narrow("llama"), iter([100.0] * 4)  # head and block, of the prompt and halfway
    monkeypatch.setattr(runner, "timed", lambda device, call: (call(), next(seconds, 0.1)))
    assert run_ladder(of, workload(of), numbers=[3])[0].estimated is None
    assert list(seconds) == []


def test_large_logits_are_held_to_a_share_of_the_largest():
    of = narrow("gpt2")
    norm = of.final_norm
    loud = replace(of, final_norm=replace(norm, w=norm.w * 40, b=norm.b * 40))
    rungs = run_ladder(loud, workload(of), numbers=range(2, 8))
    assert all(rung.ok for rung in rungs)
    assert rungs[1].allowed > 2e-4


def test_nan_is_no_agreement():
    """Only the rungs that are requested are run."""
    of = narrow("gpt2")
    run = workload(of)
    rungs = run_ladder(of, run, numbers=[6, 3, 8])
    assert [rung.number for rung in rungs] == [3, 6, 8]
    assert rungs[1].ok
    norm = of.final_norm
    broken = replace(of, final_norm=replace(norm, w=norm.w * torch.nan))
    assert not run_ladder(broken, run, numbers=[3, 4])[1].ok
    of.decoder.ln_final.w[3] = torch.nan  # a model that is not finite says so
    with pytest.raises(NotFinite):
        workload(of)


@pytest.mark.parametrize(("heads", "letter"), [(2, "d/h"), (4, "d_k")])
def test_a_head_is_called_d_h_only_where_it_is(heads, letter):
    of = weights(llama(layer(GATED, heads=heads)))
    other = {"d/h": "d_k", "d_k": "d/h"}[letter]
    assert letter in dict(axis_sizes(of.config, tokens=4, sequences=1))
    for rung in run_ladder(of, workload(of)):
        assert rung.ok
        assert not any(other in text for text in (*rung.change, rung.idea))


A, B, X = torch.ones(3, 4), torch.ones(4, 5), torch.ones(4)
BIAS, BATCH = torch.ones(5), torch.ones(2, 3, 4)
HEADS = torch.ones(2, 6, 3, 4)  # two sequences, six heads, three tokens


@pytest.mark.parametrize(("call", "gemv", "gemm", "multiply_adds", "numbers"), [
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
])
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
def test_nothing_is_copied(kind):
    of = narrow(kind)
    slots = parameters_of(of.decoder)
    assert of.W_E.data_ptr() == slots["embed.W"].data_ptr()
    _, mlp = of.blocks[0].parts
    assert torch.equal(mlp.down.W, slots["blocks.0.mlp.W_down"].t())
    assert mlp.down.W.data_ptr() == slots["blocks.0.mlp.W_down"].data_ptr()


def test_a_parameter_without_a_formula_is_refused(monkeypatch):
    decoder = narrow("gpt2").decoder
    named = [*decoder.weight_names, "blocks.0.attn.temperature"]
    monkeypatch.setattr(decoder, "weight_names", named)
    with pytest.raises(UnsupportedModel, match=r"no formula for `blocks\.0\.attn\.temperature`"):
        Weights.of(decoder)


@pytest.mark.parametrize(("dtype", "allowed", "numbers"), [
    ("float32", 1e-4, (1, 2, 3, 4, 5, 8)), ("float64", 1e-9, (5, 6, 7, 8)),
])  # fmt: skip
def test_every_rung_of_smollm2_with_the_loops_estimated(smollm2_path, dtype, allowed, numbers):
    """Each with the one below in one of the dtypes."""
    loaded = load(str(smollm2_path), dtype=dtype)
    of, ids = Weights.of(loaded.decoder), loaded.tokenizer.encode("In the beginning")
    run = plan_workload(of, ids, more=1, sequences=2, rounds=0, budget=10)
    rungs = run_ladder(of, run, numbers=numbers)
    assert all(rung.ok for rung in rungs)
    if dtype == "float32":
        assert rungs[0].estimated.startswith("block 0 alone")
        assert rungs[1].compared.endswith("after block 0")
    for rung in rungs[1:]:
        assert rung.number < 4 or rung.compared == "logits"
        assert rung.number < 4 or rung.difference <= allowed

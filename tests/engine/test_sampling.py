"""The filtered distribution against a slow oracle in plain Python, the draws from it, and the
ranges of options: 20,000 draws are distributed as the oracle says (chi-square).
"""

import math
from typing import Any

import numpy as np
import pytest
import torch
from continued import filtered, stream
from fake_model import VOCAB, fake_model, script
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tensors import drawn

from llmcli.engine.sampling import Sampling, choose, penalized, sample, top
from llmcli.engine.seeds import sample_seed, uniforms
from llmcli.errors import UsageError

OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
INF = math.inf


def distribution(
    logits: list[float], prompt: list[int], output: list[int], options: Any
) -> tuple[list[float], float]:
    """The distribution that sampling claims, slowly and in plain Python; no code of ours.

    Probabilities after all filters, and how near any threshold comes to being met exactly.
    """
    scores = []
    for x, p, o in zip(logits, prompt, output, strict=True):
        if p or o:
            x = x / options.repetition_penalty if x > 0 else x * options.repetition_penalty
        x -= options.presence_penalty if o else 0.0
        x -= options.frequency_penalty * o
        scores.append(x)
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    if options.temperature == 0:
        best = max(scores)
        runners = [best - x for x in scores if x < best]
        margin = min(runners, default=1.0)
        return [float(i == scores.index(best)) for i in range(len(scores))], margin
    best = max(scores)
    weights = [math.exp((x - best) / options.temperature) for x in scores]
    if options.top_k:
        order = order[: options.top_k]
    margin = 1.0
    total = math.fsum(weights[i] for i in order)
    if options.top_p < 1:
        kept: list[int] = []
        for i in order:
            share = math.fsum(weights[j] for j in kept) / total
            margin = min(margin, abs(share - options.top_p))
            if share >= options.top_p:
                break
            kept.append(i)
        order = kept
    for i in order:
        margin = min(margin, abs(weights[i] - options.min_p) if 0 < options.min_p < 1 else 1.0)
    order = [i for i in order if weights[i] >= options.min_p]
    total = math.fsum(weights[i] for i in order)
    return [weights[i] / total if i in order else 0.0 for i in range(len(scores))], margin


def kept(logits: torch.Tensor, **options: float) -> list[int]:
    probs = filtered(logits, Sampling(**{**OFF, **options}))  # type: ignore[arg-type]
    return probs[0].nonzero()[:, 0].tolist()


def test_what_may_not_begin_a_text_may_follow():
    sampling = Sampling(suppress_tokens=(2, 9), begin_suppress_tokens=(1,))
    hidden = [sampling.suppressed(torch.zeros(1, 4), step).isinf()[0].tolist() for step in (0, 1)]
    assert hidden == [[False, True, True, False], [False, False, True, False]]


grid = st.integers(-8, 8).map(lambda n: n / 2)  # a coarse grid, so that ties are common


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[float], list[int], list[int], Sampling]:
    vocab = draw(st.integers(1, 12))
    logits = draw(st.lists(grid | st.just(-INF) | st.just(-0.0), min_size=vocab, max_size=vocab))
    assume(max(logits) > -INF)
    counts = st.lists(st.integers(0, 3), min_size=vocab, max_size=vocab)
    sampling = Sampling(
        temperature=draw(st.sampled_from([0, 0.1, 0.7, 1.0, 2.5, 1e-300])),
        top_k=draw(st.integers(0, vocab + 2)),
        top_p=draw(st.sampled_from([1.0, 0.999, 0.9, 0.7, 0.31, 0.05, 1e-9])),
        min_p=draw(st.sampled_from([0.0, 0.011, 0.3, 0.9, 1.0])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.3, 0.8, 5.0])),
        presence_penalty=draw(st.sampled_from([0.0, 0.5, -0.3])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.25, -0.6])),
    )
    return logits, draw(counts), draw(counts), sampling


@settings(max_examples=250, deadline=None)
@given(case=cases(), double=st.booleans())
def test_filtered_equals_the_oracle(case, double):
    logits, prompt, output, sampling = case
    expected, margin = distribution(logits, prompt, output, sampling)
    assume(margin > 1e-9)  # a threshold met within rounding may fall either way
    dtype = torch.float64 if double else torch.float32
    got = filtered(
        torch.tensor([logits, logits], dtype=dtype), sampling, torch.tensor([prompt, prompt]),
        torch.tensor([output, output]),
    )  # fmt: skip
    assert got.dtype == torch.float64
    assert torch.equal(got[0], got[1])
    assert [p > 0 for p in got[0].tolist()] == [p > 0 for p in expected]
    assert got[0].tolist() == pytest.approx(expected, rel=1e-9, abs=1e-15)


@settings(max_examples=120, deadline=None)
@given(case=cases(), u=st.floats(0, 1, exclude_max=True))
def test_choose_is_sample_of_filtered(case, u):
    logits, prompt, output, sampling = case
    counts = (torch.tensor([prompt]), torch.tensor([output]))
    scores = torch.tensor([logits], dtype=torch.float64)
    probs = filtered(scores, sampling, *counts)
    cumulative = probs.cumsum(-1)[0]
    assume(float((cumulative - u).abs().min()) > 1e-9 or u == 0)
    draw = torch.tensor([u], dtype=torch.float64)
    ids, best = choose(scores, sampling, draw, *counts)
    assert ids.tolist() == sample(probs, draw).tolist()
    assert probs[0, ids[0]] > 0
    assert math.isfinite(best.item())


SHARES = [math.log(share) for share in (0.4, 0.3, 0.2, 0.1)]
# logits, options, and the ids of which one may be drawn
KEPT: list[tuple[list[float], dict[str, float], list[int]]] = [
    # exactly k, of equals the lowest ids
    *(([1, 3, 2, 2, 2, 0, 2], {"top_k": k}, left) for k, left in (
        (1, [1]), (3, [1, 2, 3]), (4, [1, 2, 3, 4]), (5, [1, 2, 3, 4, 6]),
        *((everything, [0, 1, 2, 3, 4, 5, 6]) for everything in (0, 7, 99)),
    )),
    ([-0.0, 0.0, -0.0], {"top_k": 2}, [0, 1]), ([-1, -INF, -2, -INF], {"top_k": 3}, [0, 2]),
    # the token that crosses the line stays
    *((SHARES, {"top_p": p}, [*range(count)]) for p, count in (
        (0.39, 1), (0.41, 2), (0.71, 3), (0.91, 4), (1e-12, 1)
    )),
    # a line that is exactly met adds no token, and equals go by id
    ([1, 1, 1, 1], {"top_p": 0.5}, [0, 1]), ([1, 1, 1, 1], {"top_p": 0.51}, [0, 1, 2]),
    ([0, 1, 0, 1], {"top_p": 0.5}, [1, 3]),
    # among the first two the shares are 4/7 and 3/7
    (SHARES, {"top_k": 2, "top_p": 0.55}, [0]), (SHARES, {"top_k": 2, "top_p": 0.58}, [0, 1]),
    # relative to the best after temperature: weights 1, e^-1, e^-2
    ([0, -1, -2], {"min_p": 0.36}, [0, 1]), ([0, -1, -2], {"min_p": 0.37}, [0]),
    ([0, -1, -2], {"min_p": 0.37, "temperature": 2.0}, [0, 1]), ([5, 2, 5], {"min_p": 1.0}, [0, 2]),
    ([1, 4, 4, 3], {"temperature": 0}, [1]),  # the first of the best
]  # fmt: skip


@pytest.mark.parametrize(("logits", "options", "left"), KEPT)
def test_which_tokens_may_be_drawn(logits, options, left):
    assert kept(torch.tensor([logits], dtype=torch.float32), **options) == left


def test_penalties_in_numbers():
    """A positive and a negative logit of the prompt, two outputs, and what is in neither."""
    prompt, output = torch.tensor([[1, 0, 0, 1]]), torch.tensor([[0, 2, 0, 0]])
    sampling = Sampling(repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25)
    scores = penalized(torch.tensor([[2.0, 3.0, 2.0, -2.0]]), sampling, prompt, output)
    assert scores.tolist() == [[1, 0.5, 2, -4]]


@settings(max_examples=240, deadline=None)
@given(double=st.booleans(), data=st.data())
def test_top_is_ordered_by_score_then_id(double, data):
    """Of float64 by its own digits."""
    numbers = st.floats(width=64 if double else 32, allow_nan=False) | grid
    scores = data.draw(st.lists(numbers, min_size=1, max_size=20))
    k = data.draw(st.integers(1, len(scores)))
    expected = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:k]
    both = torch.tensor([scores, scores[::-1]], dtype=torch.float64 if double else torch.float32)
    assert top(both, k).tolist()[0] == expected


def test_filters_and_greedy_agree_where_float32_sees_no_difference():
    logits = torch.zeros(1, 3000, dtype=torch.float64)
    logits[0, :4] = torch.tensor([7.0, 7.0 + 1e-10, 7.0 + 2e-10, 7.0], dtype=torch.float64)
    greedy, _ = choose(logits, Sampling(temperature=0), None)
    assert greedy.tolist() == [2]
    u = torch.zeros(1, dtype=torch.float64)
    for only_one in ({"top_k": 1}, {"top_p": 1e-9}):
        assert choose(logits, Sampling(**{**OFF, **only_one}), u)[0].tolist() == [2]  # type: ignore[arg-type]
    assert kept(logits, top_k=3) == [0, 1, 2]
    broken = logits.clone()
    broken[0, 77] = math.nan
    _, best = choose(broken, Sampling(**{**OFF, "top_k": 1}), u)  # type: ignore[arg-type]
    assert math.isnan(best.item())


@pytest.mark.parametrize("spread", [0.02, 1.0, 4.0])
@pytest.mark.parametrize("top_p", [0.2, 0.95])
def test_top_p_over_a_large_vocabulary(spread, top_p):
    """From a handful of tokens in the nucleus to nearly all: each way of finding it."""
    vocab = 20_000
    logits = (drawn(2, vocab, seed=3) * spread * 8).round() / 8  # many equal
    got = filtered(logits, Sampling(**{**OFF, "top_p": top_p}))  # type: ignore[arg-type]
    for row_logits, row_probs in zip(logits.double().numpy(), got.numpy(), strict=True):
        order = np.lexsort((np.arange(vocab), -row_logits))
        weights = np.exp(row_logits - row_logits.max())[order]
        before = np.concatenate(([0.0], weights.cumsum()[:-1]))
        stay = order[before < top_p * weights.sum()]
        expected = np.zeros(vocab)
        expected[stay] = np.exp(row_logits[stay])
        np.testing.assert_allclose(row_probs, expected / expected.sum(), rtol=1e-9)


def test_sample_inverts_the_cumulative_sum():
    probs = torch.tensor([[0.0, 0.25, 0.0, 0.5, 0.25, 0.0]], dtype=torch.float64)
    almost = math.nextafter(1.0, 0.0)
    cases = {0.0: 1, 0.2499: 1, 0.25: 3, 0.7499: 3, 0.75: 4, almost: 4}
    for u, expected in cases.items():
        for scale in (1.0, 3.0, 1e-3):  # weights need not be normalized
            got = sample(probs * scale, torch.tensor([u], dtype=torch.float64))
            assert got.tolist() == [expected], (u, scale)


def test_rows_of_a_batch_do_not_touch_each_other():
    logits, counts = drawn(5, 300) * 3, drawn(5, 300, seed=1).abs().long()
    sampling = Sampling(repetition_penalty=1.2, frequency_penalty=0.1)
    together = filtered(logits, sampling, counts, counts)
    for b in range(5):
        alone = filtered(logits[b : b + 1], sampling, counts[b : b + 1], counts[b : b + 1])
        assert torch.equal(together[b : b + 1], alone)


@pytest.mark.parametrize("bad", [math.nan, INF])
@pytest.mark.parametrize("temperature", [0, 1.0])
def test_best_tells_of_logits_that_are_not_finite(bad, temperature):
    u = torch.tensor([0.3], dtype=torch.float64)
    logits = torch.zeros(1, 100)
    logits[0, 70] = bad
    for top_k in (0, 5):
        _, best = choose(logits, Sampling(temperature=temperature, top_k=top_k), u)
        assert not math.isfinite(best.item())
    _, best = choose(torch.full((1, 9), -INF), Sampling(temperature=temperature), u)
    assert best.item() == -INF


def test_sampling_without_a_random_number_is_an_error():
    with pytest.raises(ValueError, match="random number"):
        choose(torch.zeros(1, 2), Sampling(), None)


@pytest.mark.parametrize(("option", "value"), [
    ("temperature", -0.1), ("temperature", math.nan), ("temperature", INF), ("top_k", -1),
    ("top_p", 0.0), ("top_p", 1.01), ("top_p", math.nan), ("min_p", -0.1), ("min_p", 1.1),
    ("repetition_penalty", 0.0), ("repetition_penalty", -1.0), ("repetition_penalty", INF),
    ("presence_penalty", math.nan), ("frequency_penalty", -INF), ("seed", -1),
])  # fmt: skip
def test_ranges(option, value):
    with pytest.raises(UsageError, match=option.replace("_", "-")) as caught:
        Sampling(**{option: value})  # type: ignore[arg-type]
    assert caught.value.hint
    assert caught.value.code == 2


def test_extremes_in_range_stay_finite():
    logits = torch.tensor(np.linspace(-1e4, 1e4, 50), dtype=torch.float32)[None]
    for temperature in (5e-324, 1e-30, 9e18):
        probs = filtered(logits, Sampling(temperature=temperature, top_p=1.0, min_p=0.0))
        assert torch.isfinite(probs).all()
        assert probs.sum().item() == pytest.approx(1)


# draws

DRAWS = 20_000
SIZE = 40
# a ladder of logits, each at least twice, so that ties lie at every threshold
LOGITS = [round(1.6 * (i // 2 % 19 - 9) / 3, 3) for i in range(SIZE)]
PROMPT = [int(i % 3 == 0) for i in range(SIZE)]
OUTPUT = [i % 5 % 3 for i in range(SIZE)]

CASES = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "hot": {"temperature": 2.0},
    "top-k": {"top_k": 11},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.1},
    "top-k cuts a tie": {"top_k": 5, "temperature": 1.5},
    "top-p cuts a tie": {"top_p": 0.5, "temperature": 1.5},
    "penalties": {"repetition_penalty": 1.4, "presence_penalty": 0.7, "frequency_penalty": 0.3},
    "all together": {
        "temperature": 1.3, "top_k": 25, "top_p": 0.9, "min_p": 0.04, "repetition_penalty": 1.2,
        "presence_penalty": -0.4, "frequency_penalty": 0.5,
    },
    "the defaults": {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05},
}  # fmt: skip


def chi_square_p(ids: torch.Tensor, probs: list[float]) -> float:
    """The chance of counts at least as far off; cells that expect fewer than 5 are pooled."""
    counts = torch.bincount(ids, minlength=len(probs)).double()
    expected = torch.tensor(probs, dtype=torch.float64) * len(ids)
    if (counts[expected == 0] > 0).any():
        return 0.0
    small = expected < 5
    cells = [(counts[~small], expected[~small])]
    if expected[small].sum() > 0:
        cells.append((counts[small].sum()[None], expected[small].sum()[None]))
    seen, wanted = (torch.cat(parts) for parts in zip(*cells, strict=True))
    statistic = ((seen - wanted) ** 2 / wanted).sum()
    freedom = torch.tensor((len(seen) - 1) / 2, dtype=torch.float64)
    return torch.special.gammaincc(freedom, statistic / 2).item()


def draw(sampling: Sampling) -> torch.Tensor:
    rows = [torch.tensor(row).expand(DRAWS, SIZE) for row in (LOGITS, PROMPT, OUTPUT)]
    u = torch.tensor(uniforms(sampling.seed, 0, 0, DRAWS), dtype=torch.float64)
    return choose(rows[0], sampling, u, rows[1], rows[2])[0]


@pytest.mark.parametrize("name", CASES)
def test_draws_follow_the_filtered_distribution(name):
    sampling = Sampling(**{**OFF, **CASES[name]}, seed=2026)  # type: ignore[arg-type]
    probs, margin = distribution(LOGITS, PROMPT, OUTPUT, sampling)
    assert margin > 1e-9
    assert chi_square_p(draw(sampling), probs) > 1e-3


@pytest.mark.parametrize("name", [name for name in CASES if name != "plain"])
def test_the_statistic_sees_a_filter_that_is_missing(name):
    probs, _ = distribution(LOGITS, PROMPT, OUTPUT, Sampling(**OFF))  # type: ignore[arg-type]
    sampling = Sampling(**{**OFF, **CASES[name]}, seed=2026)  # type: ignore[arg-type]
    assert chi_square_p(draw(sampling), probs) < 1e-9


def test_the_statistic_sees_the_crossing_token_left_out():
    sampling = Sampling(**{**OFF, "top_p": 0.8}, seed=2026)  # type: ignore[arg-type]
    probs, _ = distribution(LOGITS, PROMPT, OUTPUT, sampling)
    last = max(i for i in range(SIZE) if 0 < probs[i] <= min(p for p in probs if p))
    wrong = [0.0 if i == last else p / (1 - probs[last]) for i, p in enumerate(probs)]
    assert chi_square_p(draw(sampling), wrong) < 1e-9


WIDE = [*LOGITS, *[-20.0] * (VOCAB - SIZE)]
WARM = {"temperature": 1.3, "top_k": 25, "top_p": 0.9, "min_p": 0.04}


@pytest.mark.parametrize(("options", "limit", "samples"), [(WARM, 1, DRAWS), ({}, 4000, 1)])
def test_tokens_of_many_samples_and_of_one_text(options, limit, samples):
    """The whole way through the engine: sample i draws with its own seed."""
    model = fake_model(script(WIDE), text=False, context=4000)
    sampling = Sampling(**options, seed=5)
    tokens = stream(model, [[1]], sampling, limit=limit, samples=samples)
    ids = torch.tensor([token.id for token in tokens])
    assert len(ids) == limit * samples
    nothing = [0] * VOCAB
    assert chi_square_p(ids, distribution(WIDE, nothing, nothing, sampling)[0]) > 1e-3


# random numbers that depend on (seed, sequence, step) alone


def test_a_number_depends_on_its_key_alone():
    whole = uniforms(7, 0, 0, 600)
    assert uniforms(7, 0, 0, 600) == whole
    assert uniforms(7, 0, 256, 100) == whole[256:356]
    assert [uniforms(7, 0, step, 1)[0] for step in (0, 1, 599)] == [whole[i] for i in (0, 1, 599)]
    assert len({*whole, *uniforms(8, 0, 0, 600), *uniforms(7, 1, 0, 600)}) == 1800
    assert sample_seed(5, 0) == 5
    for one in (1, 2, 77):  # a sample can be drawn alone
        assert uniforms(sample_seed(5, one), 0, 0, 20) == uniforms(5, one, 0, 20)


def test_frozen_numbers():
    """A seed must give the same text in every version."""
    assert uniforms(0, 0, 0, 3) == [0.07000858729146686, 0.01827966528692393, 0.3281910999056221]
    assert sample_seed(0, 1) == 800278779541541


def test_neighbouring_seeds_share_no_samples():
    seeds = [sample_seed(seed, sample) for seed in range(50) for sample in range(50)]
    assert len(set(seeds)) == 2500
    assert all(0 <= seed < 2**53 for seed in seeds)


def test_numbers_are_uniform_over_steps_seeds_and_samples():
    runs = {
        "steps": uniforms(1, 0, 0, 20_000),
        "seeds": [uniforms(seed, 0, 0, 1)[0] for seed in range(20_000)],
        "samples": [uniforms(1, sample, 0, 1)[0] for sample in range(20_000)],
    }
    for name, numbers in runs.items():
        u = torch.tensor(numbers, dtype=torch.float64)
        assert u.min() >= 0
        assert u.max() < 1
        pairs = (u[:-1:2] * 10).long() * 10 + (u[1::2] * 10).long()  # neighbours independent too
        for cells, size in ((u * 100).long(), 100), (pairs, 100):
            p = chi_square_p(cells, [1 / size] * size)
            assert 1e-4 < p < 1 - 1e-4, name

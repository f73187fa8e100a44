"""20,000 draws are distributed as the oracle's filtered distribution says (chi-square)."""

import pytest
import torch
from continued import stream
from fake_model import VOCAB, fake_model, script
from filter_oracle import distribution

from llmcli.engine.sampling import Sampling, choose
from llmcli.engine.seeds import sample_seed, uniforms

DRAWS = 20_000
SIZE = 40
OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
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
    for sample in (1, 2, 77):  # a sample can be drawn alone
        assert uniforms(sample_seed(5, sample), 0, 0, 20) == uniforms(5, sample, 0, 20)


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

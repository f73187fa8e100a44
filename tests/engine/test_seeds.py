"""Random numbers that depend on (seed, sequence, step) alone, and look random."""

from __future__ import annotations

import torch

from llmcli.engine.seeds import sample_seed, uniforms


def test_a_number_depends_on_its_key_alone() -> None:
    whole = uniforms(7, 0, 0, 600)
    assert uniforms(7, 0, 0, 600) == whole
    assert uniforms(7, 0, 256, 100) == whole[256:356]
    assert [uniforms(7, 0, step, 1)[0] for step in (0, 1, 599)] == [whole[i] for i in (0, 1, 599)]
    assert len({*whole, *uniforms(8, 0, 0, 600), *uniforms(7, 1, 0, 600)}) == 1800


def test_frozen_numbers() -> None:
    """A seed must give the same text in every version."""
    assert uniforms(0, 0, 0, 3) == FROZEN
    assert sample_seed(0, 1) == FROZEN_SEED


FROZEN = [0.07000858729146686, 0.01827966528692393, 0.3281910999056221]
FROZEN_SEED = 800278779541541


def test_a_sample_can_be_drawn_alone() -> None:
    assert sample_seed(5, 0) == 5
    for sample in (1, 2, 77):
        assert uniforms(sample_seed(5, sample), 0, 0, 20) == uniforms(5, sample, 0, 20)


def test_neighbouring_seeds_share_no_samples() -> None:
    seeds = [sample_seed(seed, sample) for seed in range(50) for sample in range(50)]
    assert len(set(seeds)) == 2500
    assert all(0 <= seed < 2**53 for seed in seeds)


def chi_square_p(counts: torch.Tensor, expected: torch.Tensor) -> float:
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = torch.tensor((counts.numel() - 1) / 2, dtype=torch.float64)
    return torch.special.gammaincc(freedom, statistic.double() / 2).item()


def test_numbers_are_uniform_over_steps_seeds_and_samples() -> None:
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
            counts = torch.bincount(cells, minlength=size).double()
            p = chi_square_p(counts, torch.full_like(counts, len(cells) / size))
            assert 1e-4 < p < 1 - 1e-4, name

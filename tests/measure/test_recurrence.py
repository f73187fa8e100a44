"""A walk through a recurrence against the recurrence itself, token by token."""

import math

import pytest
import torch
import torch.nn.functional as F

from llmcli.inspect import recurrence
from llmcli.inspect.recurrence import walk
from llmcli.ops.recurrence import Inputs, Map, recur_chunks


def inputs(tokens=150, *, plain=False, tiled=False, rate=0.3, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, k = (F.normalize(drawn(1, 2, tokens, 6) + 1, dim=-1) for _ in range(2))
    made = {
        "q_BKTd": q * 6**-0.5, "k_BKTd": k, "v_BHTe": drawn(1, 4, tokens, 5),
        "beta_BHT": drawn(1, 4, tokens).sigmoid(),
        "log_decay_BHT": -F.softplus(drawn(1, 4, tokens)) * rate,
    }  # fmt: skip
    made = {name: one.to(dtype) for name, one in made.items()}
    return Inputs(**made, plain=plain, tiled=tiled)


def each(x):
    """Of every token: what its key reads, the state after it, z, `[H, …]`, as papers have it."""
    q, k = (x.of_heads(one)[0].double() for one in (x.q_BKTd, x.k_BKTd))
    v, beta, g = x.v_BHTe[0].double(), x.beta_BHT[0].double(), x.log_decay_BHT[0].double()
    state = torch.zeros(4, 6, 5, dtype=torch.float64)
    for t in range(x.tokens):
        state = state * g[:, t, None, None].exp()
        read = torch.einsum("hd,hde->he", k[:, t], state)
        written = v[:, t] if x.plain else v[:, t] - read
        state = state + beta[:, t, None, None] * k[:, t, :, None] * written[:, None]
        yield read, state, torch.einsum("hd,hde->he", q[:, t], state)


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 150])
@pytest.mark.parametrize("plain", [False, True])
def test_norms_states_and_results_are_those_of_the_recurrence(plain, tokens):
    x = inputs(tokens, plain=plain, tiled=plain)
    at = sorted({0, tokens // 2, tokens - 1})
    walked = walk(x, at, results=True)
    reads, states, z = (torch.stack(one, 1) for one in zip(*each(x), strict=True))
    assert torch.allclose(walked.norms_HT, states.flatten(2).norm(dim=-1), rtol=1e-10)
    assert torch.allclose(walked.z_HTe, z, atol=1e-12)
    assert sorted(walked.states) == at
    for position in at:
        assert torch.allclose(walked.states[position], states[:, position], atol=1e-12)
    assert torch.allclose(walked.end.state_Hde, states[:, -1], atol=1e-12)
    beta = x.beta_BHT[0]
    read = (beta * reads.norm(dim=-1)).sum(-1)
    brought = (beta * x.v_BHTe[0].norm(dim=-1)).sum(-1)
    if plain:
        assert all(math.isnan(share) for share in walked.overwritten())
    else:
        assert walked.overwritten() == pytest.approx((read / (read + brought)).tolist())


def test_a_walk_goes_on_where_one_ended():
    x = inputs(150, dtype=torch.float32)
    whole, first = walk(x, results=True), walk(x.part(0, 70), results=True)
    then = walk(x.part(70, 150), [79], before=first.end, results=True)
    assert torch.allclose(torch.cat((first.z_HTe, then.z_HTe), 1), whole.z_HTe, atol=1e-12)
    assert torch.allclose(then.states[79], whole.end.state_Hde, atol=1e-12)
    assert torch.allclose(then.end.sizes_H, whole.end.sizes_H)


def lives(*log_decays):
    """Of one head with these log-decays."""
    tokens = len(log_decays)
    x = Inputs(
        q_BKTd=torch.ones(1, 1, tokens, 2), k_BKTd=torch.ones(1, 1, tokens, 2),
        v_BHTe=torch.ones(1, 1, tokens, 2), beta_BHT=torch.ones(1, 1, tokens),
        log_decay_BHT=torch.tensor(log_decays)[None, None], plain=True,
    )  # fmt: skip
    (life,) = walk(x).half_lives()
    return life


def test_half_lives():
    half = -math.log(2)
    assert lives(*[half * 1.001] * 9) == 1
    assert lives(*[half / 3 * 1.001] * 30) == 3
    assert lives(*[half / 3 * 0.999] * 30) == 4
    assert lives(0.0, 0.0, -5.0, 0.0, 0.0, -5.0, 0.0, 0.0, -5.0) == 2, "1 or 2 or 3 of 8 that end"
    assert lives(*[-1e-4] * 50) == math.inf
    assert lives(*[half / 20] * 30) == math.inf, "most writes are more than half there at the end"
    assert lives(half) == math.inf, "nothing comes after the only token"


@pytest.mark.parametrize("rate", [0.001, 0.3, 3.0])
@pytest.mark.parametrize("plain", [False, True])
def test_sizes_bound_what_is_rounded_and_little_more(plain, rate):
    """A kernel and a map in float32 are within twice of them, decays off by 1 % far outside."""
    wide = inputs(700, plain=plain, rate=rate)
    x = inputs(700, plain=plain, rate=rate, dtype=torch.float32)
    exact = walk(x, results=True)
    allowed = (torch.finfo(torch.float32).eps * exact.sizes_HT)[..., None]

    def off(z):
        return float(((z[0].double() - exact.z_HTe).abs() / allowed).max())

    state = torch.zeros(1, 4, 6, 5)
    assert off(recur_chunks(x, state)) < 2
    assert off(Map(x).rows(0, 700) @ x.v_BHTe) < 2
    assert exact.check(state[0], "cache.0.state").ok
    assert exact.check(state[0].flatten(1), "cache.0.state").value < 0.3
    faulty = {**vars(x), "log_decay_BHT": 1.01 * x.log_decay_BHT}
    assert off(recur_chunks(Inputs(**faulty), torch.zeros(1, 4, 6, 5))) > 20
    wide_state = torch.zeros(1, 4, 6, 5, dtype=torch.float64)
    z = recur_chunks(wide, wide_state)[0]
    assert walk(wide, results=True).check_results(z, torch.finfo(torch.float64).eps, "z").ok


@pytest.mark.parametrize("alike", [0, 1, 20])
def test_keys_that_are_alike_lose_no_digits(alike):
    """β near 1: powers of the matrix that solves a chunk get large, its inverse does not."""
    generator = torch.Generator().manual_seed(1)
    x = inputs(256, rate=0.01, dtype=torch.float32)
    k = torch.randn(1, 2, 256, 6, generator=generator) + alike * torch.ones(6)
    beta = torch.full_like(x.beta_BHT, 0.97)
    x = Inputs(**{**vars(x), "k_BKTd": F.normalize(k, dim=-1), "beta_BHT": beta})
    exact = walk(x, results=True)
    z = recur_chunks(x, torch.zeros(1, 4, 6, 5))[0]
    assert exact.check_results(z, torch.finfo(torch.float32).eps, "z").value < 0.5
    z = (Map(x).rows(0, 256) @ x.v_BHTe)[0]
    assert exact.check_results(z, torch.finfo(torch.float32).eps, "z").value < 0.5


def test_a_state_that_is_shown_is_what_its_query_reads(monkeypatch):
    x, kept = inputs(90), recurrence._state
    z = recur_chunks(x, torch.zeros(1, 4, 6, 5, dtype=torch.float64))[0]

    def shown(*state, at):
        return kept(*state, at) * (1 if at == -1 else 1 + 1e-9)

    monkeypatch.setattr(recurrence, "_state", lambda *state: shown(*state[:-1], at=state[-1]))
    found = walk(x, [70], results=True).check_results(z, torch.finfo(torch.float64).eps, "z")
    assert not found.ok
    assert found.where.endswith(",70]")


def test_a_state_that_is_not_the_last_one_is_seen():
    x = inputs(90)
    state = torch.zeros(1, 4, 6, 5, dtype=torch.float64)
    recur_chunks(x.part(0, 89), state)
    found = walk(x).check(state[0], "cache.3.state")
    assert not found.ok
    assert found.where.startswith("cache.3.state[")
    assert not walk(x).check(torch.full_like(state[0], math.nan), "cache.3.state").ok
    # where nothing is written nothing is allowed
    x = Inputs(**{**vars(x), "beta_BHT": torch.zeros_like(x.beta_BHT)})
    walked = walk(x, [89], results=True)
    assert not walked.norms_HT.any()
    assert walked.check(torch.zeros(4, 6, 5), "s").ok
    assert not walked.check(torch.full((4, 6, 5), 1e-9), "s").ok
    assert all(math.isnan(share) for share in walked.overwritten())

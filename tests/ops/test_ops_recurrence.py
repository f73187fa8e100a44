"""Recurrences: chunks, steps and maps give the same numbers, whatever the state before them."""

import math

import pytest
import torch

from llmcli.ops.recurrence import Inputs, Map, recur_chunks, recur_steps, states

F64 = torch.float64
KINDS = {"delta": False, "plain": True}
# log-decays of every token: none, weak, all but everything forgotten, and all of these mixed
DECAYS = {"none": 0.0, "weak": -0.01, "e^-50": -50.0, "mixed": None}


def inputs(tokens, *, plain, decay=-0.1, beta=None, tiled=False, dtype=F64, batch=2, seed=0):
    """Six heads on two heads of queries and keys, or on six; sizes 5 and 7."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, dtype=F64, generator=g)

    q, k = (torch.nn.functional.normalize(normal(batch, 2, tokens, 5), dim=-1) for _ in "qk")
    logs = normal(batch, 6, tokens).abs() * 3 if decay is None else torch.full((), -decay)
    if decay is None:
        logs = logs * torch.tensor([0.0, 0.01, 1.0, 20.0], dtype=F64)[
            torch.randint(4, (batch, 6, tokens), generator=g)
        ]
    betas = normal(batch, 6, tokens).sigmoid() if beta is None else torch.full((), beta)
    return Inputs(
        q_BKTd=q.to(dtype), k_BKTd=k.to(dtype), v_BHTe=normal(batch, 6, tokens, 7).to(dtype),
        beta_BHT=betas.to(dtype).expand(batch, 6, tokens),
        log_decay_BHT=-logs.to(dtype).expand(batch, 6, tokens), plain=plain, tiled=tiled,
    )  # fmt: skip


def some_state():
    return torch.randn(2, 6, 5, 7, dtype=F64, generator=torch.Generator().manual_seed(9))


def by_loops(x, state):
    """The formulas, number by number, of the first sequence: lists of floats."""
    heads, tokens, group = 6, x.tokens, 6 // x.q_BKTd.shape[1]
    out = []
    for head in range(heads):
        of = head % x.q_BKTd.shape[1] if x.tiled else head // group
        s = state[0, head].tolist()
        rows = []
        for t in range(tokens):
            q, k = x.q_BKTd[0, of, t].tolist(), x.k_BKTd[0, of, t].tolist()
            v, beta = x.v_BHTe[0, head, t].tolist(), float(x.beta_BHT[0, head, t])
            left = math.exp(float(x.log_decay_BHT[0, head, t]))
            s = [[left * number for number in row] for row in s]
            for e in range(7):
                read = 0.0 if x.plain else sum(k[d] * s[d][e] for d in range(5))
                new = beta * (v[e] - read)
                for d in range(5):
                    s[d][e] += k[d] * new
            rows.append([sum(q[d] * s[d][e] for d in range(5)) for e in range(7)])
        out.append(rows)
    return torch.tensor(out, dtype=F64)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tiled", [False, True])
def test_steps_are_the_formulas(kind, tiled):
    x, state = inputs(9, plain=KINDS[kind], tiled=tiled), some_state()
    expected = by_loops(x, state)
    found = recur_steps(x, state.clone())[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)
    other = by_loops(inputs(9, plain=KINDS[kind], tiled=not tiled), state)
    assert not torch.allclose(found, other)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("beta", [None, 1.0])
def test_chunks_are_steps_from_any_state(kind, decay, beta):
    x = inputs(150, plain=KINDS[kind], decay=DECAYS[decay], beta=beta)
    for state in (torch.zeros(2, 6, 5, 7, dtype=F64), some_state()):
        slow = state.clone()
        expected = recur_steps(x, slow)
        size = max(1.0, float(expected.abs().max()))
        for chunk in (1, 7, 64, 65, 75, 149, 150, 512):
            fast = state.clone()
            found = recur_chunks(x, fast, chunk)
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-10 * size)
            torch.testing.assert_close(fast, slow, rtol=0, atol=1e-10 * float(slow.abs().max()))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("tiled", [False, True])
def test_the_map_times_the_values_is_what_is_read(kind, decay, tiled):
    x = inputs(150, plain=KINDS[kind], decay=DECAYS[decay], tiled=tiled)
    expected = recur_steps(x, torch.zeros(2, 6, 5, 7, dtype=F64))
    of = Map(x)
    found = torch.cat([of.rows(a, min(a + 50, 150)) for a in range(0, 150, 50)], 2)
    assert found.shape == (2, 6, 150, 150)
    assert not found.triu(1).any()
    size = max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(found @ x.v_BHTe, expected, rtol=0, atol=1e-10 * size)
    torch.testing.assert_close(Map(x).rows(70, 71), found[:, :, 70:71], rtol=0, atol=0)
    some = Map(x.of_some(slice(1, 4))).rows(0, 150)
    torch.testing.assert_close(some, found[:, 1:4], rtol=0, atol=1e-13)


def test_the_map_at_4096_tokens():
    for plain in KINDS.values():
        x = inputs(4096, plain=plain, decay=None, batch=1).of_some(slice(2, 4))
        expected = recur_chunks(x, torch.zeros(1, 2, 5, 7, dtype=F64))
        of = Map(x)
        for first in range(0, 4096, 512):
            rows = of.rows(first, first + 512)
            found = rows @ x.v_BHTe
            torch.testing.assert_close(
                found, expected[:, :, first : first + 512], rtol=0, atol=1e-10
            )


@pytest.mark.parametrize("kind", KINDS)
def test_states_after_some_tokens(kind):
    x, after = inputs(140, plain=KINDS[kind]), [0, 1, 64, 100, 140]
    found = [one.clone() for one in states(x, some_state(), after)]
    for last, state in zip(after, found, strict=True):
        expected = some_state()
        if last:
            recur_steps(x.part(0, last), expected)
        torch.testing.assert_close(state, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scan", [recur_steps, recur_chunks])
def test_padding_leaves_the_state_as_it_is(kind, scan):
    x, lengths = inputs(70, plain=KINDS[kind]), (70, 23)
    there = torch.arange(70) < torch.tensor(lengths)[:, None]
    state, alone = some_state(), some_state()[1:]
    out = scan(x.only(there), state)
    expected = scan(x.each(lambda one: one[1:, :, :23]), alone)
    torch.testing.assert_close(out[1:, :, :23], expected, rtol=0, atol=1e-13)
    torch.testing.assert_close(state[1:], alone, rtol=0, atol=1e-13)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("decay", DECAYS)
def test_float32_is_as_exact_as_its_numbers(kind, decay):
    """Also where tokens forget everything: decays between others come from sums in float64."""
    wide = inputs(300, plain=KINDS[kind], decay=DECAYS[decay])
    x = inputs(300, plain=KINDS[kind], decay=DECAYS[decay], dtype=torch.float32)
    exact = recur_steps(wide, torch.zeros(2, 6, 5, 7, dtype=F64))
    found = recur_chunks(x, torch.zeros(2, 6, 5, 7))
    off = (found.double() - exact).abs().max() / max(1.0, float(exact.abs().max()))
    assert off < 5e-6

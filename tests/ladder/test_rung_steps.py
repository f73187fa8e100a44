"""What the rungs show: the documents' steps with the values computed, views and copies, counts."""

from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from covers import covered, in_turn
from ladder_models import DENSE
from small_models import ids, read, weights
from zoo import CONFIGS, GATED, gpt2, layer, llama

from llmcli.commands.ladder.measure.count import multiply_adds
from llmcli.commands.ladder.measure.notation import first_attention, first_mlp
from llmcli.commands.ladder.measure.rungs import loops
from llmcli.commands.ladder.measure.rungs.batch import Batch
from llmcli.commands.ladder.measure.rungs.cache import KeyValueCache
from llmcli.commands.ladder.measure.rungs.combined import CombinedQKV
from llmcli.commands.ladder.measure.rungs.fused import FusedKernels
from llmcli.commands.ladder.measure.rungs.loops import Loops
from llmcli.commands.ladder.measure.rungs.matrices import Matrices
from llmcli.commands.ladder.measure.rungs.rows import VectorRows
from llmcli.commands.ladder.measure.runner import RUNGS
from llmcli.commands.ladder.measure.trace import Trace

N = 6


class Shown:
    """A `Show` that keeps what was first said of each formula, and how often it came."""

    def __init__(self):
        self.steps, self.times = {}, Counter()

    def __call__(self, formula, value, axes="", *, source=None, note="", token=None):
        self.times[formula] += 1
        self.steps.setdefault(formula, (value, token))

    def __getitem__(self, formula):
        return self.steps[formula][0]

    def section(self, title, again=False):
        return


def traced(kind, config, more=0):
    """The steps of a prompt of N tokens and of some more, and the decoder's own values."""
    of = weights(config)
    tokens = ids(2, N + more)
    shown = Shown()
    read(kind(of, shown), tokens if kind.batched else tokens[:1], N)
    taps = {}
    of.decoder(tokens[:, :N], tap=lambda name, value: taps.setdefault(name, value))
    return shown, taps


def assert_last_rows(value, expected):
    """A matrix, or a single row that is its last, is the first sequence's."""
    value = torch.as_tensor(value, dtype=torch.float64)
    value = value[0] if value.ndim == 3 else value
    torch.testing.assert_close(value, expected[0] if value.ndim == 2 else expected[0, -1])


BLOCK = {
    "ln1.out": (
        "t¹ = RMSNorm(x) = x/√(mean(x²) + ε) · w",
        "T¹ = RMSNorm(X) = X/√(mean(X²) + ε) · w",
    ),
    "attn_out": ("t² = c {}W_o", "T² = C W_o"),
    "resid_mid": ("t³ = t² + x", "T³ = T² + X"),
    "ln2.out": (
        "t⁴ = RMSNorm(t³) = t³/√(mean((t³)²) + ε) · w",
        "T⁴ = RMSNorm(T³) = T³/√(mean((T³)²) + ε) · w",
    ),
    "mlp.post": (
        "l = Activation(g) ∘ u, Activation = silu",
        "L = Activation(G) ∘ U, Activation = silu",
    ),
    "mlp_out": ("t⁵ = l {}W_down", "T⁵ = L W_down"),
    "resid_post": ("H_q = t⁵ + t³", "H = T⁵ + T³"),
}


@pytest.mark.parametrize("kind", RUNGS[:7], ids=lambda kind: kind.name)
def test_the_steps_of_a_block_are_the_decoders_values(kind):
    shown, taps = traced(kind, CONFIGS["llama"])
    for tap, (row, rows) in BLOCK.items():
        formula = rows if kind.number >= 3 else row.format("× " if kind.number == 1 else "")
        assert_last_rows(shown[formula], taps[f"blocks.0.{tap}"])
    shown, taps = traced(kind, CONFIGS["gpt2"])
    X, name = taps["blocks.0.resid_pre"][0], "x" if kind.number <= 2 else "X"
    mean = torch.as_tensor(shown[f"μ = mean({name})"]).double().flatten()
    square = torch.as_tensor(shown[f"σ² = mean(({name} − μ)²)"]).double().flatten()
    rows = 1 if kind.number <= 2 else N  # of the first sequence
    torch.testing.assert_close(mean[:rows], X.mean(-1)[-rows:])
    torch.testing.assert_close(square[:rows], X.var(-1, correction=0)[-rows:])


def steps(kind, config):
    """What a rung shows of a prompt and of one more token, a line a step."""
    trace, section = Trace(), None
    tokens = ids(2, N + 1)
    read(kind(weights(config), trace), tokens if kind.batched else tokens[:1], N)
    for step in trace.steps:
        if step.section != section:
            section = step.section
            yield f"{section}:"
        moved = {None: "", False: ", a view", True: ", a copy"}[step.moved]
        token = "" if step.token is None else f" of token {step.token}"
        shape = " × ".join(map(str, step.shape)) or "a number"
        strides = f" by {' '.join(map(str, step.strides))}" if step.source is not None else ""
        yield f"  {step.formula}{token}: {step.axes or '1'} = {shape}{strides}{moved}"
        yield from (f"    {line}" for line in step.note.split("\n") if line)


def test_steps_as_they_are_shown(as_written):
    """Formulas with axes, sizes and strides, what is copied, and notes: what is new on each rung.

    Then what is so in another model, and not in the first.
    """
    models = CONFIGS | {"gpt2, another scale": gpt2(scale=0.3)}
    llama = {kind: list(steps(kind, models["llama"])) for kind in RUNGS}
    parts = {RUNGS[0].name: llama[Loops]} | {
        above.name: [line for line in llama[above] if line[-1] == ":" or line not in llama[below]]
        for below, above in pairwise(RUNGS)
    }
    for kind, name, first in (
        (Loops, "gpt2", "llama"), (Matrices, "gpt2", "llama"), (CombinedQKV, "gpt2", "llama"),
        (Matrices, "gpt2, another scale", "gpt2"), (Loops, "window", "llama"),
        (KeyValueCache, "window", "llama"), (Batch, "keys of their own", "llama"),
    ):  # fmt: skip
        known = set(steps(kind, models[first]))
        parts[f"{kind.name} of {name}, and not of {first}"] = [
            line for line in steps(kind, models[name]) if line not in known
        ]
    as_written(Path(__file__).with_name("steps.txt"), parts)


@pytest.mark.parametrize(("name", "kind"), in_turn(covered(DENSE), RUNGS))
def test_the_letters_of_a_shape_are_its_numbers(name, kind):
    """Axis by axis: what is shown as `n × d/h` is n tokens times the size of a head."""
    trace, tokens = Trace(), ids(2, N + 2)
    config = DENSE[name]
    read(kind(weights(config), trace), tokens if kind.batched else tokens[:1], N)
    mixer, width = first_attention(config), config.width
    v = mixer.value_dim
    q, k = mixer.heads * mixer.head_dim, mixer.kv_heads * mixer.head_dim
    sizes = {
        "1": 1, "b": 2, "d": width, "h": mixer.heads, "h_kv": mixer.kv_heads, "d/h": mixer.head_dim,
        "h/h_kv": mixer.heads // mixer.kv_heads, "d_v": v, "v": 43,
        "F": first_mlp(config).hidden,
        "h·d/h": q, "h_kv·d/h": k, "h·d_v": mixer.heads * v, "h_kv·d_v": mixer.kv_heads * v,
        "d_qkv": q + k + mixer.kv_heads * v,
        "3d": 3 * width, "4d": 4 * width,
        "W": mixer.window, "seen": mixer.window,
    }  # fmt: skip
    assert len(trace.steps) > 15
    for step in trace.steps:
        sizes["n"] = N + 1 if step.section.startswith("the next token") else N
        assert [sizes[letter] for letter in step.letters] == list(step.shape), step.formula


def test_the_fused_rung_shows_the_decoders_own_activations():
    shown, taps = traced(FusedKernels, CONFIGS["qk norm"], more=1)
    names = {
        "X = W_E[ids]": "resid_pre", "T¹ = RMSNorm(X) = X/√(mean(X²) + ε) · w": "ln1.out",
        "Q, columns of one product": "attn.q",
        "Q_norm = RMSNorm(Q) = Q/√(mean(Q²) + ε) · w": "attn.q_norm",
        "K_rot = R(position) K_norm": "attn.k_rot",
        "C = attend(Q_rot, K_rot, V), one kernel": "attn.z", "T³ = T² + X": "resid_mid",
        "T⁵ = L W_down": "mlp_out", "H = T⁵ + T³": "resid_post",
    }  # fmt: skip
    for formula, tap in names.items():
        torch.testing.assert_close(shown[formula], taps[f"blocks.0.{tap}"], rtol=0, atol=0)
    assert shown["C_n = attend(Q_rot_n, K_rot, V), one kernel"].shape == (2, 4, 1, 8)


@pytest.mark.parametrize("name", covered(DENSE))
def test_the_fused_rung_says_what_is_the_same_as_below_alike(name):
    """The formulas that it shares with rung 7 are the same strings, so that they can be folded."""
    found = []
    for kind in (FusedKernels, Batch):
        trace = Trace()
        read(kind(weights(DENSE[name]), trace), ids(2, N + 1), N)
        found.append({(step.section, step.formula): step for step in trace.steps})
    fused, batch = found
    kernels = ("columns of", "one kernel", "of the stored", "seen by heads")
    own = [formula for _, formula in set(fused) - set(batch)]
    assert [f for f in own if not any(word in f for word in kernels)] == []
    for key in set(fused) & set(batch):
        one, other = fused[key], batch[key]
        assert one.axes.rpartition("= ")[2] == other.axes.rpartition("= ")[2]
        torch.testing.assert_close(one.values, other.values, rtol=1e-6, atol=1e-9)


def test_nothing_is_tapped_where_no_one_looks(monkeypatch):
    of = weights(CONFIGS["llama"])
    taps, step = [], of.decoder._step

    def watched(ids, state, lengths, totals, tap, *rest):
        taps.append(tap)
        return step(ids, state, lengths, totals, tap, *rest)

    monkeypatch.setattr(of.decoder, "_step", watched)
    read(FusedKernels(of), ids(2, 5), 4)
    read(FusedKernels(of, Shown()), ids(2, 5), 4)
    assert [tap is None for tap in taps] == [True, True, False, False]


def test_the_lowest_rungs_show_the_last_token_and_whose_keys_it_reads():
    shown, taps = traced(Loops, CONFIGS["llama"])
    row, _ = traced(VectorRows, CONFIGS["llama"])
    weights_ = torch.tensor(shown["a = softmax(s)"], dtype=torch.float64)
    assert weights_.shape == (N,)
    assert weights_.sum() == pytest.approx(1)
    torch.testing.assert_close(row["a = softmax(s)"], weights_)
    rotated = torch.tensor(shown["q_rot = R(position) q"], dtype=torch.float64)
    torch.testing.assert_close(rotated, taps["blocks.0.attn.q_rot"][0, 0, -1])
    for found, formulas in (
        (shown, ("k = t_k × W_k", "v = t_v × W_v")), (row, ("k_i = t¹_i W_k", "v_i = t¹_i W_v"))
    ):  # fmt: skip
        for formula in formulas:
            assert found.steps[formula][1] == 0
            value = torch.as_tensor(found[formula], dtype=torch.float64)
            torch.testing.assert_close(value, taps[f"blocks.0.attn.{formula[0]}"][0, 0, 0])
    windowed, _ = traced(Loops, CONFIGS["window"])
    # the first that the last token sees
    assert windowed.steps["k = t_k × W_k"][1] == N - 4


def test_matrices_show_each_heads_own_and_a_masked_square():
    shown, taps = traced(Matrices, CONFIGS["window"])
    torch.testing.assert_close(shown["Q = T¹ W_q"], taps["blocks.0.attn.q"][0, 0])
    assert (shown.times["Q = T¹ W_q"], shown.times["K = T¹ W_k"]) == (2 * 4, 2 * 2)
    hidden = torch.tensor([[j > i or j <= i - 4 for j in range(N)] for i in range(N)])
    M, A = shown["M, the mask"], shown["A = softmax(S + M)"]
    assert torch.equal(M.isneginf(), hidden)
    assert (M[~hidden] == 0).all()
    assert (A[hidden] == 0).all()
    torch.testing.assert_close(A.sum(-1), torch.ones(N, dtype=torch.float64))


# two feed-forwards of one block have one size there, whatever their configurations say
@pytest.mark.parametrize("name", covered(DENSE))
@pytest.mark.parametrize("until", [None, 0])
def test_multiply_adds_are_those_that_the_loops_do(name, until, monkeypatch):
    of = weights(DENSE[name])
    done = 0
    dot, add_weighted = loops.dot, loops.add_weighted

    def counted_dot(a, b):
        nonlocal done
        done += len(a)
        return dot(a, b)

    def counted_sum(total, weight, v):
        nonlocal done
        done += len(v)
        return add_weighted(total, weight, v)

    monkeypatch.setattr(loops, "dot", counted_dot)
    monkeypatch.setattr(loops, "add_weighted", counted_sum)
    for tokens in (1, N):
        done = 0
        Loops(of).forward(ids(1, tokens)[0], until=until)
        assert done == multiply_adds(of.config, tokens, until)


def test_multiply_adds_by_hand():
    """One head of one number, one token: q, k, q · k, v, weight v, W_o, three of F, the head."""
    mlp = GATED.__class__(hidden=5, activation="silu", gated=True)
    tiny = layer(mlp, heads=1, kv_heads=1, head_dim=2, value_dim=2, rope=None)
    assert multiply_adds(llama(tiny), 1) == 16 * 2 * 4 + 2 + 2 + 3 * 16 * 5 + 16 * 43
    two = 2 * (16 * 2 * 2) + 3 * (16 * 2 * 2 + 2 + 2) + 2 * 3 * 16 * 5
    assert multiply_adds(llama(tiny), 2, until=0) == two


@pytest.mark.parametrize(("until", "changed", "seen"), [
    (None, "q", False), (None, "head", False), (0, "q", False), (0, "head", True),
])  # fmt: skip
def test_the_loops_convert_before_they_are_timed(until, changed, seen):
    """What changes later is not seen, but where they had not been asked to convert it."""
    of, tokens = weights(CONFIGS["llama"]), ids(1, 4)[0]
    before, rung = Loops(of).start(tokens), Loops(of)
    rung.prepare(until)
    {"q": next(of.blocks[0].matrices), "head": of.head}[changed].W.mul_(2)
    assert torch.equal(rung.start(tokens), before) is not seen

"""What the rungs show: the documents' steps with the values computed, views and copies, counts."""

import pytest
import torch
from covers import covered
from ladder_models import DENSE
from small_models import ids, read, weights
from zoo import CONFIGS, GATED, PLE, gpt2, layer, llama

from llmcli.commands.ladder.measure.count import multiply_adds
from llmcli.commands.ladder.measure.notation import first_attention, first_mlp
from llmcli.commands.ladder.measure.rungs import loops
from llmcli.commands.ladder.measure.rungs.batch import Batch
from llmcli.commands.ladder.measure.rungs.cache import KeyValueCache
from llmcli.commands.ladder.measure.rungs.combined import CombinedQKV
from llmcli.commands.ladder.measure.rungs.fused import FusedKernels
from llmcli.commands.ladder.measure.rungs.heads import HeadsAsDimension
from llmcli.commands.ladder.measure.rungs.loops import Loops
from llmcli.commands.ladder.measure.rungs.matrices import Matrices
from llmcli.commands.ladder.measure.rungs.rows import VectorRows
from llmcli.commands.ladder.measure.runner import RUNGS
from llmcli.commands.ladder.measure.trace import Trace

N = 6


class Shown:
    """A `Show` that keeps what was first said of each formula, and how often it came."""

    def __init__(self):
        self.values, self.sources, self.times, self.axes, self.notes = {}, {}, {}, {}, {}
        self.sections, self.tokens = {}, {}
        self.part = ""

    def __call__(self, formula, value, axes="", *, source=None, note="", token=None):
        self.times[formula] = self.times.get(formula, 0) + 1
        if formula not in self.values:
            self.values[formula], self.sources[formula] = value, source
            self.axes[formula] = axes.rpartition("= ")[2]
            self.notes[formula] = note if isinstance(note, str) else note()
            self.sections[formula], self.tokens[formula] = self.part, token

    def section(self, title, again=False):
        self.part = title

    def moved(self, formula):
        """Whether what is shown lies elsewhere than what it was made from."""
        value, source = self.values[formula], self.sources[formula]
        return value.untyped_storage().data_ptr() != source.untyped_storage().data_ptr()


def traced(kind, config, more=0):
    """The steps of a prompt of N tokens and of some more, and the decoder's own values."""
    of = weights(config)
    tokens = ids(2, N + more)
    shown = Shown()
    read(kind(of, shown), tokens if kind.batched else tokens[:1], N)
    taps = {}
    of.decoder(tokens[:, :N], tap=lambda name, value: taps.setdefault(name, value))
    return shown, taps


def shown_last_row(value):
    """The last token's row of the first sequence, of a matrix, a list of rows or a single row."""
    value = torch.as_tensor(value, dtype=torch.float64)
    return value[0] if value.ndim == 3 else value


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
        value = shown_last_row(shown.values[formula])
        expected = taps[f"blocks.0.{tap}"][0]
        torch.testing.assert_close(value, expected if value.ndim == 2 else expected[-1])


@pytest.mark.parametrize("kind", RUNGS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("name", covered(DENSE))
def test_the_letters_of_a_shape_are_its_numbers(kind, name):
    """Axis by axis: what is shown as `n × d/h` is n tokens times the size of a head."""
    trace, tokens = Trace(), ids(2, N + 2)
    config = DENSE[name]
    read(kind(weights(config), trace), tokens if kind.batched else tokens[:1], N)
    mixer, width = first_attention(config), config.width
    v = mixer.value_dim
    q, k = mixer.heads * mixer.head_dim, mixer.kv_heads * mixer.head_dim
    sizes = {
        "1": 1, "b": 2, "d": width, "h": mixer.heads, "h_kv": mixer.kv_heads, "d/h": mixer.head_dim,
        "h/h_kv": mixer.heads // mixer.kv_heads, "d_v": v, "v": 43, "P": PLE.size,
        "F": first_mlp(config).hidden,
        "h·d/h": q, "h_kv·d/h": k, "h·d_v": mixer.heads * v, "h_kv·d_v": mixer.kv_heads * v,
        "d_qkv": q + (k if mixer.kv.equal else k + mixer.kv_heads * v),
        "3d": 3 * width, "4d": 4 * width,
        "W": mixer.window, "seen": mixer.window,
    }  # fmt: skip
    assert len(trace.steps) > 15
    for step in trace.steps:
        sizes["n"] = N + 1 if step.section.startswith("the next token") else N
        assert [sizes[letter] for letter in step.letters] == list(step.shape), step.formula


@pytest.mark.parametrize("kind", RUNGS, ids=lambda kind: kind.name)
def test_every_step_is_said_to_be_where_it_is(kind):
    """Block 0's H is not what the final norm takes."""
    shown, taps = traced(kind, CONFIGS["gpt2"], more=1)
    name = "H_q" if kind.number <= 2 else "H"
    last = f"{name} of block 1"
    assert shown.sections[last] == "after the last block"
    assert shown.notes[last] == (
        "block 1 does the same with their own weights: X of block i + 1 is H of block i"
    )
    value = shown_last_row(shown.values[last])
    expected = taps["blocks.1.resid_post"][0]
    torch.testing.assert_close(value, expected if value.ndim == 2 else expected[-1])
    after = next(f for f in shown.values if f.startswith(f"{name[0]}′"))
    assert shown.sections[after] == "after the last block"
    inside = next(f for f in shown.values if f.startswith(f"{name} = "))
    assert shown.sections[inside] == "block 0 of 2"
    following = [part for part in shown.sections.values() if part.startswith("the next token: ")]
    assert bool(following) == (kind.number >= 6)


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
        torch.testing.assert_close(shown.values[formula], taps[f"blocks.0.{tap}"], rtol=0, atol=0)
    assert shown.values["C_n = attend(Q_rot_n, K_rot, V), one kernel"].shape == (2, 4, 1, 8)
    for letter, place, rows in (("q", "first", 32), ("k", "next", 16), ("v", "last", 16)):
        formula = f"W_{letter}ᵀ, the {place} rows of the stored W_qkvᵀ"
        assert shown.values[formula].shape == (rows, 16)
        assert not shown.moved(formula)


@pytest.mark.parametrize("name", DENSE)
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


@pytest.mark.parametrize("kind", RUNGS[:7], ids=lambda kind: kind.name)
def test_a_formula_has_a_bias_only_where_there_is_one_and_a_norm_its_mean(kind):
    without, _ = traced(kind, CONFIGS["llama"])
    assert not any(" + b" in formula or "μ" in formula for formula in without.values)
    shown, taps = traced(kind, CONFIGS["gpt2"])
    names = {f.split(" + b_")[1].rstrip(")") for f in shown.values if " + b_" in f}
    attention = {"qkv"} if kind.number >= 5 else {"q", "k", "v"}
    assert names == attention | {"o", "up", "down"}
    name = "x" if kind.number <= 2 else "X"
    X = taps["blocks.0.resid_pre"][0]
    mean = shown_last_row(shown.values[f"μ = mean({name})"]).flatten()
    square = shown_last_row(shown.values[f"σ² = mean(({name} − μ)²)"]).flatten()
    torch.testing.assert_close(mean, X.mean(-1)[-len(mean) :])
    torch.testing.assert_close(square, X.var(-1, correction=0)[-len(square) :])


@pytest.mark.parametrize("kind", RUNGS[:7], ids=lambda kind: kind.name)
def test_the_scale_is_said_to_be_the_usual_one_only_where_it_is(kind):
    for scale, end in ((8**-0.5, " / √(d/h)"), (0.3, " · scale")):
        shown, _ = traced(kind, gpt2(scale=scale))
        (formula,) = (f for f in shown.values if f.startswith(("s = ", "S = ")))
        assert formula.endswith(end)
        value = "√(d/h) = √8 = 2.828" if scale != 0.3 else "scale = 0.3"
        assert shown.notes[formula].startswith(value)


def test_the_lowest_rungs_show_the_last_token_which_sees_all_others():
    shown, taps = traced(Loops, CONFIGS["llama"])
    weights_ = torch.tensor(shown.values["a = softmax(s)"], dtype=torch.float64)
    assert weights_.shape == (N,)
    assert weights_.sum() == pytest.approx(1)
    rotated = torch.tensor(shown.values["q_rot = R(position) q"], dtype=torch.float64)
    torch.testing.assert_close(rotated, taps["blocks.0.attn.q_rot"][0, 0, -1])
    row, _ = traced(VectorRows, CONFIGS["llama"])
    torch.testing.assert_close(row.values["a = softmax(s)"], weights_)
    assert not row.moved("K_rotᵀ")
    assert row.values["K_rotᵀ"].shape == (8, N)


def test_the_lowest_rungs_say_whose_keys_and_values_they_show():
    for kind, names in ((Loops, ("k = t_k × W_k", "v = t_v × W_v")),
                        (VectorRows, ("k_i = t¹_i W_k", "v_i = t¹_i W_v"))):  # fmt: skip
        shown, taps = traced(kind, CONFIGS["llama"])
        for formula in names:
            assert shown.tokens[formula] == 0
            value = torch.as_tensor(shown.values[formula], dtype=torch.float64)
            torch.testing.assert_close(value, taps[f"blocks.0.attn.{formula[0]}"][0, 0, 0])
    windowed, _ = traced(Loops, CONFIGS["window"])
    assert windowed.tokens["k = t_k × W_k"] == N - 4  # the first that the last token sees


def test_one_score_is_spelled_out():
    shown, _ = traced(Matrices, CONFIGS["gpt2"])
    S = shown.values["S = Q Kᵀ / √(d/h)"]
    Q, K = shown.values["Q = T¹ W_q + b_q"], shown.values["K = T¹ W_k + b_k"]
    _, rows, terms = shown.notes["S = Q Kᵀ / √(d/h)"].split("\n")
    assert rows == f"S[{N - 1},0] = (Q row {N - 1} · K row 0) / 2.828"
    assert terms.startswith(f"= (({Q[-1, 0]:.3g})({K[0, 0]:.3g}) + ")
    assert terms.endswith(f"/ 2.828 = {S[-1, 0]:.4g}")
    assert S[-1, 0].item() == pytest.approx((Q[-1] @ K[0] / 8**0.5).item())
    assert shown.notes["Kᵀ"] == "Q K is not defined: n × d/h times n × d/h"


def test_matrices_show_each_heads_own_and_a_masked_square():
    shown, taps = traced(Matrices, CONFIGS["window"])
    torch.testing.assert_close(shown.values["Q = T¹ W_q"], taps["blocks.0.attn.q"][0, 0])
    assert shown.times["Q = T¹ W_q"] == 2 * 4
    assert shown.times["K = T¹ W_k"] == 2 * 2
    hidden = torch.tensor([[j > i or j <= i - 4 for j in range(N)] for i in range(N)])
    M = shown.values["M, the mask"]
    assert torch.equal(M.isneginf(), hidden)
    assert (M[~hidden] == 0).all()
    A = shown.values["A = softmax(S + M)"]
    assert (A[hidden] == 0).all()
    torch.testing.assert_close(A.sum(-1), torch.ones(N, dtype=torch.float64))
    assert shown.values["K_rotᵀ"].stride() == (1, 8)
    assert not shown.moved("K_rotᵀ")


@pytest.mark.parametrize(
    ("kind", "batch", "width"),
    [(HeadsAsDimension, (), 32), (CombinedQKV, (), 96), (Batch, (2,), 96)],
)
def test_heads_are_split_by_strides_and_merged_by_a_copy(kind, batch, width):
    shown, _ = traced(kind, CONFIGS["keys of their own"])
    b = "b × " if batch else ""
    for name in "QKV":
        apart, turned = f"{name} as {b}n × h × d/h", f"{name} as {b}h × n × d/h"
        assert shown.values[apart].shape == (*batch, N, 4, 8)
        assert shown.values[turned].shape == (*batch, 4, N, 8)
        assert shown.values[turned].stride()[-3:] == (8, width, 1)
        assert not shown.moved(apart)
        assert not shown.moved(turned)
    assert shown.values["K_rotᵀ"].shape == (*batch, 4, 8, N)
    assert not shown.moved("K_rotᵀ")
    turned, merged = f"C as {b}n × h × d/h", f"C as {b}n × h·d/h, heads merged"
    assert not shown.moved(turned)
    assert shown.moved(merged)
    assert shown.values[merged].shape == (*batch, N, 32)
    assert shown.values[merged].is_contiguous()


def test_shared_keys_are_copied_for_every_head():
    shown, _ = traced(HeadsAsDimension, CONFIGS["llama"])
    name = "K_rot as h × n × d/h, for every head"
    K = shown.values[name]
    assert K.shape == (4, N, 8)
    assert torch.equal(K[0], K[1])
    assert not torch.equal(K[1], K[2])
    assert shown.moved(name)
    assert shown.moved("V as h × n × d/h, for every head")
    assert shown.values["K as h_kv × n × d/h"].shape == (2, N, 8)
    assert shown.moved("W_q = W_q¹ ⊕ … ⊕ W_qʰ, as the model is built")


def test_combined_slices_are_views_of_one_product():
    shown, taps = traced(CombinedQKV, CONFIGS["llama"])
    assert shown.values["QKV = T¹ W_qkv"].shape == (N, 32 + 16 + 16)
    places = {"q": ("first", 0), "k": ("next", 32), "v": ("last", 48)}
    for letter, (place, start) in places.items():
        formula = f"{letter.upper()}, the {place} columns"
        assert not shown.moved(formula)
        assert shown.values[formula].storage_offset() == start
        heads = taps[f"blocks.0.attn.{letter}"][0].transpose(0, 1).flatten(1)
        torch.testing.assert_close(shown.values[formula], heads)


def test_one_more_token_is_one_row_without_a_mask():
    shown, _ = traced(KeyValueCache, CONFIGS["llama"], more=2)
    assert shown.values["QKV_n = T¹_n W_qkv"].shape == (1, 64)
    S_n = "S_n = Q_rot_n K_rotᵀ / √(d/h)"
    assert shown.values[S_n].shape == (4, 1, N + 1)
    assert shown.times["M, the mask"] == 2  # once a layer, for the prompt
    kept = Trace()
    of = weights(CONFIGS["llama"])
    read(KeyValueCache(of, kept), ids(1, N + 2), N)
    both = [step for step in kept.steps if step.formula.startswith("K_rot: of all tokens")]
    assert [step.shape for step in both] == [(2, N, 8), (2, N + 1, 8)]
    assert [step.moved for step in both] == [False, False]
    assert [step.note for step in both] == ["", f"rows 0 to {N - 1} from the cache, row {N} new"]
    windowed, _ = traced(KeyValueCache, CONFIGS["window"], more=1)
    assert windowed.values[S_n].shape == (4, 1, 4)
    assert windowed.axes[S_n].endswith("1 × W")


# two feed-forwards of one block have one size there, whatever their configurations say
@pytest.mark.parametrize("name", DENSE)
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


def test_the_loops_convert_before_they_are_timed():
    of = weights(CONFIGS["llama"])
    rung = Loops(of)
    rung.prepare(0)
    assert len(rung._converted) == 7  # q, k, v, o, gate, up, down of layer 0, and no head
    rung.prepare()
    assert len(rung._converted) == 2 * 7 + 1
    before = dict(rung._converted)
    rung.start(ids(1, 4)[0])
    assert rung._converted.keys() == before.keys()
    assert all(rung._converted[key] is value for key, value in before.items())
    column = rung._converted[id(of.head.W)][3]
    assert column == of.head.W[:, 3].tolist()

"""What the rungs show: the documents' steps with the values computed, views and copies, counts."""

import pytest
import torch
from rung_models import CONFIGS, GATED, gpt2, ids, layer, llama, read, weights

from llmcli.ladder import loops
from llmcli.ladder.batch import Batch
from llmcli.ladder.cache import KeyValueCache
from llmcli.ladder.combined import CombinedQKV
from llmcli.ladder.fused import FusedKernels
from llmcli.ladder.heads import HeadsAsDimension
from llmcli.ladder.loops import Loops, multiply_adds
from llmcli.ladder.matrices import Matrices
from llmcli.ladder.rows import Rows
from llmcli.ladder.rungs import RUNGS

N = 6


class Shown:
    """A `Show` that keeps the first value and source of each formula, and how often it came."""

    def __init__(self):
        self.values, self.sources, self.times = {}, {}, {}

    def __call__(self, formula, value, source=None):
        self.times[formula] = self.times.get(formula, 0) + 1
        if formula not in self.values:
            self.values[formula], self.sources[formula] = value, source

    def moved(self, formula):
        """Whether what is shown lies elsewhere than what it was made from."""
        value, source = self.values[formula], self.sources[formula]
        return value.untyped_storage().data_ptr() != source.untyped_storage().data_ptr()


def climbed(kind, config, more=0):
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
    "ln1.out": ("T = T¹: t¹ of every token", "t¹ = RMSNorm(x)", "T = T¹ = RMSNorm(X)"),
    "attn_out": ("T² = attention(T¹)", "t² = c W_o", "T² = attention(T¹) = C W_o"),
    "resid_mid": ("T³ = T² + X", "t³ = t² + x", "T³ = T² + X"),
    "ln2.out": ("t⁴ = RMSNorm(t³)", "t⁴ = RMSNorm(t³)", "T⁴ = RMSNorm(T³)"),
    "mlp_out": (
        "T⁵ = FFN(T⁴): t⁵ of every token",
        "t⁵ = hidden W_down",
        "T⁵ = FFN(T⁴) = hidden W_down",
    ),
    "resid_post": ("H = T⁵ + T³", "row of H = t⁵ + t³", "H = T⁵ + T³"),
}


@pytest.mark.parametrize("kind", RUNGS[:7], ids=lambda kind: kind.name)
def test_the_steps_of_a_block_are_the_decoders_values(kind):
    shown, taps = climbed(kind, CONFIGS["llama"])
    for tap, formulas in BLOCK.items():
        value = shown_last_row(shown.values[formulas[min(kind.number, 3) - 1]])
        expected = taps[f"blocks.0.{tap}"][0]
        torch.testing.assert_close(value, expected if value.ndim == 2 else expected[-1])


def test_the_fused_rung_shows_the_decoders_own_activations():
    shown, taps = climbed(FusedKernels, CONFIGS["qk norm"], more=1)
    names = {
        "X": "resid_pre", "T = T¹ = norm(X)": "ln1.out", "Q, columns of one product": "attn.q",
        "Q = norm(Q)": "attn.q_norm", "K rotated by position": "attn.k_rot",
        "C = attend(Q, K, V), one kernel": "attn.z", "T³ = T² + X": "resid_mid",
        "T⁵ = FFN(T⁴)": "mlp_out", "H = T⁵ + T³": "resid_post",
    }  # fmt: skip
    for formula, tap in names.items():
        torch.testing.assert_close(shown.values[formula], taps[f"blocks.0.{tap}"], rtol=0, atol=0)
    assert shown.values["C_n = attend(Q_n, K, V), one kernel"].shape == (2, 4, 1, 8)
    assert not shown.moved("W_k, some rows of the stored W_qkvᵀ")
    assert not any("_" in formula.replace("_n", "").replace("W_", "") for formula in shown.values)


def test_nothing_is_tapped_where_no_one_looks(monkeypatch):
    of = weights(CONFIGS["llama"])
    taps, step = [], of.decoder._step

    def watched(*arguments):
        taps.append(arguments[-1])
        return step(*arguments)

    monkeypatch.setattr(of.decoder, "_step", watched)
    read(FusedKernels(of), ids(2, 5), 4)
    read(FusedKernels(of, Shown()), ids(2, 5), 4)
    assert [tap is None for tap in taps] == [True, True, False, False]


@pytest.mark.parametrize("kind", RUNGS[:7], ids=lambda kind: kind.name)
def test_a_formula_has_a_bias_only_where_there_is_one(kind):
    without, _ = climbed(kind, CONFIGS["llama"])
    assert not any(" + b" in formula for formula in without.values)
    shown, _ = climbed(kind, CONFIGS["gpt2"])
    names = {f.split(" + b_")[1].rstrip(")") for f in shown.values if " + b_" in f}
    attention = {"qkv"} if kind.number >= 5 else {"q", "k", "v"}
    assert names == attention | {"o", "up", "down"}


@pytest.mark.parametrize("kind", RUNGS[:7], ids=lambda kind: kind.name)
def test_the_scale_is_said_to_be_the_usual_one_only_where_it_is(kind):
    for scale, formula in ((8**-0.5, "scores / √(d/h)"), (0.3, "scores · scale")):
        shown, _ = climbed(kind, gpt2(scale=scale))
        assert formula in shown.values
        assert len([f for f in shown.values if f.startswith(("scores /", "scores ·"))]) == 1


def test_the_lowest_rungs_show_the_last_token_which_sees_all_others():
    shown, taps = climbed(Loops, CONFIGS["llama"])
    weights_ = torch.tensor(shown.values["weights = softmax(scores)"], dtype=torch.float64)
    assert weights_.shape == (N,)
    assert weights_.sum() == pytest.approx(1)
    rotated = torch.tensor(shown.values["q rotated by its position"], dtype=torch.float64)
    torch.testing.assert_close(rotated, taps["blocks.0.attn.q_rot"][0, 0, -1])
    row, _ = climbed(Rows, CONFIGS["llama"])
    torch.testing.assert_close(row.values["weights = softmax(scores)"], weights_)
    assert not row.moved("Kᵀ")
    assert row.values["Kᵀ"].shape == (8, N)


def test_matrices_show_each_heads_own_and_a_masked_square():
    shown, taps = climbed(Matrices, CONFIGS["window"])
    torch.testing.assert_close(shown.values["Q = T W_q"], taps["blocks.0.attn.q"][0, 0])
    assert shown.times["Q = T W_q"] == 2 * 4
    assert shown.times["K = T W_k"] == 2 * 2
    hidden = torch.tensor([[j > i or j <= i - 4 for j in range(N)] for i in range(N)])
    M = shown.values["mask M"]
    assert torch.equal(M.isneginf(), hidden)
    assert (M[~hidden] == 0).all()
    A = shown.values["A = softmax(scores)"]
    assert (A[hidden] == 0).all()
    torch.testing.assert_close(A.sum(-1), torch.ones(N, dtype=torch.float64))
    assert shown.values["Kᵀ"].stride() == (1, 8)
    assert not shown.moved("Kᵀ")


@pytest.mark.parametrize(
    ("kind", "batch", "width"),
    [(HeadsAsDimension, (), 32), (CombinedQKV, (), 96), (Batch, (2,), 96)],
)
def test_heads_are_split_by_strides_and_merged_by_a_copy(kind, batch, width):
    shown, _ = climbed(kind, CONFIGS["keys of their own"])
    b = "b × " if batch else ""
    for name in "QKV":
        apart, turned = f"{name} as {b}n × h × d/h", f"{name} as {b}h × n × d/h"
        assert shown.values[apart].shape == (*batch, N, 4, 8)
        assert shown.values[turned].shape == (*batch, 4, N, 8)
        assert shown.values[turned].stride()[-3:] == (8, width, 1)
        assert not shown.moved(apart)
        assert not shown.moved(turned)
    assert shown.values["Kᵀ"].shape == (*batch, 4, 8, N)
    assert not shown.moved("Kᵀ")
    turned, merged = f"C as {b}n × h × d/h", f"C as {b}n × d, heads merged"
    assert not shown.moved(turned)
    assert shown.moved(merged)
    assert shown.values[merged].shape == (*batch, N, 32)
    assert shown.values[merged].is_contiguous()


def test_shared_keys_are_seen_more_than_once_and_not_repeated():
    shown, _ = climbed(HeadsAsDimension, CONFIGS["llama"])
    K = shown.values["K as k × h/k × n × d/h"]
    assert K.shape == (2, 2, N, 8)
    assert K.stride(1) == 0
    assert not shown.moved("K as k × h/k × n × d/h")
    assert shown.values["K as k × n × d/h"].shape == (2, N, 8)
    assert shown.moved("W_q = W_q¹ ⊕ … ⊕ W_qʰ, as the model is built")


def test_combined_slices_are_views_of_one_product():
    shown, taps = climbed(CombinedQKV, CONFIGS["llama"])
    assert shown.values["QKV = T W_qkv"].shape == (N, 32 + 16 + 16)
    places = {"q": ("first", 0), "k": ("next", 32), "v": ("last", 48)}
    for letter, (place, start) in places.items():
        formula = f"{letter.upper()}, the {place} columns"
        assert not shown.moved(formula)
        assert shown.values[formula].storage_offset() == start
        heads = taps[f"blocks.0.attn.{letter}"][0].transpose(0, 1).flatten(1)
        torch.testing.assert_close(shown.values[formula], heads)


def test_one_more_token_is_one_row_without_a_mask():
    shown, _ = climbed(KeyValueCache, CONFIGS["llama"], more=2)
    assert shown.values["QKV_n = T_n W_qkv"].shape == (1, 64)
    assert shown.values["scores_n = Q_n Kᵀ"].shape == (2, 2, 1, N + 1)
    assert shown.times["mask M"] == 2  # once a layer, for the prompt
    kept = shown.values["K: the cache's slots so far, K_n the last"]
    assert kept.shape == (2, N + 1, 8)
    assert not shown.moved("K: the cache's slots so far, K_n the last")
    windowed, _ = climbed(KeyValueCache, CONFIGS["window"], more=1)
    assert windowed.values["scores_n = Q_n Kᵀ"].shape == (2, 2, 1, 4)


@pytest.mark.parametrize("name", ["gpt2", "window", "wide values", "layers that differ"])
@pytest.mark.parametrize("until", [None, 0])
def test_multiply_adds_are_those_that_the_loops_do(name, until, monkeypatch):
    of = weights(CONFIGS[name])
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
    column = rung._converted[id(of.W_head)][3]
    assert column == of.W_head[:, 3].tolist()

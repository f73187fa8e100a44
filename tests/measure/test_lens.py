"""The logit lens: against the formula written out, with faults planted, chunk by chunk."""

from __future__ import annotations

import dataclasses
import gc

import pytest
import torch
from blocks import configure
from decoder_parameters import parameters_of
from hypothesis import given
from hypothesis import strategies as st
from small_models import as_model
from tiny_checkpoints import (
    llama_tensors,
    with_more,
    write_llama,
    write_mistral,
    write_qwen3,
    write_small_gpt2,
)
from zoo import BLOCKS, layer, llama

import llmcli.commands.lens.measure.reader as lens_reader
import llmcli.commands.lens.measure.run as lens_module
import llmcli.devices
from llmcli.commands.lens.measure.run import Places, measure_lens
from llmcli.commands.lens.measure.unembedding import Agreement
from llmcli.engine.sampling import Sampling
from llmcli.errors import NotFinite, OutOfMemory
from llmcli.formats.dense import Dense
from llmcli.loading.load import load
from llmcli.nn.block import Block
from llmcli.nn.decoder import Decoder
from llmcli.parts.embedding.config import HeadConfig
from llmcli.parts.norm.config import NormConfig

IDS = (5, 17, 3, 17, 42, 8, 30)
CPU = torch.device("cpu")
GREEDY = Sampling(temperature=0.0)


QWEN2 = {"q_proj.bias": 32, "k_proj.bias": 16, "v_proj.bias": 16}
UNTIED = {name: value for name, value in llama_tensors().items() if name != "lm_head.weight"}
WRITERS = {
    "gpt2": write_small_gpt2,
    "llama": write_llama,
    "llama-tied": lambda path: write_llama(path, UNTIED, tie_word_embeddings=True),
    "mistral": write_mistral,
    "qwen2": lambda path: write_llama(path, with_more(QWEN2), model_type="qwen2"),
    "qwen3": write_qwen3,
}
NAMES = (*WRITERS, "biased")


def biased(config, dtype):
    """A head with a bias after a LayerNorm, which no family of today has."""
    config = dataclasses.replace(
        config, final_norm=NormConfig(kind="layer", eps=1e-3, bias=True),
        head=HeadConfig(tied=False, bias=True),
    )  # fmt: skip
    decoder = Decoder(config, device="cpu", dtype=dtype)
    g = torch.Generator().manual_seed(0)
    for slot in parameters_of(decoder).values():
        slot.copy_(torch.randn(slot.shape, generator=g) * 0.4)
    return as_model(decoder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("lens")
    for name, write in WRITERS.items():
        write(root / name)
    return root


@pytest.fixture
def model(folder):
    """`model(name, dtype)`: a fresh one, so that a test may break it."""

    def make(name, dtype="float64"):
        if name == "biased":
            config = load(str(folder / "llama"), dtype=dtype).config
            return biased(config, getattr(torch, dtype))
        return load(str(folder / name), dtype=dtype)

    return make


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    """Five layers that add little each, so that tokens settle at every one of them."""
    path = tmp_path_factory.mktemp("deep")
    write_llama(path, deep_tensors(), num_hidden_layers=5)
    return load(str(path), dtype="float64")


def deep_tensors():
    tensors = llama_tensors()
    g = torch.Generator().manual_seed(2)
    layer = [name for name in tensors if name.startswith("model.layers.0.")]
    for i in range(5):
        for name in layer:
            size = tensors[name].shape
            made = torch.randn(size, generator=g) * 0.3 if len(size) > 1 else tensors[name].clone()
            tensors[name.replace(".0.", f".{i}.", 1)] = made
    return tensors


def every(total):
    return range(total)


def look(model, ids=IDS, *, span=every, mid=False, layers=None, **options):
    return measure_lens(model, ids, span=span, places=Places(layers=layers, mid=mid), **options)


def tapped(model, ids):
    seen = {}
    logits = model.decoder(torch.tensor([ids]), tap=lambda name, x: seen.setdefault(name, x[0]))
    return seen, logits[0].double()


def by_hand(model, h_TD, scale_T1=None):
    """Norm, head, softmax; `scale_T1` instead of the rows' own statistics."""
    config, slots = model.config, {k: v.double() for k, v in parameters_of(model.decoder).items()}
    h_TD = h_TD.double()
    if config.final_norm.kind == "layer":
        h_TD = h_TD - h_TD.mean(1, keepdim=True)
    own_T1 = (h_TD.pow(2).mean(1, keepdim=True) + config.final_norm.eps).sqrt()
    x_TD = h_TD / (own_T1 if scale_T1 is None else scale_T1) * slots["ln_final.w"]
    x_TD = x_TD + slots.get("ln_final.b", 0)
    return (x_TD @ slots.get("head.W", slots["embed.W"]).T + slots.get("head.b", 0)).softmax(1)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", NAMES)
def test_the_last_row_is_the_output(name, dtype, model):
    loaded = model(name, dtype)
    report = look(loaded)
    assert report.ok, report.checks
    layers = range(len(loaded.config.layers))
    assert [row.layer for row in report.rows] == [None, *layers]
    assert [row.name for row in report.rows] == [
        "blocks.0.resid_pre", *(f"blocks.{i}.resid_post" for i in layers),
    ]  # fmt: skip
    p_TV = tapped(loaded, IDS)[1].softmax(1)
    near = {"float64": 1e-12, "float32": 1e-5}.get(dtype, 0.05)
    for position, cell in enumerate(report.rows[-1].cells):
        for token in cell.top:
            assert token.probability == pytest.approx(float(p_TV[position, token.id]), abs=near)
        assert cell.kl <= near
    assert (report.dtype, report.vocabulary) == (dtype, loaded.config.vocab)


@pytest.mark.parametrize("name", NAMES)
def test_every_cell_is_the_formula(name, model):
    loaded = model(name)
    report = look(loaded, mid=True, top=3)
    seen, logits_TV = tapped(loaded, IDS)
    output_TV = logits_TV.softmax(1)
    for row in report.rows:
        lens_TV = by_hand(loaded, seen[row.name])
        for t, cell in enumerate(row.cells):
            p_V, q_V = lens_TV[t], output_TV[t]
            order = p_V.argsort(descending=True)[:3]
            assert [token.id for token in cell.top] == order.tolist()
            assert [token.probability for token in cell.top] == pytest.approx(p_V[order].tolist())
            assert cell.entropy == pytest.approx(float(-(p_V * p_V.log()).sum()))
            kl = float((q_V * (q_V / p_V).log()).sum())
            assert cell.kl == pytest.approx(kl, abs=1e-12)
            target = int(q_V.argmax())
            assert report.targets[t].id == target
            assert report.targets[t].probability == pytest.approx(float(q_V[target]))
            assert cell.target_rank == 1 + int((p_V > p_V[target]).sum())
            assert cell.target_probability == pytest.approx(float(p_V[target]))
    if name in ("gpt2", "llama"):  # early rows have their own statistics, not the last one's
        cached = by_hand(loaded, seen["blocks.0.resid_pre"], seen["ln_final.scale"].double())
        apart = [
            abs(cell.top[0].probability - float(cached[t, cell.top[0].id]))
            for t, cell in enumerate(report.rows[0].cells)
        ]
        assert min(apart) > 1e-3


def test_settled_is_where_the_outputs_token_comes_to_stay(model):
    report = look(model("llama"), ids=tuple(range(40)), mid=True)
    best = [[cell.top[0].id for cell in row.cells] for row in report.rows]
    names = [row.name for row in report.rows]
    for t, first in enumerate(map(names.index, report.settled)):
        final = best[-1][t]
        assert all(row[t] == final for row in best[first:])
        assert first == 0 or best[first - 1][t] != final
    assert len(set(report.settled)) > 2


@pytest.mark.parametrize("mid", [False, True])
@pytest.mark.parametrize("layers", [(0,), (1,), (2, 3), (4, 0)])
def test_settled_counts_layers_that_are_not_shown(layers, mid, deep):
    ids = tuple(range(40))
    whole, part = (look(deep, ids=ids, layers=chosen, mid=mid) for chosen in (None, layers))
    assert part.settled == whole.settled
    shown = {row.name for row in part.rows}
    assert not set(part.settled) <= shown, "some settle where nothing is shown"
    best = [[cell.top[0].id for cell in row.cells] for row in part.rows]
    assert any(  # and what is shown says something else
        all(row[t] == best[-1][t] for row in best) and name not in ("blocks.0.resid_pre", *shown)
        for t, name in enumerate(part.settled)
    )


def test_the_output_settles_at_the_last_place_at_the_latest():
    logits_RPV = torch.tensor([[[0.0, 1], [1, 0]], [[1, 0], [0, 1]], [[0, 1], [0, 1]]])
    best_P = torch.tensor([1, 0])
    assert lens_reader.settled(logits_RPV, best_P).tolist() == [2, 2]
    assert lens_reader.settled(logits_RPV[::2], best_P).tolist() == [0, 0]
    assert lens_reader.settled(logits_RPV[2:], best_P).tolist() == [0, 0]


def _wrong_eps(decoder):
    configure(decoder.ln_final, eps=decoder.ln_final.config.eps + 4)


def _wrong_weight(decoder):
    decoder.ln_final.w = decoder.ln_final.w.flip(0)


def _wrong_head(decoder):
    decoder.head = Dense(decoder.head.dense().roll(1, 0))


def _soft_cap(decoder):
    plain = decoder._unembed
    decoder._unembed = lambda x, step: _emitted(plain, x, step)


def _emitted(plain, x, step):
    emit = step.emit
    step.emit = lambda name, t: emit(name, 3 * torch.tanh(t / 3) if name == "logits" else t)
    return plain(x, step)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("fault", [_wrong_eps, _wrong_weight, _wrong_head, _soft_cap])
def test_another_output_than_the_last_row_is_red(fault, dtype, model):
    loaded = model("llama", dtype)
    fault(loaded.decoder)
    for ids in (IDS, IDS[:1]):
        checks = {check.name: check.ok for check in look(loaded, ids).checks}
        assert checks == {
            "output": False, "output_logprob": False, "output_kl": False, "residual_stream": True,
            "cache": True,
        }  # fmt: skip


def _swapped(decoder):
    """Two rows of the head, of tokens that are far apart but never likely."""
    w = decoder.head.dense().clone()
    size = w.norm(dim=1).median()
    towards = decoder.ln_final.w / decoder.ln_final.w.norm()
    w[7], w[8] = -size * towards, torch.zeros_like(towards)
    parameters_of(decoder)["head.W"].copy_(w)
    decoder.head = Dense(w[[*range(7), 8, 7, *range(9, len(w))]])


def _hundredth(decoder):
    decoder.ln_final.w = decoder.ln_final.w * 1.01


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("fault", [_swapped, _hundredth])
def test_sixteen_bits_do_not_hide_wrong_logits_of_unlikely_tokens(fault, dtype, model):
    loaded = model("llama", dtype)
    parameters_of(loaded.decoder)["head.W"].mul_(4)
    assert look(loaded).ok
    fault(loaded.decoder)
    checks = {check.name: check for check in look(loaded).checks}
    assert not checks["output_logprob"].ok
    assert checks["residual_stream"].ok


def test_what_the_run_itself_gave_out_is_compared_wherever_one_looks(model):
    loaded = model("llama")
    _soft_cap(loaded.decoder)
    report = look(loaded, span=lambda total: range(1, 3))
    assert not report.ok
    assert report.checks[0].where.startswith("position 6, id ")


def _adds_something_else(plain, self, x, cache, step):
    """The pass continues with another tensor than the tap is shown."""
    emit, last = step.emit, self.name == "blocks.1"

    def shown(name, tensor):
        if not last or not name.endswith("mlp_out"):
            return emit(name, tensor)
        emit(name, tensor * 1.05)
        return tensor

    step.emit = shown
    return plain(self, x, cache, step)


def _gets_something_else(plain, self, x, cache, step):
    return plain(self, x * 1.001, cache, step)


@pytest.mark.parametrize(
    ("name", "dtype", "fault", "where"),
    [
        *(("llama", dtype, _adds_something_else, "blocks.1.resid_post, position ")
          for dtype in ("float64", "float32", "bfloat16")),
        ("gpt2", "float64", _gets_something_else, "blocks.0.resid_pre"),
    ],
)  # fmt: skip
def test_another_stream_than_the_sum_is_red(name, dtype, fault, where, model, monkeypatch):
    plain = Block.__call__
    monkeypatch.setattr(Block, "__call__", lambda *args: fault(plain, *args))
    checks = {check.name: check for check in look(model(name, dtype)).checks}
    assert not checks["residual_stream"].ok
    assert checks["residual_stream"].where.startswith(where)
    assert checks["output"].ok or fault is _gets_something_else


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_looking_is_one_forward_pass_and_changes_no_bit(dtype, model, monkeypatch):
    loaded = model("qwen3", dtype)
    before = {name: slot.clone() for name, slot in parameters_of(loaded.decoder).items()}
    plain = loaded.decoder(torch.tensor([IDS]), logits="last")
    calls, call = [], Decoder.__call__

    def spied(*arguments, **options):
        calls.append(call(*arguments, **options))
        return calls[-1]

    monkeypatch.setattr(Decoder, "__call__", spied)
    look(loaded, mid=True)
    (found,) = calls
    assert torch.equal(found, plain)
    assert all(torch.equal(before[n], slot) for n, slot in parameters_of(loaded.decoder).items())


@pytest.mark.parametrize("chunk", [1, 500])
def test_chunks_say_the_same_and_are_all_that_exists(chunk, model, monkeypatch):
    loaded = model("llama")
    whole = look(loaded, mid=True)
    rows, sizes = len(whole.rows), []
    plain = lens_reader.unembed
    monkeypatch.setattr(lens_module, "CHUNK", chunk)
    monkeypatch.setattr(lens_reader, "unembed", lambda m, h: sizes.append(len(h)) or plain(m, h))
    parts = look(loaded, mid=True)
    assert max(sizes) == rows * max(1, chunk // (rows * 97))
    assert parts.settled == whole.settled
    for a, b in zip(whole.rows, parts.rows, strict=True):
        for one, other in zip(a.cells, b.cells, strict=True):
            assert [t.id for t in one.top] == [t.id for t in other.top]
            assert (one.entropy, one.kl, one.target_probability) == pytest.approx(
                (other.entropy, other.kl, other.target_probability), abs=1e-12
            )


def test_a_long_text_says_how_far_it_is(model, monkeypatch):
    monkeypatch.setattr(lens_module, "CHUNK", 2 * 3 * 97)
    told = []
    look(model("llama"), span=lambda total: range(1, total), progress=lambda *a: told.append(a))
    assert told[:2] == [("reading the prompt", done, 7) for done in (0, 7)]
    assert told[2:] == [("reading the rows", done, 6) for done in (0, 2, 4)]


def test_some_positions_and_layers_are_those_of_all(model):
    loaded = model("llama")
    whole = look(loaded)
    part = look(loaded, span=lambda total: range(2, 4), layers=(0,))
    assert part.positions == (2, 3)
    assert [row.name for row in part.rows] == ["blocks.0.resid_post", "blocks.1.resid_post"]
    for row, same in zip(part.rows, whole.rows[1:], strict=True):
        for cell, other in zip(row.cells, same.cells[2:4], strict=True):
            assert cell.entropy == pytest.approx(other.entropy)
            assert [t.id for t in cell.top] == [t.id for t in other.top]


def test_places_are_in_order_each_once_and_the_last_is_there():
    four, one = llama(*(layer(),) * 4), llama(layer())
    assert Places(layers=(2, 0, 2)).names(four) == (
        "blocks.0.resid_post", "blocks.2.resid_post", "blocks.3.resid_post",
    )  # fmt: skip
    assert Places(layers=(3,), mid=True).names(four) == (
        "blocks.3.resid_mid", "blocks.3.resid_post",
    )  # fmt: skip
    beside = BLOCKS["parallel with one norm"]  # nothing is between parts side by side
    assert Places(layers=(1,), mid=True).names(beside) == ("blocks.1.resid_post",)
    assert Places(mid=True).names(one) == (
        "blocks.0.resid_pre", "blocks.0.resid_mid", "blocks.0.resid_post",
    )  # fmt: skip


def test_one_token_is_enough_and_more_than_the_vocabulary_are_not_asked_for(model):
    report = look(model("gpt2"), ids=(3,), top=1000)
    assert report.ok
    assert report.positions == (0,)
    assert all(len(row.cells) == 1 for row in report.rows)
    assert len(report.rows[0].cells[0].top) == 53


def test_new_tokens_are_read_too_and_as_if_they_had_been_the_prompt(model):
    loaded = model("llama")
    report = look(loaded, span=lambda total: range(total - 4, total), generate=3, sampling=GREEDY)
    ids = [id for id, _ in report.tokens]
    assert len(ids) == 10
    assert report.ok
    assert report.positions == (6, 7, 8, 9)
    assert [token.id for token in report.targets[:3]] == ids[7:]  # what it wrote is the likeliest
    again = look(loaded, ids=tuple(ids))
    for row, same in zip(report.rows, again.rows, strict=True):
        for cell, other in zip(row.cells, same.cells[6:], strict=True):
            assert cell.entropy == pytest.approx(other.entropy)
            assert cell.top[0].id == other.top[0].id


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_cache_holds_what_the_layers_gave_out(name, dtype, model):
    report = look(model(name, dtype), generate=3, sampling=GREEDY)
    cache = report.checks[-1]
    assert (cache.name, cache.value, cache.tolerance) == ("cache", 0.0, 0.0)
    assert report.prompt_tokens == len(IDS)
    assert report.from_prompt == len(IDS)
    cache = look(model(name, dtype)).checks[-1]
    assert (cache.name, cache.value, cache.tolerance) == ("cache", 0.0, 0.0)


@pytest.mark.parametrize("part", ["k", "v"])
@pytest.mark.parametrize("new", [False, True])
def test_a_cache_that_holds_something_else_is_red(part, new, model, monkeypatch):
    plain = Decoder.__call__

    def wrong(self, ids, state=None, **options):
        out = plain(self, ids, state, **options)
        if (ids.shape[1] == 1) == new:
            at = state.lengths[0] - 1
            slots = getattr(state.layers[1], part)
            slots[0, 1, at, 3] = torch.nextafter(slots[0, 1, at, 3], torch.tensor(torch.inf))
        return out

    monkeypatch.setattr(Decoder, "__call__", wrong)
    report = look(model("llama", "float32"), generate=3, sampling=GREEDY)
    cache = {check.name: check for check in report.checks}["cache"]
    assert not cache.ok
    first = len(IDS) if new else len(IDS) - 1
    assert cache.where == f"cache.1.{part}[1,{first}]"
    assert cache.value == (3 if new else 1)


def test_the_cache_is_asked_for_with_the_rows(model, monkeypatch):
    loaded, asked = model("llama"), []
    monkeypatch.setattr(llmcli.devices, "require_memory", lambda *a: asked.append(a[0]))
    look(loaded, generate=3, sampling=GREEDY)
    look(loaded, ids=tuple(range(10)))
    assert asked[0] == asked[1] > loaded.decoder.state_bytes(1, 10)


def test_an_early_end_moves_what_is_counted_from_it(model):
    loaded = model("llama")
    ids = [i for i, _ in look(loaded, generate=1, sampling=GREEDY).tokens]
    loaded.eos_ids = frozenset(ids[-1:])
    report = look(loaded, span=lambda total: range(total - 1, total), generate=5, sampling=GREEDY)
    assert len(report.tokens) == 8
    assert report.positions == (7,)
    assert len(report.rows[0].cells) == 1


def test_targets(model):
    loaded = model("llama")
    after = look(loaded, target="next")
    best = look(loaded).targets
    assert [token.id for token in after.targets] == [*IDS[1:], best[-1].id]
    one = look(loaded, target=7, span=lambda total: range(2, 5))
    assert [token.id for token in one.targets] == [7, 7, 7]
    seen, _ = tapped(loaded, IDS)
    p_TV = by_hand(loaded, seen["blocks.0.resid_post"])
    ranks = 1 + (p_TV > p_TV[:, 7:8]).sum(1)
    assert [cell.target_rank for cell in one.rows[1].cells] == ranks[2:5].tolist()


def test_what_does_not_fit_in_memory_is_refused_before_the_run(model, monkeypatch):
    loaded = model("llama")
    monkeypatch.setattr(llmcli.devices, "available_bytes", lambda device: 1000)
    monkeypatch.setattr(Decoder, "__call__", pytest.fail)
    with pytest.raises(OutOfMemory, match="3 rows of 7 positions and the cache of 7 tokens need"):
        look(loaded)


@pytest.mark.parametrize(
    ("parameter", "number", "told"),
    [
        ("blocks.1.attn.W_o", torch.nan, "`blocks.1.resid_mid` is not finite at position 0"),
        ("blocks.1.mlp.W_down", torch.nan, "`blocks.1.resid_post` is not finite at position 0"),
        # the logits that the run itself gave out come first
        ("head.W", torch.inf, "the logits at position 6 are not finite"),
    ],
)
def test_what_is_not_finite_is_named(parameter, number, told, model):
    loaded = model("llama")
    parameters_of(loaded.decoder)[parameter].view(-1)[99 * (parameter == "head.W")] = number
    with pytest.raises(NotFinite, match=told):
        look(loaded)


@pytest.mark.parametrize("chunk", [1, 1 << 20])
def test_a_row_that_is_not_finite_is_told_with_its_position(chunk, model, monkeypatch):
    plain = lens_reader.unembed

    def broken(loaded, h_ND):
        logits_NV = plain(loaded, h_ND)
        logits_NV[(h_ND == marked).all(-1)] = torch.nan
        return logits_NV

    loaded = model("llama")
    marked = tapped(loaded, IDS)[0]["blocks.0.resid_post"][4]
    monkeypatch.setattr(lens_module, "CHUNK", chunk)
    monkeypatch.setattr(lens_reader, "unembed", broken)
    with pytest.raises(NotFinite, match="the logits at position 4 are not finite"):
        look(loaded)


NUMBERS = st.lists(st.floats(-20, 20), min_size=2, max_size=12)


@given(NUMBERS, st.floats(0, 1), st.randoms(use_true_random=False))
def test_logits_that_are_off_by_at_most_e_are_within_what_is_allowed(logits, share, random):
    own = torch.tensor([logits], dtype=torch.float64)
    off = share * torch.finfo(torch.bfloat16).eps * float(own.abs().max())
    noise = torch.tensor([[random.choice((-off, off)) for _ in logits]], dtype=torch.float64)
    agreement = Agreement(torch.bfloat16, CPU)
    agreement.add([0], own + noise, own)
    assert all(check.ok for check in agreement.checks()), agreement.checks()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_logit_that_is_off_by_four_times_what_is_allowed_is_seen(dtype):
    own = torch.linspace(-5, 10, 50, dtype=torch.float64)[None]
    roundings = {torch.float32: 16, torch.bfloat16: 1}[dtype]
    for factor, ok in ((1, True), (8, False)):
        ours, agreement = own.clone(), Agreement(dtype, CPU)
        ours[0, 3] += factor * roundings * torch.finfo(dtype).eps * 10
        agreement.add([0], ours, own)
        assert all(check.ok for check in agreement.checks()) is ok


def test_the_worst_position_is_told_and_a_nan_is_worse_than_all():
    agreement = Agreement(torch.float32, CPU)
    own = torch.zeros(3, 4, dtype=torch.float64)
    own[:, 0] = 1.0
    ours = own.clone()
    ours[1, 2] += 0.5
    agreement.add([4, 5, 6], ours, own)
    checks = agreement.checks()
    assert [check.ok for check in checks] == [False] * 3
    assert [check.where for check in checks] == ["position 5, id 2"] * 2 + ["position 5"]
    p = own[1].softmax(0)
    divergence = float((p * (p / ours[1].softmax(0)).log()).sum())
    assert checks[2].value == pytest.approx(divergence)
    ours[2, 2] = torch.nan
    agreement.add([7, 8, 9], ours, own)
    agreement.add([5], ours[1:2], own[1:2])
    assert not agreement.checks()[0].ok
    assert agreement.checks()[0].where.startswith("position 9")


def held():
    """Bytes of all tensors there are, each memory once."""
    gc.collect()
    storages = {
        one.untyped_storage().data_ptr(): one.untyped_storage().nbytes()
        for one in gc.get_objects()
        if type(one) is torch.Tensor
    }
    return sum(storages.values())


@pytest.mark.real
def test_smollm2_is_looked_at_in_one_pass_and_changed_in_no_bit(smollm2_path, monkeypatch):
    loaded = load(str(smollm2_path), dtype="float32")
    ids = tuple(loaded.tokenizer.encode("In the beginning God created the heaven and the earth."))
    plain_TV = loaded.decoder(torch.tensor([ids]))[0]
    plain = loaded.decoder(torch.tensor([ids]), logits="last")
    calls, sizes = [], []
    call, read = Decoder.__call__, lens_reader.unembed

    def spied(*arguments, **options):
        calls.append(call(*arguments, **options))
        return calls[-1]

    def measured(model, h_ND):
        sizes.append(held())
        return read(model, h_ND)

    monkeypatch.setattr(Decoder, "__call__", spied)
    monkeypatch.setattr(lens_reader, "unembed", measured)
    before = held()
    weights = sum(slot.nbytes for slot in parameters_of(loaded.decoder).values())
    report = look(loaded, ids, top=20)
    (found,) = calls
    assert torch.equal(found, plain)
    assert before >= weights > 500e6
    assert max(sizes) - before < weights / 20  # rows of the stream, and no second copy of weights
    assert report.ok
    p_TV = plain_TV.double().softmax(1)
    for t, cell in enumerate(report.rows[-1].cells):
        top = p_TV[t].topk(20)
        assert [token.probability for token in cell.top] == pytest.approx(
            top.values.tolist(), abs=5e-5
        )
        assert cell.kl < 1e-6
        assert cell.entropy == pytest.approx(float(torch.special.entr(p_TV[t]).sum()), abs=1e-4)


@pytest.mark.real
def test_smollm2s_last_row_is_the_whole_distribution_at_every_position(smollm2_path):
    loaded = load(str(smollm2_path), dtype="float32")
    ids = tuple(loaded.tokenizer.encode("In the beginning God created the heaven and the earth."))
    seen, logits_TV = tapped(loaded, ids)
    last_TV = lens_reader.unembed(loaded, seen["blocks.29.resid_post"]).double()
    apart_TV = (last_TV.log_softmax(1) - logits_TV.log_softmax(1)).abs()
    assert last_TV.shape == (len(ids), 49152)
    assert apart_TV.max() < 1e-4
    assert (last_TV.softmax(1) - logits_TV.softmax(1)).abs().max() < 5e-5


@pytest.mark.real
def test_smollm2_knows_paris_late_and_its_last_row_is_its_output(smollm2_path):
    loaded = load(str(smollm2_path), dtype="float32")
    ids = tuple(loaded.tokenizer.encode("The capital of France is"))
    report = look(loaded, ids, span=lambda total: range(total - 1, total))
    assert report.ok
    assert report.targets[0].text == " Paris"
    assert report.settled == ("blocks.29.resid_post",)
    p_V = loaded.decoder(torch.tensor([ids]))[0, -1].softmax(0)
    last = report.rows[-1].cells[0]
    top = p_V.topk(5)
    assert [token.id for token in last.top] == top.indices.tolist()
    assert [token.probability for token in last.top] == pytest.approx(top.values.tolist(), abs=1e-5)
    assert report.rows[0].cells[0].target_rank > 1000

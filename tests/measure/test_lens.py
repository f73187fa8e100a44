"""The logit lens: against the formula written out, with faults planted, chunk by chunk."""

import dataclasses

import pytest
import torch
from covers import in_turn
from decoder_faults import in_the_model, wrap
from decoder_parameters import packed_model, parameters_of
from hypothesis import given
from hypothesis import strategies as st
from needs import needs_kernels
from small_models import random_model
from unfused import emitted
from zoo import BLOCKS, MODELS, VOCAB, layer, llama

import llmcli.commands.lens.measure as lens_module
import llmcli.devices
from llmcli.commands.lens.measure import Agreement, measure_lens, places
from llmcli.config.embedding import HeadConfig
from llmcli.config.norm import NormConfig
from llmcli.decoder.block import Block
from llmcli.errors import NotFinite, OutOfMemory
from llmcli.inspect.passes import Passes
from llmcli.nn.step import Step
from llmcli.records.work import no_progress
from llmcli.weights.dense import Dense

IDS = (5, 17, 3, 17, 42, 8, 30)
CPU = torch.device("cpu")
CONFIGS = {name: MODELS[name] for name in ("gpt2", "llama", "window", "qk norm")}
CONFIGS |= {
    "qwen2": MODELS["biases and relu"],
    "tied": dataclasses.replace(MODELS["llama"], head=HeadConfig(tied=True)),
    # a head with a bias after a LayerNorm, which no family of today has
    "biased": dataclasses.replace(
        MODELS["llama"],
        final_norm=NormConfig(kind="layer", eps=1e-3, bias=True),
        head=HeadConfig(tied=False, bias=True),
    ),
}
DEEP = llama(*(layer(),) * 5)


def made(name="llama", dtype="float64"):
    return random_model(CONFIGS[name], dtype)


def look(model, ids=IDS, *, span=range, generate=0, progress=no_progress, **options):
    return measure_lens(Passes(model, ids, generate, progress), span=span, **options)


def checks_of(model, *args, **options):
    return {check.name: check for check in look(model, *args, **options).checks}


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


def same_cells(cells, others):
    for cell, other in zip(cells, others, strict=True):
        assert [token.id for token in cell.top] == [token.id for token in other.top]
        assert (cell.entropy, cell.kl, cell.target_probability) == pytest.approx(
            (other.entropy, other.kl, other.target_probability), abs=1e-12
        )


@pytest.mark.parametrize(
    ("name", "dtype"), in_turn(list(CONFIGS), ["float64", "float32", "bfloat16", "float16"])
)
def test_the_last_row_is_the_output(name, dtype):
    model = made(name, dtype)
    before = {name: slot.clone() for name, slot in parameters_of(model.decoder).items()}
    report, longer = look(model), look(model, generate=3)
    p_TV = emitted(model, IDS)["logits"].double().softmax(1)
    near = {"float64": 1e-12, "float32": 1e-5}.get(dtype, 0.05)
    for position, cell in enumerate(report.rows[-1].cells):
        for token in cell.top:
            assert token.probability == pytest.approx(float(p_TV[position, token.id]), abs=near)
        assert cell.kl <= near
    assert (report.dtype, report.vocabulary) == (dtype, VOCAB)
    for one in (report, longer):
        assert one.ok, one.checks
        assert one.prompt_tokens == one.from_prompt == len(IDS)
    for name, slot in parameters_of(model.decoder).items():
        assert torch.equal(before[name], slot), name


@needs_kernels
def test_the_inputs_of_both_matrices_behind_the_norm_are_rounded_as_the_models_are():
    """Of a head and of the projection before it, both in blocks."""
    assert look(packed_model("post-norm, narrow embeddings")).ok


@pytest.mark.parametrize("name", CONFIGS)
def test_every_cell_is_the_formula(name):
    model = made(name)
    report = look(model, mid=True, top=3)
    seen = emitted(model, IDS)
    output_TV = seen["logits"].double().softmax(1)
    for row in report.rows:
        lens_TV = by_hand(model, seen[row.name])
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
        cached = by_hand(model, seen["blocks.0.resid_pre"], seen["ln_final.scale"].double())
        apart = [
            abs(cell.top[0].probability - float(cached[t, cell.top[0].id]))
            for t, cell in enumerate(report.rows[0].cells)
        ]
        assert min(apart) > 1e-3


def test_the_output_settles_at_the_last_place_at_the_latest():
    logits_RPV = torch.tensor([[[0.0, 1], [1, 0]], [[1, 0], [0, 1]], [[0, 1], [0, 1]]])
    best_P = torch.tensor([1, 0])
    assert lens_module.settled(logits_RPV, best_P).tolist() == [2, 2]
    assert lens_module.settled(logits_RPV[::2], best_P).tolist() == [0, 0]
    assert lens_module.settled(logits_RPV[2:], best_P).tolist() == [0, 0]


def capped(emit, step, name, x):
    """The run gives out other logits than it computes."""
    return emit(step, name, 3 * (x / 3).tanh() if name == "logits" else x)


WRONG = {
    "eps": in_the_model(lambda decoder: decoder.ln_final, "config",
                        lambda config: dataclasses.replace(config, eps=config.eps + 4)),
    "weight": in_the_model(lambda decoder: decoder.ln_final, "w", lambda w: w.flip(0)),
    "head": in_the_model(lambda decoder: decoder, "head",
                         lambda head: Dense(head.dense().roll(1, 0))),
    "capped": wrap(Step, "emit", capped),
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("fault", WRONG)
def test_another_output_than_the_last_row_is_red(fault, dtype, monkeypatch):
    model = made(dtype=dtype)
    WRONG[fault](monkeypatch, model)
    for ids in (IDS, IDS[:1]):
        assert {name: check.ok for name, check in checks_of(model, ids).items()} == {
            "output": False, "output_logprob": False, "output_kl": False, "residual_stream": True,
        }  # fmt: skip
    if fault == "capped":  # what the run itself gave out is compared wherever one looks
        report = look(model, span=lambda total: range(1, 3))
        assert not report.ok
        assert report.checks[0].where.startswith("position 6, id ")


def swapped(patch, of):
    """Two rows of the head, of tokens that are far apart but never likely."""
    decoder = of.decoder
    w = decoder.head.dense().clone()
    size = w.norm(dim=1).median()
    towards = decoder.ln_final.w / decoder.ln_final.w.norm()
    w[7], w[8] = -size * towards, torch.zeros_like(towards)
    parameters_of(decoder)["head.W"].copy_(w)
    decoder.head = Dense(w[[*range(7), 8, 7, *range(9, len(w))]])


a_hundredth = in_the_model(lambda decoder: decoder.ln_final, "w", lambda w: w * 1.01)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("fault", [swapped, a_hundredth])
def test_sixteen_bits_do_not_hide_wrong_logits_of_unlikely_tokens(fault, dtype, monkeypatch):
    model = made(dtype=dtype)
    parameters_of(model.decoder)["head.W"].mul_(4)
    assert look(model).ok
    fault(monkeypatch, model)
    checks = checks_of(model)
    assert not checks["output_logprob"].ok
    assert checks["residual_stream"].ok


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_another_stream_than_the_tap_is_shown_is_red(dtype, monkeypatch):
    def block(plain, self, x, cache, step):
        emit, last = step.emit, self.name == "blocks.1"

        def shown(name, tensor):
            if not last or not name.endswith("mlp_out"):
                return emit(name, tensor)
            emit(name, tensor * 1.05)
            return tensor

        step.emit = shown
        return plain(self, x, cache, step)

    wrap(Block, "__call__", block)(monkeypatch, None)
    checks = checks_of(made(dtype=dtype))
    assert not checks["residual_stream"].ok
    assert checks["residual_stream"].where.startswith("blocks.1.resid_post, position ")
    assert checks["output"].ok


@pytest.mark.parametrize(
    ("chunk", "read"), [(1, range(7)), (2 * 5 * VOCAB, range(0, 7, 2)), (1 << 25, [0])]
)
def test_chunks_of_logits_say_the_same_and_how_far_they_are(chunk, read, monkeypatch):
    """Of all five places, though three are shown."""
    model, reported = made(), []
    whole = look(model, mid=True, layers=(0,))
    monkeypatch.setattr(lens_module, "CHUNK", chunk)
    parts = look(model, mid=True, layers=(0,), progress=lambda *now: reported.append(now))
    assert reported[:2] == [("reading the prompt", done, 7) for done in (0, 7)]
    assert reported[2:] == [("reading the rows", done, 7) for done in read]
    assert parts.settled == whole.settled
    for row, other in zip(whole.rows, parts.rows, strict=True):
        same_cells(row.cells, other.cells)
    # a row that is not finite is reported with its position: here a large number in token 42
    parameters_of(model.decoder)["embed.W"][42] = 50 * torch.eye(16)[0]
    parameters_of(model.decoder)["ln_final.w"][0] = 5e307
    with pytest.raises(NotFinite, match="the logits at position 4 are not finite"):
        look(model)


def test_no_more_tokens_than_the_vocabulary_has():
    report = look(made("gpt2"), ids=(3,), top=1000)
    assert report.ok
    assert [[len(cell.top) for cell in row.cells] for row in report.rows] == [[VOCAB]] * 3


@pytest.mark.parametrize(
    ("config", "chosen", "names"),
    [  # in order, each once, and the last is there
        (DEEP, {"layers": (1, 0, 1)}, "0.resid_post 1.resid_post 4.resid_post"),
        (DEEP, {"layers": (4,), "mid": True}, "4.resid_mid 4.resid_post"),
        # nothing is between parts side by side
        (BLOCKS["parallel with one norm"], {"layers": (1,), "mid": True}, "1.resid_post"),
        (llama(layer()), {"mid": True}, "0.resid_pre 0.resid_mid 0.resid_post"),
    ],
)
def test_names_of_places(config, chosen, names):
    assert places(config, **chosen) == tuple(f"blocks.{name}" for name in names.split())


def test_new_tokens_are_read_too_and_as_if_they_had_been_the_prompt():
    model = made()
    report = look(model, span=lambda total: range(total - 4, total), generate=3)
    ids = [one.id for one in report.tokens]
    assert len(ids) == 10
    assert report.ok
    assert report.positions == (6, 7, 8, 9)
    assert [token.id for token in report.targets[:3]] == ids[7:]  # what it wrote is the likeliest
    again = look(model, ids=tuple(ids))
    for row, same in zip(report.rows, again.rows, strict=True):
        same_cells(row.cells, same.cells[6:])
    # an early end moves what is counted from it
    model.eos_ids = frozenset(ids[7:8])
    report = look(model, span=lambda total: range(total - 1, total), generate=5)
    assert len(report.tokens) == 8
    assert report.positions == (7,)
    assert len(report.rows[0].cells) == 1


def test_what_does_not_fit_in_memory_is_refused_before_the_run(monkeypatch):
    """To the byte; new tokens as if they had been the prompt."""
    model = made()
    logits = (3 + 12) * 10 * VOCAB  # of all rows, and what cells are made with
    needed = (3 * 10 * 16 + logits) * 8 + model.decoder.state_bytes(1, 10)
    for ids, generate in ((IDS, 3), (tuple(range(10)), 0)):
        options = {"ids": ids, "generate": generate}
        monkeypatch.setattr(llmcli.devices, "available_bytes", lambda device: needed)
        look(model, **options)
        monkeypatch.setattr(llmcli.devices, "available_bytes", lambda device: needed - 1)
        needs = "3 rows of 10 positions and the cache of 10 tokens need"
        with pytest.raises(OutOfMemory, match=needs):
            look(model, **options, progress=lambda *reported: pytest.fail("it runs"))


@pytest.mark.parametrize(("parameter", "number", "reported"), [
    ("blocks.1.attn.W_o", torch.nan, "`blocks.1.resid_mid` is not finite at position 0"),
    ("blocks.1.mlp.W_down", torch.nan, "`blocks.1.resid_post` is not finite at position 0"),
    # the logits that the run itself gave out come first
    ("head.W", torch.inf, "the logits at position 6 are not finite"),
])
def test_what_is_not_finite_is_named(parameter, number, reported):
    model = made()
    parameters_of(model.decoder)[parameter].view(-1)[99 * (parameter == "head.W")] = number
    with pytest.raises(NotFinite, match=reported):
        look(model)


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

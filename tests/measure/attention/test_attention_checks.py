"""Every check of the view turns red for the faults that it is there for."""

from __future__ import annotations

import dataclasses
from itertools import cycle
from types import SimpleNamespace

import decoder_faults
import pytest
import torch
from attention_models import BASE, RMS, config_of, ids_of, model_of, small
from blocks import norm_of
from decoder_parameters import parameters_of
from small_models import as_model

from llmcli.commands.attention.measure.run import measure_attention
from llmcli.commands.attention.report.request import AttentionRequest
from llmcli.errors import NotFinite
from llmcli.formats.dense import Dense
from llmcli.nn import softmax_map
from llmcli.nn.step import Step
from llmcli.observe import formulas
from llmcli.observe.attention.averages import Averages, Mixed
from llmcli.observe.attention.block import Block, Tokens
from llmcli.observe.attention.checks import Proof
from llmcli.ops.attention import visible_keys
from llmcli.parts.attention import forward as nn_attention

OF = SimpleNamespace(pattern="blocks.0.attn.pattern", mixed="blocks.0.attn.z")  # of a LayerMap


def checked(model, *, generate=0, count=40, rows=None):
    report = measure_attention(
        model, ids_of(count), AttentionRequest(generate=generate), block_rows=rows
    )
    return {check.name: check for check in report.checks}


def red(model, **options) -> set[str]:
    return {name for name, check in checked(model, **options).items() if not check.ok}


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["gqa", "window", "no-rotation", "wide-values"])
def test_a_sound_model_is_green(kind, dtype):
    found = checked(small(kind, dtype), generate=3)
    assert all(check.ok for check in found.values()), found
    narrow = ["averages"] if dtype == "bfloat16" else []
    assert list(found) == ["row_sums", "masks", "values", *narrow, "formulas", "cache"]
    assert found["values"].value < found["values"].tolerance / 2


@pytest.fixture
def model():
    """Both kinds of layer, with everything that can go wrong in them."""
    window = dataclasses.replace(BASE, window=7, qk_norm=RMS)
    return model_of(config_of(BASE, window), "float32")


def set_mixer(model, layer, **values):
    mixer = model.decoder.blocks[layer].mixers[0]
    mixer.config = dataclasses.replace(mixer.config, **values)


def test_a_scale_that_is_wrong_everywhere(model):
    set_mixer(model, 1, scale=BASE.scale * 1.0005)
    found = checked(model)
    assert not found["formulas"].ok
    assert found["formulas"].where.startswith("blocks.1.attn.scores")


@pytest.mark.parametrize("window", [6, 8, None])
def test_a_window_of_one_key_more_or_less_or_none(model, window):
    set_mixer(model, 1, window=window)
    found = checked(model)
    assert not found["masks"].ok
    assert found["masks"].where.startswith("blocks.1.attn.pattern")
    assert "masks" in red(model, generate=2)
    assert "masks" in red(model, rows=1), "a block reaches one key further than its rows"


def test_a_window_where_there_is_none(model):
    set_mixer(model, 0, window=39)
    assert "masks" in red(model)


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_mask_that_is_shifted_in_the_rows_but_not_in_the_kernel(model, monkeypatch, shift):
    def shifted(positions, keys, window):
        return visible_keys((positions + shift).clamp_min(0), keys, window)

    monkeypatch.setattr(softmax_map, "visible_keys", shifted)
    assert {"masks", "values"} <= red(model)
    assert "masks" in red(small("gqa", "float32"), rows=1), "a block reaches one key further"


def fault_in_kernel(monkeypatch, change):
    attend = nn_attention.attend
    monkeypatch.setattr(nn_attention, "attend", lambda *a, **kwargs: change(attend, a, kwargs))


KERNEL_FAULTS = {
    "no mask": lambda attend, args, kwargs: attend(
        *args, **kwargs | {"causal": False, "mask": None}
    ),
    "scale": lambda attend, args, kwargs: attend(
        *args, **kwargs | {"scale": kwargs["scale"] * 1.0005}
    ),
    "other head's keys": lambda attend, args, kwargs: attend(
        args[0], args[1].flip(1), args[2], **kwargs
    ),
    "other head's values": lambda attend, args, kwargs: attend(
        args[0], args[1], args[2].flip(1), **kwargs
    ),
    "heads split the other way": lambda attend, args, kwargs: attend(
        *args, **kwargs
    )[:, [0, 2, 1, 3]],
    "half a thousandth more": lambda attend, args, kwargs: attend(*args, **kwargs) * 1.0005,
    "capped": lambda attend, args, kwargs: attend(
        torch.tanh(args[0] / 50) * 50, *args[1:], **kwargs
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", KERNEL_FAULTS)
def test_a_kernel_that_computes_something_else(model, monkeypatch, fault):
    fault_in_kernel(monkeypatch, KERNEL_FAULTS[fault])
    assert {"values", "formulas"} <= red(model)


NARROW_FAULTS = {
    "one head a hundredth larger": lambda attend, args, kwargs: attend(*args, **kwargs)
    * torch.tensor([1, 1, 1.01, 1], dtype=torch.bfloat16)[:, None, None],
    "a hundredth smaller": lambda attend, args, kwargs: attend(*args, **kwargs) * 0.99,
    "a scale of three hundredths more": lambda attend, args, kwargs: attend(
        *args, **kwargs | {"scale": kwargs["scale"] * 1.03}
    ),
    "a scale of three hundredths less": lambda attend, args, kwargs: attend(
        *args, **kwargs | {"scale": kwargs["scale"] * 0.97}
    ),
}  # fmt: skip


@pytest.mark.parametrize("rows", [None, 1, 7])
@pytest.mark.parametrize("fault", NARROW_FAULTS)
def test_16_bits_show_a_hundredth_on_average(monkeypatch, fault, rows):
    model = small("gqa", "bfloat16")
    assert red(model, rows=rows) == set()
    fault_in_kernel(monkeypatch, NARROW_FAULTS[fault])
    found = checked(model, rows=rows)["averages"]
    assert not found.ok
    assert found.where.startswith("blocks.")
    assert fault != "one head a hundredth larger" or found.where.endswith(".attn.z[2]")


def test_one_leaking_cell_in_16_bits(monkeypatch):
    def leak(attend, args, kwargs):
        mask = torch.ones(args[0].shape[2], args[1].shape[2], dtype=torch.bool).tril()
        mask[4, 5] = True
        return attend(*args, scale=kwargs["scale"], mask=mask)

    model = small("gqa", "bfloat16")
    fault_in_kernel(monkeypatch, leak)
    found = checked(model)["values"]
    assert not found.ok
    assert found.where.endswith(",4]")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("ids", [[5] * 40, [5, 6] * 20, [3, *[5] * 39]])
def test_rows_that_are_all_rounded_alike_are_no_fault(ids, dtype):
    """Equal tokens have equal values, and a head that looks at one key gives it to every row."""
    for kind in ("gqa", "no-rotation", "window"):
        report = measure_attention(small(kind, dtype), ids)
        assert report.ok, report.checks


def test_what_roundings_may_add_up_to():
    """Independent ones cancel, those of equal tokens need not, and a factor does not at all."""
    generator = torch.Generator().manual_seed(0)
    eps = torch.finfo(torch.bfloat16).eps
    mixed = torch.randn(2, 60, 16, generator=generator)
    squares = mixed.square().sum(-1) * 4

    def share(z, tokens):
        averages = Averages(eps, 2, tokens)
        for first in range(0, 60, 25):
            part = slice(first, first + 25)
            rows = Mixed(
                mixed[:, part], z[:, part], torch.zeros_like(mixed[:, part]), squares[:, part],
                torch.zeros(2, len(z[0, part])),
            )  # fmt: skip
            averages.add(rows, first)
        return averages.shares_H().tolist()

    different, same = torch.arange(60), torch.zeros(60, dtype=torch.long)
    noise = (torch.rand(mixed.shape, generator=generator) - 0.5) * eps
    assert max(share(mixed * (1 + noise), different)) < 0.1
    larger = mixed * torch.tensor([1, 1 + 1.2 * eps])[:, None, None]
    assert share(larger, different)[0] == 0
    assert share(larger, different)[1] > 1
    assert share(larger, same)[1] < 0.5, "60 rows with the same roundings"
    assert share(mixed, different) == [0, 0]


def test_no_averages_where_single_numbers_tell():
    assert Proof(torch.float32, torch.device("cpu")).averages(2, torch.arange(3)) is None
    assert "averages" not in checked(small("gqa", "float32"))


def test_a_gpu_is_allowed_more_of_16_bits():
    """Nobody measured how much: `NARROW_ROUNDINGS_GPU`."""
    found = {}
    for device in ("cpu", "cuda"):
        proof = Proof(torch.bfloat16, torch.device(device))
        a = torch.eye(3)[None]
        block = Block(a, 0, 0, torch.arange(1, 4), Tokens(ids_of(3), torch.device("cpu")))
        v = torch.ones(1, 3, 2)
        proof.compare(
            block, torch.zeros_like(a), OF, [0], v_KSe=v, norms=(v[..., 0] * 0,) * 2,
            z_Hte=v * 1.02,
        )  # fmt: skip
        found[device] = {check.name: check for check in proof.checks()}["values"].ok
    assert found == {"cpu": False, "cuda": True}


def test_rows_of_new_tokens_are_held_against_the_kernel_too(model, monkeypatch):
    def change(attend, args, kwargs):
        z = attend(*args, **kwargs)
        return z * 1.001 if z.shape[2] == 1 else z

    fault_in_kernel(monkeypatch, change)
    assert red(model) == set()
    found = checked(model, generate=2)
    assert not found["values"].ok
    assert found["values"].where.endswith((",40]", ",41]"))


def _eps(model):
    norm = norm_of(model.decoder.blocks[0], 1)
    norm.config = dataclasses.replace(norm.config, eps=1e-3)


def _qk_eps(model):
    norm = model.decoder.blocks[1].mixers[0].k_norm
    norm.config = dataclasses.replace(norm.config, eps=1e-3)


def _projection(part):
    def change(model):
        qkv = model.decoder.blocks[0].mixers[0].qkv
        qkv.weight = Dense(qkv.weight.dense().clone())
        qkv.weight.tensor[{"q": 3, "k": 26, "v": 40}[part], 5] *= 1.01

    return change


def _output(model):
    out = model.decoder.blocks[1].mixers[0].out
    out.weight = Dense(out.weight.dense().clone())
    out.weight.tensor[3, 2] += 1e-3


@pytest.mark.parametrize(
    ("fault", "where"),
    [
        (_eps, "blocks.0.ln1"),
        (_qk_eps, "blocks.1.attn.k_norm"),
        (_projection("q"), "blocks.0.attn.q"),
        (_projection("k"), "blocks.0.attn.k"),
        (_projection("v"), "blocks.0.attn.v"),
        (_output, "blocks.1.attn_out"),
    ],
)
def test_what_leads_to_the_product_and_away_from_it(model, fault, where):
    fault(model)
    for generate in (0, 2):
        found = checked(model, generate=generate)["formulas"]
        assert not found.ok
        assert found.where.startswith(where)


@pytest.mark.parametrize(
    "turn",
    [
        lambda rotate: lambda x, cos, sin: rotate(x, cos, -sin),
        lambda rotate: lambda x, cos, sin: rotate(x, cos.roll(1, 0), sin.roll(1, 0)),
        lambda rotate: lambda x, cos, sin: x,
    ],
)
def test_a_wrong_rotation_though_pattern_and_values_agree(model, monkeypatch, turn):
    monkeypatch.setattr(nn_attention, "rotate", turn(nn_attention.rotate))
    assert red(model) == {"formulas"}


@pytest.mark.parametrize("position", range(0, 40, 3))
def test_a_rotation_that_is_wrong_at_one_position(model, monkeypatch, position):
    rotate = nn_attention.rotate

    def turn(x, cos, sin):
        at = torch.arange(len(cos))
        at[position] = (position + 1) % len(at)
        return rotate(x, cos[at], sin[at])

    monkeypatch.setattr(nn_attention, "rotate", turn)
    monkeypatch.setattr(formulas, "CHEAP", 1)
    found = checked(model)["formulas"]
    assert not found.ok
    assert f",{position}," in found.where
    assert found.words.endswith("(products: 12 or more of 40 rows)")


def test_a_cache_that_is_written_wrongly(model, monkeypatch):
    turns = cycle("kv")

    def write(step, x, slots):
        begin = step.starts[0]
        slots[:, :, begin : step.keys] = x
        if next(turns) == "v" and begin == 0:
            slots[0, 1, 4, 2] += 1e-6

    monkeypatch.setattr(Step, "write", write)
    found = checked(model, generate=2)["cache"]
    assert not found.ok
    assert found.where == "cache.0.v[1,4,2]"


# mistakes outside of what this view looks at: embedding, feed-forward, residual stream, head
ELSEWHERE = {
    "no bias in the feed forward", "another gelu", "learned positions from one",
    "no residual around attention", "feed forward of t3 and not of t4", "gate and up exchanged",
    "tied head in another order", "stream rounded to 16 bits", "stream kept in 16 bits",
}  # fmt: skip


assert decoder_faults.FAULTS.keys() >= ELSEWHERE


@pytest.mark.parametrize("fault", sorted(set(decoder_faults.FAULTS) - ELSEWHERE))
def test_mistakes_that_somebody_makes_when_writing_a_transformer(fault, monkeypatch):
    name, plant = decoder_faults.FAULTS[fault]
    weights = decoder_faults.model(name, torch.float32)
    model = as_model(weights.decoder)
    assert red(model, count=12, generate=3) == set()
    plant(monkeypatch, weights)
    assert red(model, count=12, generate=3)


def rows_of_a_block(a, scores=None):
    proof = Proof(torch.float32, torch.device("cpu"))
    rows, keys = a.shape[1:]
    seen = torch.arange(1, rows + 1)
    block = Block(a, 0, 0, seen, Tokens(ids_of(keys), torch.device("cpu")))
    if scores is None:
        hidden = torch.ones(rows, keys, dtype=torch.bool).triu(1)
        scores = torch.zeros_like(a).masked_fill(hidden, -torch.inf)
    proof.see(block, scores, OF, [0])
    return {check.name: check for check in proof.checks()}


def test_rows_that_do_not_add_up_and_masked_cells_with_a_weight():
    a = torch.tril(torch.ones(1, 5, 5)) / torch.arange(1, 6)[:, None]
    assert all(check.ok for check in rows_of_a_block(a).values())
    off = a.clone()
    off[0, 3] *= 1.00001
    found = rows_of_a_block(off)["row_sums"]
    assert not found.ok
    assert found.where == "blocks.0.attn.pattern[0,3]"
    leaking = a.clone()
    leaking[0, 2, 4] = 1e-30
    found = rows_of_a_block(leaking)["masks"]
    assert (found.value, found.where) == (1, "blocks.0.attn.pattern[0,2]")


@pytest.mark.parametrize("cell", [(0, 0), (4, 0), (4, 4), (3, 1)])
def test_a_key_that_should_be_seen_and_is_not(cell):
    a = torch.tril(torch.ones(1, 5, 5)) / torch.arange(1, 6)[:, None]
    scores = torch.zeros_like(a).masked_fill(a == 0, -torch.inf)
    scores[0, *cell] = -torch.inf
    assert not rows_of_a_block(a, scores)["masks"].ok


def test_a_visible_weight_may_be_0():
    a = torch.zeros(1, 3, 3)
    a[0, :, 0] = 1
    assert all(check.ok for check in rows_of_a_block(a).values())


def test_numbers_that_are_not_finite_end_the_view(model):
    parameters_of(model.decoder)["blocks.1.attn.W_v"][3, 3] = float("nan")
    with pytest.raises(NotFinite, match=r"blocks\.1\.attn"):
        measure_attention(model, ids_of(9))

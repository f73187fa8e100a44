"""Every check of the view turns red for the faults that it is there for.

Mistakes that somebody makes when writing a transformer are shown to it by `test_view_faults`.
"""

from itertools import cycle
from types import SimpleNamespace

import pytest
import torch
from attention_models import BASE, RMS, ids_of, looked, model_of, small
from blocks import configure, norm_of
from covers import few, in_turn
from decoder_faults import attending, red, rotating, wrap
from decoder_parameters import parameters_of

from llmcli.commands.attention.measure.layers import measure_attention
from llmcli.errors import NotFinite
from llmcli.inspect import formulas
from llmcli.inspect.attention import AttentionChecks, Block, Tokens
from llmcli.inspect.passes import Passes
from llmcli.nn import softmax_map
from llmcli.nn.step import Step
from llmcli.weights.dense import Dense

OF = SimpleNamespace(pattern="blocks.0.attn.pattern", mixed="blocks.0.attn.z")  # of a LayerMap


def checked(model, *, generate=0, count=40, rows=None):
    report = measure_attention(Passes(model, ids_of(count), generate), block_rows=rows)
    return {check.name: check for check in report.checks}


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["gqa", "window", "no-rotation", "wide-values"])
def test_a_sound_model_is_green(kind, dtype):
    found = checked(small(kind, dtype), generate=3)
    assert all(check.ok for check in found.values()), found
    assert list(found) == ["row_sums", "masks", "values", "formulas", "steps"]
    assert found["values"].value < found["values"].tolerance / 2


@pytest.mark.parametrize("kind", few(["no-rotation", "gqa"], 1))
def test_values_of_equal_tokens_which_round_alike_are_no_alarm(kind):
    looked(small(kind, "float32"), [5] * 1500)


@pytest.fixture
def model():
    """Both kinds of layer, with everything that can go wrong in them."""
    window = BASE.changed(window=7, qk_norm=RMS)
    return model_of(BASE, window, dtype="float32")


def of_mixer(layer, **values):
    return lambda patch, model: configure(model.decoder.blocks[layer].mixers[0], **values)


def of_norm(find):
    """The norm `find(blocks)` has another eps."""
    return lambda patch, model: configure(find(model.decoder.blocks), eps=1e-3)


def of_weight(layer, name, cell, fault):
    """One number of a weight is `fault(it)`."""

    def change(patch, model):
        linear = getattr(model.decoder.blocks[layer].mixers[0], name)
        linear.weight = Dense(linear.weight.dense().clone())
        linear.weight.tensor[cell] = fault(linear.weight.tensor[cell])

    return change


def shifted(shift):
    """The mask of the rows, but not of the kernel."""
    return wrap(softmax_map, "visible_keys", lambda plain, at, *keys: plain(
        (at + shift).clamp_min(0), *keys
    ))  # fmt: skip


# what is planted, which checks are red at least, and where the last of them is
MASKS, VALUES, FORMULAS = ("masks",), ("values", "formulas"), ("formulas",)
FAULTS = {
    "a scale": (of_mixer(1, scale=BASE.scores.scale * 1.0005), FORMULAS, "blocks.1.attn.scores"),
    "a window of a key less": (of_mixer(1, window=6), MASKS, "blocks.1.attn.pattern"),
    "a window of a key more": (of_mixer(1, window=8), MASKS, "blocks.1.attn.pattern"),
    "no window": (of_mixer(1, window=None), MASKS, "blocks.1.attn.pattern"),
    "a window where there is none": (of_mixer(0, window=39), MASKS, "blocks.0.attn.pattern"),
    "a mask of rows before": (shifted(-1), ("values", "masks"), ""),
    "a mask of rows behind": (shifted(1), ("values", "masks"), ""),
    "a kernel without a mask": (attending(
        lambda attend, *qkv, **rest: attend(*qkv, **rest | {"causal": False, "mask": None})),
        VALUES, ""),
    "a kernel's scale": (attending(
        lambda attend, *qkv, scale, **rest: attend(*qkv, scale=scale * 1.0005, **rest)),
        VALUES, ""),
    "other head's keys": (
        attending(lambda attend, q, k, v, **rest: attend(q, k.flip(1), v, **rest)), VALUES, ""),
    "other head's values": (
        attending(lambda attend, q, k, v, **rest: attend(q, k, v.flip(1), **rest)), VALUES, ""),
    "heads split the other way": (
        attending(lambda attend, q, k, v, **rest: attend(q, k, v, **rest)[:, [0, 2, 1, 3]]),
        VALUES, ""),
    "half a thousandth more": (
        attending(lambda attend, q, k, v, **rest: attend(q, k, v, **rest) * 1.0005), VALUES, ""),
    "capped": (
        attending(lambda attend, q, k, v, **rest: attend(torch.tanh(q / 50) * 50, k, v, **rest)),
        VALUES, ""),
    # what leads to the product and away from it
    "a norm": (of_norm(lambda blocks: norm_of(blocks[0], 1)), FORMULAS, "blocks.0.ln1"),
    "a norm of keys": (
        of_norm(lambda blocks: blocks[1].mixers[0].k_norm), FORMULAS, "blocks.1.attn.k_norm"),
    **{f"a weight of {part}": (
        of_weight(0, "qkv", (row, 5), lambda x: x * 1.01), FORMULAS, f"blocks.0.attn.{part}")
       for part, row in (("q", 3), ("k", 26), ("v", 40))},
    "a weight of the output": (
        of_weight(1, "out", (3, 2), lambda x: x + 1e-3), FORMULAS, "blocks.1.attn_out"),
}  # fmt: skip


# a block reaches one key further than its rows, at both ends: blocks of one row show it
@pytest.mark.parametrize(
    ("fault", "options"), in_turn(list(FAULTS), [{"generate": 2, "rows": 1}, {}])
)
def test_a_fault_turns_its_checks_red(model, monkeypatch, fault, options):
    plant, wrong, where = FAULTS[fault]
    plant(monkeypatch, model)
    found = checked(model, **options)
    assert {*wrong} <= red(found.values())
    assert found[wrong[-1]].where.startswith(where)
    if "mask of rows" in fault:
        plain = checked(small("gqa", "float32"), rows=1)
        assert not plain["masks"].ok, "without a window, too"


@pytest.mark.parametrize("kind", ["gqa", "window"])
@pytest.mark.parametrize("fault", ["a kernel's scale", "half a thousandth more"])
def test_a_longer_prompt_hides_no_fault(monkeypatch, kind, fault):
    """What a row may be off depends on the keys that it sees, not on the rows after it."""
    model = small(kind, "float32")
    FAULTS[fault][0](monkeypatch, model)
    short, long = checked(model), checked(model, count=500)
    for name in VALUES:  # of formulas only some rows are compared
        assert long[name].value > short[name].value / 3 > 1


def test_one_leaking_cell_in_16_bits(monkeypatch):
    def leak(attend, q, k, v, **rest):
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
        mask[4, 5] = True
        return attend(q, k, v, scale=rest["scale"], mask=mask)

    model = small("gqa", "bfloat16")
    attending(leak)(monkeypatch, model)
    found = checked(model)["values"]
    assert not found.ok
    assert found.where.endswith(",4]")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("ids", [[5] * 40, [5, 6] * 20, [3, *[5] * 39]])
def test_rows_that_are_all_rounded_alike_are_no_fault(ids, dtype):
    """Equal tokens have equal values, and a head that looks at one key gives it to every row."""
    for kind in ("gqa", "no-rotation", "window"):
        looked(small(kind, dtype), ids)


def test_a_gpu_is_allowed_more_of_16_bits():
    """Nobody measured how much: `NARROW_ROUNDINGS_GPU`."""
    found = {}
    for device in ("cpu", "cuda"):
        proof = AttentionChecks(torch.bfloat16, torch.device(device))
        a = torch.eye(3)[None]
        block = Block(a, 0, 0, torch.arange(1, 4), Tokens(ids_of(3), torch.device("cpu")))
        v = torch.ones(1, 3, 2)
        none = torch.zeros(1, 3)
        proof.compare(block, OF, [0], v_KSe=v, norms=(none, none), z_Hte=v * 1.02)
        found[device] = {check.name: check for check in proof.checks()}["values"].ok
    assert found == {"cpu": False, "cuda": True}


def test_steps_of_new_tokens_are_held_against_the_formulas_too(model, monkeypatch):
    def change(attend, *qkv, **rest):
        z = attend(*qkv, **rest)
        return z * 1.001 if z.shape[2] == 1 else z

    attending(change)(monkeypatch, model)
    assert red(checked(model).values()) == set()
    found = checked(model, generate=2)
    assert red(found.values()) == {"steps"}
    assert ",40," in found["steps"].where


@pytest.mark.parametrize("turn", [
    lambda rotate, x, cos, sin: rotate(x, cos, -sin),
    lambda rotate, x, cos, sin: rotate(x, cos.roll(1, 0), sin.roll(1, 0)),
    lambda rotate, x, cos, sin: x,
])
def test_a_wrong_rotation_though_pattern_and_values_agree(model, monkeypatch, turn):
    rotating(turn)(monkeypatch, model)
    assert red(checked(model).values()) == {"formulas"}


@pytest.mark.parametrize("position", few([0, 39, 21, *range(3, 37, 6)], 3))
def test_a_rotation_that_is_wrong_at_one_position(model, monkeypatch, position):
    def turn(rotate, x, cos, sin):
        at = torch.arange(len(cos))
        at[position] = (position + 1) % len(at)
        return rotate(x, cos[at], sin[at])

    rotating(turn)(monkeypatch, model)
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
    found = checked(model, generate=2)["steps"]
    assert not found.ok
    assert found.where == "cache.0.v[1,4,2]"


def rows_of_a_block(a, scores=None):
    proof = AttentionChecks(torch.float32, torch.device("cpu"))
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
    assert (found.ok, found.where) == (False, "blocks.0.attn.pattern[0,3]")
    leaking = a.clone()
    leaking[0, 2, 4] = 1e-30
    found = rows_of_a_block(leaking)["masks"]
    assert (found.value, found.where) == (1, "blocks.0.attn.pattern[0,2]")
    for cell in ((0, 0), (4, 0), (4, 4), (3, 1)):  # a key that should be seen and is not
        scores = torch.zeros_like(a).masked_fill(a == 0, -torch.inf)
        scores[0, *cell] = -torch.inf
        assert not rows_of_a_block(a, scores)["masks"].ok
    a = torch.zeros(1, 3, 3)
    a[0, :, 0] = 1  # a visible weight may be 0
    assert all(check.ok for check in rows_of_a_block(a).values())


def test_numbers_that_are_not_finite_end_the_view(model):
    parameters_of(model.decoder)["blocks.1.attn.W_v"][3, 3] = float("nan")
    with pytest.raises(NotFinite, match=r"blocks\.1\.attn"):
        measure_attention(Passes(model, ids_of(9)))

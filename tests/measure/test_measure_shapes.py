"""The shapes that are shown are those that ran: held against hooks of PyTorch's own dispatcher."""

from collections import namedtuple
from dataclasses import replace

import pytest
import torch
from anatomy_configs import config_of, models
from covers import covered, in_turn
from decoder_faults import wrap
from decoder_parameters import replace_weight
from hypothesis import given, settings
from hypothesis import strategies as st
from planned import departures, wrongly_filled
from small_models import random_model
from tiny_checkpoints import write_gpt2, write_llama
from torch.utils._python_dispatch import TorchDispatchMode
from zoo import MODELS, layer, variant

from llmcli.commands.shapes import measure as shapes
from llmcli.commands.shapes.measure import (
    ShapesRequest,
    folded_check,
    model_names,
    model_shapes,
    stored_check,
    stored_tensors,
    symbols_check,
)
from llmcli.commands.shapes.report import Stored
from llmcli.config.attention import RopeConfig
from llmcli.config.mlp import MlpConfig
from llmcli.config.model import sequential
from llmcli.decoder import decoder
from llmcli.decoder.decoder import Decoder
from llmcli.graph.plan import plan
from llmcli.graph.precision import Precision
from llmcli.graph.spec import Call
from llmcli.loading.load import load
from llmcli.nn.step import Step
from llmcli.parts.attention import Attention
from llmcli.parts.norm import Norm
from llmcli.prepare.prepared import prepare

DTYPES = ("bfloat16", "float32", "float64")


def llama(layers=2, **mixer):
    mlp = MlpConfig(hidden=20, activation="silu", gated=True)
    own = {"head_dim": 4, "value_dim": 4, "scale": 0.5, "rope": RopeConfig(theta=1e4, dims=4)}
    return config_of(*(layer(mlp, **own | mixer),) * layers)


# a tensor that an operation of PyTorch gave
Made = namedtuple("Made", "shape strides dtype storage offset")


def made(tensor):
    dtype = str(tensor.dtype).removeprefix("torch.")
    storage = tensor.untyped_storage().data_ptr()
    return Made(tuple(tensor.shape), tensor.stride(), dtype, storage, tensor.storage_offset())


def requested(config, batch=1, tokens=3, dtype="float32"):
    return ShapesRequest(config=config, batch=batch, tokens=tokens, precision=Precision.of(dtype))


class Hook(TorchDispatchMode):
    """Sees what every operation gives; keeps it all, so that no storage is used twice."""

    def __init__(self):
        super().__init__()
        self.seen, self.kept = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.seen.append(made(tensor))
                self.kept.append(tensor)
        return result


calls = st.tuples(st.integers(1, 2), st.integers(1, 5), st.sampled_from(DTYPES))


@settings(max_examples=50, deadline=None)
@given(models(), calls)
def test_every_row_is_what_an_independent_hook_saw(config, call):
    """In both phases each tensor that is shown came, as it is described, from an operation."""
    batch, tokens, dtype = call
    model = random_model(config, dtype)
    report = model_shapes(requested(config, batch, tokens, dtype), {})
    state = model.decoder.new_state(batch, tokens + 1)
    for phase, new in (("prefill", tokens), ("decode", 1)):
        emitted = {}
        with Hook() as hook:
            ids = torch.zeros(batch, new, dtype=torch.long)
            model.decoder(ids, state, tap=emitted.__setitem__)
        rows = {
            tensor.name: tensor
            for tensor in report.tensors
            if tensor.phase == phase and tensor.written and tensor.kind == "activation"
        }
        assert list(rows) == list(emitted)
        came = set(hook.seen)
        for name, tensor in rows.items():
            what = made(emitted[name])
            assert what in came, name
            assert (tensor.shape, tensor.dtype) == (what.shape, what.dtype), name
            assert tensor.bytes == emitted[name].numel() * emitted[name].element_size()
    assert departures(model, batch, tokens) == {}


@settings(max_examples=15, deadline=None)
@given(models(), calls)
def test_the_same_tensors_come_in_that_order_when_nobody_looks(config, call):
    """Without a tap too each row, but for the norms' divisors, is among the results, in order."""
    batch, tokens, dtype = call
    model = random_model(config, dtype)
    with Hook() as hook:
        model.decoder(torch.zeros(batch, tokens, dtype=torch.long))
    given = {"batch": batch, "tokens": tokens, "past": 0, "phase": "prefill", "dtype": dtype}
    at = -1
    places = {}
    for number, tensor in enumerate(hook.seen):
        places.setdefault((tensor.shape, tensor.dtype), []).append(number)
    for spec in plan(config, Call(**given)).written:
        if spec.name.endswith(".scale"):
            continue  # computed for whoever looks: the fused norm has no such tensor
        if spec.name.endswith((".q", ".k")) and config.layers[spec.layer].attention.qk_norm:
            continue  # normalized before the axes of heads and tokens are exchanged
        later = [n for n in places.get((spec.shape, spec.dtype), ()) if n >= at]
        assert later, spec.name
        at = at if spec.shares else later[0]  # views of one product may be made in any order


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*in_turn(covered(MODELS), DTYPES), ("post-norm, narrow embeddings", "bfloat16")],
)
def test_a_run_has_what_is_planned(name, dtype):
    assert departures(random_model(MODELS[name], dtype)) == {}


def broken_norm(observed, self, x, step):
    out = self(x)
    step.emit(f"{self.name}.scale", x.double().square().mean(-1, keepdim=True))
    step.emit(f"{self.name}.out", out)
    return out


def other_weight(name, change):
    """Plants `change(tensor)` instead of the weight that the decoder says it has."""
    return lambda patch, of: replace_weight(
        of.decoder, name, change(of.decoder.weight(name).dense())
    )


FAULTS = {
    "heads are copied": ("memory of prefill", wrap(
        Attention, "_heads", lambda heads, self, x: x.transpose(1, 2).contiguous())),
    "a norm in another dtype": ("decode", wrap(Norm, "observed", broken_norm)),
    "keys and values are written changed": ("copies", wrap(
        Step, "write", lambda write, self, x, slots: write(self, x + 1, slots))),
    "scores lack a key": ("derived", wrap(
        Attention, "score_rows",
        lambda rows, self, q, k, *rest: rows(self, q, k[:, :, 1:], *rest))),
    "a cache with one slot more": ("cache", wrap(
        decoder, "allocate",
        lambda allocate, config, precision, batch, capacity, device: allocate(
            config, precision, batch, capacity + 1, device))),
    "a weight by itself": ("memory of parameters", other_weight("blocks.1.attn.W_v", torch.clone)),
    "a weight of another shape": ("parameters", other_weight(
        "blocks.0.attn.W_o", lambda weight: weight.T[:, :3])),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_model_is_seen(fault, monkeypatch):
    aspect, plant = FAULTS[fault]
    model = random_model(llama(), torch.float32)
    plant(monkeypatch, model)
    assert aspect in departures(model)


SPEC_FAULTS = {
    "shape": ("prefill", "blocks.1.mlp.up", {"shape": (1, 3, 7)}),
    "name": ("decode", "blocks.0.resid_mid", {"name": "blocks.0.resid_middle"}),
    "dtype": ("prefill", "logits_raw", {"dtype": "bfloat16"}),
    "a copy called a view": ("memory of prefill", "blocks.1.resid_mid", {"shares": "embed"}),
    "a view called a copy": ("memory of decode", "blocks.1.resid_pre", {"shares": None}),
    "queries called a copy": ("memory of prefill", "blocks.0.attn.q", {"shares": None}),
    "derived": ("derived", "blocks.0.attn.result", {"shape": (1, 1, 12)}),
}


@pytest.mark.parametrize("fault", SPEC_FAULTS)
def test_a_fault_in_the_specs_is_seen(fault, monkeypatch):
    aspect, name, change = SPEC_FAULTS[fault]
    honest = ShapesRequest.plan

    def lying(self, phase):
        plan = honest(self, phase)
        specs = [replace(spec, **change) if spec.name == name else spec for spec in plan.tensors]
        return replace(plan, tensors=tuple(specs))

    monkeypatch.setattr(ShapesRequest, "plan", lying)
    assert aspect in departures(random_model(llama(), torch.float32))


def test_wrong_letters_and_wrong_rows_are_seen():
    request = requested(llama(), tokens=5)
    tensors = request.tensors(("prefill", "decode"))
    rows = shapes.fold(tensors, request.config, lambda spec: None)
    assert symbols_check(tensors, request).ok
    assert folded_check(tensors, rows).ok
    at = [item[0].name for item in tensors].index("blocks.1.attn.k_rot")
    for change in ({"axes": ("B", "H", "T", "dh")}, {"shape": (1, 2, 5, 3)}):
        wrong = list(tensors)
        wrong[at] = tuple(replace(spec, **change) for spec in tensors[at])
        assert symbols_check(wrong, request).where == "blocks.1.attn.k_rot"
        assert folded_check(wrong, rows).where == "blocks.1.attn.k_rot"
    assert not folded_check(tensors[:-1], rows).ok


def test_the_cache_grows_by_what_a_state_takes_more():
    config = llama(layers=3, window=4)
    request = requested(config, batch=2, tokens=9, dtype="bfloat16")
    growth = model_shapes(replace(request, phases=("prefill",)), {}).cache
    decoder = Decoder(config, Precision.of("bfloat16"), device="meta")
    sizes = [decoder.new_state(2, capacity).nbytes for capacity in (9, 10)]
    assert [growth.prefill, growth.decode] == sizes
    assert growth.per_token == sizes[1] - sizes[0] == 3 * growth.per_layer[0]


@pytest.mark.parametrize(("write", "dtype"), in_turn([None, write_llama, write_gpt2], DTYPES))
def test_a_checkpoint_is_what_it_says_and_as_it_is_stored_and_a_lie_is_seen(write, dtype, tmp_path):
    """`tiny`, or one that is written."""
    spec = "tiny" if write is None else str(write(tmp_path / "m"))
    model = load(spec, offline=True, dtype=dtype, device="cpu")
    prepared = prepare(model.checkpoint)
    stored, request = stored_tensors(prepared), requested(prepared.config, 2, 4, dtype)
    assert departures(model, 2, 4) == {}
    report = model_shapes(request, stored, stored_check(prepared))
    assert [check.name for check in report.checks if check.ok] == ["symbols", "folded", "stored"]
    assert all(row.source for row in report.rows if row.first.kind == "parameter")
    assert wrongly_filled(model.ledger, stored) == []
    other = stored | {"embed.W": replace(stored["embed.W"], source="somewhere.else")}
    assert wrongly_filled(model.ledger, other) == ["embed.W"]
    wider = replace(prepared.config, width=prepared.config.width + 1)
    (check,) = stored_check(replace(prepared, config=wider))
    assert check.where == "embed.W"
    total = sum(info.nbytes for info in model.checkpoint.tensors.values())
    assert sum(item.stored_bytes for item in stored.values()) == total


def test_norms_that_the_layer_before_stores_are_one_row():
    request = requested(variant("opt-350m").config(num_hidden_layers=4))
    names = {row.name: row.aliases for row in model_names(request).names}
    assert "model.decoder.layers.{i-1}.final_layer_norm" in names["blocks.{1-3}.ln1.out"]
    kept = {"stored_shape": (48,), "stored_format": "F32", "stored_bytes": 192}
    stored = {f"blocks.{i + 1}.ln1.w": Stored(source=f"layers.{i}.n", **kept) for i in range(3)}
    sources = {row.name: row.source for row in model_shapes(request, stored).rows}
    assert sources["blocks.{1-3}.ln1.w"] == "layers.{0-2}.n"


def test_eighty_layers_are_looked_at_once(monkeypatch):
    """To fold them, and once to check it. `tests/benchmarks/startup.py` has the seconds."""
    moved = []
    honest = shapes._moved
    monkeypatch.setattr(shapes, "_moved", lambda *of: (moved.append(of), honest(*of))[1])
    config = replace(llama(), vocab=128256, width=8192)
    mixer = replace(config.layers[0].attention, heads=64, kv_heads=8, head_dim=128, value_dim=128)
    ffn = replace(config.layers[0].parts[-1], hidden=28672)
    config = replace(config, layers=(sequential(mixer, ffn, norm=config.final_norm),) * 80)
    request = requested(config, tokens=8192, dtype="bfloat16")
    report = model_shapes(request, {})
    assert sum(spec.count for spec in request.parameters()) == 70_553_706_496
    assert report.cache.per_token == 80 * 2 * 8 * 128 * 2
    assert len(report.rows) < 50
    layers = [tensor for tensor in report.tensors if tensor.layer is not None]
    assert len(moved) == 2 * len(layers)

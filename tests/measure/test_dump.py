"""Dumped tensors: bit for bit what ran, in parts of any size, with faults planted."""

import math
from itertools import cycle

import numpy as np
import pytest
import torch
from covers import in_turn
from decoder_parameters import parameters_of
from hypothesis import given
from hypothesis import strategies as st
from small_models import random_model
from unfused import attention_of, emitted
from zoo import MODELS

import llmcli.commands.dump.measure as dump_module
import llmcli.devices
from llmcli.commands.dump.measure import measure_dump, plan_dump
from llmcli.errors import OutOfMemory
from llmcli.graph.names import known
from llmcli.inspect.passes import Passes
from llmcli.inspect.statistics import Statistics
from llmcli.nn.step import Step

IDS = (5, 17, 3, 17, 42, 8, 30)


def made(name="llama", dtype="float32"):
    return random_model(MODELS[name], dtype)


class File:
    """What was written, in order."""

    def __init__(self):
        self.arrays = {}

    def write(self, name, shape, dtype, parts):
        flat = [part.reshape(-1) for part in parts]
        assert name not in self.arrays
        whole = np.concatenate(flat).reshape(shape)
        assert whole.dtype.name == ("uint16" if dtype == "bfloat16" else dtype)
        if dtype == "bfloat16":
            whole = torch.from_numpy(whole.view(np.int16)).view(torch.bfloat16)
        self.arrays[name] = torch.as_tensor(whole)


def dumped(model, names=None, ids=IDS, generate=0, **options):
    """The report and the arrays; `names` None: everything that there is."""
    file = File()
    names = known(model.config) if names is None else names
    plan = plan_dump(model, names, len(ids) + generate)
    report = measure_dump(Passes(model, ids, generate), plan, write=file.write, **options)
    return report, file.arrays


@pytest.mark.parametrize(
    ("name", "dtype", "generate"),
    in_turn(["llama", "gpt2", "window", "qk norm"], ["float32", "bfloat16", "float64"], [0, 3]),
)
def test_every_tensor_is_bit_for_bit_what_ran(name, dtype, generate):
    model = made(name, dtype)
    report, arrays = dumped(model, generate=generate)
    assert report.ok
    assert not report.not_finite
    ids = [one.id for one in report.tokens]
    assert tuple(ids[: len(IDS)]) == IDS
    assert (report.prompt_tokens, len(ids)) == (len(IDS), len(IDS) + generate)
    state = model.decoder.new_state(1, 40)
    seen = emitted(model, ids, state)
    seen |= {name: one[0, :, : len(ids)] for name, one in state.tensors().items()}
    for tensor, array in arrays.items():
        if tensor in seen:
            assert torch.equal(array, seen[tensor]), tensor
    for tensor, expected in attention_of(model, seen, torch.float32).items():
        torch.testing.assert_close(arrays[tensor].float(), expected, rtol=1e-5, atol=1e-5)
    for tensor, slot in parameters_of(model.decoder).items():
        turned = tensor == "head.W" or ".W_" in tensor
        assert torch.equal(arrays[tensor], slot.t() if turned else slot)
    assert list(arrays) == [one.name for one in report.tensors] == list(known(model.config))
    # shapes and sizes are known before
    plan = plan_dump(model, arrays, len(IDS) + generate)
    for one, tensor in zip(plan, report.tensors, strict=True):
        array = arrays[one.name]
        assert tuple(array.shape) == one.shape == tensor.shape
        assert one.bytes == array.nbytes
        assert len(one.axes) == len(one.shape)
        assert "T" not in one.axes or one.shape[one.axes.index("T")] == len(ids)


@pytest.mark.parametrize("name", ["ln_final.scale", "head_proj", "logits"])
def test_outputs_are_of_all_tokens_without_a_check_too(name):
    _, arrays = dumped(made("post-norm, narrow embeddings"), [name], check=False)
    assert len(arrays[name]) == len(IDS)


@pytest.mark.parametrize("at_once", [1, 5, 17])
def test_the_size_of_the_parts_changes_nothing(at_once, monkeypatch):
    model = made("window")
    report, arrays = dumped(model, generate=2)
    monkeypatch.setattr(dump_module, "AT_ONCE", at_once)
    monkeypatch.setattr("llmcli.inspect.statistics.AT_ONCE", at_once)
    again, others = dumped(model, generate=2)
    for name, array in arrays.items():
        torch.testing.assert_close(others[name], array, rtol=1e-5, atol=1e-6)
    for one, other in zip(report.tensors, again.tensors, strict=True):
        assert math.isclose(one.norm, other.norm, rel_tol=1e-6)
        assert math.isclose(one.std, other.std, rel_tol=1e-6)
        assert one.masked == other.masked


numbers = st.one_of(
    st.floats(-1e6, 1e6, width=32), st.sampled_from([math.nan, math.inf, -math.inf, 0.0])
)


@given(st.lists(st.lists(numbers, max_size=6), max_size=6), st.booleans())
def test_statistics_do_not_depend_on_how_numbers_come(parts, masks):
    found = Statistics(masks=masks)
    for part in parts:
        found.add(torch.tensor(part, dtype=torch.float32))
    x = np.array([number for part in parts for number in part], dtype=np.float32).astype(float)
    bad = ~np.isfinite(x)
    if masks:
        assert found.masked == (x == -np.inf).sum()
        bad &= x != -np.inf
    assert found.nan == np.isnan(x).sum()
    assert found.infinite == bad.sum() - found.nan
    assert found.first_bad == (int(bad.argmax()) if bad.any() else None)
    finite = x[np.isfinite(x)]
    summary = found.summary(x.shape)
    assert summary["first_bad"] == (None if found.first_bad is None else (found.first_bad,))
    ours = (*(summary[name] for name in ("mean", "std", "min", "max")), found.norm)
    if not len(finite):
        assert all(map(math.isnan, ours))
        return
    theirs = (finite.mean(), finite.std(), finite.min(), finite.max(), np.sqrt((finite**2).sum()))
    assert np.allclose(ours, theirs, rtol=1e-9, atol=1e-9 * max(1.0, np.abs(finite).max()))


def test_looking_changes_nothing_and_runs_once_and_no_further_than_the_last_layer(monkeypatch):
    model, emit, ran = made("qk norm"), Step.emit, []
    logits = model.decoder(torch.tensor([IDS]))[0]
    monkeypatch.setattr(Step, "emit", lambda *args: ran.append(args[1]) or emit(*args))

    def runs(*names):
        ran.clear()
        _, arrays = dumped(model, names)
        return arrays, ran.count("embed"), {name.split(".")[1] for name in ran if "blocks" in name}

    arrays, passes, layers = runs("logits", "blocks.0.attn.scores", "cache.1.v")
    assert (passes, layers) == (1, {"0", "1"})
    assert torch.equal(arrays["logits"], logits)
    assert runs("blocks.0.attn.W_q")[1] == 0, "a parameter needs no run"
    assert runs("embed")[1:] == runs("blocks.0.mlp_out")[1:] == (1, {"0"})
    assert runs("logits_raw")[1:] == (1, {"0", "1"})


def test_what_is_no_longer_needed_is_forgotten():
    """Of all that a layer wrote the next one needs its residual stream."""
    model = made()
    sizes = []

    class Watched(dump_module._Dump):
        def _settle(self, one):
            super()._settle(one)
            sizes.append(len(self._kept))

    names = [f"blocks.{i}.{part}" for i in (0, 1) for part in ("attn.z", "mlp.post")]
    watched = Watched(Passes(model, IDS), plan_dump(model, names, 7), check=True, write=None)
    watched.run()
    assert sizes == [0, 0, 0, 0]
    assert len(watched.checks()) == 1


@pytest.mark.parametrize("generate", [0, 2])
def test_a_nan_is_named_where_it_first_is_and_the_rest_is_written(generate):
    broken = made("gpt2")
    parameters_of(broken.decoder)["blocks.0.mlp.b_up"][11] = math.nan
    names = [f"blocks.0.{part}" for part in ("attn.z", "ln2.out", "mlp.pre", "mlp_out")]
    report, arrays = dumped(broken, [*names, "logits"], generate=generate)
    assert report.not_finite == "`blocks.0.mlp.pre[0,11]` is not a number"
    assert list(arrays) == [*names, "logits"], "what there is"
    by_name = {one.name: one for one in report.tensors}
    assert by_name["blocks.0.mlp.pre"].nan == len(IDS)
    assert by_name["blocks.0.mlp.pre"].mean == pytest.approx(
        float(arrays["blocks.0.mlp.pre"].double().nanmean())
    )
    assert math.isnan(by_name["logits"].mean)
    assert by_name["blocks.0.ln2.out"].first_bad is None
    assert not report.ok
    assert all(check.ok for check in report.checks), "the formulas before it hold"
    assert report.checks[0].words.startswith("2 tensors")


def test_an_infinity_is_no_number_but_a_masked_score_is_one():
    broken = made("gpt2")
    parameters_of(broken.decoder)["blocks.0.mlp.b_up"][11] = -math.inf
    report, _ = dumped(broken, ["blocks.0.attn.scores", "blocks.0.mlp.pre"])
    assert report.not_finite == "`blocks.0.mlp.pre[0,11]` is infinite"
    assert [one.inf for one in report.tensors] == [0, len(IDS)]
    assert report.tensors[0].masked == 3 * 21
    # a NaN beside what is dumped, of which ReLU makes 0: its formula has it
    broken = made("gpt2")
    parameters_of(broken.decoder)["blocks.0.ln1.b"][2] = math.nan
    report, _ = dumped(broken, ["blocks.0.ln1.scale", "blocks.0.attn.q"])
    assert "blocks.0.attn.q[0,0,0]" in report.not_finite


def test_the_check_of_the_cache_turns_red(monkeypatch):
    write, turns = Step.write, cycle("kv")

    def faulty(step, x, slots):
        write(step, x, slots)
        if next(turns) == "v" and step.starts[0]:  # only for tokens from the cache
            slots[0, 1, 2, 3] += 1

    report, _ = dumped(made(), ["cache.0.v", "cache.0.k", "cache.1.v"], generate=2)
    assert [check.ok for check in report.checks] == [True, True]
    monkeypatch.setattr(Step, "write", faulty)
    report, _ = dumped(made(), ["cache.0.v", "cache.0.k", "cache.1.v"], generate=2)
    cache, steps = report.checks  # one pass wrote this cache, steps the one that is generated with
    assert (cache.ok, steps.ok, steps.name) == (True, False, "steps")
    assert steps.where == "cache.0.v, before position 7"


@pytest.mark.parametrize("name", ["ln_final.out", "blocks.0.mlp_out"])
def test_memory_is_asked_for_to_the_byte_before_the_model_runs(name, monkeypatch):
    """With the logits that are computed though they are not dumped."""
    model, tokens = made(), len(IDS)
    needed = 4 * model.config.width * tokens
    if name == "ln_final.out":
        needed += 2 * 4 * model.config.vocab * tokens  # before and after they are widened
    monkeypatch.setattr(llmcli.devices, "available_bytes", lambda device: needed)
    dumped(model, [name], check=False)
    monkeypatch.setattr(llmcli.devices, "available_bytes", lambda device: needed - 1)
    monkeypatch.setattr(type(model.decoder), "__call__", None)
    with pytest.raises(OutOfMemory, match="activations that are dumped"):
        dumped(model, [name], check=False)


def test_a_prompt_of_one_token_and_of_many():
    report, arrays = dumped(made("qk norm"), ids=(5,))
    assert report.ok
    assert arrays["blocks.0.attn.pattern"].flatten().tolist() == [1.0] * 4
    assert arrays["cache.1.k"].shape == (2, 1, 8)
    ids = [3 + i % 40 for i in range(50)]
    report, _ = dumped(made(), ["blocks.1.attn.z", "blocks.1.attn.result"], ids=ids)
    assert report.checks[0].words.endswith("(products: 32 or more of 50 rows)")

"""`selftest` passes here, sees planted faults, and compares itself with a receipt."""

import json
import sys
from dataclasses import replace
from itertools import count

import decoder_faults
import pytest
import torch
import torch.nn.functional as F
from needs import needs_kernels

from llmcli.cli.app import main
from llmcli.commands.selftest.measure import arithmetic, run
from llmcli.commands.selftest.measure.arithmetic import Group, groups_of, measure_groups
from llmcli.commands.selftest.measure.models import MODELS
from llmcli.commands.selftest.report import (
    GroupResult,
    MemoryResult,
    RateResult,
    Receipt,
    SelftestReport,
    compare,
)
from llmcli.errors import WriteFailed
from llmcli.measure import engines
from llmcli.nn.step import Step
from llmcli.records.document import ViewCheck

CPU = torch.device("cpu")
FEW = ("llama", "gpt2", "layers that differ", "experts", "short convolutions", "gated deltanet")


@pytest.fixture
def few(monkeypatch):
    """Each property of few models: all of them take a minute."""
    every = groups_of(CPU)

    def some(group):
        names = [name for name in group.models if name in FEW or group.name == "replay"][:6]
        return replace(group, models={name: group.models[name] for name in names})

    monkeypatch.setattr(arithmetic, "groups_of", lambda device: [some(group) for group in every])


def failed():
    return {result.check.name for result in measure_groups(CPU) if not result.check.ok}


def test_all_properties_hold_here(few):
    results = measure_groups(CPU)
    assert [result.check.name for result in results] == [group.name for group in groups_of(CPU)]
    assert [result.check for result in results if not result.check.ok] == []
    assert all(result.cases > 1 for result in results)


def attention_that_is_off(monkeypatch):
    attend = F.scaled_dot_product_attention
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", lambda *qkv, **how: attend(*qkv, **how) * (1 + 1e-6)
    )


def products_that_lose_bits(monkeypatch):
    product = F.linear
    monkeypatch.setattr(
        F, "linear",
        lambda x, w, b=None: product(x.half().to(x.dtype) if x.dtype == torch.float32 else x, w, b),
    )


def a_tap_that_changes_a_number(monkeypatch):
    emit = Step.emit

    def tapped(self, name, tensor):
        out = emit(self, name, tensor)
        return out * (1 + 2**-20) if self.tap and out.is_floating_point() else out

    monkeypatch.setattr(Step, "emit", tapped)


def edits_that_are_dropped(monkeypatch):
    emit = Step.emit

    def dropped(self, name, tensor):
        self.edits = {}
        return emit(self, name, tensor)

    monkeypatch.setattr(Step, "emit", dropped)


def later_tokens_rotated_one_too_far(monkeypatch):
    _, plant = decoder_faults.FAULTS["rotated one position late"]
    plant(monkeypatch, None)


@pytest.mark.parametrize(("plant", "seen"), [
    (a_tap_that_changes_a_number, "taps"), (edits_that_are_dropped, "edits"),
    (later_tokens_rotated_one_too_far, "steps"), (products_that_lose_bits, "float32"),
    (attention_that_is_off, "float64"),
], ids=lambda one: one if isinstance(one, str) else one.__name__.replace("_", " "))  # fmt: skip
def test_planted_faults_turn_their_check_red(few, monkeypatch, plant, seen):
    plant(monkeypatch)
    assert seen in failed()


@needs_kernels
def test_a_replayed_step_that_differs_is_seen(monkeypatch):
    (group,) = (one for one in groups_of(CPU) if one.name == "replay")
    name = next(iter(group.models))
    stepped = arithmetic._stepped
    monkeypatch.setattr(
        arithmetic, "_stepped", lambda decoder, tapped: stepped(decoder, tapped) + 1e-3 * tapped
    )
    value, _ = group.measure(group.models[name], CPU)
    assert value > group.tolerance


def test_nan_is_wrong(monkeypatch):
    group = Group("x", "x holds", 1.0, lambda config, device: (float("nan"), "y"), MODELS)
    monkeypatch.setattr(arithmetic, "groups_of", lambda device: [group])
    (result,) = measure_groups(CPU)
    assert not result.check.ok


def test_levels_and_exhaustion(monkeypatch):
    monkeypatch.setattr(run.native, "levels", lambda: ["portable", "avx2"])
    said = {"portable": "a", "avx2": "b"}

    class Done:
        returncode, stderr = 0, ""

        def __init__(self, text):
            self.stdout = text

    monkeypatch.setattr(
        run, "_run", lambda words, environ: Done(said[environ["LLMCLI_KERNELS"]])
    )
    result = run.measure_levels()
    assert not result.check.ok
    assert result.check.where == "portable"
    said["portable"] = "b"
    assert run.measure_levels().check.ok
    monkeypatch.setattr(Done, "returncode", 1)
    assert not run.measure_levels().check.ok, "all fail alike"
    monkeypatch.setattr(Done, "returncode", 0)
    monkeypatch.setattr(run.native, "levels", list)
    assert run.measure_levels() is None
    monkeypatch.setattr(run, "_run", lambda words, environ: Done(""))
    assert not run.measure_exhaustion(CPU).check.ok


def test_memory_that_runs_out_ends_with_5(monkeypatch):
    assert run.measure_exhaustion(CPU).check.ok
    monkeypatch.setattr(run, "_WAIT_S", 0.01)
    assert run.measure_exhaustion(CPU).check.where == "exit 124", "it does not end"


SMALL = dict(
    run.SHAPES["1B"], hidden_size=64, intermediate_size=96, head_dim=16,
    num_attention_heads=4, num_key_value_heads=2, vocab_size=256, num_hidden_layers=8,
)  # fmt: skip


@pytest.fixture
def small_shape(monkeypatch):
    """`1B` is small, and little is read."""
    monkeypatch.setitem(run.SHAPES, "1B", SMALL)
    monkeypatch.setattr(run, "_READ", 1 << 20)
    monkeypatch.setattr(run, "PROMPT", 16)


def test_rates_and_memory_of_a_shape(small_shape, monkeypatch):
    rates, memory = run.measure_shape(run.Shape("1B", 2), CPU, against=False)
    assert [(rate.phase, rate.layers, rate.all_layers) for rate in rates] == [
        ("decode", 2, 8), ("prefill", 2, 8),
    ]  # fmt: skip
    assert all(rate.tokens_per_s > 0 and rate.share > 0 for rate in rates)
    assert memory.estimated > 0
    assert run.fitting_layers("1B", CPU, 3) == 3
    monkeypatch.setattr(run, "available_bytes", lambda device: 1)
    assert run.fitting_layers("1B", CPU, 3) == 0


def test_the_rate_of_some_layers_is_reckoned_for_all(small_shape, monkeypatch):
    """By a clock that gives every run the same time: layers that were not run are of the format
    of those that were."""
    ticks = count()
    monkeypatch.setattr(engines, "perf_counter_ns", lambda: 1000 * next(ticks))
    found = [run.measure_shape(run.Shape("1B", n), CPU, against=False)[0] for n in (1, 8)]
    one, whole = (run.Shape("1B", 1).config, run.Shape("1B", 8).config)
    nbytes = [run.numbers_on(CPU, config).weight_bytes(config) for config in (one, whole)]
    for some, every in zip(*found, strict=True):
        assert some.tokens_per_s < 0.6 * every.tokens_per_s
    decode = found[0][0].tokens_per_s / found[1][0].tokens_per_s
    assert decode == pytest.approx(nbytes[0] / nbytes[1], rel=0.1)


@pytest.mark.parametrize("there", [True, False])
def test_transformers_beside_us_where_it_is_installed(small_shape, monkeypatch, there):
    if not there:
        monkeypatch.setitem(sys.modules, "transformers", None)
    rates, _ = run.measure_shape(run.Shape("1B", 2), CPU, against=True)
    assert [rate.versus is not None for rate in rates] == [there] * 2


CHECK = ViewCheck(name="taps", words="observing changes no bit", value=0.0, tolerance=0.0)
RATE = RateResult(
    shape="1B", phase="decode", format="bfloat16", tokens_per_s=10.0, share=0.7, layers=16,
    all_layers=16, versus=1.5,
)  # fmt: skip
REPORT = SelftestReport(
    device="cpu", groups=(GroupResult(check=CHECK, cases=60, seconds=1.0),), rates=(RATE,),
    memory=(MemoryResult(shape="1B", estimated=1 << 30, measured=1 << 30),), ceilings=None,
    refused=(), seconds=2.0,
)  # fmt: skip


@pytest.fixture
def measured(monkeypatch):
    """`measured(report)`: what the command finds."""
    monkeypatch.setattr(run, "measure_selftest", lambda device, **_: REPORT)
    return lambda report: monkeypatch.setattr(run, "measure_selftest", lambda device, **_: report)


def test_a_receipt_is_written_and_verified(measured, tmp_path, capsys):
    path = tmp_path / "receipt.json"
    assert main(["selftest", "-o", str(path)]) == 0
    assert "observing changes no bit" in capsys.readouterr().out
    document = json.loads(path.read_text())
    assert document["checks"]["taps"]["ok"]
    assert main(["selftest", "--verify", str(path)]) == 0
    assert "as in the receipt" in capsys.readouterr().out
    measured(replace(REPORT, rates=(replace(RATE, tokens_per_s=5.0),)))
    assert main(["selftest", "--verify", str(path)]) == 0  # slower is said, and is no fault
    assert "1B decode: 5.0 tok/s, 10.0 then" in capsys.readouterr().out
    wrong = replace(REPORT.groups[0], check=replace(CHECK, value=1.0))
    measured(replace(REPORT, groups=(wrong,)))
    assert main(["selftest", "--verify", str(path)]) == 1
    captured = capsys.readouterr()
    assert "taps passed in the receipt and fails now" in captured.out
    assert "check failed: observing changes no bit" in captured.err


def test_rates_of_another_machine_are_not_compared():
    receipt = Receipt(processor="x", gpus=(), device="cpu", passed={}, rates={("1B", "decode"): 99})
    assert compare(receipt, REPORT, same_machine=False) == []
    assert len(compare(receipt, REPORT)) == 1
    lacking = replace(receipt, passed={"levels": True})
    assert compare(lacking, REPORT, same_machine=False) == ["levels was not checked now"]


@pytest.mark.parametrize("text", [
    "", "{", "[]", "null", '{"schema": "llmcli.bench/1"}', '{"schema": "llmcli.selftest/1"}',
    "[" * 100_000, '{"schema": "llmcli.selftest/1", "environment": 3}',
])  # fmt: skip
def test_what_is_no_receipt_is_refused_before_anything_runs(measured, text, tmp_path, capsys):
    measured(None)
    path = tmp_path / "receipt.json"
    path.write_text(text)
    assert main(["selftest", "--verify", str(path)]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: `{path}` is no receipt: "), err
    assert "hint: `llmcli selftest -o receipt.json` writes one" in err
    assert main(["selftest", "--verify", str(tmp_path / "none.json")]) == 2


def test_a_full_disk(monkeypatch):
    def full(self, text):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run.Path, "write_text", full)
    with pytest.raises(WriteFailed, match="No space left"):
        run.measure_exhaustion(CPU)

"""`selftest` passes here, sees planted faults, and what it writes and verifies is a receipt."""

import json
import sys
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from decoder_faults import FAULTS, wrap
from needs import needs_kernels

from llmcli.commands.selftest.command import read_receipt
from llmcli.commands.selftest.measure import arithmetic, run
from llmcli.commands.selftest.measure.arithmetic import Group, groups_of, measure_groups
from llmcli.commands.selftest.report import Receipt
from llmcli.config.samples import MODELS
from llmcli.errors import UsageError, WriteFailed
from llmcli.measure import engines
from llmcli.nn.step import Step

CPU = torch.device("cpu")
FEW = ("llama", "gpt2", "layers that differ", "experts", "short convolutions", "gated deltanet")


def of_few(monkeypatch, *names):
    """What the groups of those names find, or all of them, with few models: all take a minute."""

    def some(group):
        models = [name for name in group.models if name in FEW or group.name == "replay"][:6]
        return replace(group, models={name: group.models[name] for name in models})

    groups = [some(group) for group in groups_of(CPU) if group.name in names or not names]
    monkeypatch.setattr(arithmetic, "groups_of", lambda device: groups)
    return measure_groups(CPU)


def test_all_properties_hold_here(monkeypatch):
    every = [group.name for group in groups_of(CPU)]
    results = of_few(monkeypatch)
    assert [result.check.name for result in results] == every
    assert [result.check for result in results if not result.check.ok] == []
    assert all(result.cases > 1 for result in results)


def tapped(emit, step, name, tensor):
    out = emit(step, name, tensor)
    return out * (1 + 2**-20) if step.tap and out.is_floating_point() else out


def dropped(emit, step, *args):
    step.edits = {}
    return emit(step, *args)


# the property that sees it, and what plants it
PLANTED = {
    "a tap that changes a number": ("taps", wrap(Step, "emit", tapped)),
    "edits that are dropped": ("edits", wrap(Step, "emit", dropped)),
    "later tokens rotated one too far": ("steps", FAULTS["rotated one position late"][1]),
    "products that lose bits": ("float32", wrap(F, "linear", lambda product, x, *rest: product(
        x.half().to(x.dtype) if x.dtype == torch.float32 else x, *rest))),
    "attention that is off": ("float64", wrap(F, "scaled_dot_product_attention", (
        lambda attend, *qkv, **how: attend(*qkv, **how) * (1 + 1e-6)))),
    "a tap that changes a step": ("replay", wrap(Step, "emit", tapped)),
}  # fmt: skip


@pytest.mark.parametrize("fault", [
    pytest.param(fault, marks=needs_kernels if seen == "replay" else ())
    for fault, (seen, _) in PLANTED.items()
])
def test_planted_faults_turn_their_check_red(monkeypatch, fault):
    seen, plant = PLANTED[fault]
    plant(monkeypatch, None)
    (result,) = of_few(monkeypatch, seen)
    assert not result.check.ok


def test_nan_is_wrong(monkeypatch):
    group = Group("x", "x holds", 1.0, lambda config, device: (float("nan"), "y"), MODELS)
    monkeypatch.setattr(arithmetic, "groups_of", lambda device: [group])
    (result,) = measure_groups(CPU)
    assert not result.check.ok


def test_levels_and_exhaustion(monkeypatch):
    monkeypatch.setattr(run.native, "levels", lambda: ["portable", "avx2"])
    said, code = {"portable": "a", "avx2": "b"}, 0
    monkeypatch.setattr(run, "_run", lambda words, environ: SimpleNamespace(
        returncode=code, stdout=said.get(environ.get("LLMCLI_KERNELS"), ""), stderr=""
    ))  # fmt: skip
    result = run.measure_levels()
    assert not result.check.ok
    assert result.check.where == "portable"
    said["portable"] = "b"
    assert run.measure_levels().check.ok
    code = 1
    assert not run.measure_levels().check.ok, "all fail alike"
    code = 0
    monkeypatch.setattr(run.native, "levels", list)
    assert run.measure_levels() is None
    assert not run.measure_exhaustion(CPU).check.ok


def test_memory_that_runs_out_ends_with_5(monkeypatch, tmp_path):
    """In a directory with a package of our name, too: sources beside an installed llmcli."""
    (tmp_path / "llmcli").mkdir()
    (tmp_path / "llmcli" / "__init__.py").write_text("raise SystemExit(9)")
    monkeypatch.chdir(tmp_path)
    assert run.measure_exhaustion(CPU).check.ok
    monkeypatch.setattr(run, "_WAIT_S", 0.01)
    assert run.measure_exhaustion(CPU).check.where == "exit 124", "it does not end"


SMALL = dict(
    run.SHAPES["1B"], hidden_size=64, intermediate_size=96, head_dim=16,
    num_attention_heads=4, num_key_value_heads=2, vocab_size=256, num_hidden_layers=8,
)  # fmt: skip


@pytest.fixture
def small_shape(monkeypatch):
    """`1B` is small, and little is read, twice."""
    monkeypatch.setitem(run.SHAPES, "1B", SMALL)
    for name, value in (("_READ", 1 << 20), ("PROMPT", 16), ("ROUNDS", 2)):
        monkeypatch.setattr(run, name, value)


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
    nbytes = [run.precision_of(CPU, config).weight_bytes(config) for config in (one, whole)]
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


def test_a_receipt_of_brackets_is_refused(tmp_path):
    """What else is none is in transcripts/selftest.txt."""
    (tmp_path / "deep").write_text("[" * 100_000)
    with pytest.raises(UsageError, match="is no receipt: "):
        read_receipt(str(tmp_path / "deep"))


def test_a_full_disk(monkeypatch):
    def full(self, text):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run.Path, "write_text", full)
    with pytest.raises(WriteFailed, match="No space left"):
        run.measure_exhaustion(CPU)


# README's "Verified on" is what the receipts in `tests/receipts` say

ROOT = Path(__file__).parents[2]
RECEIPTS = sorted((ROOT / "tests" / "receipts").glob("*.json"))
HEAD = (
    "| machine | PyTorch | checks | 1B decode | 1B prefill | 8B decode | receipt |\n"
    "|---|---|---|---|---|---|---|\n"
)


def row(file):
    """One receipt as a row of the table."""
    document = json.loads(file.read_text(encoding="utf-8"))
    machine = document["environment"]
    rates = {(rate["shape"], rate["phase"]): rate for rate in document["rates"]}

    def rate(shape, phase):
        one = rates.get((shape, phase))
        return "–" if one is None else f"{one['tokens_per_s']:.3g} tok/s ({one['share']:.0%})"

    passed = [check["ok"] for check in document["checks"].values()]
    name = next(iter(machine["gpus"]), machine["processor"])
    cells = (
        f"{document['device']}: {name}, {machine['cores']} cores", machine["torch"],
        f"{sum(passed)} of {len(passed)}", rate("1B", "decode"), rate("1B", "prefill"),
        rate("8B", "decode"), f"`tests/receipts/{file.name}`",
    )  # fmt: skip
    return f"| {' | '.join(cells)} |\n"


def test_readme_has_the_receipts():
    """A row for each of them, and one that says that no card was there."""
    rows = [row(file) for file in RECEIPTS]
    if not any(json.loads(file.read_text())["device"].startswith("cuda") for file in RECEIPTS):
        rows.append("| CUDA | | none yet | – | – | – | – |\n")
    assert f"\n{HEAD}{''.join(rows)}\n" in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("file", RECEIPTS, ids=lambda file: file.name)
def test_a_receipt_can_be_verified_and_passed(file):
    receipt = Receipt.of(json.loads(file.read_text(encoding="utf-8")))
    assert receipt.passed
    assert all(receipt.passed.values())
    assert ("1B", "decode") in receipt.rates

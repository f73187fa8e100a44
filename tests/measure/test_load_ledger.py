"""The ledger of `llmcli load`: nothing of a file is forgotten, and nothing is told twice."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from load_files import check, checked, loaded, write_gguf, write_split
from quantized_checkpoints import SCHEMES, write_quantized
from tiny_checkpoints import gpt2_tensors, llama_tensors, write_gpt2, write_llama

import llmcli.commands.load.measure.run as run_module
from llmcli.anatomy import parameters
from llmcli.checkpoints import open_checkpoint
from llmcli.commands.load.measure.run import measure_load
from llmcli.commands.load.report import folded
from llmcli.families import translate
from llmcli.kernels import native
from llmcli.records.ledger import LedgerEntry
from llmcli.records.progress import Stages


@pytest.fixture(params=["llama", "gpt2", "gguf"])
def path(request, tmp_path):
    if request.param == "gguf":
        return write_gguf(tmp_path / "m.gguf")
    return {"llama": write_llama, "gpt2": write_gpt2}[request.param](tmp_path / "m")


@pytest.mark.parametrize("look", [loaded, checked])
def test_every_byte_of_every_tensor_is_in_one_line(path, look):
    report = look(path)
    checkpoint = open_checkpoint(path)
    assert report.ok
    assert {line.source for line in report.ledger} == set(checkpoint.tensors)
    assert sum(line.bytes for line in report.ledger) == report.bytes.tensors
    assert sum(line.bytes for line in report.rows) == report.bytes.tensors
    assert [line.parameter for line in report.ledger] == [
        spec.name for spec in parameters(translate(checkpoint)[0])
    ]


@pytest.mark.parametrize("kept", [True, False])
def test_blocks_are_told_as_kept_or_as_dequantized(tmp_path, monkeypatch, kept):
    if native.level() is None and kept:
        pytest.skip("there are no kernels here")
    if not kept:
        monkeypatch.setattr(native, "level", lambda: None)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf"))
    dtype = "auto" if kept else "float32"
    model, report = measure_load(checkpoint, Stages(), device="cpu", dtype=dtype, quantize="auto")
    assert report.ok, report
    query = next(line for line in report.ledger if line.parameter == "blocks.1.attn.W_q")
    norm = next(line for line in report.ledger if line.parameter == "blocks.1.ln1.w")
    assert (query.dtype, query.dequantized) == (("Q8_0", False) if kept else ("float32", True))
    assert (norm.dtype, norm.dequantized) == ("float32", False)
    stages = {stage.name: stage.bytes for stage in report.stages}
    packed = sum(
        model.decoder.weight(line.parameter).nbytes
        for line in report.ledger if line.dtype == "Q8_0"
    )
    assert stages.get("pack") == (packed if kept else None)
    assert stages["convert"] == report.bytes.weights - packed


@pytest.mark.parametrize("look", [loaded, checked])
def test_what_no_line_has_what_is_told_twice_and_what_nobody_looked_at_is_found(
    tmp_path, monkeypatch, look
):
    plain, looked, forgotten = run_module.ledger_lines, run_module._parameters, "blocks.1.mlp.W_up"

    def forgetful(ledger, *others):
        kept = tuple(entry for entry in ledger.entries if entry.parameter != forgotten)
        return plain(replace(ledger, entries=kept), *others)

    def hasty(*args):
        return {name: found for name, found in looked(*args).items() if name != "ln_final.w"}

    path = write_llama(tmp_path / "m")
    monkeypatch.setattr(run_module, "ledger_lines", forgetful)
    report = look(path)
    ledger = check(report, "ledger")
    assert (ledger.ok, report.ok, ledger.value) == (False, False, 48 * 32 * 4)
    assert ledger.where == "model.layers.1.mlp.up_proj.weight"
    monkeypatch.setattr(run_module, "ledger_lines", lambda *a: (*plain(*a), plain(*a)[0]))
    assert check(loaded(path), "ledger").value == 97 * 32 * 4
    monkeypatch.setattr(run_module, "ledger_lines", plain)
    monkeypatch.setattr(run_module, "_parameters", hasty)
    filled = check(loaded(path), "parameters")
    assert (filled.ok, filled.value, filled.where) == (False, 32, "ln_final.w")


def line(parameter, source, **changes):
    values = {"stored": "F32", "shape": (2, 2), "bytes": 16} | changes
    return LedgerEntry(parameter=parameter, source=source, **values)


def test_layers_that_are_alike_are_one_row_and_others_are_not():
    rows = folded([
        line("embed.W", "wte"),
        *(line(f"blocks.{i}.ln1.w", f"h.{i}.n", stored="F16" if i == 2 else "F32")
          for i in range(5)),
        line("blocks.0.ln2.w", "h.1.n"),
        line(None, "old.7.inv", reason="computed"),
        line(None, "old.9.inv", reason="computed"),
        line(None, "left", reason="computed"),
    ])  # fmt: skip
    assert [(row.parameter, row.source, row.tensors, row.bytes) for row in rows] == [
        ("embed.W", "wte", 1, 16),
        ("blocks.{0-1,3-4}.ln1.w", "h.{0-1,3-4}.n", 4, 64),
        ("blocks.2.ln1.w", "h.2.n", 1, 16),
        ("blocks.0.ln2.w", "h.1.n", 1, 16),
        (None, "old.{7,9}.inv", 2, 32),
        (None, "left", 1, 16),
    ]


def test_a_row_has_the_numbers_of_all_its_layers_and_parts_of_a_fused_tensor_their_own(tmp_path):
    tensors = llama_tensors()
    report = loaded(write_llama(tmp_path / "m", tensors))
    row = next(row for row in report.rows if row.parameter == "blocks.{0-1}.mlp.W_up")
    both = torch.cat([tensors[f"model.layers.{i}.mlp.up_proj.weight"] for i in range(2)]).double()
    found = row.numbers
    assert found.count == both.numel()
    assert found.mean == pytest.approx(float(both.mean()), abs=1e-12)
    assert found.std == pytest.approx(float(both.std(correction=0)), rel=1e-12)
    assert (found.min, found.max) == (float(both.min()), float(both.max()))
    tensors = gpt2_tensors()
    lines = loaded(write_gpt2(tmp_path / "n", tensors)).ledger
    value = next(line for line in lines if line.parameter == "blocks.0.attn.W_v")
    part = tensors["h.0.attn.c_attn.weight"][:, 32:].double()
    assert value.numbers.mean == pytest.approx(float(part.mean()), abs=1e-12)
    assert value.numbers.max == float(part.max())


@pytest.mark.parametrize("look", [loaded, checked])
@pytest.mark.parametrize("scheme", ["fp8-blocks", "float-tensor", "int-channel", "bitsandbytes"])
def test_scales_are_told_where_they_are_used_and_in_lines_of_their_own(tmp_path, look, scheme):
    report = look(write_quantized(tmp_path / "m", scheme)[0])
    assert report.ok, report
    suffix = SCHEMES[scheme][3]
    lines = {line.parameter: line for line in report.ledger if line.parameter}
    query = lines["blocks.0.attn.W_q"]
    assert query.dequantized
    assert suffix in query.operations[0]
    scales = [line for line in report.ledger if line.source.endswith(suffix)]
    assert len(scales) == 14
    assert all("belongs to the scale of `model.layers." in (line.reason or "") for line in scales)
    # those of layers are one row, as their weights are
    rows = [row for row in report.rows if "belongs to the scale" in (row.reason or "")]
    of_scales = [line for line in report.ledger if "belongs to the scale" in (line.reason or "")]
    assert sum(row.tensors for row in rows) == len(of_scales) > len(rows)
    up = next(row for row in rows if "up_proj" in row.source)
    layers = up.source.partition("{")[2].partition("}")[0]
    assert f"layers.{{{layers}}}.mlp.up_proj.weight`" in up.reason
    assert sum(row.bytes for row in report.rows) == report.bytes.tensors


@pytest.mark.parametrize("look", [loaded, checked])
def test_a_model_in_parts_is_one_ledger(tmp_path, look):
    whole = look(write_gguf(tmp_path / "m.gguf"))
    report = look(write_split(tmp_path / "parts"))
    assert [line.source for line in report.ledger] == [line.source for line in whole.ledger]
    assert [line.numbers for line in report.ledger] == [line.numbers for line in whole.ledger]

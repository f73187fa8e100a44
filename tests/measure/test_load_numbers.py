"""The scan of `llmcli load`: statistics in pieces, NaN and infinity found where they are."""

from __future__ import annotations

import math

import gguf
import numpy as np
import pytest
import torch
from load_files import checked, loaded, write_gguf
from safetensors.torch import save_file
from tiny_checkpoints import llama_tensors, write_llama

import llmcli.commands.load.measure.numbers as numbers_module
from llmcli.commands.load.measure.numbers import parameter_numbers
from llmcli.commands.load.measure.run import NO_DIGEST
from llmcli.commands.load.report import pooled
from llmcli.inspect.statistics import Statistics
from llmcli.measure.peaks import Peak
from llmcli.records.ledger import Numbers

NAN, INF = math.nan, math.inf
UP = "model.layers.1.mlp.up_proj.weight"


def planted(folder, value, name=UP, index=(3, 7)):
    tensors = llama_tensors()
    tensors[name][index] = value
    return write_llama(folder, tensors)


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_a_number_that_is_not_finite_is_named_as_the_formula_has_it(tmp_path, value):
    path = planted(tmp_path / "m", value)
    kind = "not a number" if math.isnan(value) else "infinite"
    report = loaded(path)
    assert report.not_finite == f"`blocks.1.mlp.W_up[7,3]` is {kind}"
    assert not report.ok
    assert report.fits
    found = next(line.numbers for line in report.ledger if line.parameter == "blocks.1.mlp.W_up")
    assert (found.nan, found.inf, found.negative_inf) == (
        math.isnan(value), math.isinf(value), value == -INF,
    )  # fmt: skip
    assert checked(path).not_finite == f"`{UP}[3,7]` is {kind}"


def test_a_scale_that_is_no_number_is_found_in_its_blocks(tmp_path):
    path = write_gguf(tmp_path / "m.gguf")
    reader = gguf.GGUFReader(path, "r+")
    tensor = next(one for one in reader.tensors if one.name == "blk.0.ffn_up.weight")
    tensor.data[5, :2] = np.frombuffer(np.float16(np.nan).tobytes(), np.uint8)
    reader.data.flush()
    assert checked(path).not_finite == "`blk.0.ffn_up.weight[5,0]` is not a number"
    assert loaded(path).not_finite == "`blocks.0.mlp.W_up[0,5]` is not a number"


def test_a_file_without_a_configuration_is_looked_through_in_every_format(tmp_path):
    values = torch.arange(-3.0, 9.0).view(3, 4)
    kinds = [
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
        torch.float8_e5m2, torch.int8, torch.int16, torch.int32, torch.int64,
    ]  # fmt: skip
    tensors = {str(kind): values.to(kind) for kind in kinds}
    tensors |= {str(kind): values.abs().to(kind) for kind in (torch.uint8, torch.bool)}
    tensors["complex"] = torch.complex(values, values)
    save_file(tensors, tmp_path / "x.safetensors")
    report = checked(tmp_path / "x.safetensors")
    assert report.ok
    assert report.notes == (NO_DIGEST,)
    assert all(line.parameter is None and not line.reason for line in report.ledger)
    for line in report.ledger:
        if "uint" in line.source or "bool" in line.source:
            continue
        assert (line.numbers.min, line.numbers.max) == (-3, 8), line.source
        assert line.numbers.zeros == (2 if line.source == "complex" else 1)
        assert line.numbers.mean == pytest.approx(2.5)


@pytest.mark.parametrize(
    ("kind", "bits"),
    [(torch.float8_e4m3fn, 0x7F), (torch.float8_e5m2, 0xFC), (torch.complex64, None)],
)
def test_not_finite_in_formats_of_no_model(tmp_path, kind, bits):
    tensor = torch.ones(4, 4).to(kind)
    if bits is None:
        tensor[1, 2] = complex(0, INF)
    else:
        tensor.view(torch.uint8)[1, 2] = bits
    save_file({"x": tensor}, tmp_path / "x.safetensors")
    said = checked(tmp_path / "x.safetensors").not_finite
    index = "1,2,1" if bits is None else "1,2"
    assert said == f"`x[{index}]` is {'not a number' if bits == 0x7F else 'infinite'}"


def test_an_empty_tensor_and_one_of_a_single_number(tmp_path):
    save_file({"none": torch.zeros(0, 3), "one": torch.tensor(2.5)}, tmp_path / "x.safetensors")
    report = checked(tmp_path / "x.safetensors")
    lines = {line.source: line.numbers for line in report.ledger}
    assert report.ok
    assert lines["none"].count == 0
    assert math.isnan(lines["none"].mean)
    assert (lines["one"].mean, lines["one"].std) == (2.5, 0.0)


@pytest.mark.parametrize("bad", [[], [5], [200_000], [0, 299_999], range(300_000)])
def test_numbers_are_those_of_all_pieces(bad):
    """More than are looked at together: 131,072."""
    x = torch.randn(300_000, generator=torch.Generator().manual_seed(0))
    x[[7, 200_011]] = 0.0
    x[list(bad)] = torch.tensor((NAN, INF, -INF)).repeat(100_000)[list(bad)]
    found = parameter_numbers(x.view(3, -1), turned=False)
    finite = x[x.isfinite()].double()
    assert (found.count, found.finite) == (len(x), len(finite))
    assert (found.nan, found.inf) == (int(x.isnan().sum()), int(x.isinf().sum()))
    assert (found.negative_inf, found.zeros) == (int((x == -INF).sum()), int((x == 0).sum()))
    assert found.first_bad == (divmod(bad[0], 100_000) if bad else None)
    if not len(finite):
        assert all(map(math.isnan, (found.mean, found.std, found.min, found.max)))
        return
    assert found.mean == pytest.approx(float(finite.mean()), abs=1e-9)
    assert found.std == pytest.approx(float(finite.std(correction=0)))
    assert (found.min, found.max) == (float(finite.min()), float(finite.max()))


def test_rows_and_layers_pool_as_if_they_were_one():
    parts = torch.randn(3, 50, generator=torch.Generator().manual_seed(1)).double()
    parts[1, 4] = NAN
    parts[2] = INF

    def numbers(x):
        return parameter_numbers(x, turned=False)

    together, whole = pooled([numbers(part) for part in parts]), numbers(parts.view(-1))
    assert (together.count, together.nan, together.inf) == (150, 1, 50)
    assert together.first_bad == (4,)
    for name in ("mean", "std", "min", "max", "zeros"):
        assert getattr(together, name) == pytest.approx(getattr(whole, name)), name
    assert isinstance(pooled([]), Numbers)


def test_a_transposed_parameter_is_not_copied_whole(monkeypatch):
    seen = []
    plain = Statistics.add
    monkeypatch.setattr(
        Statistics, "add", lambda self, part: (seen.append(part.numel()), plain(self, part))
    )
    monkeypatch.setattr("llmcli.inspect.statistics.AT_ONCE", 64)
    slot = torch.randn(16, 32).t()
    found = parameter_numbers(slot, turned=True)
    assert max(seen) <= 64
    assert found.count == sum(seen) == 512


def test_a_large_vector_takes_no_more_memory_than_a_piece(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({"x": torch.zeros(24 << 20)}, path)  # 96 MiB in a single row
    checked(path)  # what is imported and kept for later is there now
    with Peak() as peak:
        before = peak.resident
        assert checked(path).ok
    if before is None or peak.resident is None:
        pytest.skip("the system tells no peak of memory")
    assert peak.resident - before < 40 << 20


def test_a_format_without_a_decoder_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(numbers_module, "DECODERS", {})
    report = checked(write_gguf(tmp_path / "m.gguf"))
    assert report.notes == ("numbers in Q8_0 were not checked", NO_DIGEST)
    assert report.ok
    assert {line.stored for line in report.ledger if line.numbers is None} == {"Q8_0"}
    assert report.numbers == 5 * 32

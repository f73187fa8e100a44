"""`--quantize int8` and `int4`: a dense checkpoint whose matrices are quantized at load."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from needs import needs_kernels
from planned import departures
from tiny_checkpoints import LLAMA, gpt2_tensors, llama_tensors, loaded, write_gpt2, write_llama

from llmcli.checkpoints import open_checkpoint
from llmcli.commands.info.measure import measure_info
from llmcli.commands.load.measure.run import measure_load
from llmcli.errors import UsageError
from llmcli.kernels import native
from llmcli.loading.load import load_checkpoint, load_shapes
from llmcli.ops.quant import dequantize, quantize
from llmcli.prepare.prepared import quantize_without_effect
from llmcli.records.info import Device
from llmcli.records.work import LoadTimings
from llmcli.weights.packed import Packed

both = pytest.mark.parametrize("quantized", ["int8", "int4"])


def write_wide_gpt2(folder):
    """Every matrix is stored transposed, and three of them as one."""
    tensors = {name: tensor * 0.3 for name, tensor in gpt2_tensors(32).items()}
    return write_gpt2(folder, tensors, n_embd=32)


def write_bfloat16(folder):
    tensors = llama_tensors(dtype=torch.bfloat16)
    draw = torch.Generator().manual_seed(1)
    for name in [name for name in tensors if ".mlp." in name]:
        shape = [64 if size == LLAMA["intermediate_size"] else size for size in tensors[name].shape]
        tensors[name] = torch.randn(*shape, generator=draw).bfloat16() * 0.3
    return write_llama(folder, tensors, intermediate_size=64)


@pytest.fixture(params=["gpt2", "llama"])
def path(request, tmp_path):
    return {"gpt2": write_wide_gpt2, "llama": write_bfloat16}[request.param](tmp_path / "m")


load = partial(loaded, text=False)


@needs_kernels
@both
def test_every_matrix_is_its_own_numbers_quantized(path, quantized):
    model, exact = load(path, quantize=quantized), load(path, dtype="float32")
    packed = []
    for name in model.decoder.weight_names:
        weight, right = model.decoder.weight(name), exact.decoder.weight(name).dense()
        if not isinstance(weight, Packed):
            assert torch.equal(weight.dense(), right), name
            assert right.ndim == 1 or name == "pos_embed.W"
            continue
        per_token = quantized == "int8" or name in ("embed.W", "head.W")
        assert weight.format == ("Q8_0" if per_token else "Q4_1")
        blocks = quantize(right.contiguous(), weight.format)
        right = dequantize(blocks, weight.format, dtype=torch.float32).view(right.shape)
        assert torch.equal(weight.dense(), right), name
        packed.append(name)
    assert len(packed) >= 7
    assert departures(model) == {}
    ids = torch.arange(9)[None]
    close = 0.1 if quantized == "int8" else 0.5  # of unrelated logits it is 1.4
    error = model.decoder(ids) - exact.decoder(ids)
    assert error.square().mean().sqrt() < close * exact.decoder(ids).std()


@needs_kernels
@both
def test_what_is_said_of_it(path, quantized):
    model, report = measure_load(
        open_checkpoint(path), LoadTimings(), device="cpu", dtype="auto", quantize=quantized
    )
    assert report.ok, report
    about = model.describe()
    formats = {"int8": ["Q8_0"], "int4": ["Q4_1", "Q8_0"]}[quantized]
    named = [name for name in about["weight_format"].split(" + ") if name != "float32"]
    assert sorted(named) == formats
    assert (about["activation_format"], about["cache_format"]) == ("float32", "float16")
    assert about["product_format"] == "int16"
    held = sum(model.decoder.weight(name).nbytes for name in model.decoder.weight_names)
    assert about["weight_bytes"] == report.bytes.weights == held
    assert load_shapes(open_checkpoint(path), quantize=quantized).describe() | {
        "device": "cpu", "stored_formats": about["stored_formats"],
    } == about  # fmt: skip
    lines = {line.parameter: line for line in report.ledger}
    up = lines[next(name for name in lines if name.startswith("blocks.0.mlp.W_"))]
    assert (up.dtype, up.dequantized) == (formats[0], False)
    stages = {stage.name: stage.bytes for stage in report.stages}
    kept = [model.decoder.weight(name) for name in model.decoder.weight_names]
    assert stages["pack"] == sum(one.nbytes for one in kept if isinstance(one, Packed))
    assert stages["pack"] + stages["convert"] == held


@needs_kernels
@both
def test_random_weights_are_quantized_too(path, quantized):
    one, other = (load(path, quantize=quantized, random_weights=3) for _ in range(2))
    ids = torch.arange(5)[None]
    assert torch.equal(one.decoder(ids), other.decoder(ids))
    assert one.precision.formats
    assert 0.015 < float(one.decoder.weight("blocks.0.attn.W_q").dense().std()) < 0.025


@needs_kernels
@both
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e38])
def test_what_no_block_holds_is_told(tmp_path, quantized, value):
    tensors = llama_tensors()
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = value
    _, report = measure_load(
        open_checkpoint(write_llama(tmp_path / "m", tensors)), LoadTimings(), device="cpu",
        dtype="auto", quantize=quantized,
    )  # fmt: skip
    assert "blocks.1.mlp.W_up" in report.not_finite


@both
def test_without_effect_it_says_why(tmp_path, quantized):
    checkpoint = open_checkpoint(write_bfloat16(tmp_path / "m"))
    assert quantize_without_effect(checkpoint, quantized) == ""
    packed = {
        name: replace(info, format="Q4_1") if len(info.shape) > 1 else info
        for name, info in checkpoint.tensors.items()
    }
    done = quantize_without_effect(replace(checkpoint, tensors=packed), quantized)
    no_effect = f"`--quantize {quantized}` has no effect: "
    assert done == f"{no_effect}`{checkpoint.name}` is already quantized (Q4_1)"
    narrow = open_checkpoint(write_llama(tmp_path / "narrow", hidden_size=16))
    why = quantize_without_effect(narrow, quantized)
    assert why.startswith(no_effect)
    assert why.endswith("has no matrix whose rows are whole blocks of 32 numbers")
    assert not any(quantize_without_effect(narrow, other) for other in ("auto", "none"))


@both
def test_where_it_cannot_be_had_it_is_refused(path, quantized, monkeypatch):
    monkeypatch.setattr(native, "level", lambda: "portable")
    with pytest.raises(UsageError, match=f"`--quantize {quantized}` and `--dtype float32`"):
        load(path, quantize=quantized, dtype="float32")
    gpu = Device(device="cuda:1", name="x", total_bytes=1, free_bytes=1, bfloat16=True)
    with pytest.raises(UsageError, match=r"no kernels .* on the device `cuda`"):
        measure_info(open_checkpoint(path), [gpu], quantize=quantized)
    monkeypatch.setattr(native, "level", lambda: None)
    with pytest.raises(UsageError, match=r"no kernels .* on this machine") as error:
        load(path, quantize=quantized)
    assert "--dtype bfloat16" in error.value.hint


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@both
def test_a_gpu_that_is_there_has_none_either(path, quantized):
    with pytest.raises(UsageError, match=r"no kernels .* on the device `cuda`"):
        load_checkpoint(open_checkpoint(path), device="cuda", quantize=quantized, text=False)
    dense = load_checkpoint(open_checkpoint(path), device="cuda", text=False)
    assert not dense.precision.formats

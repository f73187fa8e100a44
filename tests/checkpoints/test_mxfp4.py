"""MXFP4 of safetensors files: the numbers are transformers', every code with every scale."""

import json

import pytest
import torch
from linear_family import family_of
from needs import needs_kernels
from safetensors.torch import save_file
from tiny_checkpoints import loaded
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from zoo import in_blocks, layer, llama

from llmcli.checkpoints import open_checkpoint
from llmcli.config.formats import packed_bytes
from llmcli.errors import CheckpointError
from llmcli.families.rules import Load, PerExpert, Rows
from llmcli.graph.plan import parameters
from llmcli.loading.filling import fill, mapped, read_values
from llmcli.loading.load import load_checkpoint
from llmcli.ops.quant import dequantize
from llmcli.prepare.ahead import start
from llmcli.prepare.prepared import prepare
from llmcli.records.work import LoadTimings
from llmcli.weights.dense import Dense
from llmcli.weights.packed import Packed

NAME = "model.layers.0.mlp.experts.gate_up_proj"
QUANTIZED = {
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
}


def drawn(*shape, scales=(100, 150), seed=0):
    """Codes `[…, 16]` and scales `[…]`."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
    return codes, torch.randint(*scales, shape, generator=generator, dtype=torch.uint8)


def stored(folder, codes, scales, config=QUANTIZED, *, shards=1):
    """A directory as the hub has it."""
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt_oss"} | config))
    tensors = {f"{NAME}_blocks": codes, f"{NAME}_scales": scales, "x": torch.ones(3)}
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return open_checkpoint(folder)
    names = [f"model-0000{at + 1}-of-0000{shards}.safetensors" for at in range(shards)]
    where = {tensor: names[at % shards] for at, tensor in enumerate(tensors)}
    for name in names:
        save_file({one: tensors[one] for one in tensors if where[one] == name}, folder / name)
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return open_checkpoint(folder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_every_code_with_every_scale(tmp_path, dtype):
    """Subnormal numbers and infinities, too; the scale 255 is none (OCP: NaN)."""
    codes = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).repeat(1, 255, 1, 1)
    scales = torch.arange(255, dtype=torch.uint8).view(1, 255, 1).repeat(1, 1, 16)
    checkpoint = stored(tmp_path, codes, scales)
    info = checkpoint.tensors[f"{NAME}_blocks"]
    assert (info.format, info.shape, info.nbytes) == ("MXFP4", (1, 255, 512), 255 * 16 * 17)
    theirs = convert_moe_packed_tensors(codes, scales, dtype=dtype).transpose(1, 2)
    raw = torch.frombuffer(checkpoint.read(info.name, 0, info.nbytes), dtype=torch.uint8)
    ours = dequantize(raw.view(255, -1), "MXFP4", dtype=dtype)
    assert torch.equal(ours, theirs[0])
    wide = read_values(checkpoint, info, torch.empty(0, dtype=dtype))
    assert torch.equal(wide.to(dtype), theirs)


@needs_kernels
@pytest.mark.parametrize("shards", [1, 2, 3])
def test_gates_and_neurons_that_take_turns(tmp_path, shards, monkeypatch):
    """As an expert's rows lie in the file: dense, some rows at a time, and in its own blocks."""
    codes, scales = drawn(3, 14, 4)
    checkpoint = stored(tmp_path, codes, scales, shards=shards)
    assert list(checkpoint.tensors) == [name for name in checkpoint.tensors if "scales" not in name]
    assert sum(info.nbytes for info in checkpoint.tensors.values()) == 3 * 14 * 4 * 17 + 12
    theirs = convert_moe_packed_tensors(codes, scales, dtype=torch.float32)  # [E, D, 2F]
    monkeypatch.setattr("llmcli.loading.filling._CHUNK_BYTES", 700)
    for at in range(2):
        rows = PerExpert(Rows(at, at + 1, groups=7))
        load = Load(f"{NAME}_blocks", "w", (rows,))
        weight = Dense(torch.empty(3, 7, 128))
        fill(weight, checkpoint, load, LoadTimings())
        assert torch.equal(weight.tensor, theirs[:, :, at::2].transpose(1, 2))
    first = stored(tmp_path, codes[0], scales[0])  # a single expert is a matrix
    for at in range(2):
        packed = Packed("MXFP4", (7, 128), torch.device("cpu"))
        load = Load(f"{NAME}_blocks", "w", (Rows(at, at + 1, groups=7),))
        fill(packed, first, load, LoadTimings())
        assert packed.nbytes >= packed_bytes("MXFP4", 7, 128)
        assert torch.equal(packed.dense(torch.float32), theirs[0, :, at::2].T)


def test_only_whole_blocks_are_read_and_none_are_mapped(tmp_path):
    checkpoint = stored(tmp_path, *drawn(2, 3, 1))
    name = f"{NAME}_blocks"
    every = checkpoint.read(name, 0, 6 * 17)
    assert checkpoint.read(name, 2 * 17, 5 * 17) == every[2 * 17 : 5 * 17]
    with pytest.raises(ValueError, match="no whole blocks"):
        checkpoint.read(name, 1, 17)
    with pytest.raises(ValueError, match="which has 102"):
        checkpoint.read(name, 0, 7 * 17)
    with pytest.raises(ValueError, match="in two pieces"):
        mapped(checkpoint, Load(name, "w", ()))


@pytest.mark.parametrize(("codes", "scales"), [
    (drawn(2, 3, 4)[0], drawn(2, 4, 3)[1]), (drawn(2, 3, 4)[0], drawn(2, 3)[1]),
    (drawn(2, 3, 4)[0].view(2, 3, 64), drawn(2, 3, 4)[1]),
    (drawn(2, 3, 4)[0], drawn(2, 3, 4)[1].to(torch.int8)),
    (drawn(2, 3, 4)[0].float(), drawn(2, 3, 4)[1]),
])  # fmt: skip
def test_pairs_that_do_not_fit_are_refused(tmp_path, codes, scales):
    with pytest.raises(CheckpointError, match="one scale"):
        stored(tmp_path, codes, scales)


@pytest.mark.parametrize("config", [
    {}, {"quantization_config": {"quant_method": "fp8"}}, {"quantization_config": "mxfp4"},
])  # fmt: skip
def test_what_is_not_said_to_be_is_not(tmp_path, config):
    checkpoint = stored(tmp_path, *drawn(2, 3, 4), config)
    assert {info.format for info in checkpoint.tensors.values()} == {"U8", "F32"}


CONFIG, _ = in_blocks(llama(*(layer(sinks=True),) * 2), "MXFP4", size=64)
IN_4_BITS = ("W_gate", "W_up", "W_down")
FAMILY = family_of(
    "four", lambda _: CONFIG, stored=lambda name: name + "_blocks" * name.endswith(IN_4_BITS)
)


@needs_kernels
def test_a_model_has_the_same_numbers_however_it_is_loaded(tmp_path, monkeypatch):
    """With MXFP4 feed-forward weights: dense, in blocks, read ahead, and where memory is short."""
    monkeypatch.setattr("llmcli.families.family.families", lambda: (FAMILY,))
    generator, tensors, exact = torch.Generator().manual_seed(1), {}, {}
    for seed, spec in enumerate(parameters(CONFIG)):
        shape = spec.stored_shape or spec.shape
        if spec.name.endswith(IN_4_BITS):
            codes, scales = drawn(shape[0], shape[1] // 32, scales=(120, 124), seed=seed)
            tensors |= {f"{spec.name}_blocks": codes, f"{spec.name}_scales": scales}
            theirs = convert_moe_packed_tensors(codes[None], scales[None], dtype=torch.float32)
            exact[spec.name] = theirs[0].T
        else:
            tensors[spec.name] = exact[spec.name] = torch.randn(shape, generator=generator) / 4
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "four"} | QUANTIZED))
    checkpoint = open_checkpoint(tmp_path)
    ahead = start(prepare(checkpoint), dtype="auto", quantize="auto", bfloat16=False, free=1 << 40)
    models = [
        loaded(tmp_path, dtype="float32", text=False), loaded(tmp_path, text=False),
        load_checkpoint(checkpoint, device="cpu", text=False, ahead=ahead),
    ]  # fmt: skip
    monkeypatch.setattr("llmcli.loading.load._exceeds", lambda weights, device: True)
    models.append(loaded(tmp_path, text=False))
    for model in models:
        packed = [name for name in model.decoder.weight_names
                  if isinstance(model.decoder.weight(name), Packed)]  # fmt: skip
        assert len(packed) == (0 if model is models[0] else 2 * len(IN_4_BITS))
        for name, tensor in exact.items():
            found = model.decoder.weight(name).dense(torch.float32)
            assert torch.equal(found, tensor.to(found.dtype)), name
    entry = next(one for one in models[1].ledger.entries if one.target.endswith("W_gate"))
    assert (entry.stored, entry.dequantized) == ("MXFP4", False)

"""gpt-oss as it is published: experts in MXFP4, rows of gates and neurons in turns.

And as llama.cpp's converter writes these: `_repacked` is its `repack_mxfp4` in other words.
"""

from __future__ import annotations

import json

import gguf
import pytest
import torch
from needs import needs_kernels
from parity_gguf import Converter
from parity_models import build, opened, prompt, without_room
from parity_reference import fresh_rope, precision
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from zoo import Variant

from llmcli.kernels import native
from llmcli.weights.packed import MappedWeight, Packed

ONE = Variant("gpt_oss", "gpt_oss", {
    "hidden_size": 96, "intermediate_size": 64, "rms_norm_eps": 2.0**-17,  # a float32 of a GGUF
})  # fmt: skip
LEAVES = ("gate", "up", "down")


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A checkpoint, and transformers' model of the same numbers."""
    model, folder = build(ONE), tmp_path_factory.mktemp("gpt_oss")
    generator, tensors = torch.Generator().manual_seed(1), dict[str, Tensor]()
    for name, parameter in model.state_dict().items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            tensors[name] = parameter
            continue
        experts, columns, rows = parameter.shape
        shape = experts, rows, columns // 32
        codes = torch.randint(256, (*shape, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(121, 124, shape, generator=generator, dtype=torch.uint8)
        tensors |= {f"{name}_blocks": codes, f"{name}_scales": scales}
        parameter.copy_(convert_moe_packed_tensors(codes, scales, dtype=torch.float32))
    save_file(tensors, folder / "model.safetensors")
    quantized = {"quantization_config": {"quant_method": "mxfp4"}}
    (folder / "config.json").write_text(json.dumps(ONE.settings | quantized))
    return folder, model.double().eval()


def reference(model, ids):
    """Logarithms of probabilities."""
    model.set_experts_implementation("eager")
    with precision(model), torch.inference_mode():
        fresh_rope(model)
        found = model(ids, use_cache=False).logits.log_softmax(-1)
        return found


def test_the_same_numbers(published):
    folder, theirs = published
    ids = prompt(tokens=80)
    ours = opened(folder, "float64")
    off = ours.decoder(ids).log_softmax(-1) - reference(theirs, ids)
    assert off.abs().max() < 1e-9


@needs_kernels
@torch.inference_mode()
def test_experts_stay_in_their_blocks(published):
    folder, theirs = published
    ids = prompt(tokens=80)
    right = reference(theirs, ids)
    ours = opened(folder)
    exact = theirs.state_dict()
    for i in range(2):
        experts = f"model.layers.{i}.mlp.experts"
        gate_up = exact[f"{experts}.gate_up_proj"].mT
        rows = (gate_up[:, ::2], gate_up[:, 1::2], exact[f"{experts}.down_proj"].mT)
        for leaf, own in zip(LEAVES, rows, strict=True):
            weight = ours.decoder.weight(f"blocks.{i}.moe.W_{leaf}")
            assert isinstance(weight, Packed)
            assert weight.format == "MXFP4"
            assert torch.equal(weight.dense(torch.float64), own)
    assert all(not entry.dequantized for entry in ours.ledger.entries if "moe.W_" in entry.target)
    off = ours.decoder(ids).double().log_softmax(-1)
    assert 0 <= (right.exp() * (right - off)).sum(-1).mean() < 5e-3


def _repacked(codes, scales):
    """Bytes `[E, rows, 17·blocks]`: the exponent, then number i and number i + 16 in one byte."""
    numbers = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)
    blocks = torch.cat((scales[..., None], numbers[..., :16] | numbers[..., 16:] << 4), -1)
    return blocks.flatten(-2)


class Repacking(Converter):
    """Writes experts in the blocks of `published`, gates and neurons in one tensor or in two."""

    published: dict[str, Tensor]
    fused: bool

    def _tensor(self, name):
        if ".experts." not in name:
            return super()._tensor(name)
        stem, leaf = name.rsplit(".", 1)
        kind = "bias" if leaf.endswith("_bias") else "weight"
        if kind == "bias":
            rows = self.published[name]
        else:
            rows = _repacked(*(self.published[f"{name}_{part}"] for part in ("blocks", "scales")))
        parts = {"down": rows}
        if leaf.startswith("gate_up"):
            parts = {"gate": rows[:, ::2], "up": rows[:, 1::2]}
            parts = {"gate_up": torch.cat([*parts.values()], 1)} if self.fused else parts
        raw = gguf.GGMLQuantizationType["F32" if kind == "bias" else "MXFP4"]
        for part, data in parts.items():
            target = f"blk.{stem.split('.')[2]}.ffn_{part}_exps.{kind}"
            self.writer.add_tensor(target, data.contiguous().numpy(), raw_dtype=raw)
        return None


def converted(published, file, fused):
    """The same checkpoint as a GGUF file."""
    model = build(ONE)
    model.load_state_dict(published[1].state_dict())
    writer = Repacking(model, file, "F32", ())
    writer.published, writer.fused = load_file(published[0] / "model.safetensors"), fused
    writer.write(head=True, tokenizer="")
    return file


@pytest.mark.parametrize("fused", [False, True], ids=["split", "fused"])
@torch.inference_mode()
def test_a_gguf_file_is_the_same_model(fused, published, tmp_path, monkeypatch):
    """Number by number, unpacked, in blocks and mapped."""
    file, ids = converted(published, tmp_path / "model.gguf", fused), prompt(tokens=80)
    ours, hub = (opened(one, "float64") for one in (file, published[0]))
    assert ours.decoder.config.layers == hub.decoder.config.layers
    assert torch.equal(ours.decoder(ids), hub.decoder(ids))
    if native.level() is None:
        return
    found = []
    for folder in (file, published[0], file):
        if found[1:]:
            without_room(monkeypatch)
        model = opened(folder).decoder
        weights = [model.weight(f"blocks.1.moe.W_{leaf}") for leaf in LEAVES]
        assert {weight.format for weight in weights} == {"MXFP4"}
        assert all(isinstance(weight, MappedWeight) for weight in weights) == bool(found[1:])
        found.append((model(ids), [weight.dense(torch.float32) for weight in weights]))
    assert torch.equal(found[2][0], found[0][0])
    for blocks, other in zip(found[0][1], found[1][1], strict=True):
        assert torch.equal(blocks, other)

"""Weights of 8 bits: log-probabilities equal transformers' on the numbers that they stand for.

The reference runs on weights that are multiplied out by the definition, with transformers' own
dequantization of fp8 blocks where it has one; we read the quantized file.
"""

import copy
import json

import gguf
import pytest
import torch
from needs import needs_kernels
from parity_gguf import Converter
from parity_models import build, opened, prompt, without_room, write
from parity_reference import load_reference, reference_logprobs
from quantized_checkpoints import BLOCK, FP8, SCHEMES, quantized
from safetensors.torch import load_file, save_file
from test_transformers_parity import TOLERANCE, difference, logprobs
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from zoo import Variant

from llmcli.errors import CheckpointError
from llmcli.kernels import native
from llmcli.weights.packed import MappedWeight, Packed

IDS = prompt(tokens=60)


@pytest.fixture
def rewritten(tmp_path, checkpoints):
    """(case, scheme) → a folder with that model quantized, and what its tensors mean."""

    def write(name, scheme, **options):
        source = checkpoints(name)
        stored, meant = quantized(load_file(source / "model.safetensors"), scheme, **options)
        config = json.loads((source / "config.json").read_text())
        config["quantization_config"] = SCHEMES[scheme][0]
        (tmp_path / "config.json").write_text(json.dumps(config))
        save_file(stored, tmp_path / "model.safetensors")
        return tmp_path, meant

    return write


def filled(reference, meant):
    """The reference with those weights in place of its own."""
    made = copy.deepcopy(reference)
    state = {name: value.to(reference.dtype) for name, value in meant.items()}
    missing, unexpected = made.load_state_dict(state, strict=False)
    assert unexpected == []
    assert set(missing) <= {"lm_head.weight"}
    return made


def off(ours, theirs, ids=IDS):
    return difference(logprobs(ours.decoder, ids), reference_logprobs(theirs, ids))


@pytest.mark.parametrize(("name", "scheme"), [
    *(("llama-gqa3", scheme) for scheme in SCHEMES), ("llama-bias", "fp8-blocks"),
    ("qwen3", "fp8-blocks"), ("qwen3", "int-channel"), ("qwen2", "float-channel"),
    ("qwen2", "bitsandbytes"),
])  # fmt: skip
def test_quantized_weights(name, scheme, rewritten, references):
    folder, meant = rewritten(name, scheme)
    for dtype, tolerance in TOLERANCE.items():
        ours = opened(folder, dtype)
        assert off(ours, filled(references(name, dtype), meant), prompt()) < tolerance, dtype
    scaled = [entry for entry in ours.ledger.entries if entry.scale_tensors]
    assert len(scaled) == 14


@pytest.mark.parametrize("scheme", ["fp8-blocks", "float-channel", "fp8-null"])
@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_experts_of_8_bits(name, scheme, rewritten, checkpoints):
    """The scale of each expert is its own: the same model as of the numbers multiplied out."""
    skip = ("embed_tokens", "lm_head", "mlp.gate.", "block_sparse_moe.gate.")
    folder, meant = rewritten(name, scheme, skip=skip)
    whole = folder / "whole"
    whole.mkdir()
    save_file(meant, whole / "model.safetensors")
    (whole / "config.json").write_text((checkpoints(name) / "config.json").read_text())
    ours, theirs = (opened(one, "float64") for one in (folder, whole))
    assert difference(logprobs(ours.decoder, IDS), logprobs(theirs.decoder, IDS)) < 1e-12
    scaled = {entry.parameter for entry in ours.ledger.entries if entry.scale_tensors}
    assert {"blocks.0.moe.W_gate[0]", "blocks.1.moe.W_down[4]"} <= scaled


def test_a_quantized_embedding_and_head(rewritten, references):
    """What is quantized is what has a scale: nothing is skipped by its name."""
    folder, meant = rewritten("llama-gqa3", "float-channel", skip=("layers.0",))
    ours = opened(folder, "float64")
    assert off(ours, filled(references("llama-gqa3", "float64"), meant)) < 1e-9
    scaled = {entry.parameter for entry in ours.ledger.entries if entry.scale_tensors}
    assert {"embed.W", "head.W", "blocks.1.attn.W_q"} <= scaled
    assert not any(parameter.startswith("blocks.0") for parameter in scaled)


def test_blocks_as_transformers_dequantizes_them():
    """Its own operation gives the same numbers, where blocks divide the matrix."""
    weight = {"model.layers.0.mlp.up_proj.weight": torch.randn(64, 48)}
    stored, meant = quantized(weight, "fp8-blocks")
    numbers, scales = stored.values()
    assert scales.shape == (64 // BLOCK[0], 48 // BLOCK[1])
    theirs = Fp8Dequantize(None)._dequantize_one(numbers, scales, torch.float32)
    assert torch.equal(theirs, next(iter(meant.values())).float())


# DeepSeek-V3 as it is published: E4M3 in blocks of 128 by 128, expert by expert. All matrices but
# embeddings, head and routers have scales, those of the layers that predict tokens further on, too.
# The sides of none here are whole blocks, and a block lies across what our parameters keep apart:
# latents and rotated keys, the heads of keys and of values.
SCHEME = "fp8-default"
NOT_SCALED = ("embed_tokens", "lm_head", "mlp.gate.", "eh_proj", "shared_head")
LAYERS = 3
LATER = f"model.layers.{LAYERS}."
ONE = Variant("deepseek_v3-fp8", "deepseek_v3", {
    "num_hidden_layers": LAYERS, "first_k_dense_replace": 1, "hidden_size": 136,
    "intermediate_size": 260, "moe_intermediate_size": 130, "n_routed_experts": 6, "n_group": 3,
    "topk_group": 2, "num_experts_per_tok": 3, "n_shared_experts": 1, "q_lora_rank": 132,
    "kv_lora_rank": 129, "num_nextn_predict_layers": 1,
})  # fmt: skip
EXPERT = "model.layers.2.mlp.experts.4.up_proj"


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """The tensors of the file, and a folder with what they mean, as transformers reads it."""
    folder = write(ONE, tmp_path_factory.mktemp("fp8"))
    plain = load_file(folder / "model.safetensors")
    assert f"{EXPERT}.weight" in plain
    tensors, meant = quantized(plain, SCHEME, skip=NOT_SCALED)
    save_file(meant, folder / "model.safetensors")
    for name in list(tensors):
        if name.startswith(f"model.layers.{LAYERS - 1}."):
            tensors[name.replace(f".{LAYERS - 1}.", f".{LAYERS}.", 1)] = tensors[name].clone()
    width = ONE.settings["hidden_size"]
    tensors |= {
        f"{LATER}eh_proj.weight": torch.zeros(width, 2 * width),
        f"{LATER}enorm.weight": torch.ones(width),
        f"{LATER}shared_head.head.weight": torch.zeros(211, width),
    }
    return tensors, folder


@pytest.fixture
def published(stored, tmp_path):
    """Writes such a checkpoint; what is given replaces tensors, or removes them."""

    def make(**changed):
        tensors = {**stored[0], **changed}
        save_file({name: one for name, one in tensors.items() if one is not None},
                  tmp_path / "model.safetensors")  # fmt: skip
        config = json.loads((stored[1] / "config.json").read_text())
        config |= {"quantization_config": SCHEMES[SCHEME][0] | {
            "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
        }}  # fmt: skip
        (tmp_path / "config.json").write_text(json.dumps(config))
        return tmp_path

    return make


def test_it_is_the_model_of_its_numbers_times_their_scales(stored, published):
    folder = published()
    for dtype, tolerance in TOLERANCE.items():
        ours = opened(folder, dtype)
        assert off(ours, load_reference(stored[1], getattr(torch, dtype))) < tolerance, dtype
    entries = ours.ledger.entries
    scaled = {entry.source for entry in entries if entry.scale_tensors}
    eights = {name for name, tensor in stored[0].items() if tensor.dtype == FP8}
    assert scaled == {name for name in eights if not name.startswith(LATER)}
    read = {name for entry in entries for name in (entry.source, *entry.scale_tensors)}
    assert {name for name, _ in ours.ledger.dropped} == {*stored[0]} - read
    assert {*stored[0]} - read == {name for name in stored[0] if name.startswith(LATER)}


@pytest.mark.parametrize("rows", [0, 1])
def test_the_scale_of_one_block_of_one_expert_is_seen(rows, stored, published):
    name = f"{EXPERT}.weight_scale_inv"
    scales = stored[0][name].clone()
    assert scales.shape == (2, 2)
    scales[rows, 1] *= 1.01
    ours = opened(published(**{name: scales}), "float64")
    assert off(ours, load_reference(stored[1], torch.float64)) > 1e-7


@pytest.mark.parametrize(("changed", "says"), [
    ({"weight_scale_inv": None}, "is stored as F8_E4M3 but there is no"),
    ({"weight_scale_inv": torch.ones(1, 2)}, r"of shape \[1, 2\], which should be \[2, 2\]"),
    ({"weight_scale_inv": torch.full((2, 2), torch.nan)}, "not finite"),
    ({"weight": torch.ones(136, 130).to(FP8)}, r"should be \[130, 136\] but is"),
    ({"weight": None}, "weight_scale_inv"),
])  # fmt: skip
def test_scales_that_lie_are_named_with_the_expert(changed, says, published):
    folder = published(**{f"{EXPERT}.{leaf}": one for leaf, one in changed.items()})
    with pytest.raises(CheckpointError, match=says) as caught:
        opened(folder)
    assert EXPERT in caught.value.message
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 250


# gpt-oss as it is published: experts in MXFP4, rows of gates and neurons in turns; and as the
# converter of llama.cpp writes these: `_repacked` is its `repack_mxfp4` in other words.
GPT_OSS = Variant("gpt_oss", "gpt_oss", {
    "hidden_size": 96, "intermediate_size": 64, "rms_norm_eps": 2.0**-17,  # a float32 of a GGUF
})  # fmt: skip
LEAVES = ("gate", "up", "down")


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory):
    """A checkpoint, and transformers' model of the same numbers."""
    model, folder = build(GPT_OSS), tmp_path_factory.mktemp("gpt_oss")
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
    (folder / "config.json").write_text(json.dumps(GPT_OSS.settings | quantized))
    model.set_experts_implementation("eager")
    return folder, model.double().eval()


def test_gpt_oss_has_the_same_numbers(gpt_oss):
    folder, theirs = gpt_oss
    assert off(opened(folder, "float64"), theirs, prompt(tokens=80)) < 1e-9


@needs_kernels
@torch.inference_mode()
def test_experts_of_gpt_oss_stay_in_their_blocks(gpt_oss):
    folder, theirs = gpt_oss
    ids = prompt(tokens=80)
    right = reference_logprobs(theirs, ids)
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


def converted(gpt_oss, file, fused):
    """The same checkpoint as a GGUF file."""
    model = build(GPT_OSS)
    model.load_state_dict(gpt_oss[1].state_dict())
    writer = Repacking(model, file, "F32", ())
    writer.published, writer.fused = load_file(gpt_oss[0] / "model.safetensors"), fused
    writer.write(head=True, tokenizer="")
    return file


@pytest.mark.parametrize("fused", [False, True], ids=["split", "fused"])
@torch.inference_mode()
def test_a_gguf_file_of_gpt_oss_is_the_same_model(fused, gpt_oss, tmp_path, monkeypatch):
    """Number by number, unpacked, in blocks and mapped."""
    file, ids = converted(gpt_oss, tmp_path / "model.gguf", fused), prompt(tokens=80)
    ours, hub = (opened(one, "float64") for one in (file, gpt_oss[0]))
    assert ours.decoder.config.layers == hub.decoder.config.layers
    assert torch.equal(ours.decoder(ids), hub.decoder(ids))
    if native.level() is None:
        return
    found = []
    for folder in (file, gpt_oss[0], file):
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

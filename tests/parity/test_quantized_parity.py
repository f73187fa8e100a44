"""Weights of 8 bits: log-probabilities equal transformers' on the numbers that they stand for.

The reference runs on weights that are multiplied out by the definition, with transformers' own
dequantization of fp8 blocks where it has one; we read the quantized file.
"""

import copy
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from parity_models import opened, prompt, write
from parity_reference import load_reference, reference_logprobs
from quantized_checkpoints import BLOCK, FP8, SCHEMES, quantized
from safetensors.torch import load_file, save_file
from test_transformers_parity import TOLERANCE, difference, logprobs
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from zoo import Variant

from llmcli.errors import CheckpointError

Rewritten = Callable[..., tuple[Path, dict[str, Tensor]]]
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


def test_the_scale_is_seen(rewritten, references):
    """One scale of one block off by a thousandth: the comparison is not blind to it."""
    folder, meant = rewritten("llama-gqa3", "fp8-blocks")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.self_attn.v_proj.weight_scale_inv"][0, 1] *= 1.001
    save_file(tensors, file)
    assert off(opened(folder, "float64"), filled(references("llama-gqa3", "float64"), meant)) > 1e-7


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

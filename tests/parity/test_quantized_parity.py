"""Weights of 8 bits: log-probabilities equal transformers' on the numbers that they stand for.

The reference runs on weights that are multiplied out by the definition, with transformers' own
dequantization of fp8 blocks where it has one; we read the quantized file.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from parity_models import prompt
from parity_reference import reference_logprobs
from parity_types import Checkpoints, References
from quantized_checkpoints import BLOCK, SCHEMES, quantized
from safetensors.torch import load_file, save_file
from test_transformers_parity import TOLERANCE, difference, logprobs
from torch import Tensor
from transformers import PreTrainedModel
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from llmcli.checkpoints import open_checkpoint
from llmcli.loading.load import load_checkpoint

Rewritten = Callable[..., tuple[Path, dict[str, Tensor]]]


@pytest.fixture
def rewritten(tmp_path: Path, checkpoints: Checkpoints) -> Rewritten:
    """(case, scheme) → a folder with that model quantized, and what its tensors mean."""

    def write(name: str, scheme: str, **options: tuple[str, ...]) -> tuple[Path, dict[str, Tensor]]:
        source = checkpoints(name)
        stored, meant = quantized(load_file(source / "model.safetensors"), scheme, **options)
        config = json.loads((source / "config.json").read_text())
        config["quantization_config"] = SCHEMES[scheme][0]
        (tmp_path / "config.json").write_text(json.dumps(config))
        save_file(stored, tmp_path / "model.safetensors")
        return tmp_path, meant

    return write


def filled(reference: PreTrainedModel, meant: dict[str, Tensor]) -> PreTrainedModel:
    """The reference with those weights in place of its own."""
    made = copy.deepcopy(reference)
    state = {name: value.to(reference.dtype) for name, value in meant.items()}
    missing, unexpected = made.load_state_dict(state, strict=False)
    assert unexpected == []
    assert set(missing) <= {"lm_head.weight"}
    return made


@pytest.mark.parametrize(
    ("name", "scheme"),
    [
        *(("llama-gqa3", scheme) for scheme in SCHEMES),
        ("qwen3", "fp8-blocks"),
        ("qwen3", "int-channel"),
        ("qwen2", "float-channel"),
        ("qwen2", "bitsandbytes"),
        ("llama-bias", "fp8-blocks"),
    ],
)
def test_quantized_weights(
    name: str, scheme: str, rewritten: Rewritten, references: References
) -> None:
    folder, meant = rewritten(name, scheme)
    ids = prompt()
    for dtype, tolerance in TOLERANCE.items():
        ours = load_checkpoint(open_checkpoint(folder), device="cpu", dtype=dtype)
        theirs = reference_logprobs(filled(references(name, dtype), meant), ids)
        assert difference(logprobs(ours.decoder, ids), theirs) < tolerance, dtype
    scaled = [entry for entry in ours.ledger.entries if entry.scale]
    assert len(scaled) == 14


@pytest.mark.parametrize("scheme", ["fp8-blocks", "float-channel", "fp8-null"])
@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_experts_of_8_bits(
    name: str, scheme: str, rewritten: Rewritten, checkpoints: Checkpoints
) -> None:
    """The scale of each expert is its own: the same model as of the numbers multiplied out."""
    skip = ("embed_tokens", "lm_head", "mlp.gate.", "block_sparse_moe.gate.")
    folder, meant = rewritten(name, scheme, skip=skip)
    whole = folder / "whole"
    whole.mkdir()
    save_file(meant, whole / "model.safetensors")
    (whole / "config.json").write_text((checkpoints(name) / "config.json").read_text())
    ids = prompt(tokens=60)
    ours, theirs = (
        load_checkpoint(open_checkpoint(one), device="cpu", dtype="float64")
        for one in (folder, whole)
    )
    assert difference(logprobs(ours.decoder, ids), logprobs(theirs.decoder, ids)) < 1e-12
    scaled = {entry.parameter for entry in ours.ledger.entries if entry.scale}
    assert {"blocks.0.moe.W_gate[0]", "blocks.1.moe.W_down[4]"} <= scaled


def test_the_scale_is_seen(rewritten: Rewritten, references: References) -> None:
    """One scale of one block off by a thousandth: the comparison is not blind to it."""
    folder, meant = rewritten("llama-gqa3", "fp8-blocks")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.self_attn.v_proj.weight_scale_inv"][0, 1] *= 1.001
    save_file(tensors, file)
    ours = load_checkpoint(open_checkpoint(folder), device="cpu", dtype="float64")
    ids = prompt(tokens=40)
    theirs = reference_logprobs(filled(references("llama-gqa3", "float64"), meant), ids)
    assert difference(logprobs(ours.decoder, ids), theirs) > 1e-7


def test_a_quantized_embedding_and_head(rewritten: Rewritten, references: References) -> None:
    """What is quantized is what has a scale: nothing is skipped by its name."""
    folder, meant = rewritten("llama-gqa3", "float-channel", skip=("layers.0",))
    ours = load_checkpoint(open_checkpoint(folder), device="cpu", dtype="float64")
    ids = prompt(tokens=40)
    theirs = reference_logprobs(filled(references("llama-gqa3", "float64"), meant), ids)
    assert difference(logprobs(ours.decoder, ids), theirs) < 1e-9
    scaled = {entry.parameter for entry in ours.ledger.entries if entry.scale}
    assert {"embed.W", "head.W", "blocks.1.attn.W_q"} <= scaled
    assert not any(parameter.startswith("blocks.0") for parameter in scaled)


def test_blocks_as_transformers_dequantizes_them() -> None:
    """Its own operation gives the same numbers, where blocks divide the matrix."""
    weight = {"model.layers.0.mlp.up_proj.weight": torch.randn(64, 48)}
    stored, meant = quantized(weight, "fp8-blocks")
    numbers, scales = stored.values()
    assert scales.shape == (64 // BLOCK[0], 48 // BLOCK[1])
    theirs = Fp8Dequantize(None)._dequantize_one(numbers, scales, torch.float32)
    assert torch.equal(theirs, next(iter(meant.values())).float())

"""GGUF files written with the gguf package give transformers' log-probabilities.

Rows of q and k interleaved, Conv1D transposed, packed blocks of every format, rotary scaling in
metadata or as a tensor of factors: read by us, and compared with transformers on the weights
that the gguf package decodes from the same bytes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from parity_cases import Case, build, prompt
from parity_gguf import interleave, separate, write_gguf
from parity_reference import load_reference, reference_logprobs
from torch import Tensor

from llmcli.checkpoints import open_checkpoint
from llmcli.loading import load_checkpoint
from llmcli.ops.quant import DECODERS

# rows must be whole blocks of 32
_WIDE = {
    "gpt2": {"n_embd": 96},
    "llama": {"hidden_size": 96, "intermediate_size": 128},
    "qwen2": {"hidden_size": 96, "intermediate_size": 128},
    "qwen3": {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4},
    # what it normalizes is small, so that eps counts: GGUF rounds it to float32
    "olmo2": {"hidden_size": 96, "intermediate_size": 128, "rms_norm_eps": 2.0**-17},
    "lfm2": {"hidden_size": 96, "intermediate_size": 192},  # of which two thirds are built
}
# d·q is exact in float32; d·q + m is not, so that float64 sees the decoder's rounding there
EXACT = {"F64", "F32", "F16", "BF16", "Q4_0", "Q5_0", "Q8_0"}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}


@torch.no_grad()
def compare(
    folder: Path,
    model_type: str,
    format: str,
    overrides: dict[str, Any],
    *,
    head: bool = True,
    version: int = 3,
) -> float:
    """Largest difference of log-probabilities over a long prompt in float64."""
    one = Case("gguf", model_type, _WIDE[model_type] | overrides)
    model = build(one, seed=3)
    file = folder / "model.gguf"
    write_gguf(model, file, format, head=head)
    with file.open("r+b") as header:
        header.seek(len(b"GGUF"))
        header.write(version.to_bytes(4, "little"))  # 2 and 3 differ in nothing else
    model.save_pretrained(folder / "hf")
    theirs = reference_logprobs(load_reference(folder / "hf", torch.float64), ids := prompt())
    ours = load_checkpoint(open_checkpoint(file), device="cpu", dtype="float64")
    return (ours.decoder(ids).log_softmax(-1) - theirs).abs().nan_to_num(torch.inf).max().item()


@pytest.mark.parametrize(
    "format", ["F64", "F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]
)
@pytest.mark.parametrize("model_type", _WIDE)
def test_every_format(model_type: str, format: str, tmp_path: Path) -> None:
    assert compare(tmp_path, model_type, format, {}) < (1e-9 if format in EXACT else 1e-5)


@pytest.mark.parametrize("format", sorted({*DECODERS} - EXACT - {"Q4_1", "Q5_1"}))
def test_super_blocks(format: str, tmp_path: Path) -> None:
    wide = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8}
    assert compare(tmp_path, "llama", format, wide | {"num_hidden_layers": 1}) < 1e-5


@pytest.mark.parametrize(
    ("model_type", "overrides"),
    [
        ("llama", {"num_key_value_heads": 6}),
        ("llama", {"num_key_value_heads": 1}),
        ("llama", {"attention_bias": True}),
        ("llama", {"head_dim": 10}),
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
        ("llama", {"rope_parameters": _YARN}),
        ("qwen2", {"rope_parameters": _YARN, "rms_norm_eps": 1e-3}),
        ("qwen3", {"num_key_value_heads": 4, "head_dim": 32}),
        ("gpt2", {"n_inner": 50, "layer_norm_epsilon": 1e-3}),
    ],
    ids=str,
)
def test_variants(model_type: str, overrides: dict[str, Any], tmp_path: Path) -> None:
    # eps and theta are stored as float32: 1e-3 is not the double 1e-3
    tolerance = 1e-7 if {"rms_norm_eps", "layer_norm_epsilon"} & set(overrides) else 1e-9
    assert compare(tmp_path, model_type, "F32", overrides) < tolerance


@pytest.mark.parametrize("format", ["F32", "Q4_0"])
def test_files_of_version_2(format: str, tmp_path: Path) -> None:
    assert compare(tmp_path, "llama", format, {}, version=2) < 1e-9


def test_llama3_factors_are_a_tensor(tmp_path: Path) -> None:
    # the factors are rounded to float32 in the file: 330 positions turn that into 1e-5 radians
    overrides = {"head_dim": 32, "rope_parameters": _LLAMA3}
    assert compare(tmp_path, "llama", "F32", overrides) < 1e-5


@pytest.mark.parametrize("model_type", _WIDE)
@pytest.mark.parametrize("head", [True, False])
def test_a_tied_head_stored_or_not(model_type: str, head: bool, tmp_path: Path) -> None:
    assert compare(tmp_path, model_type, "F32", {"tie_word_embeddings": True}, head=head) < 1e-9


def test_the_interleaving_is_undone() -> None:
    """Six rows of one head: 0 3 1 4 2 5 in the file."""
    rows = torch.arange(12)
    assert interleave(rows, 2).tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]
    assert separate(interleave(rows, 2), 2).tolist() == rows.tolist()


def test_a_wrong_order_of_rows_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def plain(rows: Tensor, heads: int) -> Tensor:
        return rows

    monkeypatch.setattr("parity_gguf.interleave", plain)
    monkeypatch.setattr("parity_gguf.separate", plain)
    assert compare(tmp_path, "llama", "F32", {}) > 1e-2

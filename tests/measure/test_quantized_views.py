"""What the views say of weights in 8 bits, from the headers and from what was loaded."""

import pytest
import torch
from planned import wrongly_filled
from quantized_checkpoints import SCHEMES, write_quantized
from tiny_checkpoints import write_llama

from llmcli.checkpoints import open_checkpoint
from llmcli.commands.info.measure import measure_info
from llmcli.commands.shapes.measure import stored_check, stored_tensors
from llmcli.graph.arithmetic import auto_dtype
from llmcli.inspect.kernel import origin
from llmcli.loading.load import load_checkpoint
from llmcli.prepare.prepared import prepare

SCALE = "model.layers.1.mlp.up_proj.weight_scale_inv"
FAULTS = {
    "none": None,
    "missing": lambda tensors: tensors.pop(SCALE),
    "shape": lambda tensors: tensors.__setitem__(SCALE, torch.ones(2, 6)),
    "format": lambda tensors: tensors.__setitem__(SCALE, torch.ones(6, 2, dtype=torch.int16)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_checks_from_headers_turn_red_for_scales_that_do_not_fit(tmp_path, fault):
    folder, _ = write_quantized(tmp_path / "m", "fp8-blocks", change=FAULTS[fault])
    checkpoint = open_checkpoint(folder)
    prepared = prepare(checkpoint)
    scales = measure_info(checkpoint, ()).checks[-1]
    assert scales.name == "stored_scales"
    for check in (scales, *stored_check(prepared)):
        assert check.ok == (fault == "none")
        assert check.where == ("" if fault == "none" else "blocks.1.mlp.W_up")
    # a model that is not quantized has no such check
    plain = measure_info(open_checkpoint(write_llama(tmp_path / "plain")), ()).checks
    assert [check.name for check in plain] == ["stored_numbers", "stored_names"]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_source_of_a_parameter_says_how_it_was_scaled(tmp_path, scheme):
    folder, _ = write_quantized(tmp_path, scheme)
    checkpoint = open_checkpoint(folder)
    prepared = prepare(checkpoint)
    stored = stored_tensors(prepared)
    model = load_checkpoint(checkpoint, device="cpu", dtype="float32")
    assert wrongly_filled(model.ledger, stored) == []
    words = stored["blocks.0.attn.W_q"].operations
    assert len(words) == 1
    assert words[0].startswith(f"× {SCHEMES[scheme][3]}")
    assert f"dequantized ({words[0]})" in origin(model, "blocks.0.attn.W_q")
    assert stored["embed.W"].operations == ()


def test_a_scale_that_the_ledger_does_not_have_is_seen(tmp_path):
    folder, _ = write_quantized(tmp_path, "fp8-blocks")
    model = load_checkpoint(open_checkpoint(folder), device="cpu")
    other, _ = write_quantized(tmp_path / "other", "fbgemm")
    checkpoint = open_checkpoint(other)
    prepared = prepare(checkpoint)
    wrong = wrongly_filled(model.ledger, stored_tensors(prepared))
    assert wrong[0].startswith("blocks.0.")


def test_formats_and_bytes_of_the_file_are_counted_with_its_scales(tmp_path):
    folder, _ = write_quantized(tmp_path, "bitsandbytes")
    file = measure_info(open_checkpoint(folder), ()).file
    found = {stored.format: (stored.tensors, stored.numbers) for stored in file.formats}
    matrices = 2 * (32 * 32 * 2 + 16 * 32 * 2 + 3 * 48 * 32)
    assert found["I8"] == (14, matrices)
    assert found["U8"] == (14, 14)
    checkpoint = open_checkpoint(folder)
    total = sum(info.nbytes for info in checkpoint.tensors.values())
    assert sum(stored.bytes for stored in file.formats) == total
    prepared = prepare(checkpoint)
    stored = stored_tensors(prepared).values()
    # a parameter's bytes are with its scale's
    assert sum(one.stored_bytes for one in stored) == total


@pytest.mark.parametrize(("stored", "with_bfloat16", "without"), [
    ({"F8_E4M3", "F32", "BF16"}, "bfloat16", "float16"),
    ({"F8_E4M3", "F32", "F16"}, "float16", "float16"),
    ({"I8", "U8", "F32", "F16"}, "float16", "float16"), ({"I8", "F32"}, "bfloat16", "float16"),
    ({"F8_E5M2"}, "bfloat16", "float16"), ({"F32"}, "float32", "float32"),
    ({"Q8_0", "F32"}, "bfloat16", "float16"),
])
def test_a_gpu_computes_in_what_is_not_quantized(stored, with_bfloat16, without):
    assert auto_dtype("cuda", stored, bfloat16=True) == with_bfloat16
    assert auto_dtype("cuda", stored, bfloat16=False) == without
    assert auto_dtype("cpu", stored, bfloat16=False) == "float32"

"""Loading weights of 8 bits: every number and its scale, in any order, in bounded memory."""

from types import SimpleNamespace

import pytest
import torch
from decoder_parameters import parameters_of
from gguf_model import metadata, shapes, write_file
from live_tensors import Live
from needs import needs_kernels
from quantized_checkpoints import BLOCK, FP8, SCHEMES, quantize, spread, write_quantized
from safetensors.torch import save_file
from tiny_checkpoints import gpt2_tensors, in_chunks, llama_tensors, loaded, write_gpt2, write_llama

from llmcli.checkpoints import open_checkpoint
from llmcli.errors import CheckpointError, UnsupportedModel, WeightMismatch
from llmcli.families.rules import CollectRows, Load, Plan, Rows, Transpose, UnpairRows
from llmcli.families.scales import Grid, Scale
from llmcli.loading.weights import load_weights
from llmcli.ops.quant import dequantize
from llmcli.weights.dense import Dense

UP = "model.layers.1.mlp.up_proj"


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_every_parameter_is_what_its_tensor_means(tmp_path, scheme, dtype):
    folder, meant = write_quantized(tmp_path, scheme)
    model = loaded(folder, dtype=dtype)
    exact = torch.float64 if dtype == "float64" else torch.float32
    tolerance = {"float64": 1e-15, "float32": 2e-7, "bfloat16": 5e-3}[dtype]
    assert len(model.ledger.entries) == len(meant)
    for entry in model.ledger.entries:
        slot, right = parameters_of(model.decoder)[entry.parameter], meant[entry.source]
        assert slot.dtype == getattr(torch, dtype)
        torch.testing.assert_close(slot.to(exact), right.to(exact), rtol=tolerance, atol=0)
        scaled = right.ndim == 2 and "layers" in entry.source
        assert bool(entry.scale_tensors) == scaled, entry.source
        assert entry.dequantized == scaled


def test_memory_beyond_the_weights_is_bounded(tmp_path):
    """Of a matrix of 8 MiB, 32 in float32, at a time no more is multiplied out than 4."""
    numbers, scales = quantize(torch.randn(2048, 4096), FP8, (128, 128))
    save_file({"w": numbers, "s": scales}, tmp_path / "model.safetensors")
    slot = torch.empty(2048, 4096)
    with Live() as live:
        fill(slot, tmp_path, Grid(formats=("F8_E4M3",), rows=128, columns=128))
    assert torch.equal(slot, numbers.float() * spread(scales, (128, 128), slot.shape))
    assert live.most <= slot.nbytes + (16 << 20), live.most - slot.nbytes


def fill(slot, folder, grid, *ops):
    """A slot from the tensors `w` and `s` of a folder."""
    load_ = Load("w", "slot", ops, Scale(source="s", grid=grid))
    decoder = SimpleNamespace(
        weight_names=("slot",), weight=lambda name: Dense(slot), devices=(slot.device,)
    )
    load_weights(decoder, open_checkpoint(folder), Plan((load_,), (), ()))


# rows of two heads of 12, of which 10 are rotated and were stored in pairs
_HEAD = (*range(0, 10, 2), *range(1, 10, 2), 10, 11)
UNPAIRED = [12 * head + row for head in (0, 1) for row in _HEAD]


@pytest.mark.parametrize("block", [(5, 7), (1, None), (None, None), (3, 4)])
@pytest.mark.parametrize(("ops", "right"), [
    ((Rows(5, 17),), lambda w: w[5:17]),
    ((UnpairRows(2, 10),), lambda w: w[UNPAIRED]),
    ((UnpairRows(2, 10), Rows(2, 20)), lambda w: w[UNPAIRED][2:20]),
    ((Rows(1, 4, groups=3),), lambda w: w[[r for r in range(24) if 1 <= r % 8 < 4]]),
    ((CollectRows(2, (3, 7, 2)),), lambda w: w[[12 * g + r
                                                for part in ((0, 3), (3, 10), (10, 12))
                                                for g in (0, 1) for r in range(*part)]]),
    ((Transpose(),), lambda w: w.t()),
    ((Transpose(), Rows(3, 11)), lambda w: w.t()[3:11]),
])
def test_a_row_keeps_its_scale_wherever_it_goes(tmp_path, monkeypatch, block, ops, right):
    """The scale belongs to the stored row: it is applied before the operations move it."""
    numbers, scales = quantize(torch.randn(24, 18), FP8, block)
    save_file({"w": numbers, "s": scales}, tmp_path / "model.safetensors")
    wanted = right(numbers.float() * spread(scales, block, numbers.shape))
    grid = Grid(formats=("F8_E4M3",), rows=block[0], columns=block[1])
    for nbytes in (4 << 20, 300, 1):  # all, chunks that begin inside a block, row by row
        in_chunks(monkeypatch, nbytes)
        slot = torch.empty(wanted.shape)
        fill(slot, tmp_path, grid, *ops)
        assert torch.equal(slot, wanted)


def test_slices_of_one_fused_matrix_share_its_scale(tmp_path):
    tensors = gpt2_tensors()
    name = "h.0.attn.c_attn"
    numbers, scales = quantize(tensors[f"{name}.weight"], FP8, BLOCK)
    tensors |= {f"{name}.weight": numbers, f"{name}.weight_scale_inv": scales}
    folder = write_gpt2(tmp_path, tensors, quantization_config=SCHEMES["fp8-blocks"][0])
    slots = parameters_of(loaded(folder, dtype="float32").decoder)
    fused = numbers.float() * spread(scales, BLOCK, numbers.shape)
    for i, part in enumerate("qkv"):
        assert torch.equal(slots[f"blocks.0.attn.W_{part}"], fused[:, 16 * i : 16 * i + 16].t())


def put(name, value):
    """A change of tensors: another one, none (None), or another last number."""

    def change(tensors):
        if isinstance(value, float):
            tensors[name].view(-1)[-1] = value
        elif value is None:
            del tensors[name]
        else:
            tensors[name] = value

    return change


SCALE = f"{UP}.weight_scale_inv"


@pytest.mark.parametrize(("change", "says"), [
    (put(SCALE, None), rf"is stored as F8_E4M3 but there is no `{SCALE}`"),
    (put(SCALE, torch.ones(6, 1)), r"scale of shape \[6, 1\], which should be \[6, 2\]"),
    (put(SCALE, torch.ones(2, 6)), r"scale of shape \[2, 6\]"),
    (put(SCALE, torch.ones(6, 2, dtype=torch.int32)), "scale that is stored as I32"),
    (put(SCALE, torch.ones(6, 2).to(FP8)), "scale that is stored as F8_E4M3"),
    (put(SCALE, float("nan")), f"the scale `{SCALE}` has a number that is not finite"),
    (put(SCALE, float("inf")), "not finite"),
    (put(f"{UP}.weight", torch.ones(48, 32)), "has a scale but is stored as F32"),
    (put(f"{UP}.weight", torch.ones(48, 32, dtype=torch.int8)), "is stored as I8, not as"),
])
def test_scales_that_cannot_be_right(tmp_path, change, says):
    folder, _ = write_quantized(tmp_path, "fp8-blocks", change=change)
    with pytest.raises(CheckpointError, match=says) as caught:
        loaded(folder)
    assert caught.value.code == 4
    assert not isinstance(caught.value, UnsupportedModel)


def test_scales_without_a_weight_and_without_a_scheme(tmp_path):
    lone = put("model.layers.0.mlp.extra.weight_scale_inv", torch.ones(1))
    folder, _ = write_quantized(tmp_path / "a", "fp8-blocks", change=lone)
    surplus = loaded(folder).ledger.surplus
    assert surplus == ("model.layers.0.mlp.extra.weight_scale_inv",)
    folder, _ = write_quantized(tmp_path / "b", "fp8-blocks", quantization_config=None)
    with pytest.raises(WeightMismatch, match="weight_scale_inv"):
        loaded(folder)


@pytest.mark.parametrize("byte", [0, 1, 2, None])
def test_bitsandbytes_lays_numbers_by_rows_or_not(tmp_path, byte):
    """None: files older than the byte that says so."""
    name = f"{UP}.weight_format"
    layout = put(name, byte if byte is None else torch.tensor(byte, dtype=torch.uint8))
    folder, meant = write_quantized(tmp_path, "bitsandbytes", change=layout)
    if byte:
        with pytest.raises(CheckpointError, match="not row-major"):
            loaded(folder)
        return
    slot = parameters_of(loaded(folder, dtype="float64").decoder)["blocks.1.mlp.W_up"]
    torch.testing.assert_close(slot, meant[f"{UP}.weight"], rtol=1e-15, atol=0)


def test_scales_for_rounding_activations_are_dropped_by_name(tmp_path):
    static = put(f"{UP}.input_scale", torch.tensor(0.5))
    folder, _ = write_quantized(tmp_path, "fp8-auto", change=static)
    dropped = dict(loaded(folder).ledger.dropped)
    assert list(dropped) == [f"{UP}.input_scale"]
    assert "not rounded here" in dropped[f"{UP}.input_scale"]


@pytest.mark.parametrize("equal", [True, False])
def test_a_tied_head_with_other_scales_is_another_head(tmp_path, equal):
    """The same bytes of 8 bits are the same numbers only where their scales are."""
    tensors = llama_tensors()
    numbers, scales = quantize(tensors["model.embed_tokens.weight"], FP8, (1, None))
    tensors |= {
        "model.embed_tokens.weight": numbers, "model.embed_tokens.weight_scale": scales,
        "lm_head.weight": numbers.clone(), "lm_head.weight_scale": scales * (1 if equal else 2),
    }  # fmt: skip
    folder = write_llama(
        tmp_path, tensors, tie_word_embeddings=True,
        quantization_config=SCHEMES["float-channel"][0],
    )  # fmt: skip
    model = loaded(folder, dtype="float32")
    assert model.config.head.tied == equal
    assert ("head.W" in parameters_of(model.decoder)) != equal
    assert ("lm_head.weight_scale" in dict(model.ledger.dropped)) == equal
    if not equal:
        slots = parameters_of(model.decoder)
        assert torch.equal(slots["head.W"], 2 * slots["embed.W"])


@pytest.mark.parametrize("kind", ["float64", "float16", "float8_e4m3fn", "float8_e5m2"])
def test_plain_numbers_of_every_width(tmp_path, kind):
    """Without a scheme a number of 8 bits is what it says, as for transformers."""
    tensors = {name: t.to(getattr(torch, kind)) for name, t in llama_tensors().items()}
    model = loaded(write_llama(tmp_path, tensors), dtype="float64")
    slots = parameters_of(model.decoder)
    for entry in model.ledger.entries:
        assert torch.equal(slots[entry.parameter], tensors[entry.source].double())
        assert (entry.scale_tensors, entry.dequantized) == ((), False)


@pytest.mark.parametrize("kind", ["int8", "int32"])
def test_whole_numbers_without_a_scheme_are_no_weights(tmp_path, kind):
    tensors = llama_tensors()
    tensors[f"{UP}.weight"] = torch.ones(48, 32, dtype=getattr(torch, kind))
    with pytest.raises(UnsupportedModel, match="whole numbers") as caught:
        loaded(write_llama(tmp_path, tensors))
    assert "`quantization_config`" in caught.value.hint


NVFP4 = 40
BYTES = 36  # for 64 numbers


def write_nvfp4(path, experts, scales):
    """A Llama layer (or a Mixtral's) with an up projection in NVFP4; the numbers of its blocks."""
    generator = torch.Generator().manual_seed(1)
    rows, columns, stack = 96, 64, (experts,) if experts else ()
    suffix = "_exps" if experts else ""
    blocks = torch.randint(0, 256, (rows * max(1, experts), BYTES), generator=generator,
                           dtype=torch.uint8)  # fmt: skip
    blocks[:, :4] = blocks[:, :4] % 16 + 48  # scales of about 1
    kept = shapes(columns, rows)
    for name in [name for name, dims in kept.items() if "ffn_" in name and len(dims) == 2]:
        kept[name.replace(".weight", f"{suffix}.weight")] = (*stack, *kept.pop(name))
    if experts:
        kept["blk.0.ffn_gate_inp.weight"] = (experts, columns)
    tensors = {
        name: (0, torch.randn(dims, generator=generator).numpy().tobytes(), dims)
        for name, dims in kept.items()
    }
    up = f"blk.0.ffn_up{suffix}"
    tensors[f"{up}.weight"] = (NVFP4, blocks.numpy().tobytes(), (*stack, rows, columns))
    if scales is not None:
        held = torch.tensor(scales)
        tensors[f"{up}.scale"] = (0, held.numpy().tobytes(), held.shape)
        tensors[f"{up}.input_scale"] = (0, torch.ones(1).numpy().tobytes(), (1,))
    sizes = {"embedding_length": columns, "feed_forward_length": rows}
    if experts:
        sizes |= {"expert_count": experts, "expert_used_count": 2}
    write_file(path, metadata(**sizes), tensors)
    return dequantize(blocks, "NVFP4", dtype=torch.float32).view(*stack, rows, columns)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize(("experts", "scales"), [(0, [0.25]), (4, [0.25, 2.0, 1.0, 0.5])])
def test_nvfp4_of_gguf_has_a_scale_for_each_matrix(tmp_path, experts, scales, dtype):
    numbers = write_nvfp4(tmp_path / "plain.gguf", experts, None)
    write_nvfp4(tmp_path / "m.gguf", experts, scales)
    plain, model = (loaded(tmp_path / f"{name}.gguf", dtype=dtype) for name in ("plain", "m"))
    name = "blocks.0.moe.W_up" if experts else "blocks.0.mlp.W_up"
    held, without = (parameters_of(one.decoder)[name] for one in (model, plain))
    factor = torch.tensor(scales, dtype=held.dtype).view(-1, *[1] * (held.ndim - 1))
    assert torch.equal(without, numbers.to(held.dtype))
    assert torch.equal(held, without * (factor if experts else factor.squeeze(0)))
    (entry,) = (e for e in model.ledger.entries if e.target == name)
    assert entry.operations[0] == "× scale, one for all"
    assert [name for name, _ in model.ledger.dropped] == [
        f"blk.0.ffn_up{'_exps' if experts else ''}.input_scale"
    ]


def test_a_scale_of_nvfp4_that_does_not_fit_is_refused(tmp_path):
    write_nvfp4(tmp_path / "m.gguf", 4, [1.0, 2.0])
    with pytest.raises(CheckpointError, match=r"scale of shape \[2\], which should be \[4\]"):
        loaded(tmp_path / "m.gguf")


@needs_kernels
def test_experts_that_are_quantized_anew_have_each_its_own_scale(tmp_path, monkeypatch):
    in_chunks(monkeypatch, 10_000)  # which begin inside an expert
    scales = [0.25, 2.0, 1.0, 0.5]
    numbers = write_nvfp4(tmp_path / "m.gguf", 4, scales) * torch.tensor(scales).view(4, 1, 1)
    held = loaded(tmp_path / "m.gguf", quantize="int8").decoder.weight("blocks.0.moe.W_up")
    most = numbers.abs().amax(-1, keepdim=True)
    assert ((held.dense() - numbers).abs() <= most / 127).all()

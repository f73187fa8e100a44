"""Loading: every tensor used or dropped by name, every parameter filled, nothing else."""

import io
import json
from dataclasses import replace

import pytest
import torch
from blocks import ffn_of
from decoder_parameters import parameters_of
from planned import departures
from rich.console import Console
from tiny_checkpoints import gpt2_tensors, in_chunks, llama_tensors, loaded, write_gpt2, write_llama
from torch.nn.attention import SDPBackend, sdpa_kernel

from llmcli import devices, processor
from llmcli.checkpoints import open_checkpoint
from llmcli.commands.load.measure.run import measure_load
from llmcli.commands.load.view import render_load
from llmcli.commands.shapes.measure import ShapesRequest
from llmcli.devices import DTYPES
from llmcli.errors import CheckpointError, OutOfMemory, UsageError, WeightMismatch
from llmcli.graph.cost import total_cost
from llmcli.graph.graph import graph
from llmcli.graph.memory import PlannedRun, memory_need
from llmcli.graph.plan import _parameters, parameters
from llmcli.graph.precision import Precision
from llmcli.graph.rows import Rows
from llmcli.graph.spec import Call
from llmcli.kernels import native
from llmcli.loading import weights
from llmcli.loading.load import load, load_shapes
from llmcli.nn.parameters import Parameters
from llmcli.records.work import LoadTimings


def test_every_tensor_is_in_a_slot(tmp_path):
    """In the right one: the parity with transformers shows it."""
    tensors = llama_tensors()
    model = loaded(write_llama(tmp_path, tensors), dtype="float32")
    slots = parameters_of(model.decoder)
    assert {entry.parameter for entry in model.ledger.entries} == slots.keys()
    for entry in model.ledger.entries:
        assert torch.equal(slots[entry.parameter], tensors[entry.source])
    assert len(model.ledger.entries) == len(tensors)
    assert {entry.stored for entry in model.ledger.entries} == {"F32"}
    assert not any(entry.dequantized for entry in model.ledger.entries)
    assert model.eos_ids == {2}
    described = model.describe()
    assert described["parameters"] == sum(t.numel() for t in tensors.values())
    assert described["weight_bytes"] == 4 * described["parameters"]
    assert Precision.of("bfloat16").weight_bytes(model.config) == 2 * described["parameters"]


@pytest.mark.parametrize(("said", "ends"), [(5, {2, 5}), ([5, 7], {2, 5, 7}), (None, {2})])
def test_the_generation_settings_name_further_ends(tmp_path, said, ends):
    folder = write_llama(tmp_path)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": said}))
    assert loaded(folder).eos_ids == ends


def test_a_head_that_differs_from_the_embedding_in_its_last_number_is_another_one(tmp_path):
    """They are compared a few MiB at a time."""
    tensors = llama_tensors()
    tensors["model.embed_tokens.weight"] = torch.zeros(33_000, 32)
    tensors["lm_head.weight"] = torch.zeros(33_000, 32)
    options = {"vocab_size": 33_000, "tie_word_embeddings": True}
    assert loaded(write_llama(tmp_path / "a", tensors, **options)).config.head.tied
    tensors["lm_head.weight"][-1, -1] = 1
    assert not loaded(write_llama(tmp_path / "b", tensors, **options)).config.head.tied


GONE, L0, L1 = torch.empty(0), "model.layers.0", "model.layers.1"
WRITERS = {"gpt2": (write_gpt2, gpt2_tensors), "llama": (write_llama, llama_tensors)}


# a tensor that is missing or too short is in measure/load_reports.txt, too
@pytest.mark.parametrize(("model", "name", "tensor", "says"), [
    ("llama", f"{L1}.self_attn.q_proj.weight", GONE,
     r"would be `model\.layers\.1\.self_attn\.q_proj\.w"),
    ("llama", f"{L1}.mlp.up_proj.weight", torch.ones(47, 32),
     r"up_proj.*` should be \[48, 32\] but is \[47, 32\]"),
    ("llama", f"{L1}.mlp.up_proj.weight", torch.ones(48 * 32), r"W_up` from .* should be"),
    ("llama", "model.norm.weight", torch.ones(32, dtype=torch.int32), "I32"),
    ("gpt2", "h.0.attn.c_attn.weight", torch.ones(16, 49), "only 768 numbers are used"),
    ("gpt2", "h.0.attn.c_attn.weight", torch.ones(16, 47),
     r"W_v` from `h\.0\.attn\.c_attn\.weight`"),
    ("gpt2", "h.0.attn.c_attn.weight", torch.ones(768), "should be"),
    ("gpt2", "h.0.attn.c_attn.bias", torch.ones(()), "b_q` from"),
    ("gpt2", "h.0.attn.c_attn.bias", torch.ones(50), "only 48 numbers are used"),
    ("gpt2", "ln_f.weight", torch.ones(0),
     r"ln_final\.w` from `ln_f\.weight` should be \[16\] but is \[0\]"),
    ("gpt2", "wte.weight", torch.ones(53, 16, 1), r"be \[53, 16\] but is \[53, 16, 1\]"),
])  # fmt: skip
def test_tensors_that_do_not_fit_are_refused(tmp_path, monkeypatch, model, name, tensor, says):
    """Before anything is allocated."""
    monkeypatch.setattr("llmcli.loading.load.Decoder", None)
    write, plain = WRITERS[model]
    tensors = {one: t for one, t in (plain() | {name: tensor}).items() if t is not GONE}
    with pytest.raises(CheckpointError, match=says) as caught:
        loaded(write(tmp_path, tensors))
    assert caught.value.code == 4
    assert isinstance(caught.value, WeightMismatch) != says.startswith(("I32", "only"))


def test_what_has_no_use_is_surplus(tmp_path):
    tensors = llama_tensors() | {f"{L0}.self_attn.extra": torch.ones(2)}
    surplus = loaded(write_llama(tmp_path / "a", tensors)).ledger.surplus
    assert surplus == (f"{L0}.self_attn.extra",)
    surplus = loaded(write_llama(tmp_path / "b", num_hidden_layers=1)).ledger.surplus
    assert {name.split(".")[2] for name in surplus} == {"1"}
    assert len(surplus) == sum(name.startswith(L1) for name in llama_tensors())


def test_random_weights_need_a_configuration_only(tmp_path):
    write_llama(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    first, again, other = (
        loaded(tmp_path, random_weights=seed, dtype="float32").decoder for seed in (1, 1, 2)
    )
    ids = torch.arange(5)[None]
    assert torch.equal(first(ids), again(ids))
    assert not torch.equal(first(ids), other(ids))
    assert (parameters_of(first)["ln_final.w"] == 1).all()
    with pytest.raises(CheckpointError, match="a configuration but no weights"):
        loaded(tmp_path)


@pytest.mark.parametrize(("dtype", "share", "words", "never"), [
    ("float32", 0.9, "`--dtype bfloat16`", ""), ("float32", 0.6, "`--dtype bfloat16`", ""),
    ("float32", 0.45, "`--quantize int8`", "--dtype bfloat16"),
    ("float32", 0.25, "`--quantize int4`", "--dtype bfloat16"),
    ("bfloat16", 0.6, "a smaller model", "--dtype bfloat16"), ("float32", 0, "a smaller model", ""),
])  # fmt: skip
def test_what_does_not_fit_is_refused_before_it_is_allocated(
    tmp_path, monkeypatch, dtype, share, words, never
):
    """And what would fit is named, where that helps."""
    monkeypatch.setattr(native, "level", lambda: "portable")
    path = write_llama(tmp_path, hidden_size=64, vocab_size=4096, intermediate_size=512)
    needed = load_shapes(open_checkpoint(path), dtype=dtype).weight_bytes
    monkeypatch.setattr(devices, "available_bytes", lambda device: int(share * needed))
    with pytest.raises(OutOfMemory, match="the weights need") as caught:
        loaded(path, dtype=dtype, random_weights=0)
    assert caught.value.code == 5
    assert words in caught.value.hint
    assert not never or never not in caught.value.hint
    assert "a smaller model" in caught.value.hint


def test_dtypes_and_devices_by_name(tmp_path, monkeypatch):
    path = write_llama(tmp_path)
    model = load(str(path), device="cpu", dtype="float64")
    assert (model.dtype, model.tokenizer) == (torch.float64, None)
    monkeypatch.setattr(processor, "flags", lambda: frozenset({"avx512_bf16"}))
    assert loaded(path, dtype="auto").dtype == torch.bfloat16
    monkeypatch.setattr(processor, "flags", lambda: frozenset({"avx2"}))
    assert loaded(path, dtype="auto").dtype == torch.float32
    with pytest.raises(UsageError, match="`float8` is not a dtype"):
        loaded(path, dtype="float8")
    with pytest.raises(UsageError, match="has no float64"):
        devices.check_dtype("float64", torch.device("mps"))
    for name in ("gpu", "cpu:1", "cuda:x"):
        with pytest.raises(UsageError, match="is not a device"):
            devices.resolve_device(name)
    with pytest.raises(UsageError, match="no device `cuda:99`"):
        devices.resolve_device("cuda:99")
    with pytest.raises(UsageError, match="`--quantize int3` is not a weight format"):
        loaded(write_llama(tmp_path), quantize="int3")


def test_auto_leaves_apples_gpu_to_who_names_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert devices.resolve_device("auto").type == "cpu"
    mps = devices.resolve_device("mps")
    assert mps.type == "mps"
    assert devices.float64_device(mps).type == "cpu"


def test_products_and_attention_of_a_cuda_device_are_set(monkeypatch):
    products, kinds = torch.backends.cuda.matmul, ("bf16", "fp16")
    names = ["allow_tf32", *(f"allow_{kind}_reduced_precision_reduction" for kind in kinds)]
    before = [getattr(products, name) for name in names]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    try:
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION]):
            for name in names:
                setattr(products, name, True)
            assert devices.resolve_device("cuda:1") == torch.device("cuda:1")
            assert not any(getattr(products, name) for name in names)
            assert torch.backends.cuda.flash_sdp_enabled()
            assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        for name, value in zip(names, before, strict=True):
            setattr(products, name, value)


def test_a_broken_tokenizer_matters_only_for_text(tmp_path):
    write_llama(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"sentencepiece")
    with pytest.raises(CheckpointError, match="not a sentencepiece model"):
        loaded(tmp_path)
    assert loaded(tmp_path, text=False).tokenizer is None


def test_weights_that_lie_by_columns_are_the_same(tmp_path, monkeypatch):
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    write_llama(tmp_path, tie_word_embeddings=True, tensors=None)
    by_rows = loaded(tmp_path, dtype="bfloat16").decoder
    monkeypatch.setattr("llmcli.weights.dense.lies_by_columns", lambda rows, device, dtype: True)
    in_chunks(monkeypatch, 300)
    by_columns = loaded(tmp_path, dtype="bfloat16").decoder
    assert ffn_of(by_columns.blocks[0]).gate_up.weight.dense().stride(0) == 1
    for name, slot in parameters_of(by_rows).items():
        assert torch.equal(slot, parameters_of(by_columns)[name]), name
    assert (by_rows(ids) - by_columns(ids)).abs().max() < 0.1


def test_a_configuration_that_lies_about_sizes_is_no_matter_of_memory(tmp_path):
    with pytest.raises(WeightMismatch, match="should be"):
        loaded(write_gpt2(tmp_path, n_embd=1 << 18))


@pytest.mark.parametrize(("least", "used"), [(1 << 30, 1), (0, 2)])
def test_threads_are_used_where_they_are_worth_it_and_given_back(
    tmp_path, monkeypatch, least, used
):
    seen = set()

    def noted(*given):
        seen.add(torch.get_num_threads())
        return fill(*given)

    fill = weights.fill
    monkeypatch.setattr("llmcli.loading.weights.fill", noted)
    monkeypatch.setattr("llmcli.loading.weights._THREADED", least)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        loaded(write_llama(tmp_path))
        assert torch.get_num_threads() == 2
        assert seen == {used}
    finally:
        torch.set_num_threads(before)


# Wide parameters are kept in at least float32, whatever the model computes in. No part has one yet:
# here it is the norms that are wide.
NORMS = 32 * 5  # numbers of two norms in each of two layers, and of the last one


@pytest.fixture
def folder(tmp_path, monkeypatch):
    plain = Rows.parameter

    def parameter(*args, **how):
        return plain(*args, **how, **{"wide": True} if how.get("kind") == "norms" else {})

    monkeypatch.setattr(Rows, "parameter", parameter)
    caches = graph, _parameters
    for cached in caches:
        cached.cache_clear()
    yield write_llama(tmp_path / "m")
    for cached in caches:
        cached.cache_clear()


@pytest.mark.parametrize(("dtype", "own"), [
    ("bfloat16", "float32"), ("float16", "float32"), ("float32", "float32"),
    ("float64", "float64"),
])  # fmt: skip
def test_wide_parameters_keep_their_digits(folder, dtype, own):
    model = loaded(folder, dtype=dtype)
    slots = parameters_of(model.decoder)
    assert slots["blocks.1.ln2.w"].dtype == slots["ln_final.w"].dtype == DTYPES[own]
    assert slots["blocks.1.mlp.W_up"].dtype == DTYPES[dtype]
    stored = llama_tensors()["model.layers.1.post_attention_layernorm.weight"]
    assert torch.equal(slots["blocks.1.ln2.w"], stored.to(DTYPES[own]))
    assert model.decoder(torch.arange(5)[None]).isfinite().all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_every_count_of_bytes_is_of_what_lies_in_memory(folder, dtype):
    model = loaded(folder, dtype=dtype)
    held = sum(slot.nbytes for slot in parameters_of(model.decoder).values())
    numbers = sum(slot.numel() for slot in parameters_of(model.decoder).values())
    size = DTYPES[dtype].itemsize
    assert held == size * numbers + (max(size, 4) - size) * NORMS
    precision = replace(Precision.of(dtype), portable=native.level() == "portable")
    assert model.precision == precision
    assert precision.weight_bytes(model.config) == held
    assert model.describe()["weight_bytes"] == held
    assert load_shapes(open_checkpoint(folder), dtype=dtype).weight_bytes == held
    run = PlannedRun(model.config, precision, batch=1, context=8)
    assert memory_need(run).weights_bytes == held
    calls = ShapesRequest(config=model.config, batch=1, tokens=4, precision=precision)
    assert sum(spec.bytes for spec in calls.parameters()) == held
    call = Call(batch=1, tokens=1, past=3, phase="decode")
    table = parameters_of(model.decoder)["embed.W"]
    reads = total_cost(model.config, call, precision=precision).weights
    assert reads == held - table.nbytes + table[0].nbytes
    assert departures(model) == {}


def test_the_ledger_says_to_which_dtype_wide_ones_were_converted(folder):
    model, report = measure_load(
        open_checkpoint(folder), LoadTimings(), device="cpu", dtype="bfloat16", quantize="auto"
    )
    assert report.ok
    assert report.bytes.weights == model.weight_bytes
    console = Console(width=200, file=io.StringIO())
    console.print(render_load(report, "model", report.rows))
    rows = {line.split()[0]: line for line in console.file.getvalue().splitlines() if line.strip()}
    assert "to " not in rows["blocks.{0-1}.ln1.w"]
    assert "to bfloat16" in rows["blocks.{0-1}.mlp.W_up"]


def test_what_lies_in_one_tensor_has_one_dtype(folder):
    specs = parameters(loaded(folder, dtype="float32").config, dtype="bfloat16")
    place = Parameters(specs, Precision.of("bfloat16"), device=torch.device("cpu"))
    with pytest.raises(ValueError, match="several dtypes"):
        place.vector(("blocks.0.ln1.w", "blocks.0.mlp.W_up"))

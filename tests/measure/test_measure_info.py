"""What `info` says of a checkpoint, against what loading it really takes."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import gguf_bytes as g
import pytest
import torch
from decoder_parameters import parameters_of
from load_files import llama, write_gguf
from planned import wrongly_filled
from quantized_checkpoints import SCHEMES, write_quantized
from safetensors.torch import save_file
from tiny_checkpoints import gpt2_tensors, llama_tensors, write_gpt2, write_llama
from torch.utils.flop_counter import FlopCounterMode
from zoo import TYPES, ZOO

from llmcli.checkpoints import open_checkpoint, open_model
from llmcli.commands.info.measure import measure_info
from llmcli.commands.shapes.measure import stored_check, stored_tensors
from llmcli.config.attention import AttentionConfig
from llmcli.config.conv import ShortConvConfig
from llmcli.config.delta import DeltaConfig
from llmcli.config.experts import ExpertsConfig
from llmcli.config.latent import LatentConfig
from llmcli.config.ple import PleConfig
from llmcli.config.ssm import SsmConfig
from llmcli.decoder.decoder import Decoder
from llmcli.errors import LlmcliError
from llmcli.families import find
from llmcli.graph.precision import Precision, auto_dtype
from llmcli.inspect.kernel import origin
from llmcli.kernels import native
from llmcli.loading.load import load_checkpoint
from llmcli.prepare.prepared import prepare
from llmcli.records.info import Device

CPU = Device(device="cpu", name="x", total_bytes=1 << 40, free_bytes=1 << 40, bfloat16=False)
GPU = Device(device="cuda:0", name="y", total_bytes=1 << 40, free_bytes=10_000, bfloat16=True)
HUGE = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 8192, "num_hidden_layers": 80,
    "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8,
    "max_position_embeddings": 131072, "tie_word_embeddings": False,
}  # fmt: skip


def agrees_with_loading(checkpoint, model=None):
    report = measure_info(checkpoint, [CPU], dtype="float32", batch=2, context=32)
    model = model or load_checkpoint(checkpoint, device="cpu", dtype="float32")
    facts, about = report.architecture, model.describe()
    assert all(check.ok for check in report.checks)
    assert len(report.checks) == 2
    assert facts.parameters.total == about["parameters"]
    assert report.memory[0].need.weights_bytes == about["weight_bytes"] == model.weight_bytes
    assert report.memory[0].need.cache_bytes == model.decoder.new_state(2, 32).nbytes
    assert (facts.family, facts.context) == (about["family"], about["context"])
    computes_what_it_says(report, model)
    assert {stored.format for stored in report.file.formats} == set(about["stored_formats"])
    assert sum(stored.tensors for stored in report.file.formats) == len(checkpoint.tensors)
    assert sum(len(kind.layers) for kind in facts.layers) == len(model.config.layers)
    if model.tokenizer is not None:
        assert report.tokenizer.vocabulary == model.tokenizer.vocab_size
        assert {token.id for token in report.tokenizer.eos} == set(model.tokenizer.eos_ids)
    return report


def computes_what_it_says(report, model):
    """Bytes of the tensors that are there, and FLOPs as PyTorch counts them."""
    config, slots = model.config, parameters_of(model.decoder)
    not_read = 0 if config.head.tied else slots["embed.W"][2:].nbytes  # two sequences, two tokens
    if config.embedding.positions is not None:
        not_read += slots["pos_embed.W"][1:].nbytes
    token = report.memory[0].token
    assert token.weights == model.weight_bytes - not_read
    assert token.cache == model.decoder.new_state(2, 32).nbytes
    decoder = Decoder(config, Precision.of("float32"), device="meta")
    found = []
    for tokens, past in ((1, 0), (1, 31), (32, 0)):
        state = decoder.new_state(1, 32)
        state.lengths = [past]
        with FlopCounterMode(display=False) as counter:
            decoder(torch.zeros(1, tokens, dtype=torch.long, device="meta"), state, logits="last")
        found.append(counter.get_total_flops())
    flops = report.flops
    assert [flops.first, flops.last, flops.prompt_full] == found
    assert flops.prompt < flops.prompt_full


def test_tiny_is_what_loading_it_takes():
    report = agrees_with_loading(open_model("tiny"))
    assert report.architecture.parameters.total == report.file.formats[0].numbers == 3_814_912
    assert report.file.metadata == {"format": "pt"}
    assert (report.architecture.tied, report.architecture.positions) == (True, 512)


@pytest.mark.parametrize("write", [write_llama, write_gpt2])
def test_small_checkpoints_are_what_loading_them_takes(write, tmp_path):
    report = agrees_with_loading(open_checkpoint(write(tmp_path / "m")))
    assert (report.tokenizer, report.unknown) == (None, ())


def test_it_fits_to_the_byte(tmp_path):
    checkpoint = open_checkpoint(write_llama(tmp_path / "m"))
    needed = measure_info(checkpoint, [CPU], context=10).memory[0].need.needed_bytes
    for free, fits, longest in ((needed, True, 10), (needed - 1, False, 9)):
        (fit,) = measure_info(checkpoint, [replace(CPU, free_bytes=free)], context=10).memory
        assert (fit.fits, fit.longest_context) == (fits, longest)


def alone(folder):
    save_file(gpt2_tensors(), folder / "alone.safetensors", metadata={"by": "me"})
    return folder / "alone.safetensors"


def blocks(folder, **metadata):
    return write_gguf(folder / "m.gguf", **metadata)


def unknown_gguf(folder):
    pairs = [
        g.pair("general.architecture", g.STRING, "unheard_of"),
        g.pair("general.name", g.STRING, "Some Model"),
        g.pair("general.languages", g.ARRAY, (g.STRING, ["en", "de"])),
        g.pair("odd", g.STRING, b"\xff\x1b[31m"),
        g.pair("many", g.ARRAY, (g.U32, list(range(50)))),
    ]
    (folder / "x.gguf").write_bytes(g.gguf(pairs, [g.tensor("w", (32,), 0, 0)], bytes(128)))
    return folder / "x.gguf"


def huge(folder):
    """`tests/benchmarks/startup.py` has the seconds that this takes."""
    (folder / "config.json").write_text(json.dumps(HUGE))
    return folder


HALVES = llama({name: tensor.bfloat16() for name, tensor in llama_tensors().items()})
BLIND, ABSENT = replace(CPU, total_bytes=None, free_bytes=None), replace(GPU, usable=False)
UP, OTHER = "model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.other.weight"
# what writes a checkpoint, on which devices, how; `level`: of the kernels
CASES = {
    "devices have their own arithmetic and answer": (
        HALVES, [CPU, GPU, BLIND, ABSENT], {"context": 10}),
    "without kernels": (HALVES, [CPU, GPU], {"context": 10, "level": None}),
    "blocks are kept where there are kernels": (blocks, [CPU, GPU], {"context": 10}),
    "blocks without kernels": (blocks, [CPU, GPU], {"context": 10, "level": None}),
    "blocks that are not to be kept": (blocks, [CPU], {"context": 10, "quantize": "none"}),
    "blocks in a dtype": (blocks, [CPU], {"context": 10, "dtype": "float32"}),
    # 48 columns are no whole blocks
    "in 8 bits": (llama(), [CPU], {"context": 10, "quantize": "int8"}),
    "in 4 bits": (llama(), [CPU], {"context": 10, "quantize": "int4"}),
    "in 4 bits and in a dtype": (llama(), [CPU], {"quantize": "int4", "dtype": "float32"}),
    "in 8 bits without kernels": (llama(), [CPU], {"quantize": "int8", "level": None}),
    "a tensor too few": (llama(without=UP), [], {}),
    "a tensor too short": (llama({UP: torch.zeros(47, 32)}), [], {}),
    "a tensor that the model has no place for": (llama({OTHER: torch.zeros(3, 3)}), [], {}),
    "a layer too many": (partial(blocks, llama__block_count=1), [], {}),
    "a file alone": (alone, [], {}),
    "an unknown architecture": (llama(model_type="unheard_of"), [], {}),
    "the catalog": (lambda folder: "tiny", [], {}),
    "a name and a dtype": (llama(_name_or_path="org/x", dtype="bfloat16"), [], {}),
    "an old dtype": (llama(torch_dtype="bfloat16"), [], {}),
    "a dtype that is none": (llama(dtype="int3"), [], {}),
    "a tokenizer that cannot be used": (llama(files={"tokenizer.json": "{}"}), [], {}),
    "settings that contradict each other": (llama(num_attention_heads=5), [], {}),
    "metadata without effect": (partial(blocks, llama__attention__sliding_window=5), [], {}),
    "metadata of a GGUF file": (unknown_gguf, [], {}),
    "70 billion": (huge, [GPU, CPU], {"dtype": "bfloat16"}),
}  # fmt: skip


def report_lines(path, devices, how):
    """Lines of the report."""
    try:
        report = measure_info(open_model(str(path)), devices, **how)
    except LlmcliError as error:
        yield f"refused: {error.message}"
        return
    about, file, model = report.about, report.file, report.architecture
    yield f"about {about.name or 'nobody'}, {about.kind}, {about.languages}: {about.summary or '–'}"
    formats = [f"{one.tensors} of {one.numbers} {one.format}" for one in file.formats]
    yield f"{file.files} files, {file.bytes} bytes, {file.tensors} tensors: {', '.join(formats)}"
    yield f"metadata {dict(file.entries)}, surplus {report.surplus}"
    if model is not None:
        declared = model.declared and (model.declared.dtype, model.declared.bytes)
        yield f"model of {model.parameters.total}, declared {declared}, tied {model.tied}"
        for fit in report.memory:
            need, formats = fit.need, " ".join(fit.need.formats.values())
            yield f"fits {fit.fits}, longest {fit.longest_context}: {formats}"
            yield f"  weights {need.weights_bytes}, of which a token reads {fit.token.weights}"
            yield f"  cache {need.cache_bytes}, of a token {need.cache_bytes_per_token}"
    for key, value in report.ignored.items():
        yield f"ignored {key} = {value}"
    if report.tokenizer:
        yield f"tokenizer of {report.tokenizer.vocabulary}"
    for why in report.unknown:
        yield f"unknown: {why.partition(': Cannot')[0]}"
    for check in report.checks:
        yield f"{'✓' if check.ok else '✗'} {check.name} {check.where}".rstrip()


def test_reports(tmp_path, monkeypatch, as_written):
    found = {}
    for number, (name, (write, devices, how)) in enumerate(CASES.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        monkeypatch.setattr(native, "level", lambda how=how: how.get("level", "portable"))
        options = {option: value for option, value in how.items() if option != "level"}
        lines = report_lines(write(folder), devices, options)
        found[name] = [line.replace(str(folder), ".") for line in lines]
    as_written(Path(__file__).parent / "info_reports.txt", found)


MIXERS = {
    AttentionConfig: "attention", ShortConvConfig: "short convolution",
    LatentConfig: "latent attention", DeltaConfig: "gated DeltaNet", SsmConfig: "Mamba-2",
}  # fmt: skip


def feed_forward(part):
    if isinstance(part, ExpertsConfig):
        return "mixture of experts"
    if isinstance(part, PleConfig):
        return "per-layer embeddings"
    return "gated MLP" if part.gated else "MLP"


@pytest.mark.parametrize("model_type", TYPES)
def test_the_parts_that_are_listed_are_those_of_its_blocks(model_type):
    """Of all variants of all types of the family together."""
    family = find(model_type, "safetensors")
    configs = [one.config() for one in ZOO if one.model_type in family.hf_types]
    parts = {part for one in configs for layer in one.layers for part in layer.parts}
    mixers = {MIXERS[type(part)] for part in parts if type(part) in MIXERS}
    feeds = {feed_forward(part) for part in parts if type(part) not in MIXERS}
    assert (mixers, feeds) == ({*family.mixers}, {*family.feed_forwards})


# weights in 8 bits: from the headers, and from what was loaded


SCALE = "model.layers.1.mlp.up_proj.weight_scale_inv"
SCALE_FAULTS = {
    "none": None,
    "missing": lambda tensors: tensors.pop(SCALE),
    "shape": lambda tensors: tensors.__setitem__(SCALE, torch.ones(2, 6)),
    "format": lambda tensors: tensors.__setitem__(SCALE, torch.ones(6, 2, dtype=torch.int16)),
}


@pytest.mark.parametrize("fault", SCALE_FAULTS)
def test_checks_from_headers_turn_red_for_scales_that_do_not_fit(tmp_path, fault):
    folder, _ = write_quantized(tmp_path / "m", "fp8-blocks", change=SCALE_FAULTS[fault])
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
    stored = stored_tensors(prepare(checkpoint))
    model = load_checkpoint(checkpoint, device="cpu", dtype="float32")
    assert wrongly_filled(model.ledger, stored) == []
    name = "blocks.0.attn.W_q"
    (words,) = stored[name].operations
    assert words.startswith(f"× {SCHEMES[scheme][3]}")
    assert f"dequantized ({words})" in origin(model, name)
    assert stored["embed.W"].operations == ()
    other = stored | {name: replace(stored[name], operations=("× another scale",))}
    assert wrongly_filled(model.ledger, other) == [name]


def test_formats_and_bytes_of_the_file_are_counted_with_its_scales(tmp_path):
    folder, _ = write_quantized(tmp_path, "bitsandbytes")
    checkpoint = open_checkpoint(folder)
    file = measure_info(checkpoint, ()).file
    found = {stored.format: (stored.tensors, stored.numbers) for stored in file.formats}
    matrices = 2 * (32 * 32 * 2 + 16 * 32 * 2 + 3 * 48 * 32)
    assert found["I8"] == (14, matrices)
    assert found["U8"] == (14, 14)
    total = sum(info.nbytes for info in checkpoint.tensors.values())
    assert sum(stored.bytes for stored in file.formats) == total
    # a parameter's bytes are with its scale's
    assert sum(one.stored_bytes for one in stored_tensors(prepare(checkpoint)).values()) == total


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

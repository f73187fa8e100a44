"""What `info` says of a checkpoint, against what loading it really takes."""

from __future__ import annotations

import json
from dataclasses import replace

import gguf_bytes as g
import pytest
import torch
from decoder_parameters import parameters_of
from load_files import write_gguf
from safetensors.torch import save_file
from tiny_checkpoints import gpt2_tensors, llama_tensors, write_gpt2, write_llama
from torch.utils.flop_counter import FlopCounterMode
from zoo import TYPES, ZOO

from llmcli.checkpoints import open_checkpoint, open_model
from llmcli.checkpoints.catalog import CATALOG
from llmcli.commands.info.measure import measure_info, supported_families
from llmcli.errors import CheckpointError, UsageError
from llmcli.families import families, find
from llmcli.kernels import native
from llmcli.loading.load import load_checkpoint
from llmcli.nn.decoder import Decoder
from llmcli.parts.attention.config import AttentionConfig
from llmcli.parts.conv.config import ShortConvConfig
from llmcli.parts.delta.config import DeltaConfig
from llmcli.parts.experts.config import ExpertsConfig
from llmcli.parts.latent.config import LatentConfig
from llmcli.parts.ple.config import PleConfig
from llmcli.parts.ssm.config import SsmConfig
from llmcli.reports.info import Device

CPU = Device(device="cpu", name="x", total_bytes=1 << 40, free_bytes=1 << 40, bfloat16=False)
GPU = Device(device="cuda:0", name="y", total_bytes=1 << 40, free_bytes=10_000, bfloat16=True)
HUGE = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 8192, "num_hidden_layers": 80,
    "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8,
    "max_position_embeddings": 131072, "tie_word_embeddings": False,
}  # fmt: skip


def agrees_with_loading(checkpoint):
    report = measure_info(checkpoint, [CPU], dtype="float32", batch=2, context=32)
    model = load_checkpoint(checkpoint, device="cpu", dtype="float32")
    facts, about = report.model, model.describe()
    assert all(check.ok for check in report.checks)
    assert len(report.checks) == 2
    assert facts.counts.total == about["parameters"]
    assert facts.fits[0].need.weights == about["weight_bytes"] == model.weight_bytes
    assert facts.fits[0].need.cache == model.decoder.new_state(2, 32).nbytes
    assert (facts.family, facts.context) == (about["family"], about["context"])
    computes_what_it_says(report, model)
    assert {stored.format for stored in report.file.formats} == set(about["stored_formats"])
    assert sum(stored.tensors for stored in report.file.formats) == len(checkpoint.tensors)
    assert sum(len(kind.layers) for kind in facts.layers) == len(model.config.layers)
    if model.tokenizer is not None:
        assert report.tokenizer.vocabulary == model.tokenizer.vocab_size
        assert {id for id, _ in report.tokenizer.eos} == set(model.tokenizer.eos_ids)
    return report


def computes_what_it_says(report, model):
    """Bytes of the tensors that are there, and FLOPs as PyTorch counts them."""
    config, slots = model.config, parameters_of(model.decoder)
    not_read = 0 if config.head.tied else slots["embed.W"][2:].nbytes  # two sequences, two tokens
    if config.embedding.positions is not None:
        not_read += slots["pos_embed.W"][1:].nbytes
    token = report.model.fits[0].token
    assert token.weights == model.weight_bytes - not_read
    assert token.cache == model.decoder.new_state(2, 32).nbytes
    decoder = Decoder(config, device="meta", dtype=torch.float32)
    found = []
    for tokens, past in ((1, 0), (1, 31), (32, 0)):
        state = decoder.new_state(1, 32)
        state.lengths = [past]
        with FlopCounterMode(display=False) as counter:
            decoder(torch.zeros(1, tokens, dtype=torch.long, device="meta"), state, logits="last")
        found.append(counter.get_total_flops())
    flops = report.model.flops
    assert [flops.first, flops.last, flops.prompt_full] == found
    assert flops.prompt < flops.prompt_full


def test_tiny_is_what_loading_it_takes():
    report = agrees_with_loading(open_model("tiny"))
    assert report.model.counts.total == report.file.formats[0].numbers == 3_814_912
    assert report.file.metadata == {"format": "pt"}
    assert (report.model.tied, report.model.positions) == (True, 512)


@pytest.mark.parametrize("write", [write_llama, write_gpt2])
def test_small_checkpoints_are_what_loading_them_takes(write, tmp_path):
    report = agrees_with_loading(open_checkpoint(write(tmp_path / "m")))
    assert (report.tokenizer, report.unknown) == (None, ())


@pytest.mark.real
def test_the_real_model_is_what_loading_it_takes(smollm2_path):
    report = agrees_with_loading(open_checkpoint(smollm2_path))
    (layers,) = report.model.layers
    assert (layers.heads, layers.kv_heads, len(layers.layers)) == (9, 3, 30)
    assert report.tokenizer.chat_template
    assert report.tokenizer.bos == (1, "<|im_start|>")


@pytest.mark.parametrize("level", ["portable", None])
def test_each_device_has_its_own_arithmetic_and_answer(tmp_path, monkeypatch, level):
    monkeypatch.setattr(native, "level", lambda: level)
    checkpoint = open_checkpoint(write_llama(tmp_path / "m", bfloat16_tensors()))
    blind = replace(CPU, total_bytes=None, free_bytes=None)
    absent = replace(GPU, usable=False)
    report = measure_info(checkpoint, [CPU, GPU, blind, absent], context=10)
    cpu, gpu, unknown, unusable = report.model.fits
    formats = [fit.need.formats["activation_format"] for fit in (cpu, gpu, unknown)]
    assert formats == ["float32", "bfloat16", "float32"]
    weights = [fit.need.formats["weight_format"] for fit in (cpu, gpu)]
    assert weights == ["bfloat16" if level else "float32", "bfloat16"]  # our kernels widen them
    assert (cpu.fits, cpu.longest) == (True, 64)
    assert (gpu.fits, gpu.longest) == (False, 0)
    assert (unknown.fits, unknown.longest) == (None, None)
    assert (unusable.fits, unusable.longest) == (None, None)


@pytest.mark.parametrize("level", ["portable", None])
def test_blocks_are_kept_where_there_are_kernels_for_them(tmp_path, monkeypatch, level):
    monkeypatch.setattr(native, "level", lambda: level)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf"))
    cpu, gpu = measure_info(checkpoint, [CPU, GPU], context=10).model.fits
    (dense,) = measure_info(checkpoint, [CPU], quantize="none", context=10).model.fits
    (exact,) = measure_info(checkpoint, [CPU], dtype="float32", context=10).model.fits
    assert set(gpu.need.formats.values()) == {"bfloat16"}
    assert set(dense.need.formats.values()) == set(exact.need.formats.values()) == {"float32"}
    if level is None:
        assert cpu.need == dense.need
        return
    assert cpu.need.formats == {
        "weight_format": "Q8_0", "activation_format": "float32", "cache_format": "float16",
        "product_format": "int16",
    }  # fmt: skip
    assert 2 * cpu.need.cache == dense.need.cache
    assert cpu.need.weights < dense.need.weights / 3
    assert cpu.token.weights < dense.token.weights / 3


@pytest.mark.parametrize(
    ("quantize", "formats"), [("int8", {"Q8_0"}), ("int4", {"Q8_0", "Q4_1"})]
)
def test_what_a_dense_checkpoint_takes_quantized(tmp_path, monkeypatch, quantize, formats):
    monkeypatch.setattr(native, "level", lambda: "portable")
    checkpoint = open_checkpoint(write_llama(tmp_path / "m"))
    (fit,) = measure_info(checkpoint, [CPU], quantize=quantize, context=10).model.fits
    found = fit.need.formats["weight_format"].split(" + ")
    assert set(found) == formats | {"float32"}  # 48 columns are no whole blocks
    with pytest.raises(UsageError, match="contradict each other"):
        measure_info(checkpoint, [CPU], quantize=quantize, dtype="float32")
    monkeypatch.setattr(native, "level", lambda: None)
    with pytest.raises(UsageError, match="there are no kernels"):
        measure_info(checkpoint, [CPU], quantize=quantize)


def test_it_fits_to_the_byte(tmp_path):
    checkpoint = open_checkpoint(write_llama(tmp_path / "m"))
    needed = measure_info(checkpoint, [CPU], context=10).model.fits[0].need.total
    for free, fits, longest in ((needed, True, 10), (needed - 1, False, 9)):
        (fit,) = measure_info(checkpoint, [replace(CPU, free_bytes=free)], context=10).model.fits
        assert (fit.fits, fit.longest) == (fits, longest)


def bfloat16_tensors():
    return {name: tensor.bfloat16() for name, tensor in llama_tensors().items()}


@pytest.mark.parametrize("change", ["missing", "short", "more"])
def test_a_file_of_another_model_turns_the_checks_red(tmp_path, change):
    tensors = llama_tensors()
    name, other = "model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.other.weight"
    if change == "missing":
        del tensors[name]
    elif change == "short":
        tensors[name] = tensors[name][:-1].clone()
    else:  # a tensor that the model has no place for is named, and no more
        tensors[other] = torch.zeros(3, 3)
    report = measure_info(open_checkpoint(write_llama(tmp_path / "m", tensors)), [CPU])
    numbers, names = report.checks
    assert (numbers.ok, names.ok) == (change == "more", change != "missing")
    assert names.where == ("blocks.1.mlp.W_up" if change == "missing" else "")
    assert report.surplus == ((other,) if change == "more" else ())


def test_a_lone_file_and_an_unknown_architecture_still_have_their_facts(tmp_path):
    alone = tmp_path / "alone.safetensors"
    save_file(gpt2_tensors(), alone, metadata={"by": "me"})
    report = measure_info(open_checkpoint(alone), [CPU])
    assert report.model is None
    assert report.checks == ()
    assert report.file.metadata == {"by": "me"}
    assert report.file.tensors == 16
    assert report.file.bytes == alone.stat().st_size
    assert "no config.json" in report.unknown[0]
    folder = write_llama(tmp_path / "m", model_type="unheard_of")
    report = measure_info(open_checkpoint(folder), [CPU])
    assert report.model is None
    assert report.file.tensors == 21
    assert "`unheard_of`" in report.unknown[0]


def test_who_a_model_is(tmp_path):
    found = measure_info(open_model("tiny"), [CPU]).about
    assert (found.summary, found.kind) == (CATALOG["tiny"].summary, "GPT2LMHeadModel")
    folder = write_llama(tmp_path / "m")
    settings = json.loads((folder / "config.json").read_text())
    for key in ("torch_dtype", "dtype"):
        named = settings | {"_name_or_path": "org/x", key: "bfloat16"}
        (folder / "config.json").write_text(json.dumps(named))
        report = measure_info(open_checkpoint(folder), [CPU])
        assert (report.about.name, report.about.summary) == ("org/x", "")
        assert report.model.declared == ("bfloat16", 2 * report.model.counts.total)
    (folder / "config.json").write_text(json.dumps(settings | {"dtype": "int3"}))
    assert measure_info(open_checkpoint(folder), [CPU]).model.declared is None


def test_a_tokenizer_that_cannot_be_used_is_said_and_the_rest_is_shown(tmp_path):
    folder = write_llama(tmp_path / "m")
    (folder / "tokenizer.json").write_text("{}")
    report = measure_info(open_checkpoint(folder), [CPU])
    assert report.model is not None
    assert report.tokenizer is None
    assert "tokenizer" in report.unknown[0]
    folder = write_llama(tmp_path / "n", num_attention_heads=5)  # which contradicts itself
    with pytest.raises(CheckpointError):
        measure_info(open_checkpoint(folder), [CPU])


def test_metadata_of_a_gguf_file_is_kept_as_it_is(tmp_path):
    file = tmp_path / "x.gguf"
    pairs = [
        g.pair("general.architecture", g.STRING, "unheard_of"),
        g.pair("general.name", g.STRING, "Some Model"),
        g.pair("general.languages", g.ARRAY, (g.STRING, ["en", "de"])),
        g.pair("odd", g.STRING, b"\xff\x1b[31m"),
        g.pair("many", g.ARRAY, (g.U32, list(range(50)))),
    ]
    tensor = g.tensor("w", (32,), 0, 0)
    file.write_bytes(g.gguf(pairs, [tensor], bytes(128)))
    report = measure_info(open_checkpoint(file), [CPU])
    assert report.file.metadata["odd"].encode("utf-8", "surrogateescape") == b"\xff\x1b[31m"
    assert (report.about.name, report.about.languages) == ("Some Model", ("en", "de"))
    assert report.file.formats[0].bytes == 128
    assert report.file.formats[0].numbers == 32
    assert "`unheard_of`" in report.unknown[0]


def test_a_model_of_70_billion_is_described(tmp_path):
    """`tests/benchmarks/startup.py` has the seconds that this takes."""
    (tmp_path / "config.json").write_text(json.dumps(HUGE))
    gpus = [GPU] * 8
    report = measure_info(open_checkpoint(tmp_path), [*gpus, CPU], dtype="bfloat16")
    assert report.model.counts.total == 70_553_706_496
    assert report.model.fits[-1].need.weights == 2 * 70_553_706_496
    assert report.model.fits[-1].need.cache_per_token == 80 * 2 * 8 * 128 * 2
    assert report.checks == ()
    assert report.file.files == 0


def test_every_family_is_listed_with_its_words():
    listed = {facts.name: facts for facts in supported_families()}
    assert list(listed) == [family.name for family in families()]
    for family in families():
        types = (*family.hf_types, *family.hf_multimodal)
        assert listed[family.name].hf_types == types
        assert listed[family.name].words


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

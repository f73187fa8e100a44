"""What a file claims of its weights: true of a whole file, and red in one that lies."""

from __future__ import annotations

import json

import pytest
import torch
from gguf_bytes import STRING, gguf, pair, tensor
from load_files import check, checked, claim, loaded, write_gguf, write_sharded
from tiny_checkpoints import llama_tensors, write_llama

from llmcli.checkpoints import open_checkpoint
from llmcli.commands.info.measure import measure_info
from llmcli.commands.load.measure.claims import claims
from llmcli.families import translate
from llmcli.text import load_tokenizer

SIZE = sum(tensor.nbytes for tensor in llama_tensors().values())
NUMBERS = SIZE // 4
BOTH = pytest.mark.parametrize("look", [loaded, checked])


def names(report):
    return {claim.name for claim in report.claims}


@BOTH
def test_an_index_that_tells_the_truth(tmp_path, look):
    report = look(write_sharded(tmp_path / "m", total_size=SIZE, total_parameters=NUMBERS))
    assert report.ok
    assert report.files == 2
    assert claim(report, "total_size").says == f"{SIZE:,}"
    assert claim(report, "total_parameters").ok


@BOTH
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("total_size", SIZE + 1), ("total_size", 0), ("total_size", str(SIZE)),
        ("total_size", [SIZE]), ("total_parameters", NUMBERS - 1), ("total_parameters", 1e99),
    ],
)  # fmt: skip
def test_an_index_that_lies(tmp_path, look, name, value):
    report = look(write_sharded(tmp_path / "m", **{name: value}))
    assert names(report) == {name}
    assert not claim(report, name).ok
    assert claim(report, name).must
    assert not report.fits
    assert not report.ok


@pytest.mark.parametrize("metadata", [None, [], "total_size", {"total_size": None}])
def test_an_index_that_is_silent_claims_nothing(tmp_path, metadata):
    path = write_sharded(tmp_path / "m") / "model.safetensors.index.json"
    document = json.loads(path.read_text())
    path.write_text(json.dumps(document | {"metadata": metadata}))
    report = checked(path.parent)
    assert report.ok
    assert not report.claims


def test_the_index_of_other_files_is_not_believed(tmp_path):
    path = write_llama(tmp_path / "m")
    index = {"metadata": {"total_size": 7}, "weight_map": {"x": "gone.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert checked(path).ok


WHOLE = {
    "general__size_label": "17K", "general__name": "Tiny 0.02M", "general__file_type": 7,
    "general__quantization_version": 2, "llama__vocab_size": 97, "split__tensors__count": 21,
}  # fmt: skip


@BOTH
def test_a_gguf_file_that_tells_the_truth(tmp_path, look):
    report = look(write_gguf(tmp_path / "m.gguf", **WHOLE))
    assert all(claim.ok for claim in report.claims)
    assert names(report) == {
        "size_label", "name", "file_type", "quantization_version", "vocab_size", "split_tensors",
    }  # fmt: skip
    assert report.ok


@BOTH
@pytest.mark.parametrize(
    ("name", "key", "value", "must"),
    [
        ("size_label", "general__size_label", "135M", True),
        ("size_label", "general__size_label", "8x7B", True),
        ("name", "general__name", "Mistral-7B-Instruct", False),
        ("file_type", "general__file_type", 2, False),
        ("file_type", "general__file_type", 999, False),
        ("quantization_version", "general__quantization_version", 1, True),
        ("split_tensors", "split__tensors__count", 22, True),
    ],
)
def test_a_gguf_file_that_lies(tmp_path, look, name, key, value, must):
    report = look(write_gguf(tmp_path / "m.gguf", **(WHOLE | {key: value})))
    wrong = [claim for claim in report.claims if not claim.ok]
    assert [claim.name for claim in wrong] == [name]
    assert wrong[0].must is must
    assert report.fits is not must, "a label that is wrong is told, and no more"


@BOTH
def test_metadata_without_effect_is_reported(tmp_path, look):
    given = {"llama__attention__sliding_window": 5}
    report = look(write_gguf(tmp_path / "m.gguf", **given))
    told = claim(report, "ignored")
    assert (told.what, told.says, told.ok) == ("`llama.attention.sliding_window`", "5", False)
    assert report.ok
    facts = measure_info(open_checkpoint(tmp_path / "m.gguf"), [])
    assert facts.ignored == {"llama.attention.sliding_window": "5"}


def test_a_vocabulary_of_another_size(tmp_path):
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf"))
    config, _ = translate(checkpoint)
    checkpoint.metadata["llama.vocab_size"] = 98
    found = next(one for one in claims(checkpoint, config, None) if one.name == "vocab_size")
    assert (found.says, found.holds, found.ok, found.must) == ("98", "97", False, True)


@pytest.mark.parametrize(
    "metadata",
    [
        *({"size_label": label} for label in ("large", "135", "M", "1.2.3B", "9" * 400 + "B", "")),
        *({"name": name} for name in ("v1.5", "stories15M-x", "A2.7B", "8x7B", "30-layers")),
        {"quantization_version": 1},  # where there are no blocks
    ],
    ids=lambda metadata: str(metadata)[:30],
)
def test_what_is_no_size_and_no_blocks_claims_nothing(tmp_path, metadata):
    given = {f"general__{key}": value for key, value in metadata.items()}
    blocks = "quantization_version" not in metadata
    assert not checked(write_gguf(tmp_path / "m.gguf", blocks=blocks, **given)).claims


@pytest.mark.parametrize(
    ("settings", "ok"),
    [({"dtype": "float32"}, True), ({"torch_dtype": "torch.float32"}, True),
     ({"dtype": "bfloat16"}, False)],
)  # fmt: skip
def test_the_dtype_of_the_configuration_is_a_label(tmp_path, settings, ok):
    report = checked(write_llama(tmp_path / "m", **settings))
    assert claim(report, "dtype").ok is ok
    assert report.ok


@pytest.mark.parametrize("equal", [True, False])
def test_a_head_beside_tied_embeddings(tmp_path, equal):
    tensors = llama_tensors()
    if equal:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    report = loaded(write_llama(tmp_path / "m", tensors, tie_word_embeddings=True))
    told = claim(report, "tie_word_embeddings")
    assert told.ok is equal
    differs = "false: `lm_head.weight` differs from the embedding and is used as the head"
    assert told.holds == ("`lm_head.weight` equals the embedding" if equal else differs)
    assert report.ok, "the file is believed"
    dropped = [line.source for line in report.lines if not line.parameter]
    assert dropped == (["lm_head.weight"] if equal else [])
    kinds = [(shared.kind, set(shared.names)) for shared in report.shared]
    pair = ("equal", {"lm_head.weight", "model.embed_tokens.weight"})
    assert kinds == ([("tied", {"head.W", "embed.W"}), pair] if equal else [])


def test_matrices_that_are_there_twice_are_told_and_those_alike_at_the_ends_are_not(tmp_path):
    tensors = llama_tensors()
    up = tensors["model.layers.0.mlp.up_proj.weight"]
    tensors["model.layers.1.mlp.up_proj.weight"] = up.clone()
    report = loaded(write_llama(tmp_path / "m", tensors))
    assert [shared.names for shared in report.shared] == [
        ("model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight")
    ]
    assert report.shared[0].bytes == up.nbytes
    large = torch.zeros(128, 128)  # 64 KiB, of which 12 are compared at first
    other = large.clone()
    other[20, 3] = 1.0
    more = {"model.layers.0.self_attn.rotary_emb.inv_freq": large}
    more |= {"model.layers.1.self_attn.rotary_emb.inv_freq": other}
    report = loaded(write_llama(tmp_path / "n", llama_tensors() | more))
    assert report.shared == ()


def write_tokenizer(folder, tokens):
    from tokenizers import Tokenizer, models

    vocabulary = {f"t{i}": i for i in range(tokens)}
    Tokenizer(models.BPE(vocab=vocabulary, merges=[])).save(str(folder / "tokenizer.json"))


@BOTH
@pytest.mark.parametrize("tokens", [97, 90, 98])
def test_every_token_needs_a_row(tmp_path, look, tokens):
    path = write_llama(tmp_path / "m")
    write_tokenizer(path, tokens)
    assert load_tokenizer(open_checkpoint(path)) is not None
    report = look(path)
    assert claim(report, "tokens").ok is (tokens <= 97)
    assert report.ok is (tokens <= 97)


def test_an_end_of_text_that_no_row_has(tmp_path):
    path = write_llama(tmp_path / "m")
    write_tokenizer(path, 97)
    assert claim(checked(path), "special_tokens").says == "1, 2"
    (path / "generation_config.json").write_text('{"eos_token_id": [2, 97, "x"]}')
    report = checked(path)
    found = claim(report, "special_tokens")
    assert (found.says, found.ok, found.must, report.ok) == ("1, 2, 97", False, False, True)


@BOTH
def test_bytes_that_nothing_owns(tmp_path, look):
    path = write_gguf(tmp_path / "m.gguf")
    whole = path.read_bytes()
    assert look(path).ok, "there is padding after each tensor"
    path.write_bytes(whole + bytes(5))
    report = look(path)
    layout = check(report, "layout")
    assert (layout.ok, layout.value) == (False, 5)
    assert layout.where.startswith("the end of ")
    assert not report.fits


@pytest.mark.parametrize(
    ("offsets", "size", "where"),
    [
        ((0, 32), 64, ""), ((32, 64), 96, "the end of the header"), ((0, 64), 96, "the end of a"),
        ((0, 32), 65, "the end of b"),
    ],
)  # fmt: skip
def test_gaps_of_a_gguf_file(tmp_path, offsets, size, where):
    table = [tensor(name, (8,), 0, at) for name, at in zip("ab", offsets, strict=True)]
    names = [pair("general.architecture", STRING, "nobody"), pair("a", STRING, "b" * 40)]
    (tmp_path / "m.gguf").write_bytes(gguf(names, table, bytes(size)))
    layout = check(checked(tmp_path / "m.gguf"), "layout")
    assert (layout.ok, layout.where) == (not where, where)
    assert layout.value == (size - 64 if where else 0)


@pytest.mark.parametrize(
    ("norm", "words"),
    [(None, "no tensor for `ln_final.w`"), (torch.ones(31), "should be [32] but is [31]")],
    ids=["missing", "short"],
)
def test_what_does_not_fit_is_told_and_looked_through_all_the_same(tmp_path, norm, words):
    tensors = llama_tensors() | {"model.norm.weight": norm}
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    report = checked(write_llama(tmp_path / "m", tensors))
    assert words in report.fault
    assert not report.ok
    assert report.looked_at == sum(tensor.numel() for tensor in tensors.values())
    assert check(report, "ledger").ok
    unknown = checked(write_llama(tmp_path / "n", model_type="nobody"))
    assert "`nobody` is not supported" in unknown.fault


@BOTH
def test_a_broken_tokenizer_is_a_fault_and_one_of_an_unknown_kind_is_not(tmp_path, look):
    path = write_llama(tmp_path / "m")
    (path / "tokenizer.json").write_text("{")
    report = look(path)
    assert "tokenizer.json" in report.fault
    assert not report.fits
    report = look(write_gguf(tmp_path / "m.gguf", tokenizer__ggml__model="nobody"))
    assert report.ok
    assert "`nobody`" in report.notes[0]

"""What a file claims of its weights: true of a whole file, and red in one that lies.

load_claims.txt has what `llmcli load` and `load --check` report of each of `CASES`.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from gguf_bytes import STRING, gguf, pair, tensor
from load_files import checked, loaded, write_gguf, write_sharded, write_split
from tiny_checkpoints import llama_tensors, write_gpt2, write_llama
from tokenizers import Tokenizer, models

from llmcli.checkpoints import open_checkpoint
from llmcli.commands.info.measure import measure_info
from llmcli.commands.load.measure.ledger import claims
from llmcli.commands.load.measure.run import NO_DIGEST
from llmcli.errors import LlmcliError
from llmcli.families import translate

SIZE = sum(tensor.nbytes for tensor in llama_tensors().values())
NUMBERS = SIZE // 4
UP = "model.layers.{}.mlp.up_proj.weight"
FREQUENCIES = "model.layers.{}.self_attn.rotary_emb.inv_freq"
WHOLE = {
    "general__quantization_version": 2, "llama__vocab_size": 97, "split__tensors__count": 21
}


def index(document, **metadata):
    """Two shards whose index has other entries, too."""

    def write(folder):
        file = write_sharded(folder / "m", **metadata) / "model.safetensors.index.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | document))
        return file.parent

    return write


def llama(more=None, without="", files=None, **settings):
    """The tiny Llama with other tensors, and files beside it."""

    def write(folder):
        tensors = llama_tensors() | (more or {})
        tensors.pop(without, None)
        path = write_llama(folder / "m", tensors, **settings)
        for name, text in (files or {}).items():
            (path / name).write_text(text)
        return path

    return write


def with_gguf(blocks=True, **metadata):
    return lambda folder: write_gguf(folder / "m.gguf", blocks=blocks, **metadata)


def padded(folder):
    path = write_gguf(folder / "m.gguf")
    path.write_bytes(path.read_bytes() + bytes(5))
    return path


def with_offsets(offsets, size):
    """A GGUF file of two tensors that are there."""

    def write(folder):
        table = [tensor(name, (8,), 0, at) for name, at in zip("ab", offsets, strict=True)]
        names = [pair("general.architecture", STRING, "nobody"), pair("a", STRING, "b" * 40)]
        (folder / "m.gguf").write_bytes(gguf(names, table, bytes(size)))
        return folder / "m.gguf"

    return write


def tokens(count):
    vocabulary = {f"t{i}": i for i in range(count)}
    return {"tokenizer.json": Tokenizer(models.BPE(vocab=vocabulary, merges=[])).to_str()}


def head():
    return {"lm_head.weight": llama_tensors()["model.embed_tokens.weight"].clone()}


def alike(equal):
    """64 KiB twice, of which 12 are compared at first."""
    other = torch.zeros(128, 128)
    other[20, 3] = not equal
    return {FREQUENCIES.format(0): torch.zeros(128, 128), FREQUENCIES.format(1): other}


# what is in a checkpoint is `ok`, unless it says so
CASES = {
    "an index that tells the truth": index({}, total_size=SIZE, total_parameters=NUMBERS),
    **{
        f"an index that lies: {name} {value}": index({}, **{name: value})
        for name, value in [
            ("total_size", SIZE + 1), ("total_size", 0), ("total_size", str(SIZE)),
            ("total_size", [SIZE]), ("total_parameters", NUMBERS - 1), ("total_parameters", 1e99),
        ]
    },
    **{
        f"an index that is silent: {metadata}": index({"metadata": metadata})
        for metadata in (None, [], "total_size", {"total_size": None})
    },
    "the index of other files is not believed": llama(files={
        "model.safetensors.index.json":
            '{"metadata": {"total_size": 7}, "weight_map": {"x": "gone.safetensors"}}',
    }),
    "a GGUF file that tells the truth": with_gguf(**WHOLE),
    **{
        f"a GGUF file that lies: {key} {value}": with_gguf(**WHOLE | {key: value})
        for key, value in [
            ("general__quantization_version", 1), ("split__tensors__count", 22),
        ]
    },
    "names and labels are not read": with_gguf(
        general__size_label="8x7B", general__name="Mistral-7B-Instruct", general__file_type=2
    ),
    "a version of blocks where there are none": with_gguf(
        blocks=False, general__quantization_version=1
    ),
    "a head beside tied embeddings": llama(head(), tie_word_embeddings=True),
    "another head beside tied embeddings": llama(tie_word_embeddings=True),
    "a matrix that is there twice": llama({UP.format(1): llama_tensors()[UP.format(0)].clone()}),
    "tensors that a model computes": llama(alike(equal=True)),
    "tensors that are alike at their ends": llama(alike(equal=False)),
    "as many tokens as rows": llama(files=tokens(97)),
    "fewer tokens than rows": llama(files=tokens(90)),
    "more tokens than rows": llama(files=tokens(98)),
    "an end of text that no row has": llama(
        files=tokens(97) | {"generation_config.json": '{"eos_token_id": [2, 97, "x"]}'}
    ),
    "bytes that nothing owns": padded,
    "an exact GGUF file": with_offsets((0, 32), 64),
    "a gap after the header": with_offsets((32, 64), 96),
    "a gap after a tensor": with_offsets((0, 64), 96),
    "a gap at the end": with_offsets((0, 32), 65),
    "a tensor too few": llama(without="model.norm.weight"),
    "a tensor too short": llama({"model.norm.weight": torch.ones(31)}),
    "a model that nobody knows": llama(model_type="nobody"),
    "a broken tokenizer": llama(files={"tokenizer.json": "{"}),
    "a tokenizer of an unknown kind": with_gguf(tokenizer__ggml__model="nobody"),
    "a GGUF file in three parts": lambda folder: write_split(folder / "m"),
    # of these every row of the ledger
    "the ledger of GPT-2": lambda folder: write_gpt2(folder / "m"),
    "the ledger of a GGUF file": with_gguf(),
}  # fmt: skip


def told(look, path, ledger):
    """Lines of the report: claims, what is wrong, shared tensors, and rows that fill nothing."""
    try:
        report = look(path)
    except LlmcliError as error:
        return [f"refused: {error.message}"]
    said = [f"ok {report.ok}, fits {report.fits}, {report.files} files, {report.numbers} numbers"]
    for one in report.claims:
        mark = "✓" if one.ok else "✗" if one.must else "!"
        said.append(f"{mark} {one.name}: {one.what} says {one.says[:40]} · {one.holds}")
    for check in report.checks:
        if not check.ok:
            said.append(f"✗ check {check.name}: {check.value:g} at {check.where}")
    fault = (report.fault or "").partition(": Cannot")[0]  # the rest are words of a library
    said += [f"fault: {fault}"] if fault else []
    said += [f"note: {note}" for note in report.notes if note != NO_DIGEST]
    said += [f"{one.kind}: {', '.join(one.names)} of {one.bytes} bytes" for one in report.shared]
    for row in report.rows:
        if ledger or row.reason:
            made = ", ".join(row.operations) or row.reason
            dtype = f"{row.dtype} dequantized" if row.dequantized else row.dtype
            said.append(
                f"{row.parameter or 'nothing'} is {row.source} {row.stored} {[*row.shape]}"
                f" × {row.tensors}, {row.bytes} bytes in {dtype}: {made or 'as it is'}"
            )
    return [line.replace(str(path.parent), ".") for line in said]


def test_claims(tmp_path, as_written):
    found = {}
    for number, (name, write) in enumerate(CASES.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        path, ledger = write(folder), "ledger" in name
        by_loading, by_looking = told(loaded, path, ledger), told(checked, path, ledger)
        title = name[:60]
        found[title] = by_loading
        if by_looking != by_loading:
            found[title] = [*by_loading, "--check", *by_looking]
    as_written(Path(__file__).parent / "load_claims.txt", found)


def test_metadata_without_effect_is_in_info_too(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", llama__attention__sliding_window=5)
    facts = measure_info(open_checkpoint(path), [])
    assert facts.ignored == {"llama.attention.sliding_window": "5"}


def test_a_vocabulary_of_another_size(tmp_path):
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf"))
    config, _ = translate(checkpoint)
    checkpoint.metadata["llama.vocab_size"] = 98
    found = next(one for one in claims(checkpoint, config, None) if one.name == "vocab_size")
    assert (found.says, found.holds, found.ok, found.must) == ("98", "97", False, True)

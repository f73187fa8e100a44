"""The fixed corpus of the header fuzzers, replayed: verdicts, and what follows good headers."""

import tracemalloc
from pathlib import Path

import fuzz_gguf
import fuzz_safetensors
import make_corpus
import pytest

from llmcli.checkpoints import open_checkpoint
from llmcli.errors import LlmcliError
from llmcli.families.family import translate
from llmcli.text.load import load_tokenizer

GGUF = sorted((make_corpus.CORPUS / "gguf").iterdir())
SAFETENSORS = sorted((make_corpus.CORPUS / "safetensors").iterdir())


def test_the_named_files_are_what_their_maker_writes():
    for found, made in (
        (GGUF, make_corpus.gguf_files()), (SAFETENSORS, make_corpus.safetensors_files())
    ):
        named = {path.name: path.read_bytes() for path in found if path.name[:6] != "found-"}
        assert named == made
        assert len(found) > len(made)
        assert sum(path.stat().st_size for path in found) < 150_000


def verdict(path: Path, accepted: bool) -> None:
    kind = path.name.partition("-")[0]
    assert kind == "found" or accepted == (kind == "ok")


@pytest.mark.parametrize("path", GGUF, ids=lambda path: path.name)
def test_gguf(path, tmp_path):
    data = path.read_bytes()
    tracemalloc.start()
    accepted = fuzz_gguf.check(data)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 200_000 + 100 * len(data)
    verdict(path, accepted)
    if accepted:
        after(data, tmp_path / "a.gguf")


def after(data: bytes, path: Path) -> None:
    """The rest of opening a model: each step comes to an end, with an error of ours or none."""
    path.write_bytes(data)
    for step in (translate, load_tokenizer):
        message = ""
        try:
            step(open_checkpoint(path))
        except LlmcliError as error:
            message = error.message
        assert (message or "fine").isprintable()
        assert len(message) < 500 + len(str(path))


@pytest.mark.parametrize("path", SAFETENSORS, ids=lambda path: path.name)
def test_safetensors(path, tmp_path):
    content = fuzz_safetensors.whole(path.read_bytes()) or b"\0"
    verdict(path, fuzz_safetensors.check(tmp_path / "a.safetensors", content))

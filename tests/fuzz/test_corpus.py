"""The fixed corpus of the fuzzers, replayed: verdicts, bounds, and what follows good headers.

What each file is stands in its name; `ok-` files are accepted, `bad-` and `odd-` files refused (an
odd one not by the library). The `found-` files came out of long runs of the fuzzers: each reached a
branch that no other file did. Shapes of public reports on GGUF parsers are among them:
CVE-2024-21802, CVE-2024-21825, CVE-2024-21836, CVE-2024-23496, CVE-2024-23605 (counts and lengths
that wrap, too many layers), CVE-2025-53630 (sizes of tensors that wrap when added).
"""

from pathlib import Path

import fuzz_gguf
import fuzz_safetensors
import fuzz_tokenizer
import pytest

from llmcli.checkpoints import open_checkpoint
from llmcli.errors import LlmcliError
from llmcli.families.family import translate
from llmcli.text.load import load_tokenizer

CORPUS = Path(__file__).parent / "corpus"


def files(kind):
    found = sorted((CORPUS / kind).iterdir())
    return pytest.mark.parametrize("path", found, ids=lambda path: path.name)


def verdict(path: Path, accepted: bool) -> None:
    kind = path.name.partition("-")[0]
    assert kind == "found" or accepted == (kind == "ok")


@files("gguf")
def test_gguf(path, tmp_path):
    data = path.read_bytes()
    accepted = fuzz_gguf.in_proportion(fuzz_gguf.check, data)
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


@files("safetensors")
def test_safetensors(path, tmp_path):
    content = fuzz_safetensors.whole(path.read_bytes()) or b"\0"
    verdict(path, fuzz_safetensors.check(tmp_path / "a.safetensors", content))


@files("tokenizer")
def test_tokenizers(path):
    data = path.read_bytes()
    verdict(path, fuzz_tokenizer.check(data))
    for seed in range(20 if path.name.startswith("found-") else 0):  # what lies beside it
        fuzz_tokenizer.check(fuzz_tokenizer.mutate(data, 1 << 14, seed))

"""What the tests of text share: frozen fixtures, GGUF metadata made by hand."""

import gzip
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from llama_cpp_strings import letters

from llmcli.errors import CheckpointError
from llmcli.text.tokenizer import Tokenizer

DATA = Path(__file__).parent / "data"


@cache
def frozen(name: str) -> dict[str, Any]:
    return json.loads(gzip.decompress((DATA / name).read_bytes()))


def table(name: str) -> dict[str, list[Any]]:
    """The rows of a file of JSON lines, by the first entry of each.

    Of vocabularies: words, more of it, a text and its tokens, each with the bytes that it is.
    """
    rows = map(json.loads, (DATA / name).read_text("utf-8").splitlines())
    return {title: row for title, *row in rows}


def check_pieces(tokenizer: Tokenizer, text: str, expected: str) -> None:
    """The tokens of a text, and where in it each of them lies."""
    pieces = tokenizer.pieces(text, add_bos=False)
    found = [f"{p.text.replace(' ', '▁')} {p.start} {p.end}" for p in pieces]
    assert ", ".join(found) == expected
    assert [piece.id for piece in pieces] == tokenizer.encode(text, add_bos=False)


def metadata(words: list[str] = (), *, types: dict[str, int] | None = None, **more: Any) -> dict:
    """Metadata of a GGUF vocabulary: 256 bytes, `words` merged from the left, special tokens.

    `types` maps further tokens to their type; `more` sets `tokenizer.ggml.*` keys.
    """
    tokens, merges = letters(), []
    for word in words:
        for end in range(2, len(word) + 1):
            if word[:end] not in tokens:
                tokens.append(word[:end])
                merges.append(f"{word[: end - 1]} {word[end - 1]}")
    kinds = [1] * len(tokens) + list((types or {}).values())
    tokens = tokens + list(types or {})
    values = {
        "model": "gpt2", "pre": "gpt-2", "tokens": tokens, "merges": merges, "token_type": kinds,
    } | more  # fmt: skip
    return {f"tokenizer.ggml.{key}": value for key, value in values.items() if value is not None}


@contextmanager
def clear_error(words: str = "", *, most: int = 240, always: bool = True) -> Iterator[None]:
    """What is done within is refused with one short line and a hint; or not, if not `always`."""
    refused = None
    try:
        yield
    except CheckpointError as error:
        refused = error
    if refused is None:
        assert not always, "it was not refused"
        return
    assert refused.hint
    assert str(refused).isprintable()
    assert re.search(words, str(refused))
    assert len(str(refused)) < most


def decoded(theirs: Any, ids: list[int], **options: Any) -> str:
    """The text of transformers' tokenizer for them."""
    return theirs.decode(ids, clean_up_tokenization_spaces=False, **options)


def same_as_transformers(ours: Tokenizer, theirs: Any, texts: Sequence[str]) -> None:
    """Ids, as a prompt and as plain text, and these as text; special tokens and their ids."""
    ending = theirs("a").input_ids[len(ours.encode("a")) :]  # EOS, which a prompt does not have
    texts = list(texts)  # in one batch: theirs takes long to begin
    wholes = theirs(texts).input_ids
    plains = theirs(texts, add_special_tokens=False, split_special_tokens=True).input_ids
    for text, ids, plain in zip(texts, wholes, plains, strict=True):
        assert ours.encode(text) + ending == ids, text
        assert ours.encode(text, add_bos=False, parse_special=False) == plain, text
        assert ours.decode(ids, skip_special=False) == decoded(theirs, ids), text
    assert (ours.bos_id, ours.vocab_size) == (theirs.bos_token_id, len(theirs))
    assert {theirs.eos_token_id} - {None} <= ours.eos_ids
    assert ours.special_ids == set(theirs.all_special_ids) | {
        index for index, token in theirs.added_tokens_decoder.items() if token.special
    }

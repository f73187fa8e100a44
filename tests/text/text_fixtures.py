"""What the tests of text share: frozen fixtures, GGUF metadata made by hand."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from pair_vocabulary import letters

from llmcli.errors import CheckpointError

DATA = Path(__file__).parent / "data"


@cache
def frozen(name: str) -> dict[str, Any]:
    return json.loads(gzip.decompress((DATA / name).read_bytes()))


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
def clear_error(words: str = "", *, most: int = 240) -> Iterator[None]:
    """What is done within is refused with one short line and a hint."""
    with pytest.raises(CheckpointError, match=words or None) as caught:
        yield
    assert caught.value.code == 4
    assert caught.value.hint
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < most

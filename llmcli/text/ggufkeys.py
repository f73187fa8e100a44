"""Reads `tokenizer.ggml.*` from a GGUF file's untrusted metadata.

Rules from llama.cpp (src/llama-vocab.cpp). Where it aborts (a duplicate token), an error is raised.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

from llmcli.checkpoints.files import shown
from llmcli.errors import CheckpointError
from llmcli.text.chat import ChatTemplate

KEY = "tokenizer.ggml."
BROKEN = "the file is damaged or was written by a faulty converter; fetch or convert it again"
ID_NAMES = ("bos", "eos", "eot", "eom", "unknown", "padding", "fim_pad", "fim_rep", "fim_sep")


def tokens_of(metadata: Mapping[str, Any]) -> list[str]:
    """Read `tokenizer.ggml.tokens`; empty tokens get llama.cpp's placeholder.

    Raises CheckpointError for an empty list or a duplicate.
    """
    tokens = strings_of(metadata, "tokens")
    if not tokens:
        raise CheckpointError("the vocabulary (`tokenizer.ggml.tokens`) is empty", hint=BROKEN)
    distinct = set(tokens)
    if "" in distinct:
        tokens = [token or f"[EMPTY_{index}]" for index, token in enumerate(tokens)]
        distinct = set(tokens)
    if len(distinct) != len(tokens):
        last = {token: index for index, token in enumerate(tokens)}
        twice = next(token for index, token in enumerate(tokens) if last[token] != index)
        raise CheckpointError(f"the vocabulary has the token `{shown(twice)}` twice", hint=BROKEN)
    return tokens


def types_of(metadata: Mapping[str, Any], count: int) -> Sequence[int]:
    """Read `tokenizer.ggml.token_type` of `count` tokens; if absent, all are normal.

    Values that are not numbers become 0 (undefined). Raises CheckpointError for a list that is too
    short.
    """
    values = metadata.get(KEY + "token_type")
    if values is None:
        return [1] * count
    types = _long_enough(values, "token_type", count)
    try:
        return array("i", types)
    except (TypeError, OverflowError):
        return [kind if isinstance(kind, int) else 0 for kind in types]


def scores_of(metadata: Mapping[str, Any], count: int) -> array[float]:
    """Read `tokenizer.ggml.scores` (float32) of `count` tokens; if absent, all are zero.

    Raises CheckpointError for a list that is too short or has a score that is not finite, since
    such a score cannot be ordered.
    """
    values = metadata.get(KEY + "scores")
    if values is None:
        return array("f", bytes(4 * count))
    try:
        scores = array("f", _long_enough(values, "scores", count))
    except (TypeError, OverflowError, ValueError):
        raise CheckpointError(f"`{KEY}scores` is not a list of numbers", hint=BROKEN) from None
    if not isfinite(sum(scores)):  # not finite if any score is not; finite ones cannot overflow
        at = next(index for index, score in enumerate(scores) if not isfinite(score))
        raise CheckpointError(f"the score of token {at} is {scores[at]}", hint=BROKEN)
    return scores


def _long_enough(values: Any, name: str, count: int) -> Sequence[Any]:
    if not isinstance(values, Sequence) or isinstance(values, str | bytes) or len(values) < count:
        raise CheckpointError(
            f"`{KEY}{name}` does not have one entry for each of {count} tokens", hint=BROKEN
        )
    return values if len(values) == count else values[:count]


def strings_of(metadata: Mapping[str, Any], name: str) -> list[str]:
    """The list of strings `tokenizer.ggml.<name>`, or CheckpointError."""
    values = metadata.get(KEY + name)
    if not isinstance(values, list) or not all(map(str.__instancecheck__, values)):
        raise CheckpointError(f"`{KEY}{name}` is not a list of strings", hint=BROKEN)
    return values


def ids_of(
    metadata: Mapping[str, Any],
    count: int,
    notes: list[str],
    usual: Mapping[str, int] | None = None,
) -> dict[str, int | None]:
    """Read the special ids (`bos`, `eos`, …), with defaults from `usual`.

    An id outside of `count` tokens counts as absent and adds to `notes`, as in llama.cpp. Raises
    CheckpointError for values that are not numbers.
    """
    found: dict[str, int | None] = {}
    for name in ID_NAMES:
        key = f"{KEY}{name}_token_id"
        value = metadata.get(key)
        if isinstance(value, bool) or not isinstance(value, int | None):
            raise CheckpointError(f"`{key}` is {shown(value, 40)}, which is not an id", hint=BROKEN)
        if value is not None and not 0 <= value < count:
            notes.append(f"`{key}` is {value}, but there are {count} tokens: it is ignored")
            value = None
        if value is None:
            value = (usual or {}).get(name, count)
        found[name] = value if value < count else None
    return found


def prefix_of(metadata: Mapping[str, Any], bos: int | None, *, usual: bool) -> tuple[int, ...]:
    """BOS if the file's `add_bos_token` is set, or by default if `usual`."""
    asked = metadata.get(KEY + "add_bos_token")
    if bos is None:
        if asked:
            raise CheckpointError(
                "`tokenizer.ggml.add_bos_token` is true but there is no `bos_token_id`",
                hint=BROKEN,
            )
        return ()
    return (bos,) if (usual if asked is None else asked) else ()


def template_of(
    metadata: Mapping[str, Any], strings: Sequence[str], ids: Mapping[str, int | None]
) -> ChatTemplate | None:
    """The chat template with its special tokens; None if there is none."""
    key = "tokenizer.chat_template"
    source = metadata.get(key)
    if source is None:  # without a default, the first named one
        source = next((metadata[name] for name in metadata if name.startswith(f"{key}.")), None)
    if source is None:
        return None
    if not isinstance(source, str):
        raise CheckpointError("`tokenizer.chat_template` is not a string", hint=BROKEN)
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    special = {
        names[name]: strings[index]
        for name, index in ids.items()
        if name in names and index is not None
    }
    return ChatTemplate(source, special_tokens=special)

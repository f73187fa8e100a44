"""The tokenizer of a directory: tokenizer.json and the other files that transformers reads.

The class, special tokens and chat template are in tokenizer_config.json, special_tokens_map.json
and chat_template.jinja (transformers, tokenization_utils_base.py and
tokenization_utils_tokenizers.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmcli.checkpoints.files import read_bytes, shown
from llmcli.errors import CheckpointError, LlmcliError, UnsupportedModel
from llmcli.text.hf_classes import MARKING, apply_class, class_of
from llmcli.text.hfspecial import add_tokens
from llmcli.text.settings import (
    BROKEN,
    added_tokens,
    chat_template_of,
    eos_ids,
    named_tokens,
    read_settings,
    rows_of,
    special_tokens,
    token_text,
)
from llmcli.text.spelling import spelling_of
from llmcli.text.tokenizer import Tokenizer, Vocabulary
from llmcli.text.vocabfiles import NAMES as PAIR
from llmcli.text.vocabfiles import read_pair

if TYPE_CHECKING:
    import tokenizers

MAX_FILE = 1 << 28  # bytes; the largest known tokenizer.json has 34 million
_FILE = ("tokenizer.json",)
_PROBES = "a0.eA \u4e00\u0905"  # every vocabulary has one of these characters
_OTHERS = ("tokenizer.model", "tekken.json", "vocab.json", "spiece.model", "vocab.txt")


def from_directory(
    directory: Path,
    *,
    config: Mapping[str, Any] | None = None,
    generation: Mapping[str, Any] | None = None,
) -> Tokenizer | None:
    """Build the tokenizer of a checkpoint's directory; None if it has none.

    `config` and `generation` (config.json, generation_config.json) provide additional end ids.
    Raises `UnsupportedModel` if there is only another kind of tokenizer, `CheckpointError` for
    broken files.
    """
    settings: Mapping[str, Any]
    found = next((names for names in (_FILE, PAIR) if _has(directory, names)), None)
    if found is None:
        _refuse(directory)
        return None
    try:
        settings, marks = read_settings(directory), False
        if found is PAIR:
            backend, settings, kind = read_pair(directory, settings, config)
        else:
            backend, byte_level = _read(directory / _FILE[0])
            own = class_of(settings, config or {}, byte_level=byte_level)
            settings, marks = apply_class(backend, own, settings), own in MARKING
            kind = type(backend.model).__name__
        listed: dict[int, Any] = added_tokens(directory, settings)
        if "added_tokens_decoder" not in settings:
            listed |= backend.get_added_tokens_decoder()
        named = special_tokens(settings)
        add_tokens(backend, listed, named, marks=marks, rows=rows_of(config or {}))
        ends = {*eos_ids(config), *eos_ids(generation)}
        return _build(directory, backend, settings, ends, name=f"{' + '.join(found)}, {kind}")
    except (KeyboardInterrupt, SystemExit, LlmcliError):
        raise
    except BaseException as error:  # the library's panics are not `Exception`s
        raise CheckpointError(
            f"`{found[0]}` cannot be read: {shown(error, 120)}", hint=BROKEN
        ) from error


def _has(directory: Path, names: tuple[str, ...]) -> bool:
    return all((directory / name).is_file() for name in names)


def _refuse(directory: Path) -> None:
    """Raise UnsupportedModel if there is a tokenizer of another kind."""
    other = next((name for name in _OTHERS if (directory / name).is_file()), None)
    if other is None:
        return
    raise UnsupportedModel(
        f"the only tokenizer is `{other}`, which llmcli does not read",
        hint="load it with transformers' AutoTokenizer and save it: that writes tokenizer.json",
    )


def _build(
    directory: Path,
    backend: tokenizers.Tokenizer,
    settings: Mapping[str, Any],
    eos: set[int],
    *,
    name: str,
) -> Tokenizer:
    named = named_tokens(settings)
    found = (backend.token_to_id(token_text(token) or "") for token in special_tokens(settings))
    special = {index for index in found if index is not None}
    ids = {role: backend.token_to_id(text) for role, text in named.items()}
    added = backend.get_added_tokens_decoder()
    strings = _strings(backend, added)
    named_eos = ids.get("eos_token")
    eos = eos | ({named_eos} if named_eos is not None else set())
    return Tokenizer(
        backend,
        Vocabulary(
            strings=strings,
            spelling=spelling_of(_decoder(backend)),
            literal=frozenset(),
            silent=frozenset(),
            special_ids=frozenset(special).union(i for i in added if added[i].special),
            bos_id=ids.get("bos_token"),
            eos_ids=frozenset(index for index in eos if 0 <= index < len(strings)),
            prefix=_prefix(backend),
        ),
        name=name,
        chat_template=chat_template_of(directory, settings, named),
        split_special=settings.get("split_special_tokens") is True,
    )


def _read(path: Path) -> tuple[tokenizers.Tokenizer, bool]:
    """Read the file's tokenizer, and whether one of its steps is byte-level."""
    import tokenizers

    # by contents: the library only accepts UTF-8 file names
    data = read_bytes(path, MAX_FILE, hint=BROKEN)
    backend = tokenizers.Tokenizer.from_buffer(data)
    backend.no_truncation()
    backend.no_padding()
    return backend, b'"ByteLevel"' in data


def _strings(
    backend: tokenizers.Tokenizer, added: Mapping[int, tokenizers.AddedToken]
) -> list[str | None]:
    vocab = backend.get_vocab(with_added_tokens=True)
    size = 1 + max(vocab.values(), default=-1)
    if size > 2 * len(vocab) + (1 << 20):  # gaps are valid, but this many would fill the memory
        raise CheckpointError(f"one of {len(vocab)} tokens has the id {size - 1}", hint=BROKEN)
    strings: list[str | None] = [None] * size
    for string, index in vocab.items():
        strings[index] = string
    # a token matched in normalized text has its normalized form: `▁<img>`
    for index, token in added.items():
        if token.normalized:
            strings[index] = backend.id_to_token(index)
    return strings


def _decoder(backend: tokenizers.Tokenizer) -> dict[str, Any] | None:
    """The decoder's serialized form, without the vocabulary around it."""
    if backend.decoder is None:
        return None
    state: dict[str, Any] = json.loads(backend.decoder.__getstate__())
    return state


def _prefix(backend: tokenizers.Tokenizer) -> tuple[int, ...]:
    """Ids that the post-processor puts before the text: BOS, nothing, or several tokens.

    As in transformers, `add_bos_token` of tokenizer_config.json is ignored if there is a
    tokenizer.json. Ids after the text (EOS) are not wanted in a prompt.
    """
    probes = (text for text in _PROBES if backend.encode(text, add_special_tokens=False).ids)
    probe = next(probes, _PROBES)
    plain = backend.encode(probe, add_special_tokens=False).ids
    full = backend.encode(probe, add_special_tokens=True).ids
    for start in range(len(full) - len(plain) + 1):
        if full[start : start + len(plain)] == plain:
            return tuple(full[:start])
    return ()

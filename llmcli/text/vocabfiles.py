"""The tokenizer of a directory with vocab.json and merges.txt but no tokenizer.json.

The files contain the merges but not the pre-tokenizer. transformers determines it by the class in
tokenizer_config.json, else by the model type (models/*/tokenization_*.py,
models/auto/tokenization_auto.py). A class that is not in pairclass.py is an error, since a wrong
split gives plausible ids and worse text.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmcli.checkpoints.files import read_bytes, read_object, shown
from llmcli.errors import CheckpointError
from llmcli.text.pairclass import KINDS, PairKind, class_name
from llmcli.text.pretokenizers import PRE_TOKENIZERS
from llmcli.text.settings import BROKEN, added_tokens, check_id, token_text

if TYPE_CHECKING:
    import tokenizers

NAMES = ("vocab.json", "merges.txt")
_MAX_FILE = 1 << 25  # bytes; the largest known have 6 million
_MAX_MERGES = 1 << 21


def read_pair(
    directory: Path, settings: Mapping[str, Any], config: Mapping[str, Any] | None
) -> tuple[tokenizers.Tokenizer, dict[str, Any], str]:
    """The library's tokenizer of vocab.json and merges.txt, the settings, and the class's name.

    The returned settings include the class's special tokens and added_tokens.json as
    `added_tokens_decoder`. Raises `UnsupportedModel` for an unknown or missing class,
    `CheckpointError` for broken or contradictory files.
    """
    name = class_name(settings, config or {})
    kind = KINDS[name]
    settings = {**kind.defaults, **settings}
    added = added_tokens(directory, settings)
    settings["added_tokens_decoder"] = {str(index): token for index, token in added.items()}
    vocab = _read_vocab(directory / NAMES[0])
    _join(vocab, added)
    return _build(kind, vocab, _read_merges(directory / NAMES[1]), settings), settings, name


def _read_vocab(path: Path) -> dict[str, int]:
    if path.stat().st_size > _MAX_FILE:
        raise CheckpointError(f"`{path.name}` has more than {_MAX_FILE} bytes", hint=BROKEN)
    try:
        vocab = read_object(path) or {}
    except CheckpointError as error:
        raise CheckpointError(error.message, hint=error.hint or BROKEN) from error
    for text, index in vocab.items():
        check_id(path.name, text, index)
    taken: dict[int, str] = {}
    for text, index in vocab.items():
        if taken.setdefault(index, text) != text:
            both = f"`{shown(taken[index])}` and `{shown(text)}`"
            raise CheckpointError(f"`{path.name}` gives {both} the id {index}", hint=BROKEN)
    return vocab


def _read_merges(path: Path) -> list[tuple[str, str]]:
    """Read the pairs in rank order, without `#version` and blank lines."""
    data = read_bytes(path, _MAX_FILE, hint=BROKEN)
    try:
        lines = data.decode("utf-8-sig").split("\n")  # the only line end, as in the library
    except UnicodeDecodeError:
        raise CheckpointError(f"`{path.name}` is not UTF-8", hint=BROKEN) from None
    if len(lines) > _MAX_MERGES:
        raise CheckpointError(f"`{path.name}` has more than {_MAX_MERGES} lines", hint=BROKEN)
    merges: list[tuple[str, str]] = []
    for number, line in enumerate(lines, 1):
        line = line.removesuffix("\r")
        if not line or line.startswith("#version"):
            continue
        left, between, right = line.partition(" ")
        if not left or not right or not between or " " in right:
            raise CheckpointError(
                f"line {number} of `{path.name}` is not a pair of tokens: `{shown(line, 40)}`",
                hint=BROKEN,
            )
        merges.append((left, right))
    return merges


def _join(vocab: dict[str, int], added: Mapping[int, Mapping[str, Any]]) -> None:
    """Put the added tokens into the vocabulary under their ids in the files.

    The library would number them from the vocabulary's size on, which is wrong if ids have gaps.
    """
    at = {index: text for text, index in vocab.items()}
    for index, token in added.items():
        text = token["content"]
        if vocab.get(text, index) != index or at.get(index, text) != text:
            raise CheckpointError(
                f"the added token `{shown(text)}` has the id {index}, unlike in `{NAMES[0]}`",
                hint=BROKEN,
            )
        vocab[text] = index
        at[index] = text


def _build(
    kind: PairKind,
    vocab: dict[str, int],
    merges: list[tuple[str, str]],
    settings: Mapping[str, Any],
) -> tokenizers.Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers
    from tokenizers.models import BPE
    from tokenizers.processors import TemplateProcessing

    try:
        backend = Tokenizer(BPE(vocab, merges))
    except Exception as error:
        raise CheckpointError(
            f"`{NAMES[1]}` does not fit `{NAMES[0]}`: {shown(error, 120)}", hint=BROKEN
        ) from error
    if kind.nfc:
        backend.normalizer = normalizers.NFC()
    spaced = bool(settings.get("add_prefix_space"))
    patterns = PRE_TOKENIZERS[kind.rule].patterns if kind.rule else ()
    letters = pre_tokenizers.ByteLevel(add_prefix_space=spaced, use_regex=not patterns)
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, letters]) if cuts else letters
    backend.decoder = decoders.ByteLevel()
    role = "cls_token" if kind.encloses else "bos_token"
    first = token_text(settings.get(role))
    if first is not None and (kind.encloses or settings.get("add_bos_token")):
        if first not in vocab:
            raise CheckpointError(
                f"`{NAMES[0]}` has no `{shown(first)}`, which begins every text", hint=BROKEN
            )
        backend.post_processor = TemplateProcessing(
            single=[first, "$A"], special_tokens=[(first, vocab[first])]
        )
    return backend

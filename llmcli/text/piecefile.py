"""Reads a SentencePiece file: `tokenizer.model` of a directory without a tokenizer.json.

Field numbers from sentencepiece_model.proto of google/sentencepiece. Values are checked before they
are passed on, since the library is not safe for a hostile model.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from struct import unpack

from llmcli.checkpoints.files import read_bytes
from llmcli.errors import CheckpointError, UnsupportedModel
from llmcli.text.charsmap import check_charsmap
from llmcli.text.sentencepiece import (
    BYTE,
    NORMAL,
    UNKNOWN,
    Normalizer,
    PieceModel,
    byte_ids,
)
from llmcli.text.wire import Value, fields

MAX_FILE = 1 << 26  # bytes; Gemma's, the largest known, has 4.7 million
_BROKEN = "the file is damaged; fetch it again"


@dataclass(frozen=True, kw_only=True)
class PieceFile:
    """A model with its BOS, EOS and unknown strings."""

    model: PieceModel
    bos: str
    eos: str
    unknown: str


def read_pieces(path: Path) -> PieceFile:
    """Read the SentencePiece model in `path`.

    Raises CheckpointError for an invalid or contradictory file, and UnsupportedModel for kinds that
    no language model uses (words, characters).
    """
    data = read_bytes(path, MAX_FILE, hint=_BROKEN)
    try:
        return parse_pieces(data)
    except UnsupportedModel:
        raise
    except CheckpointError as error:
        raise CheckpointError(
            f"`{path.name}` is not a sentencepiece model: {error.message}",
            hint="tiktoken's files have that name too; llmcli reads their tokenizer.json",
        ) from error


def parse_pieces(data: bytes) -> PieceFile:
    """Parse a model from bytes; errors do not name the file."""
    strings: list[str] = []
    scores, kinds = array("f"), bytearray()
    trainer: dict[int, Value] = {}
    rules: dict[int, Value] = {}
    for field, value in fields(data):
        if field == 1 and isinstance(value, bytes):
            string, score, kind = _piece(value)
            strings.append(string)
            scores.append(score)
            kinds.append(kind)
        elif field == 2 and isinstance(value, bytes):
            trainer.update(fields(value))
        elif field == 3 and isinstance(value, bytes):
            rules.update(fields(value))
    kind = _number(trainer, 3, 1)
    if kind not in (1, 2):
        raise UnsupportedModel("sentencepiece models of words or characters are not supported")
    if not _number(rules, 5, 1) or _number(trainer, 24, 0):
        raise UnsupportedModel("sentencepiece models without `▁` in front are not supported")
    charsmap = rules.get(2, b"")
    model = PieceModel(
        strings=strings,
        scores=scores,
        kinds=kinds,
        unigram=kind == 1,
        normalizer=Normalizer(
            space_prefix=bool(_number(rules, 3, 1)),
            merge_spaces=bool(_number(rules, 4, 1)),
            charsmap=charsmap if isinstance(charsmap, bytes) else b"",
        ),
    )
    _check(model)
    return PieceFile(
        model=model,
        bos=_string(trainer, 46, "<s>"),
        eos=_string(trainer, 47, "</s>"),
        unknown=strings[kinds.index(UNKNOWN)],
    )


def _piece(body: bytes) -> tuple[str, float, int]:
    found = dict(fields(body))
    string, score, kind = found.get(1, b""), found.get(2, bytes(4)), found.get(3, NORMAL)
    if not isinstance(string, bytes) or not isinstance(score, bytes) or len(score) != 4:
        raise CheckpointError("a piece has no string or no score")
    if not isinstance(kind, int) or not 0 < kind <= BYTE:
        raise CheckpointError("a piece has an unknown kind")
    return string.decode("utf-8", "surrogateescape"), unpack("<f", score)[0], kind


def _check(model: PieceModel) -> None:
    """Check everything that the library assumes or reports unclearly."""
    strings, kinds = model.strings, model.kinds
    if not strings:
        raise CheckpointError("it has no pieces")
    if len(set(strings)) != len(strings) or "" in strings:
        raise CheckpointError("a piece is empty or a duplicate")
    if not isfinite(sum(model.scores)):
        raise CheckpointError("a score is not a finite number")
    if sum(kind == UNKNOWN for kind in kinds) != 1:
        raise CheckpointError("there is not exactly one unknown piece")
    bytes_there = {index for index, kind in enumerate(kinds) if kind == BYTE}
    if bytes_there and bytes_there != set(byte_ids(strings)):
        raise CheckpointError("its pieces for bytes are not all 256")
    check_charsmap(model.normalizer.charsmap)


def _number(message: dict[int, Value], field: int, usual: int) -> int:
    value = message.get(field, usual)
    return value if isinstance(value, int) else usual


def _string(message: dict[int, Value], field: int, usual: str) -> str:
    value = message.get(field)
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else usual

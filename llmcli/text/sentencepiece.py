"""SentencePiece vocabularies, encoded by the `sentencepiece` library.

For vocabularies from GGUF metadata and `tokenizer.model` alike, the library gets a model serialized
here from checked values, since a hostile model can crash its C++ code. The format is
sentencepiece_model.proto of google/sentencepiece.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain
from struct import iter_unpack
from typing import TYPE_CHECKING

from llmcli.checkpoints.files import shown
from llmcli.errors import CheckpointError
from llmcli.text.wire import fields, message, number, varint

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor

# ModelProto.SentencePiece.Type
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
BYTE_TOKENS = frozenset(f"<0x{byte:02X}>" for byte in range(256))
_NEVER = "\ufdd0"  # a Unicode noncharacter: prefix of placeholder names
_REST = 7  # bytes of a piece's message after its string


@dataclass(frozen=True, kw_only=True)
class Normalizer:
    """SentencePiece's normalization before segmentation.

    `charsmap`: its replacement table, checked by `check_charsmap` (empty: none); `space_prefix`:
    prefix a space; `merge_spaces`: merge runs of spaces and strip both ends.
    """

    space_prefix: bool
    merge_spaces: bool
    charsmap: bytes = b""


@dataclass(frozen=True, kw_only=True)
class PieceModel:
    """A SentencePiece model: string, float32 score and kind of every piece, by id.

    Strings are unique and not empty, scores finite, at most one piece is UNKNOWN. `unigram`: pieces
    maximize the sum of scores; otherwise they are merged, best score first.
    """

    strings: Sequence[str]
    scores: array[float]
    kinds: Sequence[int]
    unigram: bool
    normalizer: Normalizer

    def serialized(self) -> bytes:
        """The serialized ModelProto, with an added UNKNOWN piece if there is none.

        BYTE pieces encode text without a piece, if all 256 are present.
        """
        count = len(self.strings)
        scores = self.scores.tobytes()
        kinds = bytearray(self.kinds)
        texts = _texts(self.strings, kinds)
        rests = bytearray(_REST * count)  # after each string: score and kind
        rests[0::_REST] = b"\x15" * count
        for byte in range(4):
            rests[1 + byte :: _REST] = scores[byte::4]
        rests[5::_REST] = b"\x18" * count
        rests[6::_REST] = kinds
        heads = map(_Heads().__getitem__, map(len, texts))
        ends = (end for (end,) in iter_unpack(f"{_REST}s", rests))
        pieces = list(chain.from_iterable(zip(heads, texts, ends, strict=True)))
        if UNKNOWN not in kinds:
            pieces.append(message(1, message(1, _NEVER.encode()) + b"\x18\x02"))
        trainer = number(3, 1 if self.unigram else 2)
        trainer += number(35, BYTE in kinds)
        pieces.append(message(2, trainer))
        pieces.append(message(3, self._normalizer()))
        return b"".join(pieces)

    def _normalizer(self) -> bytes:
        rules = self.normalizer
        flags = number(3, rules.space_prefix) + number(4, rules.merge_spaces) + number(5, 1)
        return (message(2, rules.charsmap) if rules.charsmap else b"") + flags


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """A stretch of text as pieces; `offsets` (in characters) are computed on demand."""

    ids: list[int]
    text: str
    processor: SentencePieceProcessor

    @cached_property
    def offsets(self) -> list[tuple[int, int]]:
        """(start, end) in characters of every piece; a byte piece covers its whole character.

        Read from a SentencePieceText message, whose format is stable across library versions.
        """
        data: bytes = self.processor.encode(self.text, out_type="serialized_proto")
        found = [
            dict(fields(part))
            for field, part in fields(data)
            if isinstance(part, bytes) and field == 2
        ]
        spans = [(int(piece.get(4, 0)), int(piece.get(5, 0))) for piece in found]
        for index in range(len(spans) - 2, -1, -1):  # the library assigns it to the last byte only
            begin, end = spans[index]
            if begin == end and self.processor.is_byte(self.ids[index]):
                spans[index] = (begin, max(end, spans[index + 1][1]))
        ends = accumulate((len(char.encode()) for char in self.text), initial=0)
        at = {byte: index for index, byte in enumerate(ends)}
        return [(at[begin], at[end]) for begin, end in spans]


class PieceEncoder:
    """Text → pieces, with the interface of `tokenizers.Tokenizer`.

    The library's model takes 0.25 s to build for 262,144 pieces and is built when a text is first
    encoded: displaying tokens does not need it.
    """

    def __init__(self, model: PieceModel) -> None:
        self.encode_special_tokens = False  # special tokens are handled elsewhere
        self._model = model

    @cached_property
    def _processor(self) -> SentencePieceProcessor:
        from sentencepiece import SentencePieceProcessor

        try:
            return SentencePieceProcessor(model_proto=self._model.serialized())
        except Exception as error:
            raise CheckpointError(
                f"the sentencepiece library refuses the vocabulary: {shown(error, 120)}",
                hint="fetch or convert the model again",
            ) from error

    def encode(self, text: str, *, add_special_tokens: bool = False) -> Pieces:
        """The pieces of `text`; special tokens are neither matched nor added."""
        ids: list[int] = self._processor.encode(text)
        return Pieces(ids=ids, text=text, processor=self._processor)


def byte_ids(strings: Sequence[str]) -> list[int]:
    """Ids of the 256 byte tokens (`<0x0A>`); empty unless all are present.

    The library accepts all of them or none.
    """
    found = [index for index, string in enumerate(strings) if string in BYTE_TOKENS]
    return found if len(found) == 256 else []


class _Heads(dict[int, bytes]):
    """Length of a piece's string → the bytes before it, computed on demand."""

    def __missing__(self, size: int) -> bytes:
        inner = b"\n" + varint(size)
        self[size] = head = b"\n" + varint(len(inner) + size + _REST) + inner
        return head


def _texts(strings: Sequence[str], kinds: bytearray) -> list[bytes]:
    """UTF-8 of every string; strings that the library cannot hold become CONTROL placeholders.

    These are invalid UTF-8, which occurs in no text, and strings with NUL.
    """
    try:
        texts = list(map(str.encode, strings))
        if "\0" not in "".join(strings):
            return texts
    except UnicodeEncodeError:
        texts = [string.encode("utf-8", "surrogateescape") for string in strings]
    for index, string in enumerate(strings):
        if "\0" in string or not _is_utf8(string):
            texts[index] = f"{_NEVER}{index}".encode()
            if kinds[index] != UNKNOWN:
                kinds[index] = CONTROL
    return texts


def _is_utf8(string: str) -> bool:
    return string.isascii() or not any("\ud800" <= char <= "\udfff" for char in string)

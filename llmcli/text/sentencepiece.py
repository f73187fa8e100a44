"""SentencePiece: `tokenizer.model` files, and vocabularies encoded by the `sentencepiece` library.

For vocabularies from GGUF metadata and `tokenizer.model` alike, the library gets a model serialized
here from checked values, since a hostile model can crash its C++ code. Field numbers are those of
sentencepiece_model.proto of google/sentencepiece, in the protobuf wire format.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, chain
from math import isfinite
from pathlib import Path
from struct import iter_unpack, unpack
from typing import TYPE_CHECKING, TypeVar

from llmcli.checkpoints.files import read_bytes, shown
from llmcli.errors import CheckpointError, UnsupportedModel
from llmcli.text.spelling import is_unicode

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor

Value = int | bytes  # of a field in the protobuf wire format
Default = TypeVar("Default", int, bytes)
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5


def varint(number: int) -> bytes:
    """Encode base 128, low digits first, the top bit set on all but the last."""
    digits = bytearray()
    while number > 127:
        digits.append(number & 127 | 128)
        number >>= 7
    digits.append(number)
    return bytes(digits)


def number(field: int, value: int) -> bytes:
    """Encode a field with a number or a flag."""
    return varint(field << 3) + varint(value)


def message(field: int, body: bytes) -> bytes:
    """Encode a field with a message, a string or bytes."""
    return varint(field << 3 | BYTES) + varint(len(body)) + body


def fields(data: bytes) -> Iterator[tuple[int, Value]]:
    """Yield (field, value) in order: a number, or the bytes of any other type.

    Raises CheckpointError for invalid data.
    """
    at, size = 0, len(data)
    while at < size:
        tag, at = _read(data, at)
        kind = tag & 7
        if kind == VARINT:
            value, at = _read(data, at)
            yield tag >> 3, value
            continue
        if kind == BYTES:
            length, at = _read(data, at)
        elif kind in (FIXED32, FIXED64):
            length = 4 if kind == FIXED32 else 8
        else:
            raise CheckpointError(f"there is no field of wire type {kind}")
        if length > size - at:
            raise CheckpointError("a field is longer than what holds it")
        yield tag >> 3, data[at : at + length]
        at += length


def _read(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data) and shift < 70:  # ten bytes at most
        digit = data[at]
        at += 1
        value |= (digit & 127) << shift
        if digit < 128:
            return value, at
        shift += 7
    raise CheckpointError("a number has no end")


_BLOCK = 256  # units: a step is an XOR with one byte, which stays in the block


def check_charsmap(data: bytes) -> None:
    """Raise CheckpointError unless every lookup in `precompiled_charsmap` stays inside it.

    The library follows the trie's offsets without checking them. Layout (google/sentencepiece,
    normalizer.cc; darts-clone, darts.h): a little-endian u32 with the size of the trie in bytes,
    the trie as u32 units, then replacement strings that end with NUL. An empty table is valid.
    """
    if not data:
        return
    import numpy as np

    size = int.from_bytes(data[:4], "little")
    if len(data) <= 4 + size or size == 0 or size % (4 * _BLOCK):
        raise CheckpointError("the table of replacements has an impossible size")
    units = np.frombuffer(data, "<u4", size // 4, offset=4).astype(np.int64)
    texts = data[4 + size :]
    at = np.arange(len(units))
    is_value = units >= 1 << 31
    offset = (units >> 10) << ((units >> 6) & 8)
    target = np.where(is_value, 0, at ^ offset)
    if (target >= len(units)).any():
        raise CheckpointError("the table of replacements has an offset outside of it")
    # Units with bit 8 have a value, in the unit at their offset.
    values = units[target[~is_value & ((units >> 8) & 1 == 1)]] & 0x7FFFFFFF
    if (values >= len(texts)).any() or texts[-1:] != b"\0":
        raise CheckpointError("the table of replacements has a text outside of it")


# ModelProto.SentencePiece.Type
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
BYTE_TOKENS = frozenset(f"<0x{byte:02X}>" for byte in range(256))
_NEVER = "\ufdd0"  # a Unicode noncharacter: prefix of placeholder names
_REST = 7  # bytes of a piece's message after its string


@dataclass(frozen=True, kw_only=True)
class PieceModel:
    """A SentencePiece model: string, float32 score and kind of every piece, by id.

    Strings are as in `check_strings`, at most one piece is UNKNOWN. `unigram`: pieces maximize the
    sum of scores; otherwise they are merged, best score first. A text is normalized before:
    `charsmap` is a table of replacements (empty: none); `space_prefix` puts a space in front;
    `merge_spaces` merges runs of spaces and strips both ends. `names`: the texts of `bos_token`,
    `eos_token` and `unk_token`, if known.
    """

    strings: Sequence[str]
    scores: array[float]
    kinds: Sequence[int]
    unigram: bool
    space_prefix: bool
    merge_spaces: bool
    charsmap: bytes = b""
    names: Mapping[str, str] = field(default_factory=dict)

    def checked(self) -> PieceModel:
        """The model; raises CheckpointError for what the library assumes or reports unclearly.

        Scores are finite (others cannot be ordered), and the table of replacements is sound.
        """
        if not isfinite(sum(self.scores)):  # not finite if any is not; finite ones do not overflow
            at = next(index for index, score in enumerate(self.scores) if not isfinite(score))
            raise CheckpointError(f"the score of token {at} is {self.scores[at]}")
        check_charsmap(self.charsmap)
        return self

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
        rules = message(2, self.charsmap) if self.charsmap else b""
        rules += number(3, self.space_prefix) + number(4, self.merge_spaces) + number(5, 1)
        return b"".join([*pieces, message(2, trainer), message(3, rules)])


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
        self._model = model

    @cached_property
    def _processor(self) -> SentencePieceProcessor:
        from sentencepiece import SentencePieceProcessor

        try:
            return SentencePieceProcessor(model_proto=self._model.serialized())
        except Exception as error:
            why = shown(error, 120)
            raise CheckpointError(
                f"the sentencepiece library refuses the vocabulary: {why}"
            ) from error

    def encode(self, text: str, *, add_special_tokens: bool = False) -> Pieces:
        """The pieces of `text`; special tokens are neither matched nor added."""
        ids: list[int] = self._processor.encode(text)
        return Pieces(ids=ids, text=text, processor=self._processor)


def check_strings(strings: Sequence[str]) -> None:
    """Raise CheckpointError for a vocabulary without tokens, an empty token or a duplicate."""
    if not strings:
        raise CheckpointError("the vocabulary is empty")
    if len(distinct := set(strings)) != len(strings):
        twice = next(string for string, times in Counter(strings).items() if times > 1)
        raise CheckpointError(f"the vocabulary has the token `{shown(twice)}` twice")
    if "" in distinct:
        raise CheckpointError("the vocabulary has an empty token")


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
        if "\0" in string or not is_unicode(string):
            texts[index] = f"{_NEVER}{index}".encode()
            if kinds[index] != UNKNOWN:
                kinds[index] = CONTROL
    return texts


MAX_FILE = 1 << 26  # bytes; Gemma's, the largest known, has 4.7 million


def read_pieces(path: Path) -> PieceModel:
    """Read the SentencePiece model in `path`.

    Raises CheckpointError for an invalid or contradictory file, and UnsupportedModel for kinds that
    no language model uses (words, characters).
    """
    data = read_bytes(path, MAX_FILE)
    try:
        return parse_pieces(data)
    except UnsupportedModel:
        raise
    except CheckpointError as error:
        raise CheckpointError(
            f"`{path.name}` is not a sentencepiece model: {error.message}",
            hint="tiktoken's files have that name too; llmcli reads their tokenizer.json",
        ) from error


def parse_pieces(data: bytes) -> PieceModel:
    """Parse a model from bytes; errors do not name the file."""
    strings: list[str] = []
    scores, kinds = array("f"), bytearray()
    messages: dict[int, dict[int, Value]] = {2: {}, 3: {}}  # the trainer's, the normalizer's
    for part, value in fields(data):
        if part == 1 and isinstance(value, bytes):
            string, score, kind = _piece(value)
            strings.append(string)
            scores.append(score)
            kinds.append(kind)
        elif part in messages and isinstance(value, bytes):
            messages[part].update(fields(value))

    def given(part: int, inner: int, usual: Default) -> Default:
        value = messages[part].get(inner, usual)
        return value if isinstance(value, type(usual)) else usual

    kind = given(2, 3, 1)
    if kind not in (1, 2):
        raise UnsupportedModel("sentencepiece models of words or characters are not supported")
    if not given(3, 5, 1) or given(2, 24, 0):
        raise UnsupportedModel("sentencepiece models without `▁` in front are not supported")
    check_strings(strings)
    if kinds.count(UNKNOWN) != 1:
        raise CheckpointError("there is not exactly one unknown piece")
    if BYTE in kinds and byte_ids(strings) != [i for i, kind in enumerate(kinds) if kind == BYTE]:
        raise CheckpointError("its pieces for bytes are not all 256")
    bos, eos = (given(2, inner, usual) for inner, usual in ((46, b"<s>"), (47, b"</s>")))
    return PieceModel(
        strings=strings,
        scores=scores,
        kinds=kinds,
        unigram=kind == 1,
        space_prefix=bool(given(3, 3, 1)),
        merge_spaces=bool(given(3, 4, 1)),
        charsmap=given(3, 2, b""),
        names={
            "bos_token": bos.decode("utf-8", "replace"),
            "eos_token": eos.decode("utf-8", "replace"),
            "unk_token": strings[kinds.index(UNKNOWN)],
        },
    ).checked()


def _piece(body: bytes) -> tuple[str, float, int]:
    found = dict(fields(body))
    string, score, kind = found.get(1, b""), found.get(2, bytes(4)), found.get(3, NORMAL)
    if not isinstance(string, bytes) or not isinstance(score, bytes) or len(score) != 4:
        raise CheckpointError("a piece has no string or no score")
    if not isinstance(kind, int) or not 0 < kind <= BYTE:
        raise CheckpointError("a piece has an unknown kind")
    return string.decode("utf-8", "surrogateescape"), unpack("<f", score)[0], kind

"""The tokenizer for all vocabularies: text → ids, ids → text, byte offsets."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any

from llmcli.checkpoints.files import shown
from llmcli.errors import CheckpointError, LlmcliError, UsageError
from llmcli.records.text import TokenPiece
from llmcli.text.portions import PORTION, divisible, portions
from llmcli.text.segments import Markers
from llmcli.text.spelling import Spelling, literal_bytes
from llmcli.text.stream import StreamDecoder

if TYPE_CHECKING:
    import tokenizers

    from llmcli.text.added import AddedTokens
    from llmcli.text.chat import ChatTemplate
    from llmcli.text.sentencepiece import PieceEncoder, Pieces


_LINE_ENDS = re.compile(r"\n+|[^\n]+")


# Measured bytes (tests/benchmarks/memory_estimate.py): modules, and tables per vocabulary entry by
# backend.
_MODULES = 4 << 20
_PIECES, _FROM_GGUF, _FROM_JSON = 235, 570, 890  # pieces: 170 until a text is encoded, then 300


@dataclass(eq=False, repr=False, kw_only=True)
class Tokenizer:
    """Text ↔ ids. Created by `load_tokenizer`; `name` describes its kind.

    `strings[id]`: the token as in the file (None: no token); `silent`: ids that decode to nothing.
    `prefix`: ids that the tokenizer prepends by default (usually BOS).

    `added`: tokens matched in the text here, which decode to their own string, independent of the
    spelling; None (tokenizer.json): the `tokenizers` library matches them by its own rules.
    `inside`: encodes stretches that do not begin the text, if they differ (no leading space).
    `filler`: an id of the library for bytes that the vocabulary lacks; such bytes are dropped, as
    in llama.cpp and transformers. `split_special`: special tokens in a text are always plain text
    (transformers' `split_special_tokens`). `line_ends` (with `added`): tokens for whole runs of
    line ends, not merged from parts. `notes`: hints for users.
    """

    name: str
    backend: tokenizers.Tokenizer | PieceEncoder
    strings: Sequence[str | None]
    spelling: Spelling
    silent: frozenset[int] = frozenset()
    special_ids: frozenset[int]
    bos_id: int | None
    eos_ids: frozenset[int]
    prefix: tuple[int, ...]
    added: AddedTokens | None = None
    inside: PieceEncoder | None = None
    filler: int | None = None
    chat_template: ChatTemplate | None = None
    split_special: bool = False
    line_ends: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return len(self.strings)

    @property
    def add_bos(self) -> bool:
        """Whether ids are prepended by default."""
        return bool(self.prefix)

    @cached_property
    def hidden_ids(self) -> frozenset[int]:
        """Special tokens that are not part of an answer's text: not in the template's markers."""
        return self.special_ids - Markers.of_tokenizer(self).special_ids(self)

    @property
    def nbytes(self) -> int:
        """Approximate bytes of memory, including modules."""
        import tokenizers

        each = _PIECES
        if isinstance(self.backend, tokenizers.Tokenizer):
            each = _FROM_JSON if self.added is None else _FROM_GGUF
        return _MODULES + each * self.vocab_size

    def encode(
        self, text: str, *, add_bos: bool | None = None, parse_special: bool = True
    ) -> list[int]:
        """Ids of `text`.

        `add_bos` None: the tokenizer's default; EOS is never added. With `parse_special` False,
        control tokens in the text are plain text. Raises `UsageError` if `add_bos` is True and the
        model has no BOS.
        """
        ids = list(self._front(add_bos))
        for part, _, _ in self._parts(clean(text), parse_special):
            if isinstance(part, int):
                ids.append(part)
            elif self.filler is None:
                ids.extend(part.ids)
            else:
                ids.extend(token for token in part.ids if token != self.filler)
        return ids

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **how: Any) -> list[int]:
        """Ids of a conversation in the model's chat template; `how` as in its `render`.

        For prefix ids see `before_chat`. Raises `UsageError` without a template, `CheckpointError`
        if the template fails.
        """
        if self.chat_template is None:
            raise UsageError("the model has no chat template", hint="use `--raw`")
        text = self.chat_template.render(messages, **how)
        return self.encode(text, add_bos=self.before_chat(text))

    def before_chat(self, text: str) -> bool | None:
        """The `add_bos` for a text of the chat template.

        In transformers `apply_chat_template` adds nothing; llama.cpp (GGUF) follows the tokenizer's
        default unless the text begins with BOS (or the whole prefix).
        """
        if self.added is None or self.added.leftmost:
            return False
        fronts = [self.prefix, (self.bos_id,) if self.bos_id is not None else ()]
        written = ["".join(self.strings[i] or "" for i in front) for front in fronts]
        begins = any(front and text.startswith(front) for front in written)
        return False if begins else None

    def decode(
        self, ids: Iterable[int], *, skip_special: bool = True, markers: bool = False
    ) -> str:
        """Text of `ids`; invalid UTF-8 becomes U+FFFD, unknown ids are skipped.

        `markers`: of special tokens, only `hidden_ids` are hidden.
        """
        stream = StreamDecoder(self, skip_special=skip_special, markers=markers)
        return b"".join(map(stream.push_bytes, ids)).decode("utf-8", "replace")

    def has(self, token: int) -> bool:
        """Whether `token` is an id of the vocabulary (padding rows of an embedding are not)."""
        strings = self.strings
        return 0 <= token < len(strings) and strings[token] is not None

    def agrees(self, other: Tokenizer) -> bool:
        """Whether both tokenizers have equal tokens for all common ids, except special tokens."""
        pairs = zip(self.strings, other.strings, strict=False)
        differing = {id for id, (one, two) in enumerate(pairs) if one != two}
        return differing <= self.special_ids | other.special_ids

    def token_bytes(self, token: int, *, first: bool = False) -> bytes:
        """The exact bytes of `token`; empty for ids without a token.

        `first`: the first token of a text, which some vocabularies spell differently.
        """
        if not self.has(token) or token in self.silent:
            return b""
        string = self.strings[token] or ""
        if self.added is not None and token in self.added.tokens:
            return literal_bytes(string)
        return self.spelling.to_bytes(string, first=first)

    def token_text(self, token: int) -> str:
        r"""One token for display; bytes of incomplete characters are written as `\xf0`."""
        return self.token_bytes(token).decode("utf-8", "backslashreplace")

    def pieces(
        self, text: str, *, add_bos: bool | None = None, parse_special: bool = True
    ) -> list[TokenPiece]:
        """The tokens of `text` with their byte offsets.

        Offsets are exact, also inside a character, if the tokens' bytes are the text's (no
        normalizer changed it). Otherwise a token covers all characters that it touches, shared with
        other tokens.
        """
        front = ((token, 0, 0) for token in self._front(add_bos))
        return self._placed(chain(front, self._spans(clean(text), parse_special)))

    def spelled(self, ids: Iterable[int]) -> list[TokenPiece]:
        """Tokens of given ids with byte offsets in the decoded text, special tokens included."""
        stream = StreamDecoder(self, skip_special=False)
        ids = list(ids)
        ends = list(accumulate(len(stream.push_bytes(token)) for token in ids))
        return self._placed(zip(ids, [0, *ends], ends, strict=False))

    def _placed(self, spans: Iterable[tuple[int, int, int]]) -> list[TokenPiece]:
        """(id, start, end) as pieces; text and bytes of an id are computed once."""
        known: dict[int, tuple[str, str, bool]] = {}
        pieces = []
        for token, start, end in spans:
            if token not in known:
                spelled = self.token_bytes(token).hex()
                known[token] = self.token_text(token), spelled, token in self.special_ids
            text, spelled, special = known[token]
            pieces.append(
                TokenPiece(
                    id=token, text=text, bytes=spelled, start=start, end=end, special=special
                )
            )
        return pieces

    def _spans(self, text: str, parse_special: bool) -> list[tuple[int, int, int]]:
        spans: list[tuple[int, int, int]] = []
        seen = begin = 0  # characters and bytes before the part
        for part, at, end in self._parts(text, parse_special):
            begin += len(text[seen:at].encode())
            seen, stretch = end, text[at:end]
            data = stretch.encode()
            if isinstance(part, int):
                spans.append((part, begin, begin + len(data)))
            else:
                spans += self._spelled_by(part, stretch, data, begin)
            begin += len(data)
        return spans

    def _spelled_by(
        self, part: tokenizers.Encoding | Pieces, text: str, data: bytes, begin: int
    ) -> Iterator[tuple[int, int, int]]:
        """Yield (id, start, end) of tokens of `text`, whose UTF-8 `data` begins at byte `begin`."""
        ids = [token for token in part.ids if token != self.filler]
        chunks = [self.token_bytes(token) for token in ids]
        spelled = b"".join(chunks)
        # An added leading space covers no byte of the text.
        lead = spelled.startswith(b" ") and spelled[1:] == data
        if lead or spelled == data:
            ends = [max(begin, begin + n - lead) for n in accumulate(map(len, chunks))]
            return zip(ids, [begin, *ends], ends, strict=False)
        offsets = zip(part.ids, part.offsets, strict=True)
        aligned = [place for token, place in offsets if token != self.filler]
        begins, ends = self._aligned(text, begin, chunks, aligned)
        return zip(ids, begins, ends, strict=True)

    def _aligned(
        self,
        text: str,
        start: int,
        chunks: list[bytes],
        offsets: list[tuple[int, int]],
    ) -> tuple[list[int], list[int]]:
        """Start and end byte of every token of `text`, from the library's `offsets`.

        The text begins at byte `start`. Offsets are in characters and equal for all tokens of one
        character: if these tokens' bytes are the text's, each gets its own. A combining mark that a
        normalizer merged into the previous character has no offset and belongs to that character's
        tokens.
        """
        at_byte = list(accumulate((len(char.encode()) for char in text), initial=start))
        normalizer = getattr(self.backend, "normalizer", None)
        begins: list[int] = []
        ends: list[int] = []
        first = 0
        while first < len(offsets):
            begin, last = offsets[first]
            stop = first + 1
            while stop < len(offsets) and offsets[stop][0] < last:
                last = max(last, offsets[stop][1])
                stop += 1
            until = last
            behind = offsets[stop][0] if stop < len(offsets) else len(text)
            if normalizer is not None and normalizer.normalize_str(text[until:behind]):
                until = behind
            spelled = chunks[first:stop]
            if b"".join(spelled) == text[begin:until].encode():
                edges = list(accumulate(map(len, spelled), initial=at_byte[begin]))
                begins += edges[:-1]
                ends += edges[1:]
            else:
                begins += [at_byte[a] for a, _ in offsets[first:stop]]
                ends += [at_byte[until if b == last else b] for _, b in offsets[first:stop]]
            first = stop
        return begins, ends

    def _front(self, add_bos: bool | None) -> tuple[int, ...]:
        if add_bos is False:
            return ()
        if self.prefix or add_bos is None:
            return self.prefix
        if self.bos_id is None:
            raise UsageError("the model has no BOS token", hint="leave BOS out")
        return (self.bos_id,)

    def _parts(
        self, text: str, parse_special: bool
    ) -> Iterator[tuple[int | tokenizers.Encoding | Pieces, int, int]]:
        """Yield special ids and encoded stretches of `text`, each with character start and end."""
        parse_special = parse_special and not self.split_special
        if self.added is None:
            library: Any = self.backend  # a `tokenizers.Tokenizer`, without `added`
            library.encode_special_tokens = not parse_special
            yield from self._in_portions(text, 0)
            return
        for token, at, end in self.added.cut(text, parse_special):
            if token is not None:
                yield token, at, end
            elif not self.line_ends:
                yield from self._in_portions(text[at:end], at)
            else:
                for run in _LINE_ENDS.finditer(text, at, end):
                    if (line_end := self.line_ends.get(run[0])) is not None:
                        yield line_end, *run.span()
                    else:
                        yield from self._in_portions(run[0], run.start())

    def _in_portions(
        self, text: str, at: int
    ) -> Iterator[tuple[tokenizers.Encoding | Pieces, int, int]]:
        """Encode `text` from character `at` on; long texts in portions if this is exact."""
        whole = len(text) <= PORTION or not self._divisible
        for begin, end in [(0, len(text))] if whole else portions(text):
            yield self._run(text[begin:end], at + begin), at + begin, at + end

    @cached_property
    def _divisible(self) -> bool:
        import tokenizers

        return isinstance(self.backend, tokenizers.Tokenizer) and divisible(self.backend)

    def _run(self, text: str, at: int) -> tokenizers.Encoding | Pieces:
        backend = self.backend if self.inside is None or not at else self.inside
        try:
            return backend.encode(text, add_special_tokens=False)
        except (KeyboardInterrupt, SystemExit, LlmcliError):
            raise
        except BaseException as error:  # the library's panics are not `Exception`s
            raise CheckpointError(
                f"the tokenizer `{self.name}` fails on this text: {shown(error, 120)}",
                hint="the checkpoint's tokenizer is broken; fetch it again",
            ) from error


def clean(text: str) -> str:
    """`text` with lone surrogates (undecodable bytes of arguments and pipes) replaced by U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text

"""The token whose logit is explained (`--answer`, `--versus`), and how options name a token."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from llmcli.errors import UsageError
from llmcli.shell.params import opt

if TYPE_CHECKING:
    from torch import Tensor

    from llmcli.model import Model
    from llmcli.text import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The number to explain: the logit of `answer`, minus that of `versus` if there is one.

    Both are ids; `answer` is None as long as it is the model's top token. Raises UsageError where
    both are one token.
    """

    answer: int | None = None
    versus: int | None = None

    def __post_init__(self) -> None:
        """Refuse a difference that is 0."""
        if self.answer is not None and self.answer == self.versus:
            raise UsageError("`--versus` is the answer itself: the difference is 0")

    def known(self, logits_V: Tensor) -> Answer:
        """With the top token of `logits_V` as the answer where none was named."""
        return self if self.answer is not None else replace(self, answer=int(logits_V.argmax()))

    def of(self, logits: Tensor) -> Tensor:
        """The number, `[…]`, of logits `[…, V]`."""
        assert self.answer is not None
        found = logits[..., self.answer]
        return found if self.versus is None else found - logits[..., self.versus]


@dataclass(frozen=True, kw_only=True)
class AnswerOptions:
    """The token whose logit is explained, and the token that it is compared with."""

    panel: ClassVar[str] = "Answer"
    answer: str | None = opt(
        None,
        "--answer TOKEN",
        "The token whose logit counts (in quotes to keep a space; an id without a tokenizer). "
        "[default: the model's top token]",
    )
    versus: str | None = opt(
        None, "--versus TOKEN", "Another token: the difference of both logits counts."
    )

    def parse(self, model: Model) -> Answer:
        """The tokens by their ids. Raises UsageError for what is not one token."""
        tokenizer, vocabulary = model.tokenizer, model.config.vocab
        answer, versus = (
            None if text is None else parse_token(text, name, tokenizer, vocabulary)
            for name, text in (("--answer", self.answer), ("--versus", self.versus))
        )
        return Answer(answer=answer, versus=versus)

    def notes(self, answer: Answer, model: Model) -> Iterator[str]:
        """What to know of words given without their space; see `space_note`."""
        pairs = {"--answer": (self.answer, answer.answer), "--versus": (self.versus, answer.versus)}
        for name, (text, token) in pairs.items():
            if text is not None and token is not None:
                yield from filter(None, [space_note(text, name, token, (), model.tokenizer)])


def parse_token(
    text: str, option: str, tokenizer: Tokenizer | None, vocabulary: int, words: str = ""
) -> int:
    """A token of the vocabulary (which may stand in quotes), or its id.

    An id is meant only where there is no tokenizer. Raises UsageError naming `option` for anything
    else; `words`: what that takes besides.
    """
    if tokenizer is None:
        if re.fullmatch(r"\d{1,9}", text, re.ASCII) and int(text) < vocabulary:
            return int(text)
        raise UsageError(
            f"`{option} {text}`: the model has no tokenizer, so it takes an id{words}",
            hint=f"ids go from 0 to {vocabulary - 1}",
        )
    token = _unquoted(text)
    ids = tokenizer.encode(token, add_bos=False)
    if len(ids) == 1:
        return ids[0]
    split = ", ".join(f"`{tokenizer.token_text(id)}`" for id in ids[:8])
    spaced = tokenizer.encode(f" {token}", add_bos=False)
    raise UsageError(
        f"`{option} {text}` is {len(ids)} tokens, not one" + (f": {split}" if ids else ""),
        hint=f'did you mean `{option} " {token}"`? a word in a text begins with its space'
        if len(spaced) == 1 and token
        else "give one of them; a word in a text usually begins with its space",
    )


def space_note(
    text: str, option: str, token: int, likeliest: Collection[int], tokenizer: Tokenizer | None
) -> str | None:
    """What is to be known of a token that with a space before it is another one, else None.

    Words in a text begin with their space: that one may be what was meant. `likeliest`: the model's
    top tokens.
    """
    word = _unquoted(text)
    if tokenizer is None or word.startswith(" "):
        return None
    spaced = tokenizer.encode(f" {word}", add_bos=False)
    if len(spaced) != 1 or spaced[0] == token:
        return None
    here = ", the model's top token here" if spaced[0] in likeliest else ""
    return (
        f'`{option} {text}` is the token without a space; `{option} " {word}"` is another one{here}'
    )


def _unquoted(text: str) -> str:
    inside = re.fullmatch(r"(['\"])(.+)\1", text, re.DOTALL)
    return inside[2] if inside else text

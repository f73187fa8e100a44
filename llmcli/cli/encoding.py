"""From a prompt to the token ids that the model is given, and whether they fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from llmcli.cli.options import PROMPT
from llmcli.cli.prompts import (
    Prompt,
    check_ids,
    need_tokenizer,
    text_argument,
)
from llmcli.errors import PromptTooLong, UsageError

if TYPE_CHECKING:
    from llmcli.model import Model
    from llmcli.text import Tokenizer


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """Whether text is put into the model's chat template."""

    chat: Annotated[
        bool,
        typer.Option(
            "--chat",
            rich_help_panel=PROMPT,
            help="Answer, through the model's chat template. [default where it has one]",
        ),
    ] = False
    raw: Annotated[
        bool,
        typer.Option("--raw", rich_help_panel=PROMPT, help="Continue the text as it stands."),
    ] = False
    system: Annotated[
        str | None,
        typer.Option(
            "--system", metavar="TEXT", rich_help_panel=PROMPT, help="The system message."
        ),
    ] = None

    def check(self, *, ids: bool) -> None:
        """Raises UsageError for options that contradict each other."""
        if self.chat and self.raw:
            raise UsageError("`--chat` and `--raw` exclude each other")
        if self.system is not None:
            text_argument(self.system, "`--system`")
        if self.system is not None and self.raw:
            raise UsageError("`--system` is for the chat template, and `--raw` goes without it")
        if ids and (self.chat or self.system is not None):
            flag = "--chat" if self.chat else "--system"
            raise UsageError(f"`--ids` is always raw and goes without `{flag}`")

    def messages(self, text: str) -> list[dict[str, str]]:
        """The conversation that `text` begins."""
        user = {"role": "user", "content": text}
        if self.system is None:
            return [user]
        return [{"role": "system", "content": text_argument(self.system, "`--system`")}, user]

    def renderer(self, given: Sequence[Prompt]) -> AbstractContextManager[object]:
        """The process that renders the template of these prompts; none where none may need it.

        Entered before the model is loaded, it gets ready meanwhile.
        """
        if self.raw or all(prompt.ids is not None for prompt in given):
            return nullcontext()
        from llmcli.text.template_renderer import RENDERER

        return RENDERER

    def wants_template(self, tokenizer: Tokenizer, name: str) -> bool:
        """Whether the template is used; raises UsageError where it is asked for and absent."""
        if self.raw:
            return False
        if tokenizer.chat_template is None and (self.chat or self.system is not None):
            flag = "--chat" if self.chat else "--system"
            raise UsageError(
                f"`{flag}` needs a chat template, and `{name}` has none",
                hint="leave it out: the text is then continued as it stands",
            )
        return tokenizer.chat_template is not None


@dataclass(frozen=True)
class Encoded:
    """A prompt as the model gets it. `chat`: the text went through the chat template."""

    text: str | None
    ids: tuple[int, ...]
    chat: bool


def encode(prompt: Prompt, options: ChatOptions, model: Model) -> Encoded:
    """The ids of one prompt; raises UsageError, or CheckpointError without a tokenizer."""
    if prompt.ids is not None:
        check_ids(prompt.ids, model.config.vocab, prompt.where)
        text = None if model.tokenizer is None else model.tokenizer.decode(
            prompt.ids, skip_special=False
        )
        return Encoded(text, prompt.ids, False)
    tokenizer = need_tokenizer(model.tokenizer, model.name)
    text = prompt.text or ""
    if options.wants_template(tokenizer, model.name):
        ids = tuple(tokenizer.encode_chat(options.messages(text)))
        chat = True
    else:
        ids = tuple(tokenizer.encode(text))
        chat = False
    if not ids:
        raise UsageError("the prompt has no tokens", hint="give at least one character")
    model.check_tokenized(ids)
    return Encoded(text, ids, chat)


def check_fits(
    encoded: Sequence[Encoded], limit: int, room: int, *, largest: int | None = None
) -> Iterator[str]:
    """Notes on prompts that leave room for fewer than `limit` tokens of the `room` there is.

    Raises PromptTooLong, saying by how much, for one that does not fit at all. The last new
    token is never read again, so a prompt of n tokens leaves room for room - n + 1. `largest`
    is a context that cannot be exceeded.
    """
    for index, item in enumerate(encoded):
        which = "the prompt" if len(encoded) == 1 else f"prompt {index}"
        count = len(item.ids)
        if count > room:
            raise PromptTooLong(
                f"{which} has {count} tokens{' with the chat template' if item.chat else ''}, "
                f"{count - room} more than the context of {room}",
                hint="shorten it"
                + ("" if room == largest else ", or give more room with `--context-length`"),
            )
    for index, item in enumerate(encoded):
        which = "the prompt" if len(encoded) == 1 else f"prompt {index}"
        left = room - len(item.ids) + 1
        if left < limit:
            yield (
                f"{which} leaves room for {left} of the {limit} new tokens in a context of {room}: "
                "the text ends there"
            )

"""Token ids of a prompt, and whether they fit the context."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from llmcli.errors import CheckpointError, PromptTooLong, UsageError
from llmcli.shell.conversations import Transcript
from llmcli.shell.prompts import Prompt, check_ids, need_tokenizer
from llmcli.shell.template import ChatOptions

if TYPE_CHECKING:
    from llmcli.records.text import TokenPiece
    from llmcli.text import Tokenizer
    from llmcli.text.interface import TextInterface


def encode(prompt: Prompt, options: ChatOptions, model: TextInterface) -> Prompt:
    """The prompt with its ids; raises UsageError, or CheckpointError without a tokenizer."""
    if prompt.ids:
        check_ids(prompt.ids, model.config.vocab, prompt.where)
        text = None if model.tokenizer is None else model.tokenizer.decode(
            prompt.ids, skip_special=False
        )
        return replace(prompt, text=text)
    tokenizer = need_tokenizer(model.tokenizer, model.name)
    given = options.template_input(prompt, tokenizer, model.name)
    if given is None:
        ids = tuple(tokenizer.encode(prompt.text or ""))
    else:
        with name_conversation(prompt):
            ids = tuple(_encoded_chat(prompt, given, tokenizer, model))
    if not ids:
        raise UsageError("the prompt has no tokens", hint="give at least one character")
    model.check_tokenized(ids)
    messages = None if prompt.conversation is None else prompt.conversation.template_input()
    return replace(
        prompt, text=prompt.text or "", ids=ids, chat=given is not None, messages=messages
    )


def _encoded_chat(
    prompt: Prompt, given: Mapping[str, Any], tokenizer: Tokenizer, model: TextInterface
) -> list[int]:
    """Applies the chat template; answers of a transcript keep the ids that the model wrote."""
    saved, template = prompt.conversation, tokenizer.chat_template
    if template is None or not (isinstance(saved, Transcript) and saved.is_of(model)):
        return tokenizer.encode_chat(**given)
    from llmcli.engine.messages import AnswerIds

    answers = AnswerIds.of(tokenizer, model.eos_ids)
    text = template.render(**given)
    return answers.encoded([answers.checked(one) for one in saved.messages], text)


def pieces(
    prompt: Prompt, options: ChatOptions, tokenizer: Tokenizer, name: str, *, parse_special: bool
) -> tuple[str | None, list[TokenPiece]]:
    """Applies the chat template of the model `name` to a prompt; returns the text and its tokens.

    The text is None if no template is applied. Raises the errors of `encode`, and UsageError if
    special tokens shall be plain text although the template writes them.
    """
    given = options.template_input(prompt, tokenizer, name)
    if given is None or tokenizer.chat_template is None:
        return None, tokenizer.pieces(prompt.text or "", parse_special=parse_special)
    if not parse_special:
        raise UsageError("the chat template is made of special tokens: leave `--no-special` out")
    from llmcli.text.tokenizer import clean

    with name_conversation(prompt):
        text = clean(tokenizer.chat_template.render(**given))
    return text, tokenizer.pieces(text, add_bos=tokenizer.before_chat(text))


@contextmanager
def name_conversation(prompt: Prompt) -> Iterator[None]:
    """Adds the file or line of the conversation to errors of its template."""
    try:
        yield
    except CheckpointError as error:
        if prompt.conversation is None:
            raise
        from llmcli.text.chat import NO_SYSTEM, WITHOUT

        other = "change its messages to what the model's template takes"
        hint = other if error.hint in (NO_SYSTEM, WITHOUT) else error.hint
        raise CheckpointError(f"{prompt.where}: {error.message}", hint=hint) from error


def check_fits(
    encoded: Sequence[Prompt], limit: int | None, room: int, *, largest: int | None = None
) -> Iterator[str]:
    """Notes on prompts that leave room for fewer than `limit` tokens (None: no limit) in `room`.

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
        if limit is not None and left < limit:
            yield (
                f"{which} leaves room for {left} of the {limit} new tokens in a context of {room}: "
                "the text ends there"
            )

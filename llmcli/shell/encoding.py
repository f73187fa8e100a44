"""Token ids of a prompt: options of the chat template, encoding, and whether the ids fit."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, ClassVar

from llmcli.errors import CheckpointError, PromptTooLong, UsageError
from llmcli.records.numbers import did_you_mean
from llmcli.shell.documents import check_value, too_deep
from llmcli.shell.options import PROMPT
from llmcli.shell.params import opt
from llmcli.shell.prompts import Prompt, check_ids, need_tokenizer, text_argument
from llmcli.ui.theme import one_line

if TYPE_CHECKING:
    from llmcli.config.model import ModelConfig
    from llmcli.records.text import TokenPiece
    from llmcli.text import Tokenizer
    from llmcli.text.load import TextInterface

SYSTEM = "The system message."
VARIABLE = "A variable of the chat template, such as enable_thinking=false; repeatable."


def template_variables(given: Sequence[str] | None) -> dict[str, Any]:
    """The values of `--set`; raises UsageError for what is no `NAME=VALUE`."""
    from llmcli.shell.conversations import variable_names

    found = {}
    for one in given or ():
        name, equals, value = text_argument(one, "`--set`").partition("=")
        if not equals:
            raise UsageError(f"`--set {one}` is not NAME=VALUE", hint="such as `--set x=true`")
        if wrong := variable_names({name: value}):
            raise UsageError(f"`--set` {wrong}", hint="a name such as `enable_thinking` can be one")
        found[name] = value_of(value, f"`--set {name}`")
    return found


def value_of(text: str, where: str) -> Any:
    """`true`, `3`, `"high"` or `high`: JSON where it is any, else the text itself.

    Raises UsageError for what `check_value` refuses.
    """
    try:
        value = json.loads(text)
    except ValueError:
        return text
    except RecursionError:
        raise too_deep(where) from None
    check_value(value, where)
    return value


def check_name(
    name: str, known: Collection[str], model: str, *, others: Collection[str] = (), option: str
) -> None:
    """Raises UsageError for a name that the chat template of `model` does not look up.

    `others` are names that `option` takes beside these.
    """
    if name in known:
        return
    near = get_close_matches(name, [*known, *others], 1)
    hint = f"it has {', '.join(sorted(known))}" if known else "it has no variables"
    if others:
        hint = f"`{option}` takes {', '.join([*others, *sorted(known)])}"
    raise UsageError(
        f"`{option} {one_line(name)}`: the chat template of `{model}` has no such variable",
        hint=did_you_mean(near, one_line(hint)),
    )


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """Whether the chat template is applied to a text; conversations always need it."""

    panel: ClassVar[str] = PROMPT
    chat: bool = opt(
        False,
        "--chat",
        "Answer, through the model's chat template. [default where it has one]",
        excludes=("--raw", "--ids"),
    )
    raw: bool = opt(False, "--raw", "Continue the text as it stands.")
    system: str | None = opt(None, "--system TEXT", SYSTEM, excludes=("--raw", "--ids"))
    variable: list[str] | None = opt(
        None, "--set NAME=VALUE", VARIABLE, excludes=("--raw", "--ids")
    )

    def check(self) -> None:
        """Raises UsageError for a text that is not UTF-8, and for wrong variables."""
        if self.system is not None:
            text_argument(self.system, "`--system`")
        template_variables(self.variable)

    def check_conversations(self, given: Sequence[Prompt]) -> None:
        """Raises UsageError for a conversation that cannot be answered, or not with `--raw`."""
        for prompt in given:
            if prompt.conversation is None:
                continue
            if self.raw:
                raise UsageError(
                    f"{prompt.where} is a conversation: it needs the chat template, which `--raw` "
                    "leaves out",
                    hint="drop `--raw`, or give the file on stdin, which is read as text",
                )
            if prompt.conversation.finished:
                raise UsageError(
                    f"{prompt.where} ends with a finished answer: there is nothing to answer",
                    hint="say what comes next: a PROMPT behind `-f FILE`, or one more message",
                )

    def renderer(self, given: Sequence[Prompt]) -> AbstractContextManager[object]:
        """The process that renders chat templates, if one of these prompts may need it.

        Enter it before loading the model: it starts meanwhile.
        """
        if not any(self._applies(prompt) for prompt in given):
            return nullcontext()
        from llmcli.text.template_renderer import RENDERER

        return RENDERER

    def _applies(self, prompt: Prompt) -> bool:
        return not prompt.ids and (prompt.conversation is not None or not self.raw)

    def template_input(
        self, prompt: Prompt, tokenizer: Tokenizer, name: str
    ) -> Mapping[str, Any] | None:
        """Arguments of `ChatTemplate.render` for a prompt of the model `name`.

        None if no template is applied. Raises UsageError if one is needed and the model has none.
        """
        if not self._applies(prompt):
            return None
        if tokenizer.chat_template is None:
            if prompt.conversation is not None:
                raise UsageError(
                    f"{prompt.where} is a conversation, and `{name}` has no chat template for it",
                    hint="give a text, or name another model with `-m`",
                )
            with_system = self.system is not None
            flags = {"--chat": self.chat, "--system": with_system, "--set": bool(self.variable)}
            if flag := next((flag for flag, given in flags.items() if given), None):
                raise UsageError(
                    f"`{flag}` needs a chat template, and `{name}` has none",
                    hint="leave it out: the text is then continued as it stands",
                )
            return None
        from llmcli.shell.conversations import GivenConversation, GivenMessage

        given = prompt.conversation or GivenConversation(
            messages=(GivenMessage(role="user", content=prompt.text or ""),)
        )
        messages = list(given.template_input())
        if self.system is not None:
            rest = messages[1:] if messages[0]["role"] == "system" else messages
            system = text_argument(self.system, "`--system`")
            messages = [{"role": "system", "content": system}, *rest]
        ends = messages[-1]["role"] == "assistant"
        variables = template_variables(self.variable)
        known = tokenizer.chat_template.variables() if variables else ()
        for variable in variables:
            check_name(variable, known, name, option="--set")
        return {
            "messages": messages,
            "variables": {**given.variables, **variables},
            "add_generation_prompt": not ends,
            "continue_final_message": ends and not given.finished,
        }


@dataclass(frozen=True, kw_only=True)
class TemplateOptions:
    """Options of inspecting commands, which apply the chat template only on request."""

    panel: ClassVar[str] = PROMPT
    chat: bool = opt(
        False,
        "--chat",
        "Apply the model's chat template. [default: as it stands; --system, --set and "
        "a conversation imply it]",
        excludes=("--ids",),
    )
    system: str | None = opt(None, "--system TEXT", SYSTEM, excludes=("--ids",))
    variable: list[str] | None = opt(None, "--set NAME=VALUE", VARIABLE, excludes=("--ids",))

    def options(self) -> ChatOptions:
        """The options of `generate`, with `--raw` as the default."""
        raw = not self.chat and self.system is None and not self.variable
        return ChatOptions(chat=self.chat, raw=raw, system=self.system, variable=self.variable)


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
    if saved is None or template is None:
        return tokenizer.encode_chat(**given)
    from llmcli.engine.messages import AnswerIds
    from llmcli.shell.conversations import Transcript

    if not (isinstance(saved, Transcript) and saved.is_of(model)):
        return tokenizer.encode_chat(**given)
    answers = AnswerIds(tokenizer, model.eos_ids)
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


def as_it_stands(
    prompt: Prompt, model: TextInterface, *, parse_special: bool
) -> tuple[list[int], list[str], list[tuple[int, int]]]:
    """Ids, texts and bytes (start, end) of a text's tokens, with no template but a conversation's.

    Given ids have the bytes of what they spell, none without a tokenizer. Raises the errors of
    `pieces` and of `check_tokenized`, and UsageError for an id that does not exist.
    """
    tokenizer = model.tokenizer
    if prompt.ids:
        check_ids(prompt.ids, model.config.vocab)
        ids = list(prompt.ids)
        found = [] if tokenizer is None else tokenizer.spelled(ids)
        spans = [(piece.start, piece.end) for piece in found] or [(0, 0)] * len(ids)
        return ids, [model.token_text(id) for id in ids], spans
    options, tokenizer = ChatOptions(raw=True), need_tokenizer(tokenizer, model.name)
    _, found = pieces(prompt, options, tokenizer, model.name, parse_special=parse_special)
    ids = [piece.id for piece in found]
    model.check_tokenized(ids)
    return ids, [piece.text for piece in found], [(piece.start, piece.end) for piece in found]


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


def named(prompts: Sequence[Prompt]) -> Iterator[tuple[str, Prompt]]:
    """Each prompt after its name in messages: `the prompt`, or `prompt 0` where it is one of many.
    """
    for index, item in enumerate(prompts):
        yield "the prompt" if len(prompts) == 1 else f"prompt {index}", item


def check_fits(encoded: Sequence[Prompt], config: ModelConfig, wanted: int | None) -> int:
    """Returns `config.room(wanted)`, the tokens that the context holds.

    Raises PromptTooLong, saying by how much, for a prompt that has more.
    """
    room = config.room(wanted)
    larger = room != config.embedding.positions  # a larger one can exist
    for which, item in named(encoded):
        count = len(item.ids)
        if count > room:
            raise PromptTooLong(
                f"{which} has {count} tokens{' with the chat template' if item.chat else ''}, "
                f"{count - room} more than the context of {room}",
                hint="shorten it" + ", or give more room with `--context-length`" * larger,
            )
    return room

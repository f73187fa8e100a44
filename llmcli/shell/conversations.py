"""Conversations in JSON: `{"messages": […]}` of any program, and what `llmcli chat` saves.

The second, `llmcli.chat/1`, is a transcript: its answers have the ids that the model wrote.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from llmcli.errors import UsageError, WriteFailed
from llmcli.records.document import APART
from llmcli.records.ranges import Range
from llmcli.records.text import LEAD, Message
from llmcli.shell.documents import MOST, not_empty, parse, read, read_bytes, read_field
from llmcli.shell.files import OTHER_PLACE, check_place
from llmcli.shell.options import TOKEN_LIMIT
from llmcli.shell.sampling import SamplingValues

if TYPE_CHECKING:
    from llmcli.text.load import TextInterface

SCHEMA = "llmcli.chat/1"  # of the files that `llmcli chat` saves
# hints of errors, by the kind of conversation
_GIVEN = 'a conversation is {"messages": [{"role": "user", "content": "text"}]}, with "variables"'
_SAVED = "`/save FILE` writes a transcript"
# keys of an answer that `llmcli chat` has saved, which no template reads
_OWN = ("ids", "finish_reason", "lead", "raw")


def variable_names(variables: Mapping[str, Any]) -> str:
    """A rule: each name can be that of a variable of a chat template, such as `enable_thinking`."""
    for name in variables:
        if not name.isidentifier() or name in ("messages", "add_generation_prompt"):
            return f"cannot have a variable `{name}`"
    return ""


Variables = Annotated[Mapping[str, Any], variable_names]


@dataclass(frozen=True, kw_only=True)
class TextPart:
    """A part of a message's content."""

    hint: ClassVar[str] = "llmcli reads text alone: leave images and sounds out"
    type: Literal["text"]
    text: str


@dataclass(frozen=True, kw_only=True)
class GivenMessage:
    """A message as other programs write it, too; what is null there counts as absent."""

    others: ClassVar[bool] = False
    role: Annotated[str, not_empty]
    content: str | tuple[TextPart, ...] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    thinking: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None
    ids: Any = None
    finish_reason: Any = None
    lead: Any = None
    raw: Any = None

    def __post_init__(self) -> None:
        if self.content is None and self.tool_calls is None:
            raise ValueError("has no `content`")

    def template_input(self) -> dict[str, Any]:
        """The message for a chat template, the parts of its content joined."""
        found = {key: one for key, one in vars(self).items() if one is not None and key not in _OWN}
        if isinstance(self.content, tuple):
            found["content"] = "".join(part.text for part in self.content)
        return found


class Conversation:
    """Messages that `generate` answers, and the variables of the chat template beside them.

    A base of dataclasses that have these two fields.
    """

    messages: tuple[Any, ...]
    variables: Mapping[str, Any]

    def then(self, text: str) -> Self:
        """The conversation with one more user message."""
        user = type(self.messages[-1])(role="user", content=text)
        return replace(self, messages=(*self.messages, user))  # type: ignore[type-var]

    @property
    def last(self) -> str:
        """The text of the last message."""
        return str(self.template_input()[-1].get("content", ""))

    @property
    def finished(self) -> bool:
        """Whether it ends with an answer that the model had ended, or with its call of a tool."""
        last = self.messages[-1]
        ended = last.finish_reason in ("eos", "stop") or last.content is None
        return ended and bool(last.role == "assistant")

    def template_input(self) -> tuple[Mapping[str, Any], ...]:
        """The messages as a chat template takes them."""
        return tuple(one.template_input() for one in self.messages)


@dataclass(frozen=True, kw_only=True)
class GivenConversation(Conversation):
    """A conversation of any program."""

    hint: ClassVar[str] = _GIVEN
    others: ClassVar[bool] = False
    messages: Annotated[tuple[GivenMessage, ...], not_empty]
    variables: Variables = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ChatSettings(SamplingValues):
    """How the next answer is drawn; `/set` changes it. `max_tokens`: -1 is no limit."""

    max_tokens: Annotated[int, TOKEN_LIMIT]
    stop: tuple[Annotated[str, not_empty], ...]

    def change(self, name: str, value: Any) -> ChatSettings:
        """The settings with another value, as JSON has it. Raises UsageError for a wrong one."""
        return replace(self, **{name: read_field(ChatSettings, name, value)})

    @property
    def limit(self) -> int | None:
        """Maximum number of tokens of an answer; None for no limit."""
        return None if self.max_tokens == TOKEN_LIMIT.or_else else self.max_tokens


@dataclass(frozen=True, kw_only=True)
class ModelName:
    """What a transcript has to say of the model that wrote the answers."""

    name: str


@dataclass(frozen=True, kw_only=True)
class Transcript(Conversation):
    """A saved conversation. `model` wrote the answers, with ids of its vocabulary."""

    hint: ClassVar[str] = _SAVED
    model: ModelName = field(metadata=APART)  # the head of every document has it
    vocabulary: Annotated[int, Range(1)]
    sampling: ChatSettings
    variables: Variables
    answers: Annotated[int, Range(0)]
    messages: tuple[Message, ...]

    def is_of(self, model: TextInterface) -> bool:
        """Whether the answers' token ids were written by this model."""
        return (self.model.name, self.vocabulary) == (model.name, model.config.vocab)


def is_conversation(value: Any) -> bool:
    """Whether a JSON value looks like a conversation."""
    return isinstance(value, dict) and (
        isinstance(value.get("messages"), list) or value.get("schema") == SCHEMA
    )


def read_conversation(value: Mapping[str, Any], where: str) -> Conversation:
    """The conversation of a JSON object that has `messages`; `where` names its place in errors.

    Raises UsageError, naming the place, for anything that is not as it must be.
    """
    if value.get("schema") != SCHEMA:
        return read(GivenConversation, value, where)
    found = transcript_of(value, where)
    if not found.messages:
        raise UsageError(f"`messages` of {where} is empty", hint=_GIVEN)
    return found


def read_transcript(path: str, beside: Transcript) -> Transcript:
    """Reads a transcript; `beside` gives what a file of only `{"messages": […]}` lacks.

    Raises UsageError naming what is wrong with the file.
    """
    data = read_bytes(path, "give the path of a file that `chat` has saved", MOST + 1)
    where = f"`{path}`"
    if len(data) > MOST:
        raise UsageError(f"{where} has more than {MOST >> 20} MiB", hint=_SAVED)
    document = parse(data, where, _SAVED)
    if is_conversation(document) and "schema" not in document:
        given = read(GivenConversation, document, where)
        messages = tuple(_plain(where, at, one) for at, one in enumerate(given.messages))
        return replace(beside, messages=messages, variables=given.variables, answers=0)
    return transcript_of(document, where)


def _plain(where: str, number: int, given: GivenMessage) -> Message:
    """A message of a conversation that `generate` takes."""
    from llmcli.text.chat import REASONING

    message, role = given.template_input(), given.role
    other = next((key for key in message if key not in ("role", "content", *REASONING)), None)
    roles = ("user", "assistant") if number else ("system", "user", "assistant")
    if other is not None or role not in roles:
        what = f"has `{other}`" if other is not None else f"is of the role `{role}`"
        raise UsageError(
            f"`messages[{number}]` of {where} {what}, which does not belong in a chat",
            hint="it has `user` and `assistant` behind one `system`; `generate -f` takes more",
        )
    reasoning = next((message[name] for name in REASONING if name in message), "")
    found = {"role": role, "content": message["content"], "reasoning": reasoning}
    return read(Message, found, where)


def transcript_of(document: Any, where: str) -> Transcript:
    """Reads a transcript from its document. Raises UsageError for any other JSON."""
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise UsageError(
            f"{where} is not a transcript of `llmcli chat`: its `schema` is not `{SCHEMA}`",
            hint=_SAVED,
        )
    found = read(Transcript, document, where)
    for at, one in enumerate(found.messages):
        place = f"`messages[{at}]` of {where}"
        if one.role == "system" and at > 0:
            raise UsageError(f"{place} is a system message, which must be first", hint=_SAVED)
        if one.ids and one.role != "assistant":
            raise UsageError(f"{place} has `ids`, and is not an answer", hint=_SAVED)
        if not all(0 <= token < found.vocabulary for token in one.ids):
            raise UsageError(f"{place} has `ids` outside of the vocabulary", hint=_SAVED)
    return replace(
        found, messages=tuple(replace(one, lead=one.lead[-LEAD:]) for one in found.messages)
    )


def check_replaceable(path: str) -> None:
    """Raises WriteFailed for a file that is neither empty nor a transcript.

    A pipe or a device takes all that is written.
    """
    check_place(path)
    place = os.path.expanduser(path)
    if not os.path.isfile(place) or not os.path.getsize(place):
        return
    document = None
    with suppress(UsageError):
        document = parse(read_bytes(path, OTHER_PLACE, MOST), path)
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise WriteFailed(
            f"could not write `{path}`: it exists and is not a transcript of `llmcli chat`",
            hint=OTHER_PLACE,
        )


def real_path(path: str) -> str:
    """The absolute path without symbolic links: one for each file."""
    return os.path.realpath(os.path.expanduser(path))


def state_of(path: str) -> tuple[int, ...] | None:
    """Changes whenever the file is written; None if it does not exist or is not a regular file."""
    with suppress(OSError):
        found = os.stat(real_path(path))
        if stat.S_ISREG(found.st_mode):
            return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size
    return None

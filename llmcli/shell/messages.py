"""A conversation in JSON, `{"messages": […]}`, from a file or a line of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from llmcli.errors import UsageError
from llmcli.shell.documents import not_empty, read

if TYPE_CHECKING:
    from llmcli.shell.transcript import Transcript

SCHEMA = "llmcli.chat/1"  # of the files that `llmcli chat` saves
HINT = 'a conversation is {"messages": [{"role": "user", "content": "text"}]}, with "variables"'
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


@dataclass(frozen=True, kw_only=True)
class GivenConversation:
    """Messages, and the variables of the chat template that stood beside them."""

    hint: ClassVar[str] = HINT
    others: ClassVar[bool] = False
    messages: Annotated[tuple[GivenMessage, ...], not_empty]
    variables: Variables = field(default_factory=dict)

    def then(self, text: str) -> GivenConversation:
        """The conversation with one more user message."""
        return replace(self, messages=(*self.messages, GivenMessage(role="user", content=text)))

    @property
    def last(self) -> str:
        """The text of the last message."""
        return str(self.messages[-1].template_input().get("content", ""))

    @property
    def finished(self) -> bool:
        """Whether it ends with an answer that the model had ended, or with its call of a tool."""
        last = self.messages[-1]
        ended = last.finish_reason in ("eos", "stop") or last.content is None
        return ended and last.role == "assistant"

    def template_input(self) -> tuple[Mapping[str, Any], ...]:
        """The messages as a chat template takes them."""
        return tuple(one.template_input() for one in self.messages)


@dataclass(frozen=True, kw_only=True)
class SavedConversation(GivenConversation):
    """A conversation that `llmcli chat` saved, whose answers have their own ids."""

    transcript: Transcript


def is_conversation(value: Any) -> bool:
    """Whether a JSON value looks like a conversation."""
    return isinstance(value, dict) and (
        isinstance(value.get("messages"), list) or value.get("schema") == SCHEMA
    )


def read_conversation(value: Mapping[str, Any], where: str) -> GivenConversation:
    """The conversation of a JSON object that has `messages`; `where` names its place in errors.

    Of a transcript (`llmcli.chat/1`) its messages and variables. Raises UsageError, naming the
    place, for anything that is not as it must be.
    """
    if value.get("schema") == SCHEMA:
        return _of_transcript(value, where)
    return read(GivenConversation, value, where)


def _of_transcript(value: Mapping[str, Any], where: str) -> GivenConversation:
    from llmcli.shell.transcript import transcript_of

    found = transcript_of(value, where)
    if not found.messages:
        raise UsageError(f"`messages` of {where} is empty", hint=HINT)
    messages = tuple(
        GivenMessage(role=one.role, content=one.content, reasoning=one.reasoning or None,
                     finish_reason=one.finish_reason)
        for one in found.messages
    )  # fmt: skip
    return SavedConversation(messages=messages, variables=found.variables, transcript=found)

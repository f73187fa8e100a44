"""A conversation in JSON, `{"messages": […]}`, from a file or a line of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from llmcli.errors import UsageError
from llmcli.shell.documents import not_empty, read

if TYPE_CHECKING:
    from llmcli.shell.transcript import Transcript

SCHEMA = "llmcli.chat/1"  # of what `llmcli chat` saves
HINT = 'a conversation is {"messages": [{"role": "user", "content": "text"}]}, with "variables"'
# Of an answer that `llmcli chat` has saved: no template reads them.
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
        """What a chat template is given of it: the parts of its content are one text."""
        found = {key: one for key, one in vars(self).items() if one is not None and key not in _OWN}
        if isinstance(self.content, tuple):
            found["content"] = "".join(part.text for part in self.content)
        return found


@dataclass(frozen=True, kw_only=True)
class _ConversationFile:
    hint: ClassVar[str] = HINT
    others: ClassVar[bool] = False
    messages: Annotated[tuple[GivenMessage, ...], not_empty]
    variables: Variables = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class GivenConversation:
    """Messages as the template takes them, and the variables that stood beside them.

    `finished`: it ends with an answer that the model had ended, or with its call of a tool.
    `transcript` is what it was read from, where a model's answers have their own ids there.
    """

    messages: tuple[Mapping[str, Any], ...]
    variables: Mapping[str, Any] = field(default_factory=dict)
    finished: bool = False
    transcript: Transcript | None = None

    @classmethod
    def of(cls, text: str) -> GivenConversation:
        """The conversation that `text` begins."""
        return cls(messages=({"role": "user", "content": text},))

    def then(self, text: str) -> GivenConversation:
        """The conversation with one more user message."""
        return replace(self, messages=(*self.messages, *self.of(text).messages), finished=False)

    @property
    def last(self) -> str:
        """What the last message says."""
        return str(self.messages[-1].get("content", ""))


def is_conversation(value: Any) -> bool:
    """Whether a JSON value looks like a conversation."""
    return isinstance(value, dict) and (
        isinstance(value.get("messages"), list) or value.get("schema") == SCHEMA
    )


def read_conversation(value: Mapping[str, Any], where: str) -> GivenConversation:
    """The conversation of a JSON object that has `messages`; `where` it stands, for errors.

    Of a transcript (`llmcli.chat/1`) its messages and variables. Raises UsageError, naming the
    place, for anything that is not as it must be.
    """
    if value.get("schema") == SCHEMA:
        return _of_transcript(value, where)
    found = read(_ConversationFile, value, where)
    last = found.messages[-1]
    ended = last.finish_reason in ("eos", "stop") or last.content is None
    return GivenConversation(
        messages=tuple(one.template_input() for one in found.messages),
        variables=found.variables, finished=ended and last.role == "assistant",
    )  # fmt: skip


def _of_transcript(value: Mapping[str, Any], where: str) -> GivenConversation:
    from llmcli.shell.transcript import transcript_of

    found = transcript_of(value, where)
    if not found.messages:
        raise UsageError(f"`messages` of {where} is empty", hint=HINT)
    messages = tuple(
        {"role": one.role, "content": one.content}
        | ({"reasoning": one.reasoning} if one.reasoning else {})
        for one in found.messages
    )
    last = found.messages[-1]
    return GivenConversation(
        messages=messages, variables=found.variables, transcript=found,
        finished=last.role == "assistant" and last.finish_reason in ("eos", "stop"),
    )  # fmt: skip

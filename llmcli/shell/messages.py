"""A conversation in JSON, `{"messages": […]}`, from a file or a line of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from llmcli.errors import UsageError
from llmcli.shell.variables import check_value, checked_variables

if TYPE_CHECKING:
    from llmcli.shell.transcript import Transcript

SCHEMA = "llmcli.chat/1"  # of what `llmcli chat` saves
HINT = 'a conversation is {"messages": [{"role": "user", "content": "text"}]}, with "variables"'
# Of an answer that `llmcli chat` has saved: no template reads them.
_OWN = ("ids", "finish_reason", "lead", "raw")


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
        return GivenConversation(
            messages=(*self.messages, *self.of(text).messages), variables=self.variables,
            transcript=self.transcript,
        )  # fmt: skip

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
        return _transcript(value, where)
    for key in value:
        if key not in ("messages", "variables"):
            raise _wrong(f"{where} has the unknown key `{key}`")
    found = value["messages"]
    if not isinstance(found, list) or not found:
        raise _empty(where)
    variables = checked_variables(value.get("variables", {}), where)
    messages = tuple(_message(one, f"`messages[{at}]", where) for at, one in enumerate(found))
    ended = found[-1].get("finish_reason") in ("eos", "stop") or "content" not in messages[-1]
    finished = ended and messages[-1]["role"] == "assistant"
    return GivenConversation(messages=messages, variables=variables, finished=finished)


def _transcript(value: Mapping[str, Any], where: str) -> GivenConversation:
    from llmcli.shell.transcript import transcript_of

    found = transcript_of(value, where)
    if not found.messages:
        raise _empty(where)
    messages = []
    for one in found.messages:
        reasoning = {"reasoning": one.reasoning} if one.reasoning else {}
        messages.append({"role": one.role, "content": one.content, **reasoning})
    finished = one.role == "assistant" and one.end in ("eos", "stop")
    return GivenConversation(
        messages=tuple(messages), variables=found.variables, finished=finished, transcript=found
    )


def _message(value: Any, place: str, where: str) -> dict[str, Any]:
    """One message, of which nothing is null and the parts of its content are put together."""
    from llmcli.text.chat import REASONING

    texts = ("role", "content", "name", "tool_call_id", *REASONING)
    if not isinstance(value, dict):
        raise _wrong(f"{place}` of {where} is not an object")
    message = {key: one for key, one in value.items() if one is not None and key not in _OWN}
    for key, one in message.items():
        if key == "content" and isinstance(one, list):
            one = message[key] = "".join(
                _part(part, f"{place}.content[{at}]", where) for at, part in enumerate(one)
            )
        if key not in (*texts, "tool_calls"):
            raise _wrong(f"{place}` of {where} has the unknown key `{key}`")
        if not isinstance(one, str if key in texts else list):
            raise _wrong(f"{place}.{key}` of {where} is not a {'text' if key in texts else 'list'}")
        check_value(one, f"{place}.{key}` of {where}")
    if not message.get("role"):
        raise _wrong(f"{place}` of {where} has no `role`")
    if "content" not in message and "tool_calls" not in message:
        raise _wrong(f"{place}` of {where} has no `content`")
    return message


def _part(part: Any, place: str, where: str) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise UsageError(
        f"{place}` of {where} is not a part of type `text`",
        hint="llmcli reads text alone: leave images and sounds out",
    )


def _empty(where: str) -> UsageError:
    return _wrong(f"`messages` of {where} is not a list of messages, or it is empty")


def _wrong(words: str) -> UsageError:
    return UsageError(words, hint=HINT)

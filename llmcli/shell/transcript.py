"""Saved conversations, `llmcli.chat/1`: their document, and the files that they are kept in."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from llmcli.engine.messages import LEAD, Message
from llmcli.errors import UsageError, WriteFailed
from llmcli.records.document import APART
from llmcli.shell.documents import not_empty, parse, read, read_field
from llmcli.shell.files import OTHER_PLACE, check_place
from llmcli.shell.messages import (
    SCHEMA,
    GivenMessage,
    Variables,
    is_conversation,
    read_conversation,
)
from llmcli.shell.options import TOKEN_LIMIT
from llmcli.shell.params import Range
from llmcli.shell.prompts import read_bytes
from llmcli.shell.sampling import RANGES, SamplingValues
from llmcli.text.chat import REASONING

if TYPE_CHECKING:
    from llmcli.text.interface import TextInterface

_MOST = 64 << 20  # bytes of a file
_HINT = "`/save FILE` writes a transcript"


@dataclass(frozen=True, kw_only=True)
class ChatSettings(SamplingValues):
    """How the next answer is drawn; `/set` changes it. `max_tokens`: -1 is no limit."""

    max_tokens: Annotated[int, TOKEN_LIMIT]
    stop: tuple[Annotated[str, not_empty], ...]

    def change(self, name: str, value: Any) -> ChatSettings:
        """The settings with another value, as JSON has it. Raises UsageError for a wrong one."""
        return replace(self, **{name: read_field(ChatSettings, name, value)})

    @property
    def sampling(self) -> dict[str, float]:
        """The values of the sampling options, by the names of `RANGES`."""
        return {name: getattr(self, name) for name in RANGES}

    @property
    def limit(self) -> int | None:
        """Maximum number of tokens of an answer; None for no limit."""
        return None if self.max_tokens == TOKEN_LIMIT.or_else else self.max_tokens


@dataclass(frozen=True, kw_only=True)
class ModelName:
    """What a transcript has to say of the model that wrote the answers."""

    name: str


@dataclass(frozen=True, kw_only=True)
class Transcript:
    """A saved conversation. `model` wrote the answers, with ids of its vocabulary."""

    hint: ClassVar[str] = _HINT
    model: ModelName = field(metadata=APART)  # the head of every document has it
    vocabulary: Annotated[int, Range(1)]
    sampling: ChatSettings
    variables: Variables
    answers: Annotated[int, Range(0)]
    messages: tuple[Message, ...]

    def is_of(self, model: TextInterface) -> bool:
        """Whether the answers' token ids were written by this model."""
        return (self.model.name, self.vocabulary) == (model.name, model.config.vocab)


def read_transcript(path: str, beside: Transcript) -> Transcript:
    """Reads a transcript; `beside` gives what a file of only `{"messages": […]}` lacks.

    Raises UsageError naming what is wrong with the file.
    """
    data = read_bytes(path, "give the path of a file that `chat` has saved", _MOST + 1)
    where = f"`{path}`"
    if len(data) > _MOST:
        raise UsageError(f"{where} has more than {_MOST >> 20} MiB", hint=_HINT)
    document = parse(data, where, _HINT)
    if is_conversation(document) and "schema" not in document:
        given = read_conversation(document, where)
        messages = tuple(_plain(where, at, one) for at, one in enumerate(given.messages))
        return replace(beside, messages=messages, variables=given.variables, answers=0)
    return transcript_of(document, where)


def _plain(where: str, number: int, given: GivenMessage) -> Message:
    """A message of a conversation that `generate` takes."""
    message, role = given.template_input(), given.role
    other = next((key for key in message if key not in ("role", "content", *REASONING)), None)
    if other is not None or role not in ("system", "user", "assistant") or _misplaced(role, number):
        what = f"has `{other}`" if other is not None else f"is of the role `{role}`"
        raise UsageError(
            f"`messages[{number}]` of {where} {what}, which does not belong in a chat",
            hint="it has `user` and `assistant` behind one `system`; `generate -f` takes more",
        )
    reasoning = next((message[name] for name in REASONING if name in message), "")
    found = {"role": role, "content": message["content"], "reasoning": reasoning}
    return read(Message, found, where)


def _misplaced(role: str, number: int) -> bool:
    """Whether it is a system message that does not come first."""
    return role == "system" and number > 0


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
        document = parse(read_bytes(path, OTHER_PLACE, _MOST), path)
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


def transcript_of(document: Any, where: str) -> Transcript:
    """Reads a transcript from its document. Raises UsageError for any other JSON."""
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise UsageError(
            f"{where} is not a transcript of `llmcli chat`: its `schema` is not `{SCHEMA}`",
            hint=_HINT,
        )
    found = read(Transcript, document, where)
    for at, one in enumerate(found.messages):
        place = f"`messages[{at}]` of {where}"
        if _misplaced(one.role, at):
            raise UsageError(f"{place} is a system message behind others", hint=_HINT)
        if one.ids and one.role != "assistant":
            raise UsageError(f"{place} has `ids`, and is not an answer", hint=_HINT)
        if not all(0 <= token < found.vocabulary for token in one.ids):
            raise UsageError(f"{place} has `ids` outside of the vocabulary", hint=_HINT)
    return replace(
        found, messages=tuple(replace(one, lead=one.lead[-LEAD:]) for one in found.messages)
    )

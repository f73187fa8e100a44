"""A conversation as a JSON file: `llmcli.chat/1`, written whole, and read back with suspicion."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, get_args

from llmcli.errors import UsageError, WriteFailed
from llmcli.shell.files import OTHER_PLACE, check_place
from llmcli.shell.messages import SCHEMA, is_conversation, read_conversation
from llmcli.shell.options import TOKEN_LIMIT
from llmcli.shell.prompts import read_bytes
from llmcli.shell.sampling import RANGES, valid
from llmcli.shell.variables import check_value, checked_variables

if TYPE_CHECKING:
    from llmcli.engine.messages import Message
    from llmcli.text.interface import TextInterface

_MOST = 64 << 20  # bytes of a file
_ROLES = ("system", "user", "assistant")


@dataclass(frozen=True, kw_only=True)
class Transcript:
    """What such a file says. `model` is the name of the one whose ids the answers have."""

    model: str
    vocabulary: int
    sampling: Mapping[str, float]
    seed: int
    max_tokens: int
    stop: tuple[str, ...]
    variables: Mapping[str, Any]
    answers: int
    messages: tuple[Message, ...]

    def is_of(self, model: TextInterface) -> bool:
        """Whether the answers' token ids were written by this model."""
        return (self.model, self.vocabulary) == (model.name, model.config.vocab)


def body(transcript: Transcript) -> dict[str, Any]:
    """The document, without what every document has."""
    return {
        "vocabulary": transcript.vocabulary,
        "sampling": {
            **transcript.sampling,
            "seed": transcript.seed,
            "max_tokens": transcript.max_tokens,
            "stop": transcript.stop,
        },
        "variables": transcript.variables,
        "answers": transcript.answers,
        "messages": [_body(one) for one in transcript.messages],
    }


def _body(message: Message) -> dict[str, Any]:
    """One message: `ids` and `finish_reason` of the model's own answers only."""
    found: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning:
        found["reasoning"] = message.reasoning
    if message.raw is not None:
        found["raw"] = message.raw
    if message.ids:
        found |= {"ids": list(message.ids), "lead": message.lead}
    if message.end is not None:
        found["finish_reason"] = message.end
    return found


def read_transcript(path: str, beside: Transcript) -> Transcript:
    """Raises UsageError for a file that is none, saying what is wrong with it.

    Of what is only `{"messages": […]}` the rest is that of `beside`.
    """
    data = read_bytes(path, "give the path of a file that `chat` has saved", _MOST + 1)
    where = f"`{path}`"
    if len(data) > _MOST:
        raise _wrong(where, f"it has more than {_MOST >> 20} MiB")
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        raise _wrong(where, "it is not JSON") from None
    if is_conversation(document) and "schema" not in document:
        given = read_conversation(document, where)
        messages = tuple(_plain(where, at, one) for at, one in enumerate(given.messages))
        return replace(beside, messages=messages, variables=given.variables, answers=0)
    return transcript_of(document, where)


def _plain(where: str, number: int, message: Mapping[str, Any]) -> Message:
    """A message of a conversation that `generate` takes."""
    from llmcli.engine.messages import Message
    from llmcli.text.chat import REASONING

    role, known = message["role"], ("role", "content", *REASONING)
    other = next((key for key in message if key not in known), None)
    if other is not None or role not in _ROLES or (role == "system" and number):
        what = f"has `{other}`" if other is not None else f"is of the role `{role}`"
        raise UsageError(
            f"`messages[{number}]` of {where} {what}, which does not belong in a chat",
            hint="it has `user` and `assistant` behind one `system`; `generate -f` takes more",
        )
    reasoning = next((message[name] for name in REASONING if name in message), "")
    return Message(role=role, content=message["content"], reasoning=reasoning)


def check_replaceable(path: str) -> None:
    """Raises WriteFailed for a file that a transcript must not replace: any other with a text.

    A pipe or a device takes all that is written.
    """
    check_place(path)
    place = os.path.expanduser(path)
    if not os.path.isfile(place) or not os.path.getsize(place):
        return
    try:
        document = json.loads(read_bytes(path, OTHER_PLACE, _MOST))
    except (UsageError, ValueError, RecursionError):
        document = None
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise WriteFailed(
            f"could not write `{path}`: it exists and is not a transcript of `llmcli chat`",
            hint=OTHER_PLACE,
        )


def real_path(path: str) -> str:
    """The path of the file itself, by which one file is known under all its names."""
    return os.path.realpath(os.path.expanduser(path))


def state_of(path: str) -> tuple[int, ...] | None:
    """What differs once the file was written anew; None where there is none, or no regular one."""
    with suppress(OSError):
        found = os.stat(real_path(path))
        if stat.S_ISREG(found.st_mode):
            return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size
    return None


def transcript_of(document: Any, where: str) -> Transcript:
    """What a JSON document says that stands there; raises UsageError where it is none."""
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise _wrong(where, f"its `schema` is not `{SCHEMA}`")
    sampling, model, stop = document.get("sampling"), document.get("model"), None
    if isinstance(sampling, dict):
        stop = sampling.get("stop")
    if not (
        isinstance(sampling, dict) and isinstance(model, dict)
        and isinstance(model.get("name"), str) and isinstance(stop, list)
        and all(isinstance(one, str) and one for one in stop)
    ):  # fmt: skip
        raise _wrong(where, "its `model` or `sampling` are not as chat writes them")
    check_value(stop, f"`sampling.stop` of {where}")
    values: dict[str, float] = {}
    for name, allowed in RANGES.items():
        value: Any = sampling.get(name)
        if not valid(name, value):
            raise _wrong(where, f"its `sampling.{name}` must be {allowed}")
        values[name] = value
    return Transcript(
        model=model["name"],
        vocabulary=_count(where, document, "vocabulary", least=1),
        sampling=values,
        seed=_count(where, sampling, "seed"),
        max_tokens=_limit(where, sampling),
        stop=tuple(stop or ()),
        variables=checked_variables(document.get("variables"), where),
        answers=_count(where, document, "answers"),
        messages=_messages(where, document.get("messages"), document["vocabulary"]),
    )


def _messages(where: str, found: object, vocabulary: int) -> tuple[Message, ...]:
    from llmcli.engine.messages import LEAD, Ending, Message

    if not isinstance(found, list):
        raise _wrong(where, "it has no list of `messages`")
    messages = []
    for number, one in enumerate(found):
        if not (
            isinstance(one, dict) and one.get("role") in _ROLES
            and isinstance(one.get("content"), str)
            and isinstance(one.get("lead", ""), str)
            and isinstance(one.get("reasoning", ""), str)
            and isinstance(one.get("raw"), str | None)
            and one.get("finish_reason") in (None, *get_args(Ending))
            and (one["role"] != "system" or number == 0)
        ):  # fmt: skip
            raise _wrong(where, f"its message {number} is not as chat writes them")
        check_value(one, f"`messages[{number}]` of {where}")
        messages.append(Message(
            role=one["role"], content=one["content"], end=one.get("finish_reason"),
            reasoning=one.get("reasoning", ""), raw=one.get("raw"),
            ids=_ids(where, number, one, vocabulary), lead=one.get("lead", "")[-LEAD:],
        ))  # fmt: skip
    return tuple(messages)


def _ids(where: str, number: int, message: Mapping[str, Any], vocabulary: int) -> tuple[int, ...]:
    ids: Any = message.get("ids", [])
    sound = isinstance(ids, list) and all(
        isinstance(one, int) and not isinstance(one, bool) and 0 <= one < vocabulary for one in ids
    )
    if not sound or (ids and message["role"] != "assistant"):
        raise _wrong(where, f"the `ids` of its message {number} are not token ids of an answer")
    return tuple(ids)


def _count(where: str, found: Mapping[str, Any], name: str, *, least: int = 0) -> int:
    value = found.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**63:
        raise _wrong(where, f"its `{name}` is not a whole number of at least {least}")
    return value


def _limit(where: str, sampling: Mapping[str, Any]) -> int:
    found = sampling.get("max_tokens")
    if found == TOKEN_LIMIT.or_else:
        return -1
    return _count(where, sampling, "max_tokens", least=1)


def _wrong(where: str, why: str) -> UsageError:
    return UsageError(
        f"{where} is not a transcript of `llmcli chat`: {why}",
        hint="`/save FILE` writes one",
    )

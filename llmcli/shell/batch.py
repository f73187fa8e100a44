"""Files of prompts, a line each (`--batch`)."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Annotated, ClassVar

from llmcli.errors import UsageError
from llmcli.records.ranges import Range
from llmcli.shell.documents import check_value, not_empty, parse, read, read_text
from llmcli.shell.prompts import Prompt, read_stdin

_LINE = 'a line is "text", {"prompt": "text"}, {"ids": [1, 2, 3]} or {"messages": […]}'


@dataclass(frozen=True, kw_only=True)
class BatchLine:
    """A line of `--batch` that is not a conversation."""

    hint: ClassVar[str] = _LINE
    others: ClassVar[bool] = False
    prompt: Annotated[str, not_empty] | None = None
    ids: Annotated[tuple[Annotated[int, Range(0)], ...], not_empty] | None = None

    def __post_init__(self) -> None:
        if (self.prompt is None) == (self.ids is None):
            raise ValueError("must have either `prompt` or `ids`")


def read_batch(path: str) -> list[Prompt]:
    """The prompts of a JSONL file (`-`: stdin), a line each.

    A line is a string, {"prompt": …}, {"ids": […]} or {"messages": […]}. Empty lines are skipped.
    Raises UsageError with the line's number for anything else.
    """
    from llmcli.shell.conversations import read_conversation

    text = read_stdin(sys.stdin) if path == "-" else read_text(path)
    prompts = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            where = f"line {number} of `{path}`"
            value = parse(line, where, _LINE)
            if isinstance(value, dict) and "messages" in value:
                conversation = read_conversation(value, where)
                prompts.append(Prompt(conversation.last, (), where, conversation))
            elif isinstance(value, str):
                check_value(value, where)
                if not value:
                    raise UsageError(f"{where} is empty", hint=_LINE)
                prompts.append(Prompt(value))
            else:
                found = read(BatchLine, value, where)
                prompts.append(Prompt(found.prompt, found.ids or (), where))
    if not prompts:
        raise UsageError(f"`{path}` has no prompt in it", hint="write one JSON value per line")
    return prompts

"""Prompts from a file of JSON lines."""

from __future__ import annotations

import json
import sys
from typing import Any

from llmcli.errors import UsageError
from llmcli.shell.messages import read_conversation
from llmcli.shell.prompts import Prompt, read_stdin, read_text
from llmcli.shell.variables import check_value

_HINT = 'a line is "text", {"prompt": "text"}, {"ids": [1, 2, 3]} or {"messages": […]}'


def read_batch(path: str) -> list[Prompt]:
    """The prompts of a JSONL file (`-`: stdin), a line each.

    A line is a string, {"prompt": …}, {"ids": […]} or {"messages": […]}. Empty lines are skipped.
    Raises UsageError with the line's number for anything else.
    """
    text = read_stdin(sys.stdin) if path == "-" else read_text(path)
    prompts = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            prompts.append(_prompt(line, f"line {number}", f"`{path}`"))
    if not prompts:
        raise UsageError(f"`{path}` has no prompt in it", hint="write one JSON value per line")
    return prompts


def _prompt(line: str, place: str, file: str) -> Prompt:
    where = f"{place} of {file}"
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        reason = error.msg[:1].lower() + error.msg[1:]
        message = f"{place}, column {error.colno} of {file} is not JSON: {reason}"
        raise UsageError(message, hint=_HINT) from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where} is not JSON: {error}", hint=_HINT) from error
    if isinstance(value, dict) and "messages" in value:
        conversation = read_conversation(value, where)
        return Prompt(conversation.last, where=where, conversation=conversation)
    if isinstance(value, dict):
        for key in value:
            if key not in ("prompt", "ids"):
                raise UsageError(f"{where} has the unknown key `{key}`", hint=_HINT)
    if isinstance(value, dict) and set(value) == {"prompt"}:
        value = value["prompt"]
    if isinstance(value, str):
        if not value:
            raise UsageError(f"{where} is an empty prompt", hint=_HINT)
        check_value(value, where)
        return Prompt(value)
    if isinstance(value, dict) and set(value) == {"ids"} and _is_ids(value["ids"]):
        return Prompt(None, tuple(value["ids"]), where)
    raise UsageError(f"{where} is not a prompt", hint=_HINT)


def _is_ids(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(type(item) is int and item >= 0 for item in value)
    )

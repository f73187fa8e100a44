"""The command line of a run once more, for hints that are to be copied."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import fields
from typing import Any, get_type_hints

from typer.models import ArgumentInfo, OptionInfo

LONG = 40  # characters of a text that is repeated; a longer one stands as its name


def again(command: str, *given: Any) -> str:
    """`llmcli attention "a b" -m tiny`: what was `given`, dataclasses of options, set.

    Only what is not as it is by default, quoted for a shell. A long text, or one of several
    lines, is not repeated: its name stands there.
    """
    parts = [part for options in given for part in _set(options)]
    return " ".join(["llmcli", command, *parts])


def _set(options: Any) -> Iterator[str]:
    hints = get_type_hints(type(options), include_extras=True)
    for field in fields(options):
        value = getattr(options, field.name)
        if value == field.default:
            continue
        for about in hints[field.name].__metadata__:
            if isinstance(about, OptionInfo):
                for one in value if isinstance(value, list) else [value]:
                    # typer has the first name of an annotated option where others have its default
                    yield str(about.default)
                    if one is not True:
                        yield _quoted(str(one), about.metavar)
            elif isinstance(about, ArgumentInfo):
                yield _quoted(str(value), about.metavar)


def _quoted(value: str, metavar: str | None) -> str:
    long = len(value) > LONG and re.search(r"[\s,]", value)
    return (metavar or "…").strip("[]") if long or not value.isprintable() else shlex.quote(value)

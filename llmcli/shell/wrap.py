"""Messages on a terminal end their lines between words; in a pipe or file they are one line."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from typing import TextIO


def columns(stream: TextIO, environ: Mapping[str, str]) -> int:
    """$COLUMNS, else the width of this very terminal: stdout may be a file where stderr is one."""
    if given := given_columns(environ):
        return given
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError):
        return 80


def pipe_columns(environ: Mapping[str, str]) -> int:
    """Where stdout is no terminal: of the one that stderr is, else $COLUMNS; 0 where neither is."""
    if sys.stderr is not None and not sys.stderr.closed and sys.stderr.isatty():
        return columns(sys.stderr, {})
    return given_columns(environ)


def given_columns(environ: Mapping[str, str]) -> int:
    """$COLUMNS, 0 where it is not set to a number."""
    given = environ.get("COLUMNS", "")
    return int(given) if given.isdecimal() else 0


def wrapped(line: str, width: int, indent: str = "  ") -> str:
    """`line` in lines of at most `width` columns, all but the first one indented.

    A word that is longer stays whole, and so does what stands in backticks, spaces included: the
    terminal breaks it, and a path or a command can still be copied.
    """
    from rich.cells import cell_len

    if cell_len(line) <= width:
        return line
    # messages have no control characters, so NUL can stand for a space that must not break
    line = re.sub("`[^`]*`", lambda span: span[0].replace(" ", "\0"), line)
    lines = [""]
    for number, word in enumerate(line.split(" ")):
        word = word.replace("\0", " ")
        longer = f"{lines[-1]} {word}" if number else word
        if number and cell_len(longer) > width:
            lines.append(indent + word)
        else:
            lines[-1] = longer
    return "\n".join(lines)

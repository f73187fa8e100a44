"""`@path` in a message: the text of a file, put behind what was typed."""

from __future__ import annotations

import os
import re
from collections.abc import Callable

from llmcli.cli.prompts import read_text
from llmcli.ui.theme import one_line

# a word with an @ in front, perhaps quoted; with a backslash before it is an @ and nothing else
MENTION = re.compile(r"""(?<!\S)(\\?)@(?:"([^"\n]+)"|'([^'\n]+)'|(\S+))""")
_FENCED = re.compile(r"^ {0,3}(```+|~~~+).*?(?:^ {0,3}\1|\Z)", re.MULTILINE | re.DOTALL)
_BEHIND = ".,;:!?)"  # what may stand behind a name and is no part of it


def with_files(line: str, note: Callable[[str], None]) -> str:
    r"""`line` with its files' names in place of `@name`, and behind it each file's text, fenced.

    A word stays as it is where there is no such file (`note` hears of directories and of what
    looks like a path) and within a fenced block; `\@` is an @. Raises UsageError for a file that
    cannot be read.
    """
    files: dict[str, str] = {}

    def mention(match: re.Match[str]) -> str:
        escaped, *names = match.groups()
        if escaped:
            return match[0][1:]
        name, behind = next(filter(None, names)), ""
        if names[2] and not _is_file(name):
            bare = name.rstrip(_BEHIND)
            name, behind = bare, name[len(bare) :]
        if not name or not _is_file(name):
            if os.path.isdir(os.path.expanduser(name)):
                note(f"`@{one_line(name)}` is a directory: it stays as text")
            elif "/" in name or re.search(r"\w\.\w+$", name):
                note(f"`@{one_line(name)}` is no file: it stays as text")
            return match[0]
        files[name] = read_text(name)
        return f"`{name}`{behind}"

    pieces, end = [], 0
    for block in _FENCED.finditer(line):
        pieces += [MENTION.sub(mention, line[end : block.start()]), block[0]]
        end = block.end()
    pieces.append(MENTION.sub(mention, line[end:]))
    return "\n\n".join(["".join(pieces), *(_fenced(name, files[name]) for name in files)])


def _is_file(name: str) -> bool:
    return os.path.isfile(os.path.expanduser(name))


def _fenced(name: str, text: str) -> str:
    """The name and the text in a block whose fence is longer than any run of backticks in it."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"`{name}`:\n{fence}\n{text}\n{fence}"

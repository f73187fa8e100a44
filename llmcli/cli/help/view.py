"""A topic's Markdown on a terminal or, without colours, in a file or pipe."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from llmcli.ui.markdown import Code, MarkdownStream

if TYPE_CHECKING:
    from rich.console import Console

_COMMENT = re.compile(r"\s*<!--.*?-->", re.DOTALL)
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_ITEM = re.compile(r"[-*+#]+\s|[|>]|\d+[.)]\s")
WIDEST = 100  # columns of a paragraph


def drawn(text: str, console: Console) -> str:
    """The Markdown `text`: paragraphs wrapped, tables drawn, code indented, no comments.

    The lines of a paragraph are joined first: in the file they are wrapped for its readers.
    """
    colour, out, at = not console.no_color, list[str](), 0
    text = _COMMENT.sub("", text)
    console.width = min(console.width, WIDEST)
    for fence in _FENCE.finditer(text):
        out += _prose(text[at : fence.start()], console), *_code(fence, colour=colour)
        at = fence.end()
    out.append(_prose(text[at:], console))
    return re.sub(r"\n{3,}", "\n\n", "".join(out)).strip("\n") + "\n"


def _prose(text: str, console: Console) -> str:
    stream = MarkdownStream(console)
    shown = stream.push("\n".join(_joined(text))) + stream.finish() + "\n"
    # without colours a cell keeps its markers, this one, too
    return shown.replace(r"\|", "|")


def _joined(text: str) -> Iterator[str]:
    """Lines, those of a paragraph or of an item of a list as one."""
    line = ""
    for own in [*text.split("\n"), ""]:
        bare = own.strip()
        if bare and line and not line.startswith(("#", "|")) and not _ITEM.match(bare):
            line += f" {bare}"
            continue
        if line:
            yield line
        line = own.rstrip()
        if not bare:
            yield ""
    if line:
        yield line


def _code(fence: re.Match[str], *, colour: bool) -> Iterator[str]:
    code = Code(fence[1] if colour else "")
    yield "\n"
    for line in fence[2].splitlines():
        yield f"    {code.line(line)}\n" if line else "\n"
    yield "\n"

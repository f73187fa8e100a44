"""Markdown on a terminal while it is written: nothing that was shown is ever drawn again.

So a style begins with its marker and ends with its line at the latest, and only what cannot be
known earlier waits: the last word, the first characters of a line, a link, a line of code, a table.
Lines stay lines, as models mean them. Without colours the text keeps its markers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Literal

from rich import box
from rich.cells import cell_len
from rich.color import ColorSystem
from rich.console import Console
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from llmcli.ui.flow import TAB, Flow
from llmcli.ui.theme import FAINT, HEADING, printable

# what a line may begin with, as far as it has come; and what only a whole line tells
_UNSURE = re.compile(r"\s*(#{1,6}\s*|>|[-*_][-*_\s]*|\+\s*|\d{1,9}([.)]\s*)?|`+|~+)?")
_WHOLE = re.compile(r"\s*(\||```|~~~)")
_RULE = re.compile(r"\s*([-*_])( *\1){2,}\s*")
_FENCE = re.compile(r"(`{3,}(?=[^`]*$)|~{3,})\s*([^\s`]*)")
_MARKER = re.compile(r"(\s*)(?:(#{1,6})\s+|(>) ?|([-*+])\s+|(\d{1,9}[.)])\s+)")
_MOST = 16_000  # characters that are read again for every line; Pygments takes 1 µs for each
CODE = "cyan"
_LINK = "underline"
_STYLES = {"**": "bold", "__": "bold", "*": "italic", "_": "italic", "~~": "strike"}
_LINKED = re.compile(
    r"\[([^\[\]\n]{1,200})\]\(((?:[^()\s]|\([^()\s]*\)){1,2000})(?: \"[^\"]*\")?\)"
)
_LINKING = re.compile(  # the beginnings of a link
    r"\[[^\[\]\n]{0,200}(\](\((?:[^()\s]|\([^()\s]*\)){0,2000}(\([^()\s]*)?( (\"[^\"]*\"?)?)?)?)?"
)
_ORDINARY = re.compile(r"[^\\`*_~\[]+")
_ESCAPED = "\\`*_~#|>"
_BORDER = re.compile(r"(?<!\\)\|")
_TABLE_RULE = re.compile(r":?-+:?")
_LEAST = 2 + 3  # columns of the narrowest cell, which a wide character fits into, and its border


class Code:
    """A block in the language of this name; without colours if Pygments does not know it."""

    def __init__(self, language: str) -> None:
        self._language = language
        self._before = ""

    def line(self, text: str) -> str:
        """The next line, coloured; in `text` there is no newline."""
        if self._lexer is None:
            return text
        if len(self._before) > _MOST:
            self._before = ""
        theme, at, begin, out = Syntax.get_theme("ansi_dark"), 0, len(self._before), []
        self._before += text + "\n"
        for kind, value in self._lexer.get_tokens(self._before):
            own = value[max(0, begin - at) :].rstrip("\n")
            at += len(value)
            if own:
                style = theme.get_style_for_token(kind)
                out.append(style.render(own, color_system=ColorSystem.STANDARD))
        return "".join(out)

    @cached_property
    def _lexer(self) -> Any:  # Pygments' own, None for a language that it does not know
        return Syntax("", self._language).lexer


class MarkdownStream:
    """Text in pieces to what is written to a terminal as wide as `console`.

    `push` returns what can be shown now, and `finish` the rest, with the newline of the last line.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._flow = Flow(console.width, colour=not console.no_color)
        self._bullet, self._bar, self._dash = signs(console)
        self._held = ""
        self._table: list[str] = []
        self._fence, self._code = "", Code("")
        self._gap = True  # the last line is empty: a second one would be one too many
        self._begin()

    def push(self, text: str) -> str:
        """What can be shown once `text` has come, in lines as wide as the console is by now."""
        self._flow.fit(self._console.width)
        self._held += printable(text).replace("\t", TAB)
        return self._shown(end=False)

    def finish(self) -> str:
        """What was held back."""
        out = self._shown(end=True)
        if self._first and self._line is None and not self._fence:
            out += self._opened()
        return out + (self._ended("") if self._line is not None else "") + self._table_drawn()

    def _begin(self) -> None:
        """Nothing is known of the line that comes."""
        self._line: Emphasis | None = None
        self._first = self._rest = self._base = ""
        self._indent = 0  # characters of its markers

    def _shown(self, *, end: bool) -> str:
        out = []
        while self._held:
            line, newline, rest = self._held.partition("\n")
            whole = bool(newline) or end
            if self._line is not None:
                self._held = rest
                out.append(self._ended(line) if newline else self._line.push(line, end=False))
            elif not whole and (self._fence or _UNSURE.fullmatch(line) or _WHOLE.match(line)):
                break
            elif self._table and not line.lstrip().startswith("|"):
                out.append(self._table_drawn())
            elif whole and (drawn := self._drawn(line)) is not None:
                self._held = rest
                out.append(drawn)
            else:
                out.append(self._marked(line))
        return "".join(out)

    def _drawn(self, line: str) -> str | None:
        """A line that is more than text, drawn; None where it is not."""
        bare = line.strip()
        if self._fence:
            return self._code_line(line)
        if bare.startswith("|") and not self._first:
            self._table.append(bare)
            return ""
        if not bare and not self._first:
            gap, self._gap = self._gap, True
            return "\n" * (not gap)
        if _RULE.fullmatch(line):
            rule = self._dash * min(self._flow.width, 40) if self._flow.colour else bare
        elif fence := _FENCE.match(bare):
            self._fence, self._code = fence[1], Code(fence[2] if self._flow.colour else "")
            rule = bare
            spaces = line[: len(line) - len(line.lstrip())]
            self._first, self._rest = self._first + spaces, self._rest + spaces
            self._indent += len(spaces)
        else:
            return None
        first, self._gap = self._first, False
        if not self._fence:
            self._begin()
        return f"{self._flow.painted(first + rule, FAINT)}\n"

    def _code_line(self, line: str) -> str:
        """Code is not wrapped: it can be copied."""
        own = line[: self._indent].lstrip(" >") + line[self._indent :]
        rest, bare = self._flow.painted(self._rest, FAINT), own.strip()
        if bare.startswith(self._fence) and not bare.strip(self._fence[0]):
            self._fence = ""
            self._begin()
            return f"{rest}{self._flow.painted(bare, FAINT)}\n"
        return f"{rest}{self._code.line(own)}\n"

    def _marked(self, line: str) -> str:
        """Takes one of the markers that a line begins with, or begins its text."""
        self._gap = False
        marker = _MARKER.match(line)
        if marker is None:
            spaces = line[: len(line) - len(line.lstrip())]
            self._held = self._held[len(spaces) :]
            self._first, self._rest = self._first + spaces, self._rest + spaces
            return self._opened()
        self._held = self._held[marker.end() :]
        self._indent += marker.end()
        spaces, heading, quote, bullet, _ = marker.groups()
        sign = marker[0]
        if self._flow.colour and heading:
            sign = spaces
            self._base = f"{HEADING} underline" if heading == "#" else HEADING
        elif self._flow.colour and quote:
            sign = f"{spaces}{self._bar} "
        elif self._flow.colour and bullet:
            sign = sign.replace(bullet, self._bullet, 1)
        self._first += sign
        self._rest += sign if quote else " " * cell_len(sign)
        return self._opened() if self._held.startswith("\n") else ""

    def _opened(self) -> str:
        self._line = Emphasis(self._flow.add, self._base, colour=self._flow.colour)
        return self._flow.begin(self._first, self._rest, FAINT)

    def _ended(self, line: str) -> str:
        assert self._line is not None
        out = self._line.push(line, end=True) + self._flow.end()
        self._begin()
        return out

    def _table_drawn(self) -> str:
        """The table that was held back, or its lines as they are."""
        rows, self._table = self._table, []
        if not rows:
            return ""
        self._gap = False
        if (table := drawn_table(rows, self._console)) is not None:
            return table
        return "".join(self._flow.add(row) + self._flow.end() for row in rows)


class DimmedStream:
    """Text that is not the answer itself, such as reasoning: dim, behind a bar, under a title."""

    def __init__(self, console: Console, title: str) -> None:
        self._console = console
        self._flow = Flow(console.width, colour=not console.no_color)
        self._bar = signs(console)[1] + " "
        self._title = self._flow.painted(title, FAINT) + "\n"
        self._open = False  # within a line

    def push(self, text: str) -> str:
        """What can be shown once `text` has come, in lines as wide as the console is by now."""
        self._flow.fit(self._console.width)
        title, self._title = self._title, ""
        out = [title]
        for part in re.findall(r"\n|[^\n]+", printable(text)):
            if not self._open:
                out.append(self._flow.begin(self._bar, self._bar, FAINT))
            self._open = part != "\n"
            out.append(self._flow.add(part, FAINT) if self._open else self._flow.end())
        return "".join(out)

    def finish(self) -> str:
        """What was held back."""
        return self._flow.end() if self._open else ""


def signs(console: Console) -> tuple[str, str, str]:
    """A bullet, a bar and a dash that this terminal has."""
    return ("-", "|", "-") if console.options.ascii_only else ("•", "│", "─")


class Emphasis:
    """A line, read as it comes and passed to `add` in the style of what is open, over `base`.

    `add(text, style)` returns what is to be written now. Without colours the markers stay. What is
    not closed ends with the line.
    """

    def __init__(self, add: Callable[[str, str], str], base: str = "", *, colour: bool) -> None:
        self._add = add
        self._colour = colour
        self._base = base
        self._text = ""
        self._open: list[str] = []  # the markers of emphasis
        self._ticks = 0  # of the code that is open
        self._last = " "  # the last character that was read

    def push(self, text: str, *, end: bool) -> str:
        """What can be shown now; `end`: the line ends with this."""
        self._text += text
        out = []
        while self._text and (shown := self._next(end)) is not None:
            out.append(shown)
        return "".join(out)

    def _next(self, end: bool) -> str | None:
        """Takes a run of text or a marker; None: undecided yet."""
        text = self._text
        if plain := _ORDINARY.match(text):
            return self._said(plain[0])
        if text[0] in "`*_~":
            run = len(text) - len(text.lstrip(text[0]))
            if run == len(text) and not end:
                return None
            after = text[run : run + 1] or " "
            return self._ticked(run, after) if text[0] == "`" else self._starred(run, after)
        if self._ticks or not self._colour:
            return self._said(text[0])
        if text[0] == "\\":
            if len(text) == 1 and not end:
                return None
            if text[1:2] and text[1] in _ESCAPED:
                self._text = text[1:]
                return self._said(text[1])
        elif link := _LINKED.match(text):
            return self._linked(link)
        elif _LINKING.fullmatch(text) and not end:
            return None
        return self._said(text[0])

    def _said(self, text: str, style: str = "") -> str:
        """Takes `text`, which is what comes next, in the style of what is open."""
        self._text = self._text[len(text) :]
        self._last = text[-1]
        code = CODE if self._ticks else ""
        styles = [self._base, style, code, *(_STYLES[marker] for marker in self._open)]
        return self._add(text, " ".join(filter(None, styles)))

    def _dropped(self, count: int) -> str:
        """A marker."""
        if not self._colour:
            return self._said(self._text[:count])
        self._last, self._text = self._text[0], self._text[count:]
        return ""

    def _ticked(self, run: int, after: str) -> str:
        opens = not self._ticks and not after.isspace()
        if not (opens or self._ticks == run):
            return self._said(self._text[:run])
        out = self._dropped(run)
        self._ticks = run if opens else 0
        return out

    def _starred(self, run: int, after: str) -> str:
        """Emphasis, nearly as CommonMark has it: in `2**3` and `2*3` there is none."""
        sign, last = self._text[0], self._last
        if self._ticks or run > 3 or (sign == "~" and run != 2):
            return self._said(self._text[:run])
        opens = not (after.isspace() or (last.isalnum() and (sign == "_" or run == 1)))
        if last.isalnum() and (not after.isalnum() or (last + after).isascii()):
            opens = False
        left = run
        if not (last.isspace() or (sign == "_" and after.isalnum())):
            for marker in (sign * 2, sign):
                if left >= len(marker) and marker in self._open:
                    self._open.remove(marker)
                    left -= len(marker)
        if left < run:
            return self._dropped(run)
        markers = [sign * 2, sign] if run == 3 else [sign * run]
        if not opens or not set(markers).isdisjoint(self._open):
            return self._said(self._text[:run])
        out = self._dropped(run)
        self._open += markers
        return out

    def _linked(self, link: re.Match[str]) -> str:
        rest = self._text[link.end() :]
        words, target = link[1].strip("*_`") or link[1], link[2]
        self._text = words
        out = self._said(words, _LINK)
        if target != words:
            self._text = target = f" ({target})"
            out += self._said(target, FAINT)
        self._text = rest
        return out


def drawn_table(rows: Sequence[str], console: Console) -> str | None:
    """The table that these lines are, each of which begins with `|`, as wide as `console` at most.

    None where they are none, or one that cannot be drawn as it stands: rows differ in their number
    of cells, or the terminal is too narrow for so many.
    """
    cells = [_cells(row) for row in rows]
    count = len(cells[0])
    if (
        len(rows) < 2
        or any(len(row) != count for row in cells)
        or not all(map(_TABLE_RULE.fullmatch, cells[1]))
        or count * _LEAST > console.width
    ):
        return None
    table = Table(
        box=box.SIMPLE, border_style=FAINT, header_style=HEADING, show_edge=False, pad_edge=False
    )
    colour = not console.no_color
    for title, rule in zip(cells[0], cells[1], strict=True):
        table.add_column(_text(title, colour), justify=_side(rule), overflow="fold")
    for row in cells[2:]:
        table.add_row(*(_text(cell, colour) for cell in row))
    with console.capture() as drawn:
        console.print(table, crop=False)
    return "".join(f"{line.rstrip()}\n" for line in drawn.get().splitlines())


def _cells(row: str) -> list[str]:
    """The texts between the borders; a `|` behind a backslash is text, and the last is optional."""
    found = [cell.strip() for cell in _BORDER.split(row)][1:]
    return found if found[-1] else found[:-1] or found


def _side(rule: str) -> Literal["left", "center", "right"]:
    if not rule.endswith(":"):
        return "left"
    return "center" if rule.startswith(":") else "right"


def _text(cell: str, colour: bool) -> Text:
    """Without colours it keeps its markers, as all text does."""
    shown = Text()

    def add(text: str, style: str) -> str:
        shown.append(text, style)
        return ""

    Emphasis(add, colour=colour).push(cell.replace(r"\|", "|") if colour else cell, end=True)
    return shown

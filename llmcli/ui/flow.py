"""Text that flows: words are shown as they are complete, and lines break between them.

Nothing that was shown is ever changed, so nothing flickers and everything stays to scroll back to.
"""

from __future__ import annotations

import re
import unicodedata
from itertools import groupby

from rich.cells import cell_len
from rich.color import ColorSystem
from rich.style import Style

TAB = " " * 4
_FENCE = "```"
_FENCED = 80  # characters from which a line cannot become a fence any more
_CLOSING = ("Pe", "Pf", "Po")  # no line begins with 。 or 」


class Flow:
    """Lines of at most `width` columns. Styles are rich's, as text; they need `colour`.

    Every method returns what is to be written now, in the codes of the colour system `system`.
    """

    def __init__(
        self, width: int, *, colour: bool, system: ColorSystem = ColorSystem.STANDARD
    ) -> None:
        self.fit(width)
        self.colour = colour
        self._system = system
        self.column = 0
        self._rest, self._rest_style, self._indent = "", "", 0
        self._spaces = ""
        self._word: list[tuple[str, str]] = []
        self._long = False  # the word is longer than a line, and shown as it comes
        self._line = ""  # how a line of `push` begins
        self._code = False

    def fit(self, width: int) -> None:
        """Lines that begin from now on have at most `width` columns."""
        self.width = max(width, 8)

    def painted(self, text: str, style: str) -> str:
        """`text` in a style, where there are colours."""
        if not (self.colour and style and text.strip()):
            return text
        return Style.parse(style).render(text, color_system=self._system)

    def begin(self, first: str, rest: str, style: str = "") -> str:
        """Begins a line with `first`; those that it breaks into begin with `rest`."""
        self._rest, self._rest_style = rest, style
        self._indent = cell_len(rest)
        self.column = cell_len(first)
        return self.painted(first, style)

    def add(self, text: str, style: str = "") -> str:
        """Text without newlines; its last word is held back until something follows it."""
        out = []
        for character in text.replace("\t", TAB):
            if character == " ":
                out.append(self.flush())
                self._spaces += character
            elif self._long:
                out.append(self._put(character, style))
            else:
                if self._word and _may_break(self._word[-1][0], character):
                    out.append(self.flush())
                self._word.append((character, style))
                if len(self._word) > self.width:
                    out.append(self.flush())
                    self._long = True
        return "".join(out)

    def flush(self) -> str:
        """The word that was held back."""
        pieces = [
            ("".join(character for character, _ in group), style)
            for style, group in groupby(self._word, lambda one: one[1])
        ]
        self._word, self._long = [], False
        if not pieces:
            return ""
        size = cell_len("".join(text for text, _ in pieces))
        out = [self._room(len(self._spaces) + size), self._spaces]
        self.column += len(self._spaces)
        self._spaces = ""
        if self.column + size > self.width:  # longer than a line: it breaks anywhere
            pieces = [(character, style) for text, style in pieces for character in text]
        out += [self._put(text, style) for text, style in pieces]
        return "".join(out)

    def end(self) -> str:
        """Ends the line."""
        out = self.flush() + "\n"
        self.column, self._spaces = 0, ""
        self._rest, self._rest_style, self._indent = "", "", 0
        return out

    def push(self, text: str, style: str = "") -> str:
        """Plain text in pieces: all but its last word; lines of fenced code stay as they are."""
        out = []
        for part in re.findall(r"\n|[^\n]+", text):
            if part == "\n":
                out.append(self.end())
                self._code ^= self._line.lstrip().startswith(_FENCE)
                self._line = ""
            else:
                self._line = (self._line + part)[:_FENCED]
                out.append((self.painted if self._code else self.add)(part, style))
        return "".join(out)

    def finish(self) -> str:
        """What `push` held back."""
        self._line, self._code = "", False
        return self.flush()

    def _put(self, text: str, style: str) -> str:
        size = cell_len(text)
        out = self._room(size) + self.painted(text, style)
        self.column += size
        return out

    def _room(self, size: int) -> str:
        """Begins another line where this one has no room for so many columns."""
        if self.column + size <= self.width or self.column <= self._indent:
            return ""
        self._spaces = ""
        self.column = self._indent
        return "\n" + self.painted(self._rest, self._rest_style)


def _may_break(last: str, character: str) -> bool:
    """Whether a line may break between two characters without a space: ideographs."""
    if "\u200d" in (last, character) or unicodedata.category(character) in _CLOSING:
        return False
    size = cell_len(character)
    return size > 1 or (size == 1 and cell_len(last) > 1)

"""Lines of source code in the 16 colours of a terminal, one at a time."""

from __future__ import annotations

from functools import cached_property

from rich.color import ColorSystem
from rich.syntax import Syntax

_MOST = 16_000  # characters that are read again for every line; Pygments takes 1 µs for each


class Code:
    """A block in the language of this name; without colours if Pygments does not know it."""

    def __init__(self, language: str) -> None:
        self._language = language
        self._before = ""

    def line(self, text: str) -> str:
        """The next line, coloured; in `text` there is no newline."""
        lexer = self._syntax.lexer
        if lexer is None:
            return text
        if len(self._before) > _MOST:
            self._before = ""
        theme, at, begin, out = Syntax.get_theme("ansi_dark"), 0, len(self._before), []
        self._before += text + "\n"
        for kind, value in lexer.get_tokens(self._before):
            own = value[max(0, begin - at) :].rstrip("\n")
            at += len(value)
            if own:
                style = theme.get_style_for_token(kind)
                out.append(style.render(own, color_system=ColorSystem.STANDARD))
        return "".join(out)

    @cached_property
    def _syntax(self) -> Syntax:
        return Syntax("", self._language)

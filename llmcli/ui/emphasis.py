"""What Markdown marks within a line: emphasis, code and links, as far as the line has come."""

from __future__ import annotations

import re
from typing import Protocol

from llmcli.ui.theme import FAINT

CODE = "cyan"
_LINK = "underline"
_STYLES = {"**": "bold", "__": "bold", "*": "italic", "_": "italic", "~~": "strike"}
_LINKED = re.compile(
    r"\[([^\[\]\n]{1,200})\]\(((?:[^()\s]|\([^()\s]*\)){1,2000})(?: \"[^\"]*\")?\)"
)
_LINKING = re.compile(  # the beginnings of that
    r"\[[^\[\]\n]{0,200}(\](\((?:[^()\s]|\([^()\s]*\)){0,2000}(\([^()\s]*)?( (\"[^\"]*\"?)?)?)?)?"
)
_ORDINARY = re.compile(r"[^\\`*_~\[]+")
_ESCAPED = "\\`*_~#|>"


class Styled(Protocol):
    """What styled text is added to, such as `Flow`."""

    colour: bool

    def add(self, text: str, style: str = "") -> str:
        """Adds text without newlines; returns what is to be written now."""


class Emphasis:
    """A line, read as it comes and added to `flow` in the style of what is open, over `base`.

    Without colours the markers stay. What is not closed ends with the line.
    """

    def __init__(self, flow: Styled, base: str = "") -> None:
        self._flow = flow
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
        """Takes a run of text or a marker; None: that cannot be told yet."""
        text = self._text
        if plain := _ORDINARY.match(text):
            return self._said(plain[0])
        if text[0] in "`*_~":
            run = len(text) - len(text.lstrip(text[0]))
            if run == len(text) and not end:
                return None
            after = text[run : run + 1] or " "
            return self._ticked(run, after) if text[0] == "`" else self._starred(run, after)
        if self._ticks or not self._flow.colour:
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
        return self._flow.add(text, " ".join(filter(None, styles)))

    def _dropped(self, count: int) -> str:
        """A marker."""
        if not self._flow.colour:
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

"""Shows an answer: Markdown on a terminal, its reasoning dimmed, folded or left out."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING, Literal

from llmcli.records.numbers import counted
from llmcli.shell.output import Output, make_console
from llmcli.ui.theme import FAINT, printable

if TYPE_CHECKING:
    from rich.console import Console

    from llmcli.text.segments import Kind, Segment, Segmenter
    from llmcli.ui.markdown import DimmedStream, MarkdownStream

ReasoningMode = Literal["show", "fold", "hide"]
_BETWEEN_S = 0.1  # from one count of a folded line to the next


class AnswerScreen:
    """Writes an answer token by token.

    On a terminal the text is Markdown, unless `plain`. Elsewhere it is written as the model wrote
    it: with the markers if reasoning is shown, else without the reasoning.
    """

    def __init__(
        self, out: Output, segmenter: Segmenter, *, reasoning: ReasoningMode | None, plain: bool
    ) -> None:
        self._out = out
        self._segmenter = segmenter
        self._terminal = out.out.terminal
        self._reasoning = reasoning or ("show" if self._terminal else "hide")
        if self._reasoning == "fold" and not self._terminal:
            self._reasoning = "hide"
        self._plain = plain
        self._part: tuple[Kind, DimmedStream | MarkdownStream | _Folded | None] | None = None
        self._ended = False  # whether the part has ended: the next one begins a paragraph
        self._console: Console | None = None  # of the part
        self._written = ""  # the last two characters written
        self.reasoned = self.answered = False

    def add(self, text: str) -> None:
        """Shows the text of one more token."""
        self._show(self._segmenter.push(text), text)

    def finish(self) -> None:
        """Ends the answer, complete or stopped."""
        self._show(self._segmenter.finish(), "")
        self._close()
        if not self._written.endswith("\n") and (self._written or self._terminal):
            self._write("\n")
        if self.reasoned and not self.answered and self._reasoning == "hide":
            self._out.note(
                "the answer has only reasoning, which is not shown: `--reasoning show` does, and "
                "`--max-tokens` gives it more room"
            )

    def _show(self, segments: list[Segment], raw: str) -> None:
        for kind, text, marker in segments:
            self.reasoned |= kind == "reasoning" and not marker
            self.answered |= kind != "reasoning" and not marker
            hidden = kind == "reasoning" and self._reasoning == "hide"
            if hidden or (marker and kind != "tool"):
                self._ended = True
            elif self._terminal or self._reasoning != "show":
                self._push(kind, text)
        if not self._terminal and self._reasoning == "show":
            self._write(raw)

    def _push(self, kind: Kind, text: str) -> None:
        from llmcli.text.segments import gap

        kind = kind if self._terminal else "text"
        if self._part is None or self._ended or self._part[0] != kind:
            self._close()
            self._write(gap(self._written))
            self._part = kind, self._stream(kind)
        self._ended = False
        if self._console is not None:  # the terminal may have another width by now
            self._out.fit()
            self._console.width = self._out.out.width
        if (stream := self._part[1]) is not None:
            text = stream.push(text)
        elif self._terminal:
            text = printable(text)
        self._write(text)

    def _close(self) -> None:
        if self._part is not None and self._part[1] is not None:
            self._write(self._part[1].finish())
        self._part = None

    def _write(self, text: str) -> None:
        if text:
            self._out.write(text)
            self._written = text[-2:]

    def _stream(self, kind: Kind) -> DimmedStream | MarkdownStream | _Folded | None:
        """How a part is shown; None for text as the model wrote it."""
        if not self._terminal:
            return None
        self._console = console = make_console(self._out.out)
        if kind == "reasoning" and self._reasoning == "fold":
            return _Folded(console, animate=self._out.out.animate)
        from llmcli.ui.markdown import DimmedStream, MarkdownStream

        if kind != "text":
            return DimmedStream(console, {"reasoning": "thinking …", "tool": "tool call"}[kind])
        return None if self._plain else MarkdownStream(console)


class _Folded:
    """One line that counts tokens while the model reasons; its methods return what to write."""

    def __init__(self, console: Console, *, animate: bool) -> None:
        from llmcli.ui.flow import Flow

        self._console = console
        self._flow = Flow(console.width, colour=not console.no_color)
        self._animate = animate
        self._begin = self._drawn = perf_counter()
        self._tokens = 0
        self._shown = 0  # columns of the line on the screen

    def push(self, text: str) -> str:
        self._tokens += 1
        now = perf_counter()
        if not self._animate or (self._shown and now - self._drawn < _BETWEEN_S):
            return ""
        self._drawn = now
        return self._line("thinking … ")

    def finish(self) -> str:
        return self._line("thought: ") + "\n"

    def _line(self, what: str) -> str:
        took = perf_counter() - self._begin
        most = self._console.width - 1
        line = f"{what}{counted(self._tokens, 'token')}, {took:.1f} s"[:most]
        over, self._shown = " " * (min(self._shown, most) - len(line)), len(line)
        return "\r" * self._animate + self._flow.painted(line, FAINT) + over


def write_reasoning(out: Output, text: str) -> None:
    """Writes the reasoning of an answer again."""
    if out.json:  # stdout has the answers, a line each
        out.aside(printable(text))
        return
    text += "\n"
    if out.out.terminal:
        from llmcli.ui.markdown import DimmedStream

        dimmed = DimmedStream(make_console(out.out), "reasoning")
        text = dimmed.push(text) + dimmed.finish()
    out.write(text)

"""Input of a chat: lines with history and completion, and `@path` within them."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from llmcli.shell.documents import read_text
from llmcli.shell.exits import SIGNALS
from llmcli.shell.streams import KEYS
from llmcli.ui.theme import one_line
from llmcli.xdg import folder

_PROMPT, _MORE = "> ", "  "
_BLOCK = '"""'
_ENDS = "Ctrl-D or /exit ends"
# `@name`, perhaps quoted; `\@name` is an @ and nothing else
MENTION = re.compile(r"""(?<!\S)(\\?)@(?:"([^"\n]+)"|'([^'\n]+)'|(\S+))""")
_FENCED = re.compile(r"^ {0,3}(```+|~~~+).*?(?:^ {0,3}\1|\Z)", re.MULTILINE | re.DOTALL)
_BEHIND = ".,;:!?)"  # punctuation that may follow a name


class Lines:
    """Input lines that the terminal itself edits; a draft is written above the prompt.

    `aside` shows once how a conversation ends.
    """

    def __init__(self, aside: Callable[[str], None]) -> None:
        self._aside: Callable[[str], None] | None = aside

    def ask(self, draft: str, meter: str = "") -> str | None:
        """The next line, begun with `draft`: empty after Ctrl-C, None at the end of input.

        An edited line shows `meter` on its right.
        """
        try:
            line = self._line(draft, meter)
        except KeyboardInterrupt:
            SIGNALS.forget()
            if self._interrupted() and self._aside is not None:
                self._aside(_ENDS)
                self._aside = None
            return ""
        return None if line is None else without_quotes(line)

    def choose(self, question: str) -> str:
        """First letter of the answer to `question`, in lower case; empty after Enter or Ctrl-C."""
        try:
            return (self._answer(question) or "").strip().lower()[:1]
        except KeyboardInterrupt:
            SIGNALS.forget()
            return ""

    def _line(self, draft: str, meter: str) -> str | None:
        line = _read(f"{draft}\n{_PROMPT}" if draft else _PROMPT)
        while line is not None and continues(line):
            more = _read(_MORE)
            line = None if more is None else f"{_without_backslash(line)}\n{more}"
        return line

    def _answer(self, question: str) -> str | None:
        return _read(question)

    def _interrupted(self) -> bool:
        """Handles Ctrl-C; returns whether the line was empty."""
        _screen().write("\n")
        return True


class EditedLines(Lines):
    """Lines with history and completion.

    Completes the names of `commands` after a slash, then a command's argument, for which `commands`
    has a function that returns its values (None: paths), and paths after an @.
    """

    def __init__(
        self,
        commands: Mapping[str, Callable[[], Iterable[str]] | None],
        aside: Callable[[str], None],
    ) -> None:
        super().__init__(aside)
        from prompt_toolkit import PromptSession
        from prompt_toolkit.application import get_app
        from prompt_toolkit.completion import Completer, Completion, PathCompleter, WordCompleter
        from prompt_toolkit.document import Document
        from prompt_toolkit.filters import Condition
        from prompt_toolkit.history import FileHistory, InMemoryHistory
        from prompt_toolkit.key_binding import KeyBindings
        from prompt_toolkit.output import create_output
        from prompt_toolkit.styles import Style

        class History(FileHistory):
            def store_string(self, string: str) -> None:
                with suppress(OSError):  # a full disk: it is not kept
                    super().store_string(string)

        slash = WordCompleter([f"/{name}" for name in commands], sentence=True)
        paths = PathCompleter(expanduser=True)

        class Names(Completer):
            def get_completions(self, document: Any, event: Any) -> Iterator[Completion]:
                before = document.text_before_cursor
                if found := re.fullmatch(r"/(\w+) +([^\n]*)", before):
                    values = commands.get(found[1], tuple)
                    if values is None:
                        yield from paths.get_completions(Document(found[2]), event)
                        return
                    known = WordCompleter(list(values()), sentence=True)
                    yield from known.get_completions(Document(found[2]), event)
                found = re.search(r"(?<!\S)@([\"']?)((?<=[\"'])[^\"'\n]*|\S*)$", before)
                if found is None:
                    yield from slash.get_completions(document, event)
                    return
                for one in paths.get_completions(Document(found[2]), event):
                    name = found[2] + one.text
                    if found[1] or not re.search(r"\s", name):
                        yield one
                    elif quote := next((quote for quote in "\"'" if quote not in name), ""):
                        end = "" if os.path.isdir(os.path.expanduser(name)) else quote
                        text = f"{quote}{name}{end}"
                        yield Completion(text, -len(found[2]), display=one.display)

        keys = KeyBindings()

        @keys.add("escape", "enter")
        def _(event: Any) -> None:
            event.current_buffer.insert_text("\n")

        @keys.add("enter", filter=Condition(lambda: continues(get_app().current_buffer.text)))
        def _(event: Any) -> None:
            buffer = event.current_buffer
            text = _without_backslash(buffer.text) + "\n"
            buffer.document = Document(text, len(text))

        path = history_path()
        self._session: Any = PromptSession(
            _PROMPT,
            history=InMemoryHistory() if path is None else History(str(path)),
            completer=Names(),
            complete_while_typing=False,
            enable_suspend=True,
            key_bindings=keys,
            prompt_continuation=_MORE,
            style=Style.from_dict({"meter": "dim"}),
            output=create_output(_screen()),
        )

    def _line(self, draft: str, meter: str) -> str | None:
        from prompt_toolkit.application import get_app

        def right() -> Any:
            return [("class:meter", "" if get_app().is_done else meter)]

        with KEYS.prompt(_screen()), suppress(EOFError):
            return str(self._session.prompt(default=draft, rprompt=right))
        return None

    def _answer(self, question: str) -> str | None:
        from prompt_toolkit import PromptSession

        ask: Any = PromptSession(question, enable_suspend=True, output=self._session.output)
        with suppress(EOFError):
            return str(ask.prompt())
        return None

    def _interrupted(self) -> bool:
        return not self._session.default_buffer.text


def continues(text: str) -> bool:
    """Whether Enter continues the message: it ends in a backslash, or its quotes are open."""
    return _in_block(text) or re.search(r"(?<!\\)\\\Z", text) is not None


def without_quotes(text: str) -> str:
    r"""The text between `\"""` and `\"""`, which is never a command; other text unchanged."""
    bare = text.strip()
    if len(bare) < 2 * len(_BLOCK) or not (bare.startswith(_BLOCK) and bare.endswith(_BLOCK)):
        return text
    inner = bare[len(_BLOCK) : -len(_BLOCK)].strip("\n")
    return "/" * inner.startswith("/") + inner


def _in_block(text: str) -> bool:
    return text.lstrip().startswith(_BLOCK) and text.count(_BLOCK) == 1


def _without_backslash(text: str) -> str:
    """The text without the backslash that continues its line."""
    return text if _in_block(text) else text.removesuffix("\\")


def _screen() -> TextIO:
    """The stream for prompts: stdout, or stderr if stdout is not a terminal."""
    return sys.stdout if sys.stdout.isatty() else sys.stderr


def _read(prompt: str) -> str | None:
    """A line of stdin without its newline, None at its end."""
    with KEYS.heard():
        _screen().write(prompt)
        _screen().flush()
        line = sys.stdin.buffer.readline().decode("utf-8", "replace")
    return line.rstrip("\r\n") if line else None


def history_path() -> Path | None:
    """$XDG_STATE_HOME/llmcli/chat_history, created if it is missing; None if that fails."""
    try:
        path = folder("XDG_STATE_HOME", "~/.local/state") / "llmcli" / "chat_history"
    except RuntimeError:  # no home
        return None
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600, exist_ok=True)
        return path
    return None


def with_files(line: str, note: Callable[[str], None]) -> str:
    r"""`line` with its files' names in place of `@name`, and behind it each file's text, fenced.

    A fence is longer than any run of backticks in the text. A word stays as it is if there is no
    such file (`note` is called for directories and for what looks like a path) and within a fenced
    block; `\@` is an @. Raises UsageError for a file that cannot be read.
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
                note(f"`@{one_line(name)}` is not a file: it stays as text")
            return match[0]
        files[name] = read_text(name)
        return f"`{name}`{behind}"

    pieces, end = [], 0
    for block in _FENCED.finditer(line):
        pieces += [MENTION.sub(mention, line[end : block.start()]), block[0]]
        end = block.end()
    pieces.append(MENTION.sub(mention, line[end:]))
    for name, text in files.items():
        longest = max((len(run) for run in re.findall("`+", text)), default=0)
        fence = "`" * max(3, longest + 1)
        pieces.append(f"\n\n`{name}`:\n{fence}\n{text}\n{fence}")
    return "".join(pieces)


def _is_file(name: str) -> bool:
    return os.path.isfile(os.path.expanduser(name))

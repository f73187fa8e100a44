"""What is typed in a conversation: lines of a terminal, with history and completion."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from llmcli.cli.exits import SIGNALS
from llmcli.xdg import folder


class Typed:
    """The prompt of a conversation; completes `commands` after a slash, paths after an @."""

    def __init__(self, commands: Sequence[str]) -> None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.completion import Completer, Completion, PathCompleter, WordCompleter
        from prompt_toolkit.document import Document
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
                found = re.search(r"(?<!\S)@([\"']?)((?<=[\"'])[^\"'\n]*|\S*)$", before)
                if found is None:
                    yield from slash.get_completions(document, event)
                    return
                for one in paths.get_completions(Document(found[2]), event):
                    if found[1] or not re.search(r"\s", one.text):  # else it needs a quote
                        yield one

        keys = KeyBindings()

        @keys.add("escape", "enter")
        def _(event: Any) -> None:
            event.current_buffer.insert_text("\n")

        path = history_path()
        self._session: Any = PromptSession(
            "> ",
            history=InMemoryHistory() if path is None else History(str(path)),
            completer=Names(),
            complete_while_typing=False,
            enable_suspend=True,
            key_bindings=keys,
            prompt_continuation="  ",
            style=Style.from_dict({"meter": "dim"}),
            output=create_output(None if sys.stdout.isatty() else sys.stderr),
        )

    def ask(self, draft: str, meter: str = "") -> str | None:
        """The next line, begun with `draft`: empty after Ctrl-C, None at the end of input.

        `meter` stands on the right until the line is there.
        """
        from prompt_toolkit.application import get_app

        def right() -> Any:
            return [("class:meter", "" if get_app().is_done else meter)]

        try:
            line: str = self._session.prompt(default=draft, rprompt=right)
        except KeyboardInterrupt:
            SIGNALS.forget()
            return ""
        except EOFError:
            return None
        return line

    def choose(self, question: str) -> str:
        """The first letter of what is typed behind `question`, small; empty for none and Ctrl-C."""
        from prompt_toolkit import PromptSession

        ask: Any = PromptSession(question, enable_suspend=True, output=self._session.output)
        try:
            return str(ask.prompt()).strip().lower()[:1]
        except KeyboardInterrupt:
            SIGNALS.forget()
        except EOFError:
            pass
        return ""


def history_path() -> Path | None:
    """$XDG_STATE_HOME/llmcli/chat_history, made where it is not there; None where it cannot be."""
    try:
        path = folder("XDG_STATE_HOME", "~/.local/state") / "llmcli" / "chat_history"
    except RuntimeError:  # no home
        return None
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600, exist_ok=True)
        return path
    return None

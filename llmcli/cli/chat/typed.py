"""What is typed in a conversation: lines of a terminal, with history and completion."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from llmcli.cli.exits import SIGNALS


class Typed:
    """The prompt of a conversation, which completes the names of `commands` after a slash."""

    def __init__(self, commands: Sequence[str]) -> None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.completion import WordCompleter
        from prompt_toolkit.history import FileHistory, InMemoryHistory
        from prompt_toolkit.key_binding import KeyBindings
        from prompt_toolkit.output import create_output

        class History(FileHistory):
            def store_string(self, string: str) -> None:
                with suppress(OSError):  # a full disk: it is not kept
                    super().store_string(string)

        keys = KeyBindings()

        @keys.add("escape", "enter")
        def _(event: Any) -> None:
            event.current_buffer.insert_text("\n")

        path = history_path()
        self._session: Any = PromptSession(
            "> ",
            history=InMemoryHistory() if path is None else History(str(path)),
            completer=WordCompleter([f"/{name}" for name in commands], sentence=True),
            complete_while_typing=False,
            key_bindings=keys,
            prompt_continuation="  ",
            output=create_output(None if sys.stdout.isatty() else sys.stderr),
        )

    def ask(self, draft: str) -> str | None:
        """The next line, begun with `draft`: empty after Ctrl-C, None at the end of input."""
        try:
            line: str = self._session.prompt(default=draft)
        except KeyboardInterrupt:
            SIGNALS.forget()
            return ""
        except EOFError:
            return None
        return line


def history_path() -> Path | None:
    """$XDG_STATE_HOME/llmcli/chat_history, made where it is not there; None where it cannot be."""
    base = os.environ.get("XDG_STATE_HOME", "")
    folder = base if os.path.isabs(base) else os.path.expanduser("~/.local/state")
    if not os.path.isabs(folder):  # no home
        return None
    path = Path(folder, "llmcli", "chat_history")
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600, exist_ok=True)
        return path
    return None

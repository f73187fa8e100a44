"""What llama.cpp writes while it works, and the names that it has for types of numbers."""

from __future__ import annotations

import ctypes
from typing import Any

from llmcli.commands.bench.report.llama_words import CACHE_OF, CACHE_TYPES
from llmcli.errors import UsageError

_ERROR = 4  # GGML_LOG_LEVEL_ERROR


class Log:
    """Takes what llama.cpp writes, and keeps the last error of it."""

    def __init__(self, library: Any) -> None:
        self._last = ""

        @library.llama_log_callback  # type: ignore[untyped-decorator]
        def hear(level: int, text: bytes, _: Any) -> None:
            if level == _ERROR and text.strip():
                self._last = text.decode(errors="replace").strip().split("\n")[0]

        self._hear = hear  # llama.cpp keeps only the address
        library.llama_log_set(hear, ctypes.c_void_p(0))

    def told(self) -> str:
        """`: its last words`, or nothing."""
        return f": {self._last}" if self._last else ""


_DEFAULT = "f16"  # of a cache, where nothing is said


def cache_type(asked: str) -> tuple[str, int]:
    """(name, number) of a cache's type; `auto` is f16, as it is there by default."""
    name = _DEFAULT if asked == "auto" else CACHE_OF.get(asked, asked)
    if name not in CACHE_TYPES:
        raise UsageError(
            f"llama.cpp has no cache of type `{asked}`", hint=f"one of {', '.join(CACHE_TYPES)}"
        )
    return name, CACHE_TYPES[name]

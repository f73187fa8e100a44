"""What llama.cpp writes while it works, and the names that it has for types of numbers."""

from __future__ import annotations

import ctypes
from typing import Any

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


# enum ggml_type, as far as llama-bench's -ctk and -ctv go
_TYPES = {
    "f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "iq4_nl": 20,
    "bf16": 30,
}  # fmt: skip
FLASH = {"auto": -1, "off": 0, "on": 1}  # enum llama_flash_attn_type
_OURS = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "auto": "f16"}


def cache_type(asked: str) -> tuple[str, int]:
    """(name, number) of a cache's type; `auto` is f16, as it is there by default."""
    name = _OURS.get(asked, asked)
    if name not in _TYPES:
        raise UsageError(
            f"llama.cpp has no cache of type `{asked}`", hint=f"one of {', '.join(_TYPES)}"
        )
    return name, _TYPES[name]

"""How those who wait are told how far something is."""

from __future__ import annotations

from collections.abc import Callable

# (what is done, how much of it, of how much: None where that is not known)
Progress = Callable[[str, int, int | None], None]

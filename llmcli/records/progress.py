"""The type of progress callbacks."""

from __future__ import annotations

from collections.abc import Callable

# (description, done, total or None if unknown)
Progress = Callable[[str, int, int | None], None]

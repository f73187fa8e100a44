"""The type of progress callbacks, and the seconds and bytes of the stages of loading."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter

# (description, done, total or None if unknown)
Progress = Callable[[str, int, int | None], None]


class Stages:
    """Seconds and bytes of the stages of loading, in order of their start.

    `with stages("read", nbytes): …` adds to a stage. Stages are not nested.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.nbytes: dict[str, int] = {}

    @contextmanager
    def __call__(self, name: str, nbytes: int = 0) -> Iterator[None]:
        """Time the context, also if it raises."""
        begin = perf_counter()
        try:
            yield
        finally:
            self.add(name, perf_counter() - begin, nbytes)

    def add(self, name: str, seconds: float, nbytes: int = 0) -> None:
        """Add time measured elsewhere."""
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        if nbytes:
            self.nbytes[name] = self.nbytes.get(name, 0) + nbytes

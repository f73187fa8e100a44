"""What the fuzzers of parsers have in common: what a parser may do, and the run."""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from llmcli.errors import LlmcliError

SECONDS = 5.0  # of the processor: parsing takes milliseconds
Found = TypeVar("Found")


def sound(parse: Callable[[], Found], path: Path | None = None, most: int = 500) -> Found | None:
    """What it gives; None where it ends in one clear error, which names `path`. Else raises."""
    start = time.process_time()
    found, error = None, None
    try:
        found = parse()
    except LlmcliError as caught:
        error = caught
    assert time.process_time() - start < SECONDS, "slow"
    if error is not None:
        assert error.code == 4
        assert path is None or path.name in error.message
        for line in (error.message.replace(str(path), ""), error.hint or ""):
            assert line.isprintable(), line
            assert len(line) < most, line
    return found


def fuzz(check: Callable[[bytes], object], mutate: Callable[[bytes, int, int], bytes]) -> None:
    """Runs until it is told to stop, or a check fails."""
    import atheris

    def custom(data: bytes, most: int, seed: int) -> bytes:
        if seed % 3 == 0:
            return bytes(atheris.Mutate(bytes(data), most))
        return mutate(bytes(data), most, seed)

    def once(data: bytes) -> None:
        check(bytes(data))

    atheris.Setup(sys.argv, once, custom_mutator=custom)
    atheris.Fuzz()

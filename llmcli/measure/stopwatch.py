"""How long generation takes, measured from outside the engine: it knows no clocks."""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter
from typing import Protocol, TypeVar

from llmcli.measure.environment import peak_memory_bytes
from llmcli.reports.text import Timings


class _Indexed(Protocol):
    @property
    def index(self) -> int: ...


T = TypeVar("T", bound=_Indexed)


class Stopwatch:
    """Adds up the time that several streams of tokens took, one after the other.

    Only the time spent inside the engine counts, not what the consumer does with a token.
    A stream's first token costs the prompt; the others (`index` > 0) cost decoding.
    """

    def __init__(self) -> None:
        self.import_s = 0.0
        self.load_s = 0.0
        self.prompt_tokens = 0
        self.generated = 0
        self.elapsed = 0.0
        self.first_token_s: float | None = None
        self._prefill_s = 0.0
        self._decoded = 0
        self._decode_s = 0.0

    def watch(self, tokens: Iterator[T], prompt_tokens: int) -> Iterator[T]:
        """Passes the tokens of one stream on; `elapsed` is the engine's seconds so far."""
        first = True
        while True:
            begin = perf_counter()
            token = next(tokens, None)
            spent = perf_counter() - begin
            self.elapsed += spent
            if first and token is not None:
                self.prompt_tokens += prompt_tokens
                self._prefill_s += spent
                if self.first_token_s is None:
                    self.first_token_s = spent
            else:
                self._decode_s += spent
            first = False
            if token is None:
                return
            self.generated += 1
            self._decoded += token.index > 0
            yield token

    def timings(self, device_peak: int | None = None) -> Timings:
        """The sums as a report. `device_peak`: bytes of GPU memory, where the model ran on one."""
        return Timings(
            import_s=self.import_s,
            load_s=self.load_s,
            first_token_s=self.first_token_s,
            prompt_tokens=self.prompt_tokens,
            prompt_tokens_per_s=_rate(self.prompt_tokens, self._prefill_s),
            generated_tokens=self.generated,
            generated_tokens_per_s=_rate(self._decoded, self._decode_s),
            peak_memory_bytes=peak_memory_bytes() if device_peak is None else device_peak,
        )


def _rate(count: int, seconds: float) -> float | None:
    return count / seconds if count and seconds > 0 else None

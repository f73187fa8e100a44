"""How long generation takes, measured from outside the engine: it knows no clocks."""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter
from typing import TYPE_CHECKING, Protocol, TypeVar

from llmcli.measure.held import Held
from llmcli.measure.peaks import highest_bytes
from llmcli.reports.text import PhasePeak, Timings

if TYPE_CHECKING:
    import torch


class _Indexed(Protocol):
    @property
    def index(self) -> int: ...


T = TypeVar("T", bound=_Indexed)


class Stopwatch:
    """Adds up the time that several streams of tokens took, one after the other.

    Only the time spent inside the engine counts, not what the consumer does with a token.
    A stream's first token costs the prompt; the others (`index` > 0) cost decoding. Memory is
    watched too, on `device` where it is a GPU.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.peaks: tuple[PhasePeak, ...] = ()  # of what was before the streams
        self._device = device
        self._held = Held(device)
        self.import_s = 0.0
        self.load_s = 0.0
        self.prompt_tokens = 0
        self.generated = 0
        self.elapsed = 0.0
        self.first_token_s: float | None = None
        self._prefill_s = 0.0
        self._decoded = 0
        self._decode_s = 0.0
        self._spent = 0.0

    def watch(self, tokens: Iterator[T], prompt_tokens: int) -> Iterator[T]:
        """Passes the tokens of one stream on; `elapsed` is the engine's seconds so far."""
        with self._held.phase("prefill"):
            token = self._timed(tokens)
        if token is None:
            self._decode_s += self._spent
            return
        self.prompt_tokens += prompt_tokens
        self._prefill_s += self._spent
        if self.first_token_s is None:
            self.first_token_s = self._spent
        with self._held.phase("decode"):
            while token is not None:
                self.generated += 1
                self._decoded += token.index > 0
                yield token
                token = self._timed(tokens)
                self._decode_s += self._spent

    def timings(self) -> Timings:
        """The sums as a report."""
        return Timings(
            import_s=self.import_s,
            load_s=self.load_s,
            first_token_s=self.first_token_s,
            prompt_tokens=self.prompt_tokens,
            prompt_tokens_per_s=_rate(self.prompt_tokens, self._prefill_s),
            generated_tokens=self.generated,
            generated_tokens_per_s=_rate(self._decoded, self._decode_s),
            peak_memory_bytes=highest_bytes(self._device),
            peaks=(*self.peaks, *self._phase_peaks()),
        )

    def _phase_peaks(self) -> Iterator[PhasePeak]:
        """Of what took place: after a single new token there was no decoding."""
        for peak in self._held.peaks:
            if peak.phase != "decode" or self._decoded:
                yield peak

    def _timed(self, tokens: Iterator[T]) -> T | None:
        """The next token, None after the last one; `_spent` are its seconds."""
        begin = perf_counter()
        token = next(tokens, None)
        self._spent = perf_counter() - begin
        self.elapsed += self._spent
        return token


def _rate(count: int, seconds: float) -> float | None:
    return count / seconds if count and seconds > 0 else None

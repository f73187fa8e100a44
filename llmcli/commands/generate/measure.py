"""How long generation takes, measured from outside the engine: it knows no clocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Protocol, TypeVar

from llmcli.observe.held import Held
from llmcli.observe.peaks import highest_bytes
from llmcli.reports.text import PhasePeak, Timings

if TYPE_CHECKING:
    import torch


class _Indexed(Protocol):
    @property
    def index(self) -> int: ...


T = TypeVar("T", bound=_Indexed)


@dataclass(kw_only=True)
class Tally:
    """Tokens, and the engine's seconds that they took; `decoded` are those after a first one."""

    prompt_tokens: int = 0
    generated: int = 0
    decoded: int = 0
    first_token_s: float | None = None
    prefill_s: float = 0.0
    decode_s: float = 0.0


class Stopwatch:
    """Adds up the time that several streams of tokens took, one after the other.

    Only the time spent inside the engine counts, not what the consumer does with a token.
    A stream's first token costs the prompts; the others (`index` > 0) cost decoding. `total` is of
    all streams. Memory is watched too, on `device` where it is a GPU.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.peaks: tuple[PhasePeak, ...] = ()  # of what was before the streams
        self._device = device
        self._held = Held(device)
        self.import_s = 0.0
        self.load_s = 0.0
        self.elapsed = 0.0
        self.total = Tally()
        self._stream = Tally()  # the stream that runs
        self._spent = 0.0

    def watch(self, tokens: Iterator[T], prompt_tokens: int) -> Iterator[T]:
        """Passes the tokens of one stream on; `elapsed` is the engine's seconds so far."""
        total = self.total
        with self._held.phase("prefill"):
            token = self._timed(tokens)
        if token is None:
            total.decode_s += self._spent
            return
        stream = self._stream = Tally(prefill_s=self._spent, first_token_s=self._spent)
        total.prompt_tokens += prompt_tokens
        total.prefill_s += self._spent
        if total.first_token_s is None:
            total.first_token_s = self._spent
        with self._held.phase("decode"):
            while token is not None:
                total.generated += 1
                total.decoded += token.index > 0
                yield token
                token = self._timed(tokens)
                total.decode_s += self._spent
                stream.decode_s += self._spent

    def credit(self, tally: Tally, token: _Indexed, prompt_tokens: int) -> None:
        """Counts the token that was passed on last for one prompt of its stream, of that length.

        Prompts that run side by side share their seconds: each is given those from the stream's
        begin to its own last token.
        """
        tally.prompt_tokens = prompt_tokens
        tally.generated += 1
        tally.decoded += token.index > 0
        tally.first_token_s = self._stream.first_token_s
        tally.prefill_s, tally.decode_s = self._stream.prefill_s, self._stream.decode_s

    def timings(self, tally: Tally | None = None) -> Timings:
        """`tally` as a report (None: the total), with the loading and the memory of the run."""
        one = self.total if tally is None else tally
        return Timings(
            import_s=self.import_s,
            load_s=self.load_s,
            first_token_s=one.first_token_s,
            prompt_tokens=one.prompt_tokens,
            prompt_tokens_per_s=_rate(one.prompt_tokens, one.prefill_s),
            generated_tokens=one.generated,
            generated_tokens_per_s=_rate(one.decoded, one.decode_s),
            peak_memory_bytes=highest_bytes(self._device),
            peaks=(*self.peaks, *self._phase_peaks()),
        )

    def _phase_peaks(self) -> Iterator[PhasePeak]:
        """Of what took place: after a single new token there was no decoding."""
        for peak in self._held.peaks:
            if peak.phase != "decode" or self.total.decoded:
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

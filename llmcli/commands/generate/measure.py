"""A run of `generate`: tokens from the engine, and the time and memory that they took."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING

from llmcli.measure.peaks import PhaseMemory, highest_bytes
from llmcli.records.text import Timings
from llmcli.records.work import Progress

if TYPE_CHECKING:
    from llmcli.engine.output import Token
    from llmcli.engine.speculation import Speculation
    from llmcli.engine.stream import TextRequest
    from llmcli.shell.running import Loaded

ROWS = 8  # sequences that run side by side
WINDOW = 64  # prompts that are sorted by length to form groups; results wait no longer


@dataclass(kw_only=True)
class Tally:
    """Tokens, and seconds in the engine. `decoded`: tokens after the first one of a sequence."""

    prompt_tokens: int = 0
    generated: int = 0
    decoded: int = 0
    first_token_s: float | None = None
    prefill_s: float = 0.0
    decode_s: float = 0.0

    def count(self, token: Token) -> None:
        """Counts one more token."""
        self.generated += 1
        self.decoded += token.index > 0


class Stopwatch:
    """Adds up the time that several streams of tokens took, one after the other.

    Only the time spent inside the engine counts, not what the consumer does with a token.
    A stream's first token costs the prompts; the others (`index` > 0) cost decoding. `total` is of
    all streams. Memory is watched too, on the model's first device where it is a GPU. `loaded` has
    the seconds and the memory of what came before the streams.
    """

    def __init__(self, loaded: Loaded) -> None:
        self._loaded = loaded
        self._held = PhaseMemory(loaded.model.decoder.devices[0])
        self.elapsed = 0.0
        self.total = Tally()
        self._stream = Tally()  # the stream that runs

    def watch(self, tokens: Iterator[Token], prompt_tokens: int) -> Iterator[Token]:
        """Yields the tokens of one stream; `elapsed`: seconds in the engine so far."""
        total, begin = self.total, self.elapsed
        with self._held.phase("prefill"):
            token = self._timed(tokens)
        first = self.elapsed
        stream = self._stream = Tally(prefill_s=first - begin, first_token_s=first - begin)
        if token is not None:
            total.prompt_tokens += prompt_tokens
            total.prefill_s += stream.prefill_s
            if total.first_token_s is None:
                total.first_token_s = stream.first_token_s
        with self._held.phase("decode"):
            while token is not None:
                total.count(token)
                yield token
                token = self._timed(tokens)
                stream.decode_s = self.elapsed - first
                total.decode_s = self.elapsed - total.prefill_s

    def credit(self, tally: Tally, token: Token, prompt_tokens: int) -> None:
        """Counts the last token of `watch` for its prompt, of `prompt_tokens` tokens.

        Prompts that run side by side share their seconds: each has those from the start of the
        stream to its own last token.
        """
        tally.prompt_tokens = prompt_tokens
        tally.count(token)
        tally.first_token_s = self._stream.first_token_s
        tally.prefill_s, tally.decode_s = self._stream.prefill_s, self._stream.decode_s

    def timings(self, tally: Tally | None = None) -> Timings:
        """`tally` as a report (None: the total), with the loading and the memory of the run."""
        one = self.total if tally is None else tally
        # after a single new token there was no decoding
        peaks = [peak for peak in self._held.peaks if peak.phase != "decode" or self.total.decoded]
        return Timings(
            import_s=self._loaded.import_s,
            load_s=self._loaded.load_s,
            first_token_s=one.first_token_s,
            prompt_tokens=one.prompt_tokens,
            prompt_tokens_per_s=_rate(one.prompt_tokens, one.prefill_s),
            generated_tokens=one.generated,
            generated_tokens_per_s=_rate(one.decoded, one.decode_s),
            peak_memory_bytes=highest_bytes(self._loaded.model.device),
            peaks=(*self._loaded.peaks, *peaks),
        )

    def _timed(self, tokens: Iterator[Token]) -> Token | None:
        """The next token, None after the last one."""
        begin = perf_counter()
        token = next(tokens, None)
        self.elapsed += perf_counter() - begin
        return token


class Run:
    """Generates the texts of a request, group by group, and keeps count on the way.

    `ties`: near ties by the number of their sequence. `reprefilled`: how many tokens were read
    once more, each time. `side_by_side`: for each prompt, the number of texts generated at once.
    """

    def __init__(
        self, loaded: Loaded, request: TextRequest, speculation: Speculation | None = None
    ) -> None:
        self.model = loaded.model
        self.request = request
        self.speculation = speculation
        self.watch = Stopwatch(loaded)
        self.tallies = [Tally() for _ in request.prompts]
        self.side_by_side = [1] * len(request.prompts)
        self.reprefilled: list[int] = []
        self.ties: list[tuple[int, Token]] = []
        # a text ended at the limit, with the context, or before a stop text
        self.limited = self.full = self.stopped = False
        self._groups = groups(list(map(len, request.prompts)), samples=request.samples)
        self._read = 0  # tokens of the first group's prompts that the model has read

    def tokens(
        self, reading: Callable[[], AbstractContextManager[Progress]]
    ) -> Iterator[tuple[int, Token]]:
        """All tokens with the number of their sequence: prompt · samples + sample.

        `reading` shows how far the prompts of a group are read.
        """
        from llmcli.engine.stream import stream

        request = self.request
        for group in self._groups:
            prompts = [request.prompts[index] for index in group]
            for index in group:
                self.side_by_side[index] = len(group) * request.samples
            with reading() as progress:

                def read(done: int, total: int, progress: Progress = progress) -> None:
                    self._read = done
                    progress("reading the prompt", done, total)

                tokens = stream(
                    self.model,
                    replace(request, prompts=prompts),
                    on_prefill=read,
                    on_reprefill=self.reprefilled.append,
                    speculation=self.speculation,
                )
                watched = self.watch.watch(tokens, sum(map(len, prompts)))
                token = next(watched, None)
            while token is not None:
                row, sample = divmod(token.sequence, request.samples)
                self.watch.credit(self.tallies[group[row]], token, len(prompts[row]))
                number = group[row] * request.samples + sample
                if token.finish == "length":
                    at_limit = token.index + 1 == request.limit
                    self.limited, self.full = self.limited or at_limit, self.full or not at_limit
                self.stopped = self.stopped or token.finish == "stop"
                if token.tied:
                    self.ties.append((number, token))
                yield number, token
                token = next(watched, None)

    def unread(self) -> str:
        """` while reading the prompt (512 of 700 tokens)`: where a run without tokens stopped."""
        total = sum(len(self.request.prompts[index]) for index in self._groups[0])
        return f" while reading the prompt ({self._read} of {total} tokens)"


def groups(lengths: Sequence[int], *, samples: int = 1) -> list[list[int]]:
    """Indices of prompts (`lengths` in tokens) that run together, at most ROWS sequences each.

    Rows of similar length waste little on padding; the order of the file is kept from one
    window to the next, so that results can be written early and in order.
    """
    rows = max(1, ROWS // samples)
    found = []
    for start in range(0, len(lengths), WINDOW):
        window = range(start, min(start + WINDOW, len(lengths)))
        ordered = sorted(window, key=lambda index: lengths[index])
        found += [sorted(ordered[i : i + rows]) for i in range(0, len(ordered), rows)]
    return found


def _rate(count: int, seconds: float) -> float | None:
    return count / seconds if count and seconds > 0 else None

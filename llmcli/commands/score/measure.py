"""How well a model predicts a text: log-probability and rank of every token.

Axes: T tokens of one forward call, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from time import perf_counter
from typing import TYPE_CHECKING

from llmcli.commands.score.report import Comparison, Score, ScoredToken, ScoreTimings
from llmcli.errors import NotFinite
from llmcli.records.work import Progress, no_progress
from llmcli.text.tokenizer import covered_bytes

if TYPE_CHECKING:
    from llmcli.model import Model

CHUNK = 256  # tokens of one forward call: bounds the logits to CHUNK × V numbers


def measure_score(
    model: Model,
    ids: Sequence[int],
    texts: Sequence[str],
    spans: Sequence[tuple[int, int]],
    *,
    window: int,
    stride: int,
    spelled: Callable[[int], str | None] = lambda id: None,
    progress: Progress = no_progress,
) -> Score:
    """Scores every token of `ids` but the first, given all tokens before it in its window.

    `texts[i]`: token i for display; `spans[i]`: its bytes of the text (start, end), which may
    overlap; `spelled`: the bytes of an id in hexadecimal. A text longer than `window` tokens is
    read in windows that begin `stride` tokens apart (1 ≤ stride < window). A token is scored in the
    first window that has it, so that all but the first window's tokens see at least window - stride
    tokens before them (the sliding window of Press et al. 2021, arXiv 2012.15832, section 3).
    Raises NotFinite.
    """
    begin = perf_counter()
    logprobs: list[float | None] = [None] * len(ids)
    ranks: list[int | None] = [None] * len(ids)
    for start, first, stop in windows(len(ids), window, stride):
        found = _window(model, ids[start:stop], first - start)
        for position, (logprob, rank) in enumerate(found, first):
            logprobs[position], ranks[position] = logprob, rank
            if position % 64 == 0:
                progress("scoring", position, len(ids))
    seconds = perf_counter() - begin
    tokens = tuple(
        ScoredToken(id=id, text=text, logprob=logprob, rank=rank, bytes=spelled(id))
        for id, text, logprob, rank in zip(ids, texts, logprobs, ranks, strict=True)
    )
    known = [logprob for logprob in logprobs if logprob is not None]
    pairs = zip(tokens, spans, strict=True)
    size = covered_bytes(span for token, span in pairs if token.logprob is not None)
    total = math.fsum(known)
    mean = total / len(known) if known else math.nan
    perplexity = math.inf
    with suppress(OverflowError):
        perplexity = math.exp(-mean)
    return Score(
        tokens=tokens,
        tokens_scored=len(known),
        bytes_scored=size,
        mean_logprob=mean,
        perplexity=perplexity,
        bits_per_byte=-total / math.log(2) / size if size else math.nan,
        window=window,
        stride=stride,
        timings=ScoreTimings(score_s=seconds),
    )


def windows(count: int, window: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """(start, first token to score, stop) of each window over `count` tokens.

    Every token but token 0 is scored exactly once; with 1 ≤ stride < window at least one token
    comes before it.
    """
    start, first = 0, 1
    while first < count:
        stop = min(start + window, count)
        if first < stop:
            yield start, first, stop
        first = max(first, stop)
        start += stride


def compare(ours: Score, theirs: Score) -> Comparison:
    """Their score minus ours; token by token where both have the same ids."""
    same = [token.id for token in ours.tokens] == [token.id for token in theirs.tokens]
    largest = mean = None
    if same and ours.tokens_scored:
        pairs = zip(ours.tokens, theirs.tokens, strict=True)
        largest = max(
            abs(_difference(a.logprob, b.logprob))
            for a, b in pairs
            if a.logprob is not None and b.logprob is not None
        )
        mean = _difference(ours.mean_logprob, theirs.mean_logprob)
    return Comparison(
        bits_per_byte=_difference(ours.bits_per_byte, theirs.bits_per_byte),
        mean_logprob=mean,
        largest_difference=largest,
        same_tokens=same,
    )


def _difference(ours: float, theirs: float) -> float:
    """Theirs minus ours; 0 where both are the same infinity."""
    return 0.0 if ours == theirs else theirs - ours


def _window(model: Model, ids: Sequence[int], first: int) -> Iterator[tuple[float, int]]:
    """Log-probability and rank of ids[first], ids[first + 1] … given all ids before each.

    The last id is never read: nothing comes after it.
    """
    import torch

    from llmcli.engine.session import Session
    from llmcli.model import dtype_name

    session = Session(model.decoder, 1, len(ids))
    totals = [len(ids)]  # the last id is a part of the text, though it is not read
    for start in range(0, len(ids) - 1, CHUNK):
        part = ids[start : min(start + CHUNK, len(ids) - 1)]
        if start + len(part) < first:
            session.extend([part], totals=totals, logits="none")
            continue
        logits_TV = session.extend([part], totals=totals, logits="all")[0]
        targets_T = torch.tensor(ids[start + 1 : start + 1 + len(part)], device=model.device)
        logprobs_TV = torch.log_softmax(logits_TV, -1)
        chosen_T = logprobs_TV.gather(1, targets_T[:, None])
        ranks_T = (logprobs_TV > chosen_T).sum(1) + 1
        for offset, (logprob, rank) in enumerate(
            zip(chosen_T[:, 0].tolist(), ranks_T.tolist(), strict=True)
        ):
            if math.isnan(logprob):
                raise NotFinite(
                    f"the logits after token {start + offset} are not finite",
                    dtype=dtype_name(model.dtype),
                )
            if start + 1 + offset >= first:
                yield logprob, rank

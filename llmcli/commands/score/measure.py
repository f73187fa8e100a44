"""How well a model predicts a text: log-probability and rank of every token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter

import torch

from llmcli.commands.score.report import Score, ScoredToken, ScoreTimings
from llmcli.inspect.windows import chosen, predictions, reader
from llmcli.model import Model
from llmcli.records.text import TextScore
from llmcli.records.work import Progress, no_progress


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
    overlap; `spelled`: the bytes of an id in hexadecimal. `window` and `stride`: see `predictions`.
    Raises NotFinite.
    """
    begin = perf_counter()
    logprobs: list[float | None] = [None] * min(len(ids), 1)
    ranks: list[int | None] = [None] * min(len(ids), 1)
    for position, (logits_TV,) in predictions([reader(model)], ids, window, stride):
        predicted = ids[position : position + len(logits_TV)]
        found = chosen(torch.log_softmax(logits_TV, -1), predicted, position, model.dtype)
        logprobs += found[0]
        ranks += found[1]
        progress("scoring", position, len(ids))
    seconds = perf_counter() - begin
    tokens = tuple(
        ScoredToken(id=id, text=text, logprob=logprob, rank=rank, bytes=spelled(id))
        for id, text, logprob, rank in zip(ids, texts, logprobs, ranks, strict=True)
    )
    return Score(
        **vars(TextScore.of(logprobs, spans)),
        tokens=tokens,
        window=window,
        stride=stride,
        timings=ScoreTimings(score_s=seconds),
    )

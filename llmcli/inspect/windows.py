"""What models predict along a text, which may be longer than their context.

Axes: T tokens of one forward call, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor

from llmcli.engine.session import Session
from llmcli.errors import NotFinite, UsageError
from llmcli.model import Model, dtype_name

CHUNK = 256  # tokens of one forward call: bounds the logits to CHUNK × V numbers

# `read(ids, logits=True)`: the logits `[T, V]` after each of the next tokens of a text
Read = Callable[..., Tensor]
Reader = Callable[[int], Read]  # begins a text of so many tokens


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


def edit_windows(model: Model, ids: Sequence[int], window: int) -> None:
    """Applies the model's edits to a text that may be longer than a window.

    Raises UsageError for an edit at positions of such a text, and the errors of `apply_edits`.
    """
    if not model.edits:
        return
    from llmcli.inspect.edits import apply_edits

    apply_edits(model, [ids], window)
    for edit in model.edits:
        positions = edit.prompt is not None or any(map(edit.ends, edit.places))
        if len(ids) > window and positions:
            raise UsageError(
                f"`--edit {edit.text}` names positions, and a window has only {window} tokens",
                hint="name none, or give a text that fits the context",
            )


def reader(model: Model) -> Reader:
    """Reads texts by a model, in one session each."""

    def begin(tokens: int) -> Read:
        session = Session(model.decoder, 1, tokens)

        def read(ids: Sequence[int], *, logits: bool = True) -> Tensor:
            # a last id that is not read is a part of the text, too
            of: Literal["all", "none"] = "all" if logits else "none"
            return session.extend([ids], totals=[tokens], logits=of)[0]

        return read

    return begin


def predictions(
    readers: Sequence[Reader], ids: Sequence[int], window: int, stride: int, *, beyond: bool = False
) -> Iterator[tuple[int, list[Tensor]]]:
    """(position, logits `[T, V]` of each reader): what they predict for the tokens from there on.

    All read chunk by chunk, side by side. A text longer than `window` tokens is read in windows
    that begin `stride` tokens apart (1 ≤ stride < window). A token is predicted in the first window
    that has it, so that all but the first window's tokens see at least window - stride tokens
    before them (the sliding window of Press et al. 2021, arXiv 2012.15832, section 3). `beyond`:
    also for the token after the last one.
    """
    for start, first, stop in windows(len(ids) + beyond, window, stride):
        reads = [begin(min(stop, len(ids)) - start) for begin in readers]
        for at in range(start, stop - 1, CHUNK):  # nothing comes after the last one
            part = ids[at : min(at + CHUNK, stop - 1)]
            needed = at + len(part) >= first
            logits = [read(part, logits=needed) for read in reads]
            begins = max(at + 1, first)
            if needed:
                yield begins, [one[begins - at - 1 :] for one in logits]


def chosen(
    logprobs_TV: Tensor, ids: Sequence[int], position: int, dtype: torch.dtype
) -> tuple[list[float], list[int]]:
    """The log-probabilities and ranks (1: likeliest) of `ids`, the first of them at `position`.

    Raises NotFinite for NaN; `dtype`: the model's.
    """
    chosen_T1 = logprobs_TV.gather(1, torch.tensor(ids, device=logprobs_TV.device)[:, None])
    ranks_T = (logprobs_TV > chosen_T1).sum(1) + 1
    if (wrong := chosen_T1[:, 0].isnan()).any():
        raise NotFinite(
            f"the logits after token {position - 1 + int(wrong.nonzero()[0])} are not finite",
            dtype=dtype_name(dtype),
        )
    return chosen_T1[:, 0].tolist(), ranks_T.tolist()

"""Prompts into a model's memory, some hundred tokens at a time.

Axes: P prompts, T tokens of one call, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from llmcli.anatomy.counts import PROMPT_CHUNK

if TYPE_CHECKING:
    from llmcli.nn.decoder import Decoder
    from llmcli.nn.state import State
    from llmcli.nn.step import Clock, Tap


@torch.inference_mode()
def prefill(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    state: State,
    *,
    chunk: int = PROMPT_CHUNK,
    on_prefill: Callable[[int, int], None] | None = None,
    clock: Clock | None = None,
    tap: Tap | None = None,
) -> Tensor:
    """Reads the prompts into `state`, padded on the right, and returns the last logits `[P, V]`.

    At most `chunk` tokens of each sequence are in one forward call, which bounds what attention
    needs. Final norm and head are computed only where a prompt ends. `on_prefill(done, total)` is
    called with the tokens read after each call, `clock` and `tap` with every activation in it.
    Raises ValueError where the prompts do not fit the state.
    """
    last_layer = len(decoder.blocks) - 1
    last_PV: Tensor | None = None
    before = state.lengths
    totals = [past + len(prompt) for past, prompt in zip(before, prompts, strict=True)]
    done, total = 0, sum(map(len, prompts))
    for start in range(0, max(map(len, prompts)), chunk):
        parts = [list(prompt[start : start + chunk]) for prompt in prompts]
        lengths = [len(part) for part in parts]
        width = max(lengths)
        ids_PT = torch.tensor([part + [0] * (width - len(part)) for part in parts])
        ending = [row for row, prompt in enumerate(prompts) if start < len(prompt) <= start + chunk]
        out = decoder(
            ids_PT.to(decoder.device),
            state,
            lengths=lengths,
            totals=totals,
            tap=tap,
            clock=clock,
            logits="last",
            until=None if ending else last_layer,
        )
        if ending:
            if last_PV is None:
                last_PV = out[:, 0]  # the rows of longer prompts are filled in later
            else:
                last_PV[ending] = out[ending, 0]
        done += sum(lengths)
        if on_prefill is not None:
            on_prefill(done, total)
    assert last_PV is not None
    return last_PV

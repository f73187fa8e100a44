"""Whether captured decode steps compute what computed ones do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from llmcli.engine.session import Session
from llmcli.nn.decoder import Decoder


@dataclass(frozen=True, kw_only=True)
class CapturedCheck:
    """Decode steps with a captured one and without, of the same tokens.

    `difference` is the largest of two logits: 0 on a card, where both launch the same kernels; on a
    processor, which runs the step for a card eagerly, that of rounding where its own steps use
    other kernels. `graphs` are those that were captured, of `buckets` of so many slots; `reason`
    says why there are none.
    """

    steps: int
    difference: float
    graphs: int
    buckets: tuple[int, ...]
    reason: str | None


def compare_captured(
    decoder: Decoder, prompts: Sequence[Sequence[int]], steps: int
) -> CapturedCheck:
    """Reads prompts and so many greedy tokens after them, twice.

    For a border between buckets in it, prompt and steps have to be longer than
    `decoder.first_bucket`. The decoder is left as it was, but for `not_captured`, where a capture
    fails.
    """
    capacity = max(map(len, prompts)) + steps

    def decoded(tokens: list[Tensor], *, computed: bool) -> tuple[Tensor, Session]:
        """Logits `[steps, B, V]`; with a clock nothing is replayed."""
        session = Session(decoder, len(prompts), capacity)
        session.prefill(prompts)
        rows = []
        for step in range(steps):
            assert session.logits_BV is not None
            if step == len(tokens):
                tokens.append(session.logits_BV.argmax(-1, keepdim=True))
            rows.append(session.extend(tokens[step], clock=_ignored if computed else None))
        return torch.stack(rows), session

    tokens: list[Tensor] = []
    expected, _ = decoded(tokens, computed=True)
    before = decoder.fixed_shapes
    decoder.fixed_shapes = before or (decoder.device.type == "cpu" and not decoder.by_length)
    try:
        found, session = decoded(tokens, computed=False)
    finally:
        decoder.fixed_shapes = before
    captured = session.state.captured
    return CapturedCheck(
        steps=steps,
        difference=float((found - expected).abs().max()),
        graphs=0 if captured is None else captured.captured,
        buckets=() if captured is None else tuple(sorted(captured.buckets)),
        reason=decoder.not_captured,
    )


def _ignored(name: str) -> None:
    """A clock, for which nothing is replayed."""

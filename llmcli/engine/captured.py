"""Compares captured decode steps with computed ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from llmcli.engine.session import Session
from llmcli.nn.decoder import Decoder


@dataclass(frozen=True, kw_only=True)
class CapturedCheck:
    """Result of decoding the same tokens with captured and with computed steps.

    `difference`: largest difference of two logits; 0 on a GPU, where both launch the same kernels;
    on a CPU, which runs the GPU's step eagerly, rounding if its own steps use other kernels.
    `graphs`: number of captured graphs; `buckets`: their slots; `reason`: why there are none.
    """

    steps: int
    difference: float
    graphs: int
    buckets: tuple[int, ...]
    reason: str | None


def compare_captured(
    decoder: Decoder, prompts: Sequence[Sequence[int]], steps: int
) -> CapturedCheck:
    """Prefill prompts and decode `steps` greedy tokens, twice.

    To cross a bucket border, prompt and steps must be longer than `decoder.first_bucket`. The
    decoder is unchanged, except `not_captured` if a capture fails.
    """
    capacity = max(map(len, prompts)) + steps

    def decoded(tokens: list[Tensor], *, computed: bool) -> tuple[Tensor, Session]:
        """Logits `[steps, B, V]`; a clock disables replay."""
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
    """A clock, which disables replay."""

"""Answers that are given beforehand, for what follows from them: no model is asked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from llmcli.generation import conversation
from llmcli.generation.output import Choice


def speak(monkeypatch, answers: Iterable[Sequence[int]]) -> None:
    """Each answer of any conversation has the ids of the next of `answers`."""
    given = iter(answers)

    class Scripted:
        def __init__(self, *arguments, **more):
            self._ids = iter(next(given))

        def pick(self, logits_BV):
            token = next(self._ids)
            return torch.tensor([token]), [Choice(token, None, ())]

    monkeypatch.setattr(conversation, "Picker", Scripted)

"""Answers that are given beforehand, for what follows from them: no choice of a model is asked.

As a program: llmcli, whose answers are those of $ANSWERS, a JSON list of lists of ids, a token
every $PACE seconds. Where an id is below 0, the signal of that number comes.
"""

import json
import os
import signal
import time
from collections.abc import Callable, Iterable, Sequence

import torch

from llmcli.engine import conversation, stream
from llmcli.engine.output import Choice


def speak(
    patch: Callable[[object, str, object], None],
    answers: Iterable[Sequence[int]],
    pace: float = 0.0,
) -> None:
    """Each answer of `chat`, and each text of `generate`, has the ids of the next of `answers`."""
    given = iter(answers)

    class Scripted:
        def __init__(self, *arguments, **more):
            self._ids = iter(next(given))

        def pick(self, logits_BV):
            time.sleep(pace)
            token = next(self._ids)
            if token < 0:
                signal.raise_signal(-token)
            return torch.tensor([token]), [Choice(token, None, ())]

    for module in (conversation, stream):
        patch(module, "Sampler", Scripted)


if __name__ == "__main__":
    from llmcli.__main__ import script

    speak(setattr, json.loads(os.environ["ANSWERS"]), float(os.environ.get("PACE", "0")))
    script()

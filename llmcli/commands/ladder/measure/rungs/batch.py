"""Rung 7: a batch, every tensor of rung 6 one rank higher: `b × n × d`.

The sequences have equal lengths. The names are those of rung 6, whose values have an axis
more in front.
"""

from __future__ import annotations

from typing import ClassVar

from llmcli.commands.ladder.measure.rungs.cache import KeyValueCache


class Batch(KeyValueCache):
    """The forward pass of several sequences at once, `[b, n]` ids, prompt and cached rows alike.

    No line of arithmetic changes: every operation of rung 6 counts its axes from the last one on,
    and there is one more before them. Its caches have the axes that the ids have.
    """

    number: ClassVar[int] = 7
    name: ClassVar[str] = "batch"
    batched: ClassVar[bool] = True

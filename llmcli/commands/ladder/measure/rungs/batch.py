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
    title: ClassVar[str] = "a batch: several sequences at once, one rank higher"
    batched: ClassVar[bool] = True
    change: ClassVar[tuple[str, str]] = (
        "activations of one sequence: n × d, heads h × n × d/h; logits n × v",
        "activations of b sequences: b × n × d, heads b × h × n × d/h\n"
        "logits b × n × v; the weights as before: they have no b",
    )
    idea: ClassVar[str] = (
        "Sequences do not see each other, so b of them are one more leading dimension that the "
        "library loops over, like the heads; the weights have none. Each number is computed as "
        "before. What is saved is reading: a weight fetched from memory serves b rows, so the "
        "GEMVs of a new token become products of b rows. Only the cache grows with b, "
        "b × {kv_heads} × n × d/h for keys. Here the sequences have equal lengths; shorter ones "
        "would be padded, and then the last row needs its mask back."
    )

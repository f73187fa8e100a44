"""What the letters of the axes stand for in one model, and what the documents call the same.

The sizes are those that the parts say, not those of the specs that they are held against.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

from llmcli.anatomy.graph import graph
from llmcli.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class Letters:
    """The axes of one call: `batch` sequences bring `tokens` each to `past` cached ones."""

    config: ModelConfig
    batch: int
    tokens: int
    past: int

    def size(self, axis: str, layer: int | None) -> int:
        """How long an axis is, a product (`H·dh`) too; `layer` for letters that layers differ in.

        Raises KeyError for an unknown letter.
        """
        sizes = self.sizes(layer)
        return prod(sizes[letter] for letter in axis.split("·"))

    def sizes(self, layer: int | None) -> Mapping[str, int]:
        """Letter → size: of the whole model, and of that layer where one is given."""
        if layer not in self._found:
            self._found[layer] = self._sizes(layer)
        return self._found[layer]

    @cached_property
    def _found(self) -> dict[int | None, dict[str, int]]:
        return {}

    def _sizes(self, layer: int | None) -> dict[str, int]:
        call = {"B": self.batch, "T": self.tokens, "S": self.past + self.tokens}
        return {**graph(self.config).sizes(layer), **call}

    def documented(self, axes: tuple[str, ...], layer: int | None) -> tuple[str, ...]:
        """The same axes as the documents write them: `b`, `h`, `n`, `d/h`.

        n is all tokens so far. A decode step computes the last row only, so that its T is `1`.
        """
        whole = {"B": "b", "S": "n", "D": "d", "V": "v"}
        whole["T"] = "n" if self.past == 0 else str(self.tokens)
        letters = {**whole, **graph(self.config).documents(layer)}
        return tuple(_together(axis, letters) for axis in axes)


def _together(axis: str, letters: Mapping[str, str]) -> str:
    """`d` for the axis of all heads' numbers, where they share the width."""
    written = [letters.get(one, one) for one in axis.split("·")]
    return "d" if written == ["h", "d/h"] else "·".join(written)

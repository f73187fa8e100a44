"""Sizes of axis letters in a model, and their notation in the documents.

The sizes come from the parts, independent of the specs that are compared with them.
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
    """The axes of one call: `batch` sequences of `tokens` new tokens after `past` cached ones."""

    config: ModelConfig
    batch: int
    tokens: int
    past: int

    def size(self, axis: str, layer: int | None) -> int:
        """The size of an axis or a product (`H·dh`); `layer`: for letters that differ by layer.

        Raises KeyError for an unknown letter.
        """
        sizes = self.sizes(layer)
        return prod(sizes[letter] for letter in axis.split("·"))

    def sizes(self, layer: int | None) -> Mapping[str, int]:
        """Letter → size: of the model, plus those of `layer` if given."""
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
        """The axes in the documents' notation: `b`, `h`, `n`, `d/h`. n is all tokens so far.

        A decode step only computes the last row, so its T is `1`.
        """
        whole = {"B": "b", "S": "n", "D": "d", "V": "v"}
        whole["T"] = "n" if self.past == 0 else str(self.tokens)
        letters = {**whole, **graph(self.config).documents(layer)}
        return tuple(_together(axis, letters) for axis in axes)


def _together(axis: str, letters: Mapping[str, str]) -> str:
    """The axis in the documents' notation: `d` for all heads if they divide the width."""
    written = [letters.get(one, one) for one in axis.split("·")]
    return "d" if written == ["h", "d/h"] else "·".join(written)

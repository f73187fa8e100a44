"""What the letters of the axes stand for in one model, and what the documents call the same.

The sizes come from the configuration and the call, not from the specs that they are held against.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

from llmcli.config import LayerConfig, ModelConfig


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
        config = self.config
        found = {
            "B": self.batch,
            "T": self.tokens,
            "S": self.past + self.tokens,
            "D": config.width,
            "V": config.vocab,
            "1": 1,
        }
        if config.embedding.positions is not None:
            found["P"] = config.embedding.positions
        if layer is not None:
            mixer = config.layers[layer].mixer
            found |= {
                "H": mixer.heads,
                "Hk": mixer.kv_heads,
                "dh": mixer.head_dim,
                "dv": mixer.value_dim,
                "F": config.layers[layer].ffn.hidden,
            }
        return found

    def documented(self, axes: tuple[str, ...], layer: int | None) -> tuple[str, ...]:
        """The same axes as the documents write them: `b`, `h`, `n`, `d/h`.

        n is all tokens so far. A decode step computes the last row only, so that its T is `1`.
        """
        block = None if layer is None else self.config.layers[layer]
        return tuple(self._documented(axis, block) for axis in axes)

    def _documented(self, axis: str, block: LayerConfig | None) -> str:
        whole = {"B": "b", "S": "n", "D": "d", "V": "v"}
        if axis == "T":
            return "n" if self.past == 0 else str(self.tokens)
        if block is None or axis in whole:
            return whole.get(axis, axis)
        return self._in_block(axis, block)

    def _in_block(self, axis: str, block: LayerConfig) -> str:
        mixer, width = block.mixer, self.config.width
        size = "d/h" if mixer.divides(width) else "d_k"
        letters = {
            "H": "h",
            "Hk": "h" if mixer.kv_heads == mixer.heads else "h_kv",
            "dh": size,
            "dv": size if mixer.value_dim == mixer.head_dim else "d_v",
            "F": "4d" if block.ffn.hidden == 4 * width else "F",
        }
        heads, _, part = axis.partition("·")
        if not part:
            return letters.get(axis, axis)
        if letters[heads] == "h" and letters[part] == "d/h":
            return "d"
        return f"{letters[heads]}·{letters[part]}"

"""What a file of `llmcli attention` will hold, and how large it gets: known before the run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from llmcli.cli.files import check_size
from llmcli.errors import UsageError
from llmcli.reports.matrix import What
from llmcli.reports.numbers import spans

if TYPE_CHECKING:
    from llmcli.ui.arrays import ArrayPlan
    from llmcli.ui.palette import Kind

ARRAYS = ("safetensors", "npz")
# bytes of a number of a JSON document, with its nine digits, and of a masked one
DIGITS, ZERO = 13.5, 5
SMALLER = "name fewer layers and heads with --layer and --head"


@dataclass(frozen=True, kw_only=True)
class Planned:
    """Matrices of `heads[layer]`, over `known` tokens (id, text) and up to `new` more.

    `dtype` is that of arrays; other files hold float32.
    `windows[layer]`: how many keys a query sees at most, None for all; `signed`: the layers whose
    weights have signs. `parts[layer]`: what its activations' names begin with. `title` is the
    model's line, `name` the model. `drawn`: whether matrices are in the report; `metric` has the
    map that is drawn else. `metrics`: how many each head has.
    """

    file: str
    kind: str
    name: str
    title: str
    what: What
    dtype: Literal["float32", "float64"]
    heads: Mapping[int, tuple[int, ...]]
    windows: Mapping[int, int | None]
    signed: frozenset[int]
    parts: Mapping[int, str]
    known: Sequence[tuple[int, str]]
    new: int
    drawn: bool
    scale: Kind | None
    metric: str
    metrics: int
    force: bool

    @property
    def tokens(self) -> int:
        """The most tokens that there will be."""
        return len(self.known) + self.new

    def arrays(self) -> list[ArrayPlan]:
        """The arrays, one a layer."""
        from llmcli.ui.arrays import ArrayPlan

        shape = (self.tokens, self.tokens)
        return [
            ArrayPlan(self.array_name(layer), self.dtype, (len(heads), *shape))
            for layer, heads in self.heads.items()
        ]

    def array_name(self, layer: int) -> str:
        """`blocks.3.attn.pattern`."""
        return f"{self.parts[layer]}.{self.what}"

    def metadata(self, tokens: Sequence[tuple[int, str]], *, ok: bool) -> dict[str, str]:
        """What stands beside arrays: JSON of the ids and the texts of all `tokens`."""
        heads = {str(layer): list(numbers) for layer, numbers in self.heads.items()}
        return {
            "schema": "llmcli.attention/1",
            "model": self.name,
            "what": self.what,
            "ids": json.dumps([id for id, _ in tokens]),
            "tokens": json.dumps([text for _, text in tokens]),
            "prompt_tokens": str(len(self.known)),
            "heads": json.dumps(heads),
            "ok": json.dumps(ok),
        }

    def size(self) -> int:
        """Bytes of the file, about."""
        most = max(map(len, self.heads.values()))
        windows = [self.windows[layer] for layer in self.heads]
        if self.kind in ARRAYS:
            from llmcli.ui.arrays import array_file_size

            return array_file_size(self.kind, self.arrays(), self.metadata(self.known, ok=True))
        if self.kind == "csv":
            from llmcli.commands.attention.view.as_csv import csv_file_size

            texts = [text for _, text in self.known]
            new = [texts[at % len(texts)] for at in range(self.new)]
            return csv_file_size([*texts, *new], windows, most)
        if self.kind == "html":
            from llmcli.commands.attention.view.page import page_size

            return page_size(self.tokens, windows, most, self.metrics)
        return 0 if self.kind == "png" else text_size(self.heads, self.tokens)

    def holds(self, tokens: int) -> str:
        """What a reader finds in the file, written of so many tokens."""
        if self.kind in ARRAYS:
            return "; ".join(self._arrays_of(heads, tokens) for heads in self._alike())
        if self.kind == "png" and not self.drawn:
            return f"the map of {self.metric}, {self._named}"
        cells = "" if self.kind == "png" else f", {tokens} × {tokens} tokens"
        return f"{self.what} of {self._named}{cells}"

    def _alike(self) -> list[tuple[int, ...]]:
        return list(dict.fromkeys(self.heads.values()))

    def _arrays_of(self, heads: tuple[int, ...], tokens: int) -> str:
        parts: dict[str, list[int]] = {}  # by what they are called in a block
        for layer, chosen in self.heads.items():
            if chosen == heads:
                parts.setdefault(self.array_name(layer).split(".", 2)[2], []).append(layer)
        counted = _counted("head", heads)
        return "; ".join(
            f"blocks.{spans(layers)}.{name} [{len(heads)} {tokens} {tokens}]"
            f"{'' if len(layers) == 1 else ' each'}, {counted}"
            for name, layers in parts.items()
        )

    @property
    def _named(self) -> str:
        parts = []
        for heads in self._alike():
            layers = [layer for layer, chosen in self.heads.items() if chosen == heads]
            parts.append(f"{_counted('layer', layers)} {_counted('head', heads)}")
        return "; ".join(parts)

    def check(self) -> None:
        """Raises UsageError, or WriteFailed, where the file would be too large."""
        check_size(self.file, self.size(), force=self.force, smaller=SMALLER)


def _counted(noun: str, numbers: Sequence[int]) -> str:
    return f"{noun}{'s' if len(numbers) != 1 else ''} {spans(numbers)}"


def text_size(heads: Mapping[int, tuple[int, ...]], tokens: int) -> int:
    """Bytes of causal matrices as JSON, about: half of each is masked."""
    seen = tokens * (tokens + 1) // 2
    each = seen * DIGITS + (tokens * tokens - seen) * ZERO
    return round(sum(map(len, heads.values())) * each)


def check_text_size(heads: Mapping[int, tuple[int, ...]], tokens: int, *, force: bool) -> None:
    """Raises UsageError where the matrices in a document on stdout would be too many."""
    from llmcli.cli.files import FILE_CAP
    from llmcli.ui.stats import size

    found = text_size(heads, tokens)
    if found > FILE_CAP and not force:
        raise UsageError(
            f"the document would take about {size(found)}, more than {size(FILE_CAP)}",
            hint=f"{SMALLER}, write `-o FILE.safetensors`, or add --force",
        )

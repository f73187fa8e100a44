"""The files of `llmcli attention`: written while the layers are computed, whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

from llmcli.cli.files import FILE_CAP, check_size, whole_file
from llmcli.cli.output import write_document, write_file
from llmcli.errors import UsageError
from llmcli.reports.attention import AttentionReport, What

if TYPE_CHECKING:
    import numpy as np

    from llmcli.render.arrays import ArrayPlan, ArrayWriter
    from llmcli.render.palette import Kind

# bytes of a number as text: with its nine digits, and a masked one
DIGITS, ZERO = 14, 5
SMALLER = "name fewer layers and heads with --layer and --head"


@dataclass(frozen=True, kw_only=True)
class Planned:
    """What is going to be written: matrices of `heads[layer]` heads over `tokens` tokens at most.

    `title` is the model's line, `name` the model. `drawn`: whether matrices are in the report.
    """

    file: str
    kind: str
    name: str
    title: str
    what: What
    heads: Mapping[int, tuple[int, ...]]
    tokens: int
    drawn: bool
    scale: Kind | None
    metric: str
    force: bool

    def arrays(self) -> list[ArrayPlan]:
        """The arrays, one a layer."""
        from llmcli.render.arrays import ArrayPlan

        return [
            ArrayPlan(array_name(layer, self.what), "float32", (len(heads), *[self.tokens] * 2))
            for layer, heads in self.heads.items()
        ]

    def check(self) -> None:
        """Raises UsageError, or WriteFailed, where the file would be too large."""
        from llmcli.render.arrays import array_file_size

        size = 0
        if self.kind in ("safetensors", "npz"):
            size = array_file_size(self.kind, self.arrays(), {"": " " * 40 * self.tokens})
        elif self.kind == "json":
            size = text_size(sum(map(len, self.heads.values())), self.tokens)
        check_size(self.file, size, force=self.force, smaller=SMALLER)


def array_name(layer: int, what: What) -> str:
    """`blocks.3.attn.pattern`."""
    return f"blocks.{layer}.attn.{what}"


def text_size(heads: int, tokens: int) -> int:
    """Bytes of so many causal matrices as JSON, about: half of each is masked."""
    return heads * (tokens * (tokens + 1) // 2 * DIGITS + tokens * (tokens - 1) // 2 * ZERO)


def check_text_size(heads: Mapping[int, tuple[int, ...]], tokens: int, *, force: bool) -> None:
    """Raises UsageError where the matrices in a JSON document would be too many."""
    size = text_size(sum(map(len, heads.values())), tokens)
    if size > FILE_CAP and not force:
        from llmcli.render.stats import size as words

        raise UsageError(
            f"the document would take about {words(size)}, more than {words(FILE_CAP)}",
            hint=f"{SMALLER}, write -o FILE.safetensors, or add --force",
        )


class Export(Protocol):
    """A file that is being written. `whole`: it needs whole matrices, through `add`."""

    whole: bool

    def add(self, layer: int, values_HTS: np.ndarray) -> None:
        """All matrices of a layer, layer by layer in order."""

    def finish(self, report: AttentionReport, document: Mapping[str, Any]) -> None:
        """What is written at the end. `document`: the JSON document of the run."""


@contextmanager
def opened(planned: Planned) -> Iterator[Export]:
    """The file, which is there once the block has ended well. Raises WriteFailed."""
    if planned.kind in ("safetensors", "npz"):
        with whole_file(planned.file) as file:
            yield _Arrays(planned, file)
    elif planned.kind == "json":
        yield _Document(planned)
    else:
        yield _Picture(planned)


class _Arrays:
    whole = True

    def __init__(self, planned: Planned, file: BinaryIO) -> None:
        from llmcli.render.arrays import array_writer

        self._planned = planned
        room = {"": " " * 40 * planned.tokens}  # for the tokens, which are known at the end
        self._writer: ArrayWriter = array_writer(planned.kind, file, planned.arrays(), room)

    def add(self, layer: int, values_HTS: np.ndarray) -> None:
        self._writer.write(array_name(layer, self._planned.what), values_HTS)

    def finish(self, report: AttentionReport, document: Mapping[str, Any]) -> None:
        texts = {
            "schema": document["schema"],
            "model": self._planned.name,
            "what": report.what,
            "ids": json.dumps([id for id, _ in report.tokens]),
            "tokens": json.dumps([text for _, text in report.tokens]),
            "prompt_tokens": str(report.prompt_tokens),
            "heads": json.dumps(
                {str(layer): heads for layer, heads in self._planned.heads.items()}
            ),
            "ok": json.dumps(report.ok),
        }
        self._writer.finish(texts)


@dataclass
class Matrices:
    """The matrices of a run by layer, kept for a document."""

    what: What
    whole = True
    by_layer: dict[int, np.ndarray] = field(default_factory=dict)

    def add(self, layer: int, values_HTS: np.ndarray) -> None:
        """All matrices of a layer."""
        self.by_layer[layer] = values_HTS.copy()

    def into(self, document: dict[str, Any]) -> dict[str, Any]:
        """The document with each head's matrix in it, under the name of what it is."""
        layers = [
            layer | {"heads": [
                head | {self.what: self.by_layer[layer["layer"]][at]}
                for at, head in enumerate(layer["heads"])
            ]}
            for layer in document["layers"]
        ]  # fmt: skip
        return document | {"layers": layers}


class _Document:
    whole = True

    def __init__(self, planned: Planned) -> None:
        self._file, self._kept = planned.file, Matrices(planned.what)

    def add(self, layer: int, values_HTS: np.ndarray) -> None:
        self._kept.add(layer, values_HTS)

    def finish(self, report: AttentionReport, document: Mapping[str, Any]) -> None:
        write_document(self._file, self._kept.into(dict(document)))


class _Picture:
    whole = False

    def __init__(self, planned: Planned) -> None:
        self._planned = planned

    def add(self, layer: int, values_HTS: np.ndarray) -> None:
        raise AssertionError("a picture is made of the report")

    def finish(self, report: AttentionReport, document: Mapping[str, Any]) -> None:
        from llmcli.render.attention_png import attention_png
        from llmcli.render.head_map_png import head_map_png

        planned = self._planned
        if planned.drawn:
            kind = planned.scale or ("sqrt" if report.what == "pattern" else "linear")
            image = attention_png(report, planned.title, kind=kind)
        else:
            image = head_map_png(
                report, planned.metric, planned.title, kind=planned.scale or "linear"
            )
        write_file(planned.file, image)

"""The files of `llmcli attention`, written while the layers are computed, whole or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

from llmcli.cli.files import whole_file
from llmcli.cli.output import write_document, write_file
from llmcli.commands.attention.files import ARRAYS, Planned
from llmcli.commands.attention.report.heads import AttentionReport
from llmcli.reports.matrix import What

if TYPE_CHECKING:
    import numpy as np

    from llmcli.commands.attention.measure.wanted import OnMatrix


class Export(Protocol):
    """A file that is being written."""

    @property
    def add(self) -> OnMatrix | None:
        """Takes all matrices of a layer, layer by layer in order; None where it needs none."""

    def finish(self, report: AttentionReport, document: Mapping[str, Any]) -> None:
        """What is written at the end. `document`: the JSON document of the run."""


@contextmanager
def opened(planned: Planned) -> Iterator[Export]:
    """The file, which is there once the block has ended well. Raises WriteFailed."""
    if planned.kind in ARRAYS:
        with whole_file(planned.file) as file:
            yield _Arrays(planned, file)
    else:
        makers: Mapping[str, Callable[[Planned], Export]]
        makers = {"json": _Document, "html": _Page, "png": _Picture, "csv": _Csv}
        yield makers[planned.kind](planned)


class _Arrays:
    def __init__(self, planned: Planned, file: BinaryIO) -> None:
        from llmcli.ui.arrays import array_writer

        self._planned = planned
        about = planned.metadata(planned.known, ok=True)
        self._writer = array_writer(planned.kind, file, planned.arrays(), about)

    def add(self, layer: int, values_HTS: np.ndarray) -> None:
        self._writer.write(self._planned.array_name(layer), values_HTS)

    def finish(self, report: AttentionReport, document: Mapping[str, Any]) -> None:
        self._writer.finish(self._planned.metadata(report.tokens, ok=report.ok))


@dataclass
class Matrices:
    """The matrices of a run by layer, kept for a document."""

    what: What
    by_layer: dict[int, np.ndarray] = field(default_factory=dict)

    def add(self, layer: int, values_HTS: np.ndarray) -> None:
        """All matrices of a layer, whose float32 a document has."""
        self.by_layer[layer] = values_HTS.astype("float32")

    def into(self, document: Mapping[str, Any]) -> dict[str, Any]:
        """The document with each head's matrix in it, under the name of what it is."""
        layers = [
            layer | {"heads": [
                head | {self.what: self.by_layer[layer["layer"]][at]}
                for at, head in enumerate(layer["heads"])
            ]}
            for layer in document["layers"]
        ]  # fmt: skip
        return dict(document) | {"layers": layers}


class _Document:
    def __init__(self, planned: Planned) -> None:
        self._file, self._kept = planned.file, Matrices(planned.what)

    def add(self, layer: int, values_HTS: np.ndarray) -> None:
        self._kept.add(layer, values_HTS)

    def finish(self, report: AttentionReport, document: Mapping[str, Any]) -> None:
        write_document(self._file, self._kept.into(document))


class _Csv:
    def __init__(self, planned: Planned) -> None:
        from llmcli.commands.attention.view.as_csv import AttentionCsv

        self._planned, self._table = planned, AttentionCsv()

    def add(self, layer: int, values_HTS: np.ndarray) -> None:
        self._table.add(layer, values_HTS, self._planned.windows[layer])

    def finish(self, report: AttentionReport, document: Mapping[str, Any]) -> None:
        with whole_file(self._planned.file) as file:
            for piece in self._table.pieces(report):
                file.write(piece)


class _Page:
    def __init__(self, planned: Planned) -> None:
        from llmcli.commands.attention.view.page import AttentionPage

        self._planned, self._page = planned, AttentionPage(planned.what)

    def add(self, layer: int, values_HTS: np.ndarray) -> None:
        planned = self._planned
        self._page.add(
            layer, values_HTS, planned.windows[layer], signed=layer in planned.signed
        )

    def finish(self, report: AttentionReport, document: Mapping[str, Any]) -> None:
        planned = self._planned
        kind = planned.scale or ("sqrt" if planned.what == "pattern" else "linear")
        write_file(planned.file, self._page.html(report, planned.title, kind=kind))


class _Picture:
    """The matrices that are drawn, of many heads the map."""

    add = None

    def __init__(self, planned: Planned) -> None:
        self._planned = planned

    def finish(self, report: AttentionReport, document: Mapping[str, Any]) -> None:
        from llmcli.commands.attention.view.as_png import attention_png
        from llmcli.commands.attention.view.map_as_png import head_map_png

        planned, title = self._planned, self._planned.title
        if planned.drawn:
            kind = planned.scale or ("sqrt" if planned.what == "pattern" else "linear")
            image = attention_png(report, title, kind=kind)
        else:
            image = head_map_png(report, planned.metric, title, kind=planned.scale or "linear")
        write_file(planned.file, image)

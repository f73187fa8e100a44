"""The files of `llmcli attention`, written while the layers are computed, whole or not at all.

How large a file gets is known before the run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

from llmcli.anatomy.graph import graph
from llmcli.commands.attention.options import ViewOptions
from llmcli.commands.attention.report.heads import AttentionReport
from llmcli.commands.attention.report.request import AttentionRequest, recurrent_layers
from llmcli.errors import UsageError
from llmcli.records.matrix import What
from llmcli.records.numbers import spans
from llmcli.shell.files import FILE_CAP, check_size, kind_of_file, page_to_open, whole_file
from llmcli.shell.looking import token_texts
from llmcli.shell.output import ExportFile, write_document, write_file

if TYPE_CHECKING:
    import numpy as np

    from llmcli.model import Model
    from llmcli.ui.arrays import ArrayPlan

OnMatrix = Callable[[int, "np.ndarray"], None]
ARRAYS = ("safetensors", "npz")
# bytes of a number of a JSON document, with its nine digits, and of a masked one
DIGITS, ZERO = 13.5, 5
SMALLER = "name fewer layers and heads with --layer and --head"


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A file with the matrices of a request over `known` tokens (id, text), and new ones."""

    file: str
    kind: str
    request: AttentionRequest
    model: Model
    known: Sequence[tuple[int, str]]

    @cached_property
    def title(self) -> str:
        """The model's line."""
        from llmcli.ui.stats import model_line

        return model_line(self.model.describe())

    @cached_property
    def heads(self) -> Mapping[int, tuple[int, ...]]:
        """The numbers of every layer's heads."""
        return self.request.chosen(self.model.config)

    @property
    def tokens(self) -> int:
        """The most tokens that there will be."""
        return len(self.known) + self.request.generate

    @cached_property
    def windows(self) -> dict[int, int | None]:
        """How many keys a query of each layer sees at most, None for all."""
        return {layer: self.model.config.layers[layer].window for layer in self.heads}

    @cached_property
    def signed(self) -> frozenset[int]:
        """The layers whose weights have signs."""
        return frozenset(recurrent_layers(self.model.config))

    def arrays(self) -> list[ArrayPlan]:
        """The arrays, one a layer, float32 but for a model in float64."""
        from llmcli.ui.arrays import ArrayPlan

        wide = str(self.model.dtype) == "torch.float64"
        dtype: Literal["float64", "float32"] = "float64" if wide else "float32"
        return [
            ArrayPlan(self.array_name(layer), dtype, (len(heads), self.tokens, self.tokens))
            for layer, heads in self.heads.items()
        ]

    def array_name(self, layer: int) -> str:
        """`blocks.3.attn.pattern`."""
        node = graph(self.model.config).mixing(layer)
        assert node is not None
        return f"{node.name.rpartition('.')[0]}.{self.request.what}"

    def metadata(self, tokens: Sequence[tuple[int, str]], *, ok: bool) -> dict[str, str]:
        """What stands beside arrays: JSON of the ids and the texts of all `tokens`."""
        heads = {str(layer): list(numbers) for layer, numbers in self.heads.items()}
        return {
            "schema": "llmcli.attention/1",
            "model": self.model.name,
            "what": self.request.what,
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
            from llmcli.commands.attention.view.export import csv_file_size

            texts = [text for _, text in self.known]
            new = [texts[at % len(texts)] for at in range(self.request.generate)]
            return csv_file_size([*texts, *new], windows, most)
        if self.kind == "html":
            from llmcli.commands.attention.view.export import page_size

            return page_size(self.tokens, windows, most, len(self.request.metrics))
        return 0 if self.kind == "png" else text_size(self.heads, self.tokens)

    def check(self, *, force: bool) -> None:
        """Raises UsageError, or WriteFailed, where the file would be too large."""
        check_size(self.file, self.size(), force=force, smaller=SMALLER)

    def holds(self, tokens: int) -> str:
        """What a reader finds in the file, written of so many tokens."""
        alike = list(dict.fromkeys(self.heads.values()))
        if self.kind in ARRAYS:
            return "; ".join(self._arrays_of(heads, tokens) for heads in alike)
        named = "; ".join(
            f"{_counted('layer', self._with(heads))} {_counted('head', heads)}" for heads in alike
        )
        if self.kind == "png" and not self.request.drawn:
            return f"the map of {self.request.coloured_by}, {named}"
        cells = "" if self.kind == "png" else f", {tokens} × {tokens} tokens"
        return f"{self.request.what} of {named}{cells}"

    def _with(self, heads: tuple[int, ...]) -> list[int]:
        return [layer for layer, chosen in self.heads.items() if chosen == heads]

    def _arrays_of(self, heads: tuple[int, ...], tokens: int) -> str:
        parts: dict[str, list[int]] = {}  # by what they are called in a block
        for layer in self._with(heads):
            parts.setdefault(self.array_name(layer).split(".", 2)[2], []).append(layer)
        counted = _counted("head", heads)
        return "; ".join(
            f"blocks.{spans(layers)}.{name} [{len(heads)} {tokens} {tokens}]"
            f"{'' if len(layers) == 1 else ' each'}, {counted}"
            for name, layers in parts.items()
        )


def _counted(noun: str, numbers: Sequence[int]) -> str:
    return f"{noun}{'s' if len(numbers) != 1 else ''} {spans(numbers)}"


def text_size(heads: Mapping[int, tuple[int, ...]], tokens: int) -> int:
    """Bytes of causal matrices as JSON, about: half of each is masked."""
    seen = tokens * (tokens + 1) // 2
    each = seen * DIGITS + (tokens * tokens - seen) * ZERO
    return round(sum(map(len, heads.values())) * each)


class _Arrays:
    """Arrays, which are written as they come; the file is there once all is written."""

    def __init__(self, planned: Planned, stack: ExitStack) -> None:
        from llmcli.ui.arrays import array_writer

        self._planned, self._stack = planned, stack
        file: BinaryIO = stack.enter_context(whole_file(planned.file))
        about = planned.metadata(planned.known, ok=True)
        self._writer = array_writer(planned.kind, file, planned.arrays(), about)

    def add(self, layer: int, values_HTS: np.ndarray) -> None:
        self._writer.write(self._planned.array_name(layer), values_HTS)

    def write(self, report: AttentionReport, document: Mapping[str, Any]) -> None:
        self._writer.finish(self._planned.metadata(report.tokens, ok=report.ok))
        self._stack.close()


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


class _Document(Matrices):
    def __init__(self, planned: Planned, stack: ExitStack) -> None:
        super().__init__(planned.request.what)
        self._file = planned.file

    def write(self, report: AttentionReport, document: Mapping[str, Any]) -> None:
        write_document(self._file, self.into(document))


class _Csv:
    def __init__(self, planned: Planned, stack: ExitStack) -> None:
        from llmcli.commands.attention.view.export import AttentionCsv

        self._planned, self._table = planned, AttentionCsv()

    def add(self, layer: int, values_HTS: np.ndarray) -> None:
        self._table.add(layer, values_HTS, self._planned.windows[layer])

    def write(self, report: AttentionReport, document: Mapping[str, Any]) -> None:
        with whole_file(self._planned.file) as file:
            for piece in self._table.pieces(report):
                file.write(piece)


class _Page:
    def __init__(self, planned: Planned, stack: ExitStack) -> None:
        from llmcli.commands.attention.view.export import AttentionPage

        self._planned, self._page = planned, AttentionPage(planned.request.what)

    def add(self, layer: int, values_HTS: np.ndarray) -> None:
        planned = self._planned
        self._page.add(
            layer, values_HTS, planned.windows[layer], signed=layer in planned.signed
        )

    def write(self, report: AttentionReport, document: Mapping[str, Any]) -> None:
        planned = self._planned
        page = self._page.html(report, planned.title, kind=planned.request.matrix_scale)
        write_file(planned.file, page)


class _Picture:
    """The matrices that are drawn, of many heads the map."""

    add = None

    def __init__(self, planned: Planned, stack: ExitStack) -> None:
        self._planned = planned

    def write(self, report: AttentionReport, document: Mapping[str, Any]) -> None:
        from llmcli.commands.attention.view.png import attention_png, head_map_png

        request, title = self._planned.request, self._planned.title
        if request.drawn:
            image = attention_png(report, title, kind=request.matrix_scale)
        else:
            image = head_map_png(report, request.coloured_by, title, kind=request.scale or "linear")
        write_file(self._planned.file, image)


@dataclass(frozen=True)
class Export:
    """Where whole matrices go: into a file that is being written, and into the document."""

    planned: Planned | None
    writing: Any
    kept: Matrices | None
    opened: bool

    @property
    def on_matrix(self) -> OnMatrix | None:
        """Takes all matrices of a layer, layer by layer in order; None where nobody needs them."""
        takers = [part.add for part in (self.writing, self.kept) if part is not None and part.add]

        def take(layer: int, values_HTS: np.ndarray) -> None:
            for one in takers:
                one(layer, values_HTS)

        return take if takers else None

    def body(self, report: AttentionReport) -> dict[str, Any]:
        """The report as JSON has it, but for the checks."""
        left = ("matrices", "checks")
        body = {name: value for name, value in vars(report).items() if name not in left} | {
            "tokens": [{"id": id, "text": text} for id, text in report.tokens],
            "layers": [
                vars(layer) | {"heads": [dict(vars(head)) for head in layer.heads]}
                for layer in report.layers
            ],
            "skipped": dict(report.skipped),
            "unlabelled": dict(report.unlabelled),
        }
        return body if self.kept is None else self.kept.into(body)

    def file(self, report: AttentionReport) -> ExportFile | None:
        """The file, for `Output.present`."""
        if self.planned is None:
            return None
        return ExportFile(
            path=self.planned.file,
            holds=self.planned.holds(len(report.tokens)),
            write=lambda document: self.writing.write(report, document),
            open=self.opened,
        )


@contextmanager
def exporting(
    view: ViewOptions, request: AttentionRequest, model: Model, ids: Sequence[int]
) -> Iterator[Export]:
    """The file that the options name, half of which is nowhere left, and the document's matrices.

    Raises UsageError where they would be too large, and WriteFailed.
    """
    from llmcli.ui.stats import size

    known = token_texts(model, ids)
    kept = Matrices(request.what) if view.patterns else None
    needed = text_size(request.chosen(model.config), len(ids) + request.generate)
    if kept is not None and needed > FILE_CAP and not view.force:
        raise UsageError(
            f"the document would take about {size(needed)}, more than {size(FILE_CAP)}",
            hint=f"{SMALLER}, write `-o FILE.safetensors`, or add --force",
        )
    path = page_to_open("attention") if view.open and view.save is None else view.save
    if path is None:
        yield Export(None, None, kept, opened=False)
        return
    kind = kind_of_file(path, (*ARRAYS, "json", "csv", "html", "png"))
    planned = Planned(file=path, kind=kind, request=request, model=model, known=known)
    planned.check(force=view.force)
    writers = {"json": _Document, "html": _Page, "png": _Picture, "csv": _Csv}
    with ExitStack() as stack:
        yield Export(planned, writers.get(kind, _Arrays)(planned, stack), kept, opened=view.open)

"""The file of `llmcli attention`, filled while the layers are computed, whole or not at all.

How large it gets is known before the run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from llmcli.anatomy.graph import graph
from llmcli.commands.attention.options import ViewOptions
from llmcli.commands.attention.report.heads import AttentionReport
from llmcli.commands.attention.report.request import AttentionRequest, recurrent_layers
from llmcli.records.document import members
from llmcli.records.numbers import numbered, spans
from llmcli.records.text import Token
from llmcli.shell.files import check_cap, whole_file
from llmcli.shell.inspection import Inspection
from llmcli.shell.looking import tokens_metadata
from llmcli.shell.output import ExportFile, write_document

if TYPE_CHECKING:
    import numpy as np

    from llmcli.commands.attention.view.export import AttentionPage
    from llmcli.ui.arrays import ArrayPlan, ArrayWriter

OnMatrix = Callable[[int, "np.ndarray"], None]
ARRAYS = ("safetensors", "npz")
# bytes of a number of a JSON document, with its nine digits, and of a masked one
DIGITS, ZERO = 13.5, 5
SMALLER = "name fewer layers and heads with --layer and --head"


class Export:
    """Where whole matrices go: into the file that is written, and into the document.

    `ids` are the prompt's. `patterns`: the document of `--json` has them, too.
    """

    def __init__(
        self,
        look: Inspection,
        request: AttentionRequest,
        ids: Sequence[int],
        stack: ExitStack,
        *,
        patterns: bool,
    ) -> None:
        self._stack = stack
        self._look, self._request, self._patterns = look, request, patterns
        self._known = look.model.tokens(ids)
        self._tokens = len(ids) + request.generate  # at most
        config = look.model.config
        self._heads = request.chosen(config)
        self._windows = {layer: config.layers[layer].window for layer in self._heads}
        self._writer: ArrayWriter | None = None
        self._page: AttentionPage | None = None
        self._matrices: dict[int, np.ndarray] = {}

    def check(self, *, force: bool) -> None:
        """Raises UsageError, or WriteFailed, where the file or the document gets too large."""
        from llmcli.commands.attention.view.export import page_size
        from llmcli.ui.arrays import array_file_size

        look, most = self._look, max(map(len, self._heads.values()))
        seen = self._tokens * (self._tokens + 1) // 2
        each = seen * DIGITS + (self._tokens**2 - seen) * ZERO  # half of each is masked
        needed = round(sum(map(len, self._heads.values())) * each)
        if self._patterns:
            smaller = f"{SMALLER}, write `-o FILE.safetensors`"
            check_cap("the document", needed, force=force, smaller=smaller)
        sizes = {"json": needed}
        if look.kind in ARRAYS:
            about = self._metadata(self._known, ok=True)
            sizes[look.kind] = array_file_size(look.kind, self._arrays, about)
        elif look.kind == "html":
            windows = list(self._windows.values())
            sizes["html"] = page_size(self._tokens, windows, most, len(self._request.metrics))
        look.check_size(sizes, SMALLER)

    def begin(self) -> None:
        """Opens a file of arrays, which are written as they come."""
        from llmcli.commands.attention.view.export import AttentionPage
        from llmcli.ui.arrays import array_writer

        kind, path = self._look.kind, self._look.path
        if kind in ARRAYS and path is not None:
            file = self._stack.enter_context(whole_file(path))
            about = self._metadata(self._known, ok=True)
            self._writer = array_writer(kind, file, self._arrays, about)
        elif kind == "html":
            self._page = AttentionPage(self._request.what)

    @property
    def on_matrix(self) -> OnMatrix | None:
        """Takes all matrices of a layer, layers in order; None where they are not needed."""
        needed = self._writer or self._page or self._patterns or self._look.kind == "json"
        return self._take if needed else None

    def _take(self, layer: int, values_HTS: np.ndarray) -> None:
        if self._writer is not None:
            self._writer.write(self._array_name(layer), values_HTS)
        if self._page is not None:
            signed = layer in recurrent_layers(self._look.model.config)
            self._page.add(layer, values_HTS, self._windows[layer], signed=signed)
        if self._patterns or self._look.kind == "json":
            self._matrices[layer] = values_HTS.astype("float32")  # as a document has them

    def body(self, report: AttentionReport) -> dict[str, Any]:
        """The report as JSON has it."""
        body = members(report)
        return self._with_matrices(report, body) if self._patterns else body

    def _with_matrices(
        self, report: AttentionReport, document: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The document with each head's matrix in it, under the name of what it is."""
        layers = [
            members(layer) | {"heads": [
                members(head) | {self._request.what: matrix}
                for head, matrix in zip(layer.heads, self._matrices[layer.layer], strict=True)
            ]}
            for layer in report.layers
        ]  # fmt: skip
        return dict(document) | {"layers": layers}

    def file(self, report: AttentionReport) -> ExportFile | None:
        """The file, for `Output.present`."""
        from llmcli.commands.attention.view.png import attention_png, head_map_png

        request, look, page, writer = self._request, self._look, self._page, self._writer
        scale = request.matrix_scale

        def write(document: Mapping[str, Any]) -> None:
            if writer is None:
                assert look.path is not None
                write_document(look.path, self._with_matrices(report, document))
                return
            writer.finish(self._metadata(report.tokens, ok=report.ok))
            self._stack.close()

        def picture() -> bytes:
            if request.drawn:
                return attention_png(report, look.title, kind=scale)
            kind = request.scale or "linear"
            return head_map_png(report, request.coloured_by, look.title, kind=kind)

        makers = {"png": picture}
        if page is not None:
            makers["html"] = lambda: page.html(report, look.title, kind=scale)
        return look.file(self._holds(len(report.tokens)), makers, write)

    @cached_property
    def _arrays(self) -> list[ArrayPlan]:
        """The arrays, one a layer, float32 but for a model in float64."""
        from llmcli.ui.arrays import ArrayPlan

        wide = str(self._look.model.dtype) == "torch.float64"
        dtype: Literal["float64", "float32"] = "float64" if wide else "float32"
        return [
            ArrayPlan(self._array_name(layer), dtype, (len(heads), self._tokens, self._tokens))
            for layer, heads in self._heads.items()
        ]

    def _array_name(self, layer: int) -> str:
        """`blocks.3.attn.pattern`."""
        node = graph(self._look.model.config).mixers[layer]
        return f"{node.name.rpartition('.')[0]}.{self._request.what}"

    def _metadata(self, tokens: Sequence[Token], *, ok: bool) -> dict[str, str]:
        """What stands beside arrays: JSON of the ids and the texts of all `tokens`."""
        return {
            "schema": "llmcli.attention/1",
            "model": self._look.model.name,
            "what": self._request.what,
            **tokens_metadata(tokens, len(self._known)),
            "heads": json.dumps({str(layer): list(own) for layer, own in self._heads.items()}),
            "ok": json.dumps(ok),
        }

    def _holds(self, tokens: int) -> str:
        """What a reader finds in the file, written of so many tokens."""
        kind, request = self._look.kind, self._request
        alike: dict[tuple[int, ...], list[int]] = {}  # layers, by their heads
        for layer, heads in self._heads.items():
            alike.setdefault(heads, []).append(layer)
        if kind in ARRAYS:
            return "; ".join(
                self._arrays_of(heads, layers, tokens) for heads, layers in alike.items()
            )
        named = "; ".join(
            f"{numbered('layer', layers)} {numbered('head', heads)}"
            for heads, layers in alike.items()
        )
        if kind == "png" and not request.drawn:
            return f"the map of {request.coloured_by}, {named}"
        cells = "" if kind == "png" else f", {tokens} × {tokens} tokens"
        return f"{request.what} of {named}{cells}"

    def _arrays_of(self, heads: tuple[int, ...], layers: Sequence[int], tokens: int) -> str:
        parts: dict[str, list[int]] = {}  # by what they are called in a block
        for layer in layers:
            parts.setdefault(self._array_name(layer).split(".", 2)[2], []).append(layer)
        counted = numbered("head", heads)
        return "; ".join(
            f"blocks.{spans(some)}.{name} [{len(heads)} {tokens} {tokens}]"
            f"{'' if len(some) == 1 else ' each'}, {counted}"
            for name, some in parts.items()
        )


@contextmanager
def exporting(
    look: Inspection, view: ViewOptions, request: AttentionRequest, ids: Sequence[int]
) -> Iterator[Export]:
    """The file that the options name; after an error no part of it is left.

    Raises UsageError where it would be too large, and WriteFailed.
    """
    with ExitStack() as stack:
        export = Export(look, request, ids, stack, patterns=view.patterns)
        export.check(force=view.force)
        export.begin()
        yield export

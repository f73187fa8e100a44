"""The files of `llmcli attention`, and the matrices that documents and files have."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from llmcli.commands.attention.options import AttentionOptions
from llmcli.commands.attention.report import AttentionReport, grouped
from llmcli.commands.attention.view.files import (
    AttentionPage,
    attention_png,
    head_map_png,
    page_size,
)
from llmcli.config.attention import Chunk, most_keys, visible_pairs
from llmcli.graph.graph import graph
from llmcli.graph.ops import Mix
from llmcli.records.document import members
from llmcli.records.numbers import numbered, spans
from llmcli.records.text import Token
from llmcli.shell.files import check_cap, whole_file
from llmcli.shell.inspection import Export, Inspection, tokens_metadata
from llmcli.shell.output import write_document
from llmcli.ui.arrays import ArrayPlan, ArrayWriter, array_file_size, array_writer

if TYPE_CHECKING:
    import numpy as np

    from llmcli.commands.attention.measure.layers import OnMatrix

ARRAYS = ("safetensors", "npz")
# bytes of a number of a JSON document, with its nine digits, and of a masked one
DIGITS, ZERO = 13.5, 5
SMALLER = "name fewer layers and heads with --layer and --head"


class MatrixExports:
    """Takes whole matrices for the file that is written and for the document.

    An array file is filled while the layers are computed; after an error in `stack` no part of it
    is left. Raises UsageError where the file or the document would be too large, and WriteFailed.
    """

    def __init__(self, look: Inspection, options: AttentionOptions, stack: ExitStack) -> None:
        from llmcli.model import dtype_name

        self._look, self._options, self._stack = look, options, stack
        self._heads = options.heads_of(look.model.config)
        mixers = graph(look.model.config).mixers
        ops = ((layer, mixers[layer].op) for layer in self._heads)
        self._maps = {layer: op for layer, op in ops if isinstance(op, Mix)}
        self._names = {  # of arrays: `blocks.3.attn.pattern`
            layer: f"{mixers[layer].name.rpartition('.')[0]}.{options.matrices}"
            for layer in self._heads
        }
        self._page = AttentionPage(options.matrices)
        self._matrices: dict[int, np.ndarray] = {}
        self._writer: ArrayWriter | None = None
        count = len(look.ids) + look.generate  # at most
        seen, most = count * (count + 1) // 2, max(map(len, self._heads.values()))
        each = seen * DIGITS + (count**2 - seen) * ZERO  # in JSON: half is masked
        text_size = round(sum(map(len, self._heads.values())) * each)
        if options.patterns:
            smaller = f"{SMALLER}, write `-o FILE.safetensors`"
            check_cap("the document", text_size, force=options.force, smaller=smaller)
        if look.path is None:
            return
        dtype = dtype_name(look.model.stream_dtype)
        arrays = [
            ArrayPlan(self._names[layer], dtype, (len(heads), count, count))
            for layer, heads in self._heads.items()
        ]
        about = self._metadata(look.model.tokens(look.ids), ok=True)
        array_file = Export(size=array_file_size(look.kind, arrays, about), write=self._finish)
        cells = [visible_pairs(count, 0, op.window) for op in self._maps.values()]
        exports = dict.fromkeys(ARRAYS, array_file) | {
            "json": Export(size=text_size, write=self._write_document),
            "html": Export(
                size=page_size(count, cells, most, len(options.computed)),
                make=partial(self._page.html, kind=options.matrix_scale),
            ),
            "png": Export(make=self._picture),
        }
        look.plan(exports, SMALLER)
        if look.kind in ARRAYS:
            file = stack.enter_context(whole_file(look.path))
            self._writer = array_writer(look.kind, file, arrays, about)

    @property
    def on_matrix(self) -> OnMatrix | None:
        """Takes all matrices of a layer, layers in order; None where they are not needed."""
        kind = self._look.kind
        needed = kind in (*ARRAYS, "html", "json") or self._options.patterns
        return self._take if needed else None

    def _take(self, layer: int, values_HTS: np.ndarray) -> None:
        kind, op = self._look.kind, self._maps[layer]
        if self._writer is not None:
            self._writer.write(self._names[layer], values_HTS)
        if kind == "html":
            import torch

            from llmcli.ops.attention import visible_keys

            window = {"window": most_keys(op.window), "chunks": isinstance(op.window, Chunk)}
            count = values_HTS.shape[-1]
            seen = visible_keys(torch.arange(count), count, op.window).numpy()
            self._page.add(layer, values_HTS, seen, window, signed=op.signed)
        if kind == "json" or self._options.patterns:
            self._matrices[layer] = values_HTS.astype("float32")  # as a document has them

    def body(self, report: AttentionReport) -> dict[str, Any]:
        """The report as JSON has it."""
        body = members(report)
        return self._with_matrices(report, body) if self._options.patterns else body

    def _with_matrices(
        self, report: AttentionReport, document: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The document with each head's matrix in it, under the name of what it is."""
        layers = []
        for layer in report.layers:
            each = zip(layer.heads, self._matrices[layer.layer], strict=True)
            heads = [members(head) | {report.what: matrix} for head, matrix in each]
            layers.append(members(layer) | {"heads": heads})
        return dict(document) | {"layers": layers}

    def _write_document(self, report: AttentionReport, document: Mapping[str, Any]) -> None:
        assert self._look.path is not None
        write_document(self._look.path, self._with_matrices(report, document))

    def _finish(self, report: AttentionReport, _document: Mapping[str, Any]) -> None:
        """Makes the array file whole."""
        assert self._writer is not None
        self._writer.finish(self._metadata(report.tokens, ok=report.ok))
        self._stack.close()

    def _picture(self, report: AttentionReport, title: str) -> bytes:
        options = self._options
        if report.matrices:
            return attention_png(report, title, kind=options.matrix_scale)
        kind = options.scale or "linear"
        return head_map_png(report, options.coloured_by, title, kind=kind)

    def _metadata(self, tokens: Sequence[Token], *, ok: bool) -> dict[str, str]:
        """What stands beside arrays: JSON of the ids and the texts of all `tokens`."""
        return {
            "schema": "llmcli.attention/1",
            "model": self._look.model.name,
            "what": self._options.matrices,
            **tokens_metadata(tokens, len(self._look.ids)),
            "heads": json.dumps({str(layer): list(own) for layer, own in self._heads.items()}),
            "ok": json.dumps(ok),
        }

    def holds(self, report: AttentionReport) -> str:
        """What a reader finds in the file."""
        kind, tokens = self._look.kind, len(report.tokens)
        if kind in ARRAYS:
            alike = grouped(
                ((heads, self._names[layer].split(".", 2)[2]), layer)
                for layer, heads in self._heads.items()
            )
            return "; ".join(
                f"blocks.{spans(layers)}.{part} [{len(heads)} {tokens} {tokens}]"
                f"{' each' * (len(layers) > 1)}, {numbered('head', heads)}"
                for (heads, part), layers in alike.items()
            )
        named = "; ".join(
            f"{numbered('layer', layers)} {numbered('head', heads)}"
            for heads, layers in grouped((own, one) for one, own in self._heads.items()).items()
        )
        if kind == "png" and not report.matrices:
            return f"the map of {self._options.coloured_by}, {named}"
        cells = "" if kind == "png" else f", {tokens} × {tokens} tokens"
        return f"{report.what} of {named}{cells}"

"""Attention as a table for a data frame: a line for each cell that is not masked."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence

import numpy as np

from llmcli.commands.attention.report.heads import AttentionReport
from llmcli.ui.theme import quoted
from llmcli.ui.visible import visible, visible_count

COLUMNS = ("layer", "head", "query", "key", "query_token", "key_token", "value")


class AttentionCsv:
    """Collects the matrices of one layer after the other, and writes them when all is known.

    Only what is visible is kept, four bytes a cell: a tenth of the file.
    """

    def __init__(self) -> None:
        self._layers: dict[int, tuple[int | None, list[np.ndarray]]] = {}

    def add(self, layer: int, values: np.ndarray, window: int | None = None) -> None:
        """All chosen heads of a layer, `[H, T, T]`; with a `window` a query sees so many keys."""
        seen = visible(values.shape[-1], window)
        self._layers[layer] = window, [matrix[seen].astype(np.float32) for matrix in values]

    def pieces(self, report: AttentionReport) -> Iterator[bytes]:
        """The file, a query at a time: layers, heads, queries, keys in order, nine digits a value.

        Tokens have their control characters spelled out, so that a line is a line.
        """
        yield (",".join(COLUMNS) + "\r\n").encode()
        texts = [_field(text) for _, text in report.tokens]
        for layer in report.layers:
            window, kept = self._layers[layer.layer]
            for head, values in zip(layer.heads, kept, strict=True):
                yield from _lines(f"{layer.layer},{head.head}", values, texts, window)


def csv_file_size(texts: Sequence[str], windows: Sequence[int | None], heads: int) -> int:
    """Bytes of the file, to within about a tenth: a window (None: all) for each layer.

    `heads` of every layer are in it. `texts`: of the tokens that are known.
    """
    count = len(texts)
    token = sum(len(_field(text).encode()) for text in texts) / max(1, count)
    position = sum(len(str(at)) for at in range(count)) / max(1, count)
    cells = sum(visible_count(count, window) for window in windows) * heads
    place = 2.0 + (len(windows) > 10) + (heads > 10)
    return round(cells * (place + 2 * position + 2 * token + 13 + len(COLUMNS)))


def _lines(
    place: str, values: np.ndarray, texts: Sequence[str], window: int | None
) -> Iterator[bytes]:
    at = 0
    for query, token in enumerate(texts):
        first = 0 if window is None else max(0, query - window + 1)
        count = query + 1 - first
        row = values[at : at + count].tolist()
        at += count
        yield "".join(
            f"{place},{query},{key},{token},{texts[key]},{value:.9g}\r\n"
            for key, value in zip(range(first, query + 1), row, strict=True)
        ).encode()


def _field(text: str) -> str:
    """A token as one field, in quotes where it has a comma or a quote in it."""
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow([quoted(text)[1:-1]])
    return line.getvalue()

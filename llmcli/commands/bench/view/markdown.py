"""Rows as the Markdown table that llama-bench prints, to the character."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from llmcli.commands.bench.report.fields import FIELDS, OURS, BuildInfo, backend
from llmcli.commands.bench.report.llama_names import count_words, size_words
from llmcli.commands.bench.report.results import BenchRow, Settings
from llmcli.commands.bench.view.formats import plain
from llmcli.ui.theme import one_line

_BY_NAME = {item.name: item for item in (*FIELDS, *OURS)}
SHORT = {
    "n_gpu_layers": "ngl", "n_threads": "threads", "no_kv_offload": "nkvo", "flash_attn": "fa",
    "embeddings": "embd", "devices": "dev", "product_format": "products",
}  # fmt: skip
# columns of a cell; below zero it is aligned left
_WIDTHS = {
    "model": -30, "t/s": 20, "size": 10, "params": 10, "n_gpu_layers": 3, "n_threads": 7,
    "n_batch": 7, "n_ubatch": 8, "type_k": 6, "type_v": 6, "flash_attn": 2, "devices": -12,
    "test": 15, "engine": -12,
}  # fmt: skip
_BOTH = -17  # `CUDA,transformers`
# (field, attribute of Settings): columns that are shown where they vary or were given
_OPTIONAL = (
    ("n_threads", "n_threads"), ("n_batch", "n_batch"), ("n_ubatch", "n_ubatch"),
    ("type_k", "type_k"), ("type_v", "type_v"), ("no_kv_offload", "no_kv_offload"),
    ("flash_attn", "flash_attn"), ("devices", "device"), ("embeddings", "embeddings"),
    ("dtype", "dtype"), ("product_format", "activations"),
)  # fmt: skip


# Where llama-bench's table is wider than the terminal: narrower cells, and what every row repeats
# goes, in this order, as far as it must
_NARROW = {"model": -16, "test": 10, "t/s": 16}
_FIRST_TO_GO = ("params", "size", "backend")


@dataclass(frozen=True, kw_only=True)
class TableColumns:
    """What decides the columns: all configurations, and what each option is where none is given.

    `gpu`: some of them run on one. `cpu`: some of them do not. `engines`: more than ours. `room`:
    the columns of the terminal, None where the table is llama-bench's whatever its width.
    """

    settings: Sequence[Settings]
    default: Settings
    gpu: bool
    cpu: bool
    engines: bool = False
    room: int | None = None

    def fields(self) -> tuple[str, ...]:
        """The columns, in llama-bench's order; ours before the test."""
        names = ["model", "size", "params", "backend", *(["n_gpu_layers"] if self.gpu else [])]
        for name, attribute in _OPTIONAL:
            found = {getattr(settings, attribute) for settings in self.settings}
            if found != {getattr(self.default, attribute)} or (name == "n_threads" and self.cpu):
                names.append(name)
        return (*names, *(["engine"] if self.engines else []), "test", "t/s")

    def widths(self) -> dict[str, int]:
        """The columns that there is room for, with the width of their cells."""
        found = {name: _width(name) for name in self.fields()}
        if self.engines:
            found["backend"] = _BOTH  # named with a peer's engine
        if self.room is None or _total(found) <= self.room:
            return found
        found = {name: _NARROW.get(name, width) for name, width in found.items()}
        attributes = {**dict(_OPTIONAL), "n_gpu_layers": "n_gpu_layers", "model": "model"}
        alike = [
            name
            for name, attribute in attributes.items()
            if len({getattr(one, attribute) for one in self.settings}) == 1
        ]
        for name in (*_FIRST_TO_GO, *alike):
            if _total(found) > self.room:
                found.pop(name, None)
        return found


@dataclass(kw_only=True)
class MarkdownWriter:
    """The table, and `build: …` below it."""

    by: BuildInfo
    columns: TableColumns
    _widths: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        self._widths = self.columns.widths()

    def header(self) -> str:
        """The names, and the line that says how columns are aligned."""
        names = [self._cell(name, SHORT.get(name, name)) for name in self._widths]
        lines = ["-" * (abs(w) - 1) + (":" if w > 0 else "-") for w in self._widths.values()]
        return _line(names) + _line(lines)

    def row(self, row: BenchRow) -> str:
        """One line."""
        return _line([self._cell(name, self._text(name, row)) for name in self._widths])

    def footer(self) -> str:
        """The program's commit and number."""
        return f"\nbuild: {self.by.build_commit} ({self.by.build_number})\n"

    def _text(self, name: str, row: BenchRow) -> str:
        if name == "t/s":
            return rate(row)
        if name == "test":
            return row.test.name
        if name == "backend":
            return backend(row)
        if name in ("size", "params") and row.info is None:
            return ""
        if name == "size":
            return size_words(int(row.info.model_size)) if row.info else ""
        if name == "params":
            return count_words(int(row.info.model_n_params)) if row.info else ""
        known = _BY_NAME["model_type" if name == "model" else name]
        return plain(known, known.value(row, self.by))

    def _cell(self, name: str, text: str) -> str:
        """A bar in it would begin the next cell, and a line break the next row."""
        text = one_line(text).replace("|", "\\|")
        width = self._widths[name]
        return f"{text:<{-width}}" if width < 0 else f"{text:>{width}}"


def rate(row: BenchRow) -> str:
    """`12.34 ± 0.56`, or why there is none."""
    if row.error is not None:
        return f"error: {row.error[2]}"
    return f"{row.avg_ts:.2f} ± {row.stddev_ts:.2f}" if row.samples_ns else "not run"


def _width(name: str) -> int:
    if name in _WIDTHS:
        return _WIDTHS[name]
    width = max(len(name), 10)
    known = _BY_NAME.get(name)
    return -width if known is None or known.kind == "text" else width


def _total(widths: Mapping[str, int]) -> int:
    """Columns of a line with its bars."""
    return sum(abs(width) + 3 for width in widths.values()) + 1


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |\n"

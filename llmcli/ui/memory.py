"""Whether a run fits the memory of each device, and what a token moves there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.text import Text

from llmcli.reports.info import DeviceFit, MemoryNeed, StateNeed
from llmcli.ui.layout import Column, Dotted, Rows
from llmcli.ui.stats import size
from llmcli.ui.theme import FAINT, HEADING, one_line

GOOD, BAD = "green", "red"
_LABEL, _DEVICE = 9, 14  # columns of the table: the parts' names, and each device


def render_memory(fits: Sequence[DeviceFit]) -> list[RenderableType]:
    """A heading, the table, and what the devices are."""
    need = fits[0].need
    sequences = f", {need.batch} sequences" if need.batch > 1 else ""
    heading = f"\nmemory for {need.context:,} tokens{sequences}"
    names = [
        f"{fit.device.device}: {one_line(fit.device.name)}, {_size(fit.device.total_bytes)}"
        f"{_rounding(fit)}"
        for fit in fits
    ]
    if not all(fit.device.usable for fit in fits):
        names.append("no CUDA: not in the PyTorch that is installed")
    states = [Dotted(state_words(need.states), FAINT)] if need.states is not None else []
    return [Text(heading, style=HEADING), MemoryTable(fits), *states, Dotted(names, FAINT)]


def state_words(states: StateNeed) -> list[str]:
    """What recurrent mixers keep, and from where on that is less than keys and values."""
    layers = f"{states.layers} layer{'s' * (states.layers > 1)}"
    other = {
        "attention": "of as many of its attention layers",
        "same_size": "of softmax attention whose keys and values are as large as theirs",
    }[states.against]
    return [
        f"states: {size(states.bytes)} of each sequence in {layers}",
        "0 B a token",
        f"less than keys and values {other} from {states.smaller_from:,} tokens on",
    ]


@dataclass(frozen=True)
class MemoryTable:
    """A column a device, a line for each part; as many devices beside each other as fit."""

    fits: Sequence[DeviceFit]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        beside = max(1, (options.max_width - _LABEL) // _DEVICE)
        for first in range(0, len(self.fits), beside):
            yield self._table(self.fits[first : first + beside])

    def _table(self, fits: Sequence[DeviceFit]) -> Rows:
        columns = [
            Column("", right=False),
            *(Column(fit.device.device) for fit in fits),
            Column("", right=False, cut=True, first_to_go=1),
        ]
        rows = [("format", [fit.need.formats["weight_format"] for fit in fits], "of the weights")]
        parts = [
            ("weights", [fit.need.weights for fit in fits], ""),
            ("cache", [fit.need.cache for fit in fits], _cached(fits[0].need)),
            ("  a token", [fit.need.cache_per_token for fit in fits], ""),
            ("copies", [fit.need.copies for fit in fits], "of the cache, when a sequence ends"),
            ("prompt", [fit.need.activations for fit in fits], "most tensors while it is read"),
            ("libraries", [fit.need.runtime for fit in fits], "their buffers, and the tokenizer"),
            ("needed", [fit.need.total for fit in fits], "at once, beside PyTorch itself"),
        ]
        rows += [
            (name, [size(nbytes) for nbytes in sizes], note) for name, sizes, note in parts
            if any(sizes)
        ]  # fmt: skip
        rows.append(("free", [_size(fit.device.free_bytes) for fit in fits], ""))
        longest = ["unknown" if fit.longest is None else f"{fit.longest:,}" for fit in fits]
        lines = [
            [Text(name), *map(Text, cells), Text(note, style=FAINT)] for name, cells, note in rows
        ]
        mapped = "blocks stay in the mapped file" if any(map(_stays_in_the_file, fits)) else ""
        lines.append([Text("fits"), *map(_fits, fits), Text(mapped, style=FAINT)])
        note = Text("tokens that fit", style=FAINT)
        lines.append([Text("longest"), *map(Text, longest), note])
        lines += _decoding(fits)
        return Rows(columns, lines)


def _cached(need: MemoryNeed) -> str:
    if need.states is None:
        return "keys and values of every token"
    return "states, and keys and values" if need.cache_per_token else "states"


def _decoding(fits: Sequence[DeviceFit]) -> Iterator[list[Text]]:
    """What has to be moved for one token more, and of what that is."""
    works = [fit.token for fit in fits]
    last = "read and written for the last token" + (" of each" if fits[0].need.batch > 1 else "")
    parts = [
        ("decoding", [work.bytes for work in works], last),
        ("  weights", [work.weights for work in works], "each once"),
        ("  cache", [work.cache for work in works], "what the token sees"),
        ("  others", [work.activations for work in works], "what its parts compute"),
    ]
    for name, sizes, note in parts:
        yield [Text(name), *(Text(size(nbytes)) for nbytes in sizes), Text(note, style=FAINT)]


def _fits(fit: DeviceFit) -> Text:
    if not fit.device.usable:
        return Text("no CUDA", style=FAINT)
    if fit.fits is None:
        return Text("unknown", style=FAINT)
    return Text("yes", style=GOOD) if fit.fits else Text("no", style=BAD)


def _stays_in_the_file(fit: DeviceFit) -> bool:
    """Whether loading leaves weights in blocks where they are: on a CPU without memory for them."""
    free, packed = fit.device.free_bytes, fit.need.formats["product_format"] == "int8"
    return packed and fit.device.device == "cpu" and free is not None and fit.need.weights > free


def _rounding(fit: DeviceFit) -> str:
    """What is rounded otherwise than the weights, where there is anything."""
    used = fit.need.formats
    if len({*used.values()}) == 1:
        return ""
    return (
        f", {used['product_format']} products, {used['activation_format']} activations, "
        f"{used['cache_format']} cache"
    )


def _size(nbytes: int | None) -> str:
    return "unknown" if nbytes is None else size(nbytes)

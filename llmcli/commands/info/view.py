"""What a model is, in facts by subject, and a table of whether it fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.text import Text

from llmcli.commands.info.report import (
    About,
    Architecture,
    DeclaredDtype,
    FamilyFacts,
    FileFacts,
    FlopsNeed,
    InfoReport,
    Offer,
    TokenizerFacts,
)
from llmcli.records.info import DeviceFit, LayerType
from llmcli.records.numbers import counted, spans
from llmcli.ui.facts import state_words
from llmcli.ui.layout import Column, Line, Rows, filled
from llmcli.ui.numbers import scaled, size
from llmcli.ui.theme import FAINT, HEADING, one_line, quoted

GOOD, BAD = "green", "red"
_LABEL, _DEVICE = 9, 14  # columns of the table of memory: the parts' names, and each device
_LONG_TEXT, _LONG_LIST = 200, 6  # of metadata: characters of a text, entries of a list
_Fact = tuple[str, Sequence[str]]  # a subject, and what is said of it


def render_info(
    report: InfoReport, *, full: bool = False, metadata: bool = False
) -> RenderableType:
    """The model, whether it fits in one sentence, its tokenizer and file, and memory.

    `full`: with what few need; `metadata`: with the file's own.
    """
    model, fits = report.architecture, report.fits
    facts: list[_Fact] = []
    if model is not None:
        facts += _model(model, report.flops if full else None)
    if report.tokenizer is not None:
        facts += _tokenizer(report.tokenizer, full)
    facts += _file(report.file, None if model is None else model.declared, full)
    facts += [
        ("ignored", (one_line(f"{key} = {value}"), "llama.cpp does not read it here either"))
        for key, value in report.ignored.items()
    ]
    verdict = "" if report.unsupported is None else report.unsupported.message
    facts += [("unknown", (one_line(why),)) for why in report.unknown if why != verdict]
    parts: list[RenderableType] = [Text(one_line(verdict), style=BAD)] if verdict else []
    parts.append(Text(one_line(report.name), style=HEADING))
    parts += [Line(line, FAINT) for line in _about(report.about, full)]
    if model is not None:
        parts.append(_verdict(fits[0], model.context))
        if fits[0].fits is False:
            parts.append(_would_fit(report.would_fit))
        parts.append(Text())
    for fit in () if full else fits:
        facts.append((fit.device.device, _memory(fit, len(fits) == 1)))
    parts.append(Facts(facts))
    if fits and full:
        parts += _memory_table(fits)
    if metadata:
        parts += _metadata(report.file)
    return Group(*parts)


def render_families(families: Sequence[FamilyFacts]) -> RenderableType:
    """A line for each family: the names that checkpoints have for it, and what it is made of."""
    checked = min((family.checked for family in families), key=len)  # of all, and of some more
    more = [
        f"{family.name}: {family.checked.removeprefix(checked).lstrip(', ')}"
        for family in families if family.checked != checked
    ]  # fmt: skip
    return Group(_Families(families), Text(), Line([f"checked: {checked}", *more]))


@dataclass(frozen=True)
class _Families:
    """As many columns as fit whole; where not even the first do, a list of names is cut."""

    families: Sequence[FamilyFacts]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        names = ("family", "model_type", "GGUF", "layers", "particulars")
        rows = [
            [Text(family.name), Text(", ".join(family.hf_types)),
             Text(", ".join(family.gguf_architectures)),
             Text(" + ".join((", ".join(family.mixers), *family.feed_forwards))),
             Text(family.words)]
            for family in self.families
        ]  # fmt: skip
        for shown in (5, 4, 3):
            columns = [
                Column(name, right=False, cut=shown == 3 and name == "model_type", drop=turn)
                for turn, name in enumerate(names[:shown])
            ]
            table = Rows(columns, [row[:shown] for row in rows])
            if shown == 3 or table.fit(options.max_width):
                break
        yield table
        if left := names[shown:]:
            yield Text(f"{' and '.join(left)}: --json", style=FAINT)


@dataclass(frozen=True)
class Facts:
    """A subject a row and what is said of it, parts joined by dots, beside each other.

    Lines break between parts; a part that is wider than the room breaks between words.
    """

    rows: Sequence[_Fact]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        indent = max(len(name) for name, _ in self.rows) + 2
        room = max(1, options.max_width - indent)
        for name, parts in self.rows:
            label = name
            for line in filled(parts, room):
                for piece in Text(line).wrap(console, room, overflow="fold"):
                    piece.rstrip()
                    yield Text.assemble((label.ljust(indent), FAINT), piece, no_wrap=True)
                    label = ""


def count(number: int) -> str:
    """`134,515,008`."""
    return f"{number:,}"


def _about(about: About, full: bool) -> list[list[str]]:
    """What our catalog says, else, or for `full` too, what the model says of itself."""
    languages = f"language{'s' * (len(about.languages) > 1)} " + ", ".join(about.languages)
    named = [
        about.name,
        about.kind,
        about.organization and f"by {about.organization}",
        about.license and f"license {about.license}",
        languages if about.languages else "",
    ]
    own = [one_line(words) for words in named if words]
    lines = [[about.summary] if about.summary else [], own if full or not about.summary else []]
    return [line for line in lines if line]


def _model(model: Architecture, flops: FlopsNeed | None) -> Iterator[_Fact]:
    """`flops`: in full, with what few need."""
    counts, number = model.parameters, _short if flops is None else count
    named = [one_line(model.family), f"type {one_line(model.model_type)}", f"width {model.width}"]
    yield "family", (*named, f"vocabulary {count(model.vocabulary)}")
    words = [count(counts.total) + ("" if flops is None else f" ({_short(counts.total)})")]
    if counts.active != counts.total:
        words.append(f"{count(counts.active)} active")
    elif flops is not None:
        words.append("all active")
    parts = {
        "embedding": counts.embedding,
        "attention": counts.attention,
        "other mixers": counts.mixers,
        "MLP": counts.mlp,
        "norms": counts.norms,
        "head": counts.head,
    }
    shown = [f"{name} {number(size_)}" for name, size_ in parts.items() if size_]
    if model.tied:
        shown.append("head tied to the embedding")
    if model.embedding_scale != 1:
        shown.append(f"embeddings × {model.embedding_scale:.4g}")
    if model.logit_scale != 1:
        shown.append(f"logits × {model.logit_scale:.4g}")
    if model.logit_cap is not None:
        shown.append(f"logits capped at {model.logit_cap:g}")
    if flops is None:
        yield "parameters", words + shown
    else:
        yield "parameters", words
        yield "", shown
    for place, layers in enumerate(model.layers):
        yield "" if place else "layers", _layers(layers, len(model.layers) > 1)
    if flops is not None:
        yield "FLOPs", _flops(flops)
    limit = " = learned positions" if model.positions is not None else ""
    yield "context", (f"{count(model.context)} tokens{limit}",)


def _flops(flops: FlopsNeed) -> list[str]:
    end = count(flops.context)
    return [
        f"{scaled(flops.first)} the first token",
        f"{scaled(flops.last)} token {end}",
        f"{scaled(flops.prompt)} a prompt of {end}",
        f"{scaled(flops.prompt_full)} as the full square",
    ]


def _layers(kind: LayerType, numbered: bool) -> list[str]:
    window = f" of {count(kind.window)} keys" if kind.window is not None else ""
    parts = [f"{kind.count} × {kind.kind}{window}"]
    if kind.heads is not None:
        size_ = f" of {kind.head_dim}"
        if kind.value_dim not in (None, kind.head_dim):
            size_ += f" (values {kind.value_dim})"
        parts.append((f"{kind.heads} heads" if kind.heads > 1 else "1 head") + size_)
    if kind.kv_heads is not None:
        parts.append("1 kv head" if kind.kv_heads == 1 else f"{kind.kv_heads} kv heads")
    if kind.rotary:
        parts.append("rotary")
    if kind.qk_norm:
        parts.append("q and k normalized")
    parts += filter(None, (*kind.details, kind.norm))
    if kind.hidden is not None:
        gated = ", gated" if kind.gated else ""
        parts.append(f"{kind.activation} MLP of {count(kind.hidden)}{gated}")
    if numbered:
        parts.append(f"layer{'s' if kind.count > 1 else ''} {spans(kind.layers)}")
    return parts


def _tokenizer(facts: TokenizerFacts, full: bool) -> Iterator[_Fact]:
    template = "chat template" if facts.chat_template else "no chat template"
    yield "tokenizer", (one_line(facts.kind), f"{count(facts.vocabulary)} tokens", template)
    if full:
        bos = "no BOS"
        if facts.bos is not None:
            added = "put in front" if facts.adds_bos else "not put in front"
            bos = f"BOS {facts.bos.id} {quoted(facts.bos.text)} ({added})"
        ends = [f"EOS {token.id} {quoted(token.text)}" for token in facts.eos]
        yield "", (bos, *(ends or ["no EOS"]))


def _file(file: FileFacts, declared: DeclaredDtype | None, full: bool) -> Iterator[_Fact]:
    kind = {"gguf": "GGUF", "safetensors": "safetensors"}[file.kind]
    each = [f"{one_line(stored.format)} {size(stored.bytes)}" for stored in file.formats]
    if file.files:
        words = [f"{kind}, {counted(file.files, 'file')}", f"{size(file.bytes)} on disk"]
        held = size(sum(stored.bytes for stored in file.formats))
        more = [f"{counted(file.tensors, 'tensor')} of {held}"] if full else each
        yield "stored", (*words, *more)
    else:
        yield "stored", ("a configuration without weights",)
        if declared is not None:
            held = size(declared.bytes)
            yield "", (f"declares {declared.dtype}: {held} of weights",)
    for words_, stored in zip(each, file.formats if full else (), strict=False):
        bits = 8 * stored.bytes / stored.numbers if stored.numbers else 0
        numbers = f"{count(stored.numbers)} numbers of {bits:g} bits"
        yield "", (words_, numbers, counted(stored.tensors, "tensor"))
    if file.entries and full:
        yield "", (f"{counted(len(file.entries), 'metadata key')}, shown by --metadata",)
    yield "path", (one_line(file.path),)


def _metadata(file: FileFacts) -> list[RenderableType]:
    heading = Text("\nmetadata", style=HEADING)
    if not file.entries:
        return [heading, Text("none")]
    rows = [f"{one_line(key)} = {_value(value)}" for key, value in file.entries.items()]
    return [heading, *(Text(row, overflow="fold") for row in rows)]


def _value(value: Any) -> str:
    """A value of metadata on one line: texts in quotes, long ones and long lists cut."""
    if isinstance(value, str):
        more = f" … ({count(len(value))} characters)" if len(value) > _LONG_TEXT else ""
        return quoted(value[:_LONG_TEXT]) + more
    if isinstance(value, list):
        more = f", … ({count(len(value))} entries)" if len(value) > _LONG_LIST else ""
        return f"[{', '.join(_value(item) for item in value[:_LONG_LIST])}{more}]"
    return f"{value:g}" if isinstance(value, float) else str(value).lower()


def _short(number: int) -> str:
    """`135 M`, `70.6 B`, `512`."""
    for unit, scale in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= scale:
            return f"{number / scale:.3g} {unit}"
    return str(number)


# whether it fits


def _verdict(fit: DeviceFit, context: int) -> Text:
    """One sentence about the device that a run would use first; `context` is the model's own."""
    need, device = fit.need, fit.device
    tokens = f"{count(need.context)} token{'s' * (need.context != 1)}"
    if need.context == context:
        tokens = f"its whole context of {tokens}"
    if need.batch > 1:
        tokens = f"{need.batch} sequences of {count(need.context)} tokens"
    needed = f"{size(need.total)} needed for {tokens}"
    if not device.usable:
        return Text(f"{needed}; the installed PyTorch has no CUDA", style=FAINT)
    if fit.fits is None:
        return Text(f"{needed}; the free memory of {device.device} is unknown", style=FAINT)
    beside = "" if device.device.startswith("cuda") else " besides PyTorch"
    needs = f"needs {size(need.total)}{beside}, of {_size(device.free_bytes)} free, for {tokens}"
    if fit.fits:
        return Text(f"fits on {device.device}: {needs}", style=GOOD)
    rest = f"{count(fit.longest)} tokens fit" if fit.longest else "not even one token fits"
    if _stays_in_the_file(fit):
        rest += ", and its blocks stay in the mapped file"
    words = f"does not fit on {device.device}: {needs}; {rest}"
    return Text(words, style=BAD)


def _would_fit(offers: Sequence[Offer]) -> Line:
    """With which options a model would fit that does not, and what it would need then."""
    if not offers:
        return Line(["no smaller weight format or context fits either"])
    first, *others = (f"{one.options} ({size(one.needed_bytes)})" for one in offers)
    return Line([f"would fit: {first}", *others])


def _memory(fit: DeviceFit, alone: bool) -> list[str]:
    """What a device needs, part by part; whether that fits where it is not `alone`."""
    need, device = fit.need, fit.device
    growing = f" ({size(need.cache_per_token)} a token)" if need.cache_per_token else ""
    state = {True: "fits", False: "does not fit", None: "unknown"}[fit.fits]
    state = state if device.usable else "no CUDA in the installed PyTorch"
    parts = [
        "" if alone else f"{state}: {size(need.total)} of {_size(device.free_bytes)} free",
        f"weights {size(need.weights)} ({need.formats['weight_format']})",
        f"cache {size(need.cache)}{growing}",
        f"prompt {size(need.activations)}",
        f"copies {size(need.copies)}" if need.copies else "",
        f"libraries {size(need.runtime)}" if need.runtime else "",
        f"{count(fit.longest)} tokens fit" if fit.longest not in (None, need.context) else "",
        _formats(fit),
    ]
    return [part for part in parts if part]


def _memory_table(fits: Sequence[DeviceFit]) -> list[RenderableType]:
    """A heading, the table, and what the devices are."""
    need = fits[0].need
    sequences = f", {need.batch} sequences" if need.batch > 1 else ""
    heading = f"\nmemory for {count(need.context)} tokens{sequences}"
    names = [
        f"{fit.device.device}: {one_line(fit.device.name)}, {_size(fit.device.total_bytes)}"
        + (f", {formats}" if (formats := _formats(fit)) else "")
        for fit in fits
    ]
    if not all(fit.device.usable for fit in fits):
        names.append("no CUDA: not in the PyTorch that is installed")
    states = [Line(state_words(need.states), FAINT)] if need.states is not None else []
    return [Text(heading, style=HEADING), MemoryTable(fits), *states, Line(names, FAINT)]


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
            Column("", right=False, cut=True, drop=1),
        ]
        lines = []
        for name, part, note in _parts(fits):
            found = [part(fit) for fit in fits]
            if any(found):
                cells = [size(one) if isinstance(one, int) else one for one in found]
                texts = [Text(cell) if isinstance(cell, str) else cell for cell in cells]
                lines.append([Text(name), *texts, Text(note, style=FAINT)])
        return Rows(columns, lines)


def _parts(
    fits: Sequence[DeviceFit],
) -> tuple[tuple[str, Callable[[DeviceFit], int | str | Text], str], ...]:
    """A name, what a device has of it (bytes where it is a number), and a note."""
    need = fits[0].need
    kept = "keys and values of every token"
    if need.states is not None:
        kept = "states, and keys and values" if need.cache_per_token else "states"
    mapped = "blocks stay in the mapped file" if any(map(_stays_in_the_file, fits)) else ""
    last = "read and written for the last token" + (" of each" if need.batch > 1 else "")
    return (
        ("format", lambda fit: fit.need.formats["weight_format"], "of the weights"),
        ("weights", lambda fit: fit.need.weights, ""),
        ("cache", lambda fit: fit.need.cache, kept),
        ("  a token", lambda fit: fit.need.cache_per_token, ""),
        ("copies", lambda fit: fit.need.copies, "of the cache, when a sequence ends"),
        ("prompt", lambda fit: fit.need.activations, "most tensors while it is read"),
        ("libraries", lambda fit: fit.need.runtime, "their buffers, and the tokenizer"),
        ("needed", lambda fit: fit.need.total, "at once, besides PyTorch"),
        ("free", lambda fit: _size(fit.device.free_bytes), ""),
        ("fits", _fits, mapped),
        ("longest", lambda fit: "unknown" if fit.longest is None else count(fit.longest),
         "tokens that fit"),
        ("decoding", lambda fit: size(fit.token.bytes), last),
        ("  weights", lambda fit: size(fit.token.weights), "each once"),
        ("  cache", lambda fit: size(fit.token.cache), "what the token sees"),
        ("  others", lambda fit: size(fit.token.activations), "what its parts compute"),
    )  # fmt: skip


def _fits(fit: DeviceFit) -> Text:
    if not fit.device.usable:
        return Text("no CUDA", style=FAINT)
    if fit.fits is None:
        return Text("unknown", style=FAINT)
    return Text("yes", style=GOOD) if fit.fits else Text("no", style=BAD)


def _stays_in_the_file(fit: DeviceFit) -> bool:
    """Whether loading leaves weights in blocks where they are: on a CPU without memory for them."""
    free, packed = fit.device.free_bytes, fit.need.formats["product_format"].startswith("int")
    return packed and fit.device.device == "cpu" and free is not None and fit.need.weights > free


def _formats(fit: DeviceFit) -> str:
    """What is rounded otherwise than the weights, where there is anything."""
    used = fit.need.formats
    if len({*used.values()}) == 1:
        return ""
    return (
        f"{used['product_format']} products, {used['activation_format']} activations, "
        f"{used['cache_format']} cache"
    )


def _size(nbytes: int | None) -> str:
    return "unknown" if nbytes is None else size(nbytes)

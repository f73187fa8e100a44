"""What a model is, and whether it fits, in facts by subject."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
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
    TokenizerFacts,
)
from llmcli.records.info import DeviceFit, LayerType
from llmcli.records.numbers import counted, numbered
from llmcli.ui.facts import state_words
from llmcli.ui.layout import SEPARATOR, WIDEST, Column, Line, Rows, filled
from llmcli.ui.numbers import scaled, size
from llmcli.ui.theme import FAINT, HEADING, one_line, quoted

GOOD, BAD = "green", "red"
_LONG_TEXT, _LONG_LIST = 200, 6  # of metadata: characters of a text, entries of a list
_Fact = tuple[str, Sequence[str]]  # a subject, and what is said of it


def render_info(
    report: InfoReport, *, full: bool = False, metadata: bool = False
) -> RenderableType:
    """The model, whether it fits in one sentence, its tokenizer and file, and memory.

    `full`: with what few need; `metadata`: with the file's own.
    """
    model, fits, verdict = report.architecture, report.memory, ""
    parts: list[RenderableType] = []
    if report.unsupported is not None:
        verdict = report.unsupported.message
        parts.append(Text(one_line(verdict), style=BAD))
    parts.append(Text(one_line(report.name), style=HEADING))
    parts += [Line(line, FAINT) for line in _about(report.about, full)]
    facts: list[_Fact] = []
    if model is not None:
        parts.append(_verdict(fits[0], model.context))
        if fits[0].fits is False:
            offers = [f"{one.options} ({size(one.needed_bytes)})" for one in report.would_fit]
            none = ["no smaller weight format or context fits either"]
            parts.append(Line([f"would fit: {offers[0]}", *offers[1:]] if offers else none))
        parts.append(Text())
        facts += _model(model, report.flops if full else None)
    if report.tokenizer is not None:
        facts += _tokenizer(report.tokenizer, full)
    facts += _file(report.file, None if model is None else model.declared, full)
    facts += [
        ("ignored", (one_line(f"{key} = {value}"), "llama.cpp does not read it here either"))
        for key, value in report.ignored.items()
    ]
    facts += [("unknown", (one_line(why),)) for why in report.unknown if why != verdict]
    if fits and full:  # what memory is counted for, and what its parts are
        need = fits[0].need
        sequences = f", {need.batch} sequences" if need.batch > 1 else ""
        words = [
            f"for {need.context:,} tokens{sequences}",
            "cache: keys and values of every token" if need.cache_bytes_per_token else "",
            "copies: of the cache, when a sequence ends" if need.cache_copies_bytes else "",
            "prompt: most tensors while it is read",
            "libraries: their buffers, and the tokenizer",
            *(state_words(need.states) if need.states is not None else ()),
        ]
        facts.append(("memory", [*filter(None, words)]))
    for fit in fits:
        facts += _memory(fit, full, alone=len(fits) == 1)
    parts.append(Facts(facts))
    if metadata:
        entries = [f"{one_line(key)} = {_value(one)}" for key, one in report.file.entries.items()]
        parts.append(Text("\nmetadata", style=HEADING))
        parts += [Text(entry, overflow="fold") for entry in entries or ["none"]]
    return Group(*parts)


def render_families(families: Sequence[FamilyFacts]) -> RenderableType:
    """A line for each family: the names that checkpoints have for it, and what it is made of."""
    checked = min((family.checked for family in families), key=len)  # of all, and of some more
    more = [
        f"{family.name}: {family.checked.removeprefix(checked).lstrip(', ')}"
        for family in families
        if family.checked != checked
    ]
    return Group(_Families(families), Text(), Line([f"checked: {checked}", *more]))


@dataclass(frozen=True)
class _Families:
    """As many columns as fit whole; where not even the first do, a list of names is cut.

    In a pipe, where all fit, the particulars stand below their rows: lines would be too long.
    """

    families: Sequence[FamilyFacts]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        names = ("family", "model_type", "GGUF", "layers", "particulars")
        rows = [
            (
                family.name,
                ", ".join(family.hf_types),
                ", ".join(family.gguf_architectures),
                " + ".join((", ".join(family.mixers), *family.feed_forwards)),
                family.words,
            )
            for family in self.families
        ]
        for shown in (5, 4, 3):
            columns = [
                Column(name, right=False, cut=shown == 3 and name == "model_type", drop=turn)
                for turn, name in enumerate(names[:shown])
            ]
            table = Rows(columns, [row[:shown] for row in rows], below=shown == 5)
            if shown == 3 or table.fit(options.max_width):
                break
        yield from console.render(table, options.update_width(min(options.max_width, WIDEST)))
        if left := names[shown:]:
            yield Text(f"{' and '.join(left)}: --json", style=FAINT)


@dataclass(frozen=True)
class Facts:
    """A subject a row and what is said of it, parts joined by dots, beside each other.

    Lines break between parts; a part that is wider than the room breaks between words, and a word
    where it has to. A path is in parts, too, and breaks after a `/`, never inside a name.
    """

    rows: Sequence[_Fact]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        indent = max(len(name) for name, _ in self.rows) + 2
        room = max(1, options.max_width - indent)
        for name, parts in self.rows:
            label, path = name, name == "path"
            for line in filled(parts, room, "" if path else SEPARATOR):
                for piece in Text(line).wrap(console, room, overflow="ignore" if path else "fold"):
                    piece.rstrip()
                    whole = Text.assemble((label.ljust(indent), FAINT), piece)
                    whole.no_wrap, whole.overflow = True, "ignore"
                    yield whole
                    label = ""


def _about(about: About, full: bool) -> Iterator[list[str]]:
    """What our catalog says, else, or for `full` too, what the model says of itself."""
    languages = f"language{'s' * (len(about.languages) > 1)} {', '.join(about.languages)}"
    named = [
        about.name,
        about.kind,
        about.organization and f"by {about.organization}",
        about.license and f"license {about.license}",
        about.languages and languages,
    ]
    own = [one_line(words) for words in named if words]
    if about.summary:
        yield [about.summary]
    if own and (full or not about.summary):
        yield own


def _model(model: Architecture, flops: FlopsNeed | None) -> Iterator[_Fact]:
    """`flops`: in full, with what few need."""
    counts, exact = model.parameters, flops is not None

    def short(number: int) -> str:
        return scaled(number).replace("G", "B")

    named = [one_line(model.family), f"type {one_line(model.model_type)}", f"width {model.width}"]
    yield "family", (*named, f"vocabulary {model.vocabulary:,}")
    words = [f"{counts.total:,}" + (f" ({short(counts.total)})" if exact else "")]
    if counts.active != counts.total:
        words.append(f"{counts.active:,} active")
    elif exact:
        words.append("all active")
    parts = {
        "embedding": counts.embedding,
        "attention": counts.attention,
        "other mixers": counts.mixers,
        "MLP": counts.mlp,
        "norms": counts.norms,
        "head": counts.head,
    }
    shown = [f"{name} {f'{n:,}' if exact else short(n)}" for name, n in parts.items() if n]
    if model.tied:
        shown.append("head tied to the embedding")
    if model.embedding_scale != 1:
        shown.append(f"embeddings × {model.embedding_scale:.4g}")
    if model.logit_scale != 1:
        shown.append(f"logits × {model.logit_scale:.4g}")
    if model.logit_cap is not None:
        shown.append(f"logits capped at {model.logit_cap:g}")
    yield from [("parameters", words), ("", shown)] if exact else [("parameters", words + shown)]
    for place, layers in enumerate(model.layers):
        yield "" if place else "layers", _layers(layers, len(model.layers) > 1)
    if flops is not None:
        yield "FLOPs", (
            f"{scaled(flops.first)} the first token",
            f"{scaled(flops.last)} token {flops.context:,}",
            f"{scaled(flops.prompt)} a prompt of {flops.context:,}",
            f"{scaled(flops.prompt_full)} as the full square",
        )
    limit = " = learned positions" if model.positions is not None else ""
    yield "context", (f"{model.context:,} tokens{limit}",)


def _layers(kind: LayerType, several: bool) -> list[str]:
    """Layers of one kind; their numbers where there are `several` kinds."""
    window = f" of {kind.window:,} keys" if kind.window is not None else ""
    parts = [f"{kind.count} × {kind.kind}{window}"]
    if kind.heads is not None:
        same = kind.value_dim in (None, kind.head_dim)
        values = "" if same else f" (values {kind.value_dim})"
        parts.append(f"{counted(kind.heads, 'head')} of {kind.head_dim}{values}")
    if kind.kv_heads is not None:
        parts.append(counted(kind.kv_heads, "kv head"))
    if kind.rotary:
        parts.append("rotary")
    if kind.qk_norm:
        parts.append("q and k normalized")
    parts += filter(None, (*kind.details, kind.norm))
    if kind.hidden is not None:
        gated = ", gated" if kind.gated else ""
        parts.append(f"{kind.activation} MLP of {kind.hidden:,}{gated}")
    if several:
        parts.append(numbered("layer", kind.layers))
    return parts


def _tokenizer(facts: TokenizerFacts, full: bool) -> Iterator[_Fact]:
    template = "chat template" if facts.chat_template else "no chat template"
    yield "tokenizer", (one_line(facts.kind), f"{facts.vocabulary:,} tokens", template)
    if full:
        bos = "no BOS"
        if facts.bos is not None:
            added = f"({'' if facts.adds_bos else 'not '}put in front)"
            bos = f"BOS {facts.bos.id} {quoted(facts.bos.text)} {added}"
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
    if declared is not None and not file.files:
        yield "", (f"declares {declared.dtype}: {size(declared.bytes)} of weights",)
    for words_, stored in zip(each, file.formats if full else (), strict=False):
        bits = 8 * stored.bytes / stored.numbers if stored.numbers else 0
        numbers = f"{stored.numbers:,} numbers of {bits:g} bits"
        yield "", (words_, numbers, counted(stored.tensors, "tensor"))
    if file.entries and full:
        yield "", (f"{counted(len(file.entries), 'metadata key')}, shown by --metadata",)
    yield "path", re.split(r"(?<=/)", one_line(file.path))


def _value(value: Any) -> str:
    """A value of metadata on one line: texts in quotes, long ones and long lists cut."""
    if isinstance(value, str):
        more = f" … ({len(value):,} characters)" if len(value) > _LONG_TEXT else ""
        return quoted(value[:_LONG_TEXT]) + more
    if isinstance(value, list):
        more = f", … ({len(value):,} entries)" if len(value) > _LONG_LIST else ""
        return f"[{', '.join(_value(item) for item in value[:_LONG_LIST])}{more}]"
    return f"{value:g}" if isinstance(value, float) else str(value).lower()


# whether it fits


def _verdict(fit: DeviceFit, context: int) -> Text:
    """One sentence about the device that a run would use first; `context` is the model's own."""
    need, device = fit.need, fit.device
    tokens = counted(need.context, "token")
    if need.context == context:
        tokens = f"its whole context of {tokens}"
    if need.batch > 1:
        tokens = f"{need.batch} sequences of {need.context:,} tokens"
    needed = f"{size(need.needed_bytes)} needed for {tokens}"
    if not device.usable:
        return Text(f"{needed}; the installed PyTorch has no CUDA", style=FAINT)
    if fit.fits is None:
        return Text(f"{needed}; the free memory of {device.device} is unknown", style=FAINT)
    beside = "" if device.device.startswith("cuda") else " besides PyTorch"
    free = _size(device.free_bytes)
    needs = f"needs {size(need.needed_bytes)}{beside}, of {free} free, for {tokens}"
    if fit.fits:
        return Text(f"fits on {device.device}: {needs}", style=GOOD)
    longest = fit.longest_context
    rest = f"{longest:,} tokens fit" if longest else "not even one token fits"
    if _stays_in_the_file(fit):
        rest += ", and its blocks stay in the mapped file"
    words = f"does not fit on {device.device}: {needs}; {rest}"
    return Text(words, style=BAD)


def _memory(fit: DeviceFit, full: bool, *, alone: bool) -> Iterator[_Fact]:
    """What a device needs, part by part; whether that fits where it is not `alone`.

    `full`: also what the device is, and what decoding a token reads and writes.
    """
    need, device, longest = fit.need, fit.device, fit.longest_context
    token, copies = need.cache_bytes_per_token, need.cache_copies_bytes
    state = {True: "fits", False: "does not fit", None: "unknown"}[fit.fits]
    state = state if device.usable else "no CUDA in the installed PyTorch"
    runtime, formats = need.runtime_bytes_estimate, [*need.formats.values()]
    weight, activation, cache, product = formats
    same = len(set(formats)) == 1  # nothing is rounded otherwise than the weights
    parts = [
        "" if alone else f"{state}: {size(need.needed_bytes)} of {_size(device.free_bytes)} free",
        f"weights {size(need.weights_bytes)} ({weight})",
        f"cache {size(need.cache_bytes)}" + (f" ({size(token)} a token)" if token else ""),
        f"prompt {size(need.prompt_bytes_estimate)}",
        f"copies {size(copies)}" if copies else "",
        f"libraries {size(runtime)}" if runtime else "",
        f"{longest:,} tokens fit" if longest not in (None, need.context) else "",
        "" if same else f"{product} products, {activation} activations, {cache} cache",
    ]
    yield device.device, [part for part in parts if part]
    if full:
        mapped = ["blocks stay in the mapped file"] if _stays_in_the_file(fit) else []
        yield "", [f"{one_line(device.name)}, {_size(device.total_bytes)}", *mapped]
        each = " of each" if need.batch > 1 else ""
        yield "", (
            f"to decode the last token{each}: {size(fit.token.bytes)} read and written",
            f"weights {size(fit.token.weights)}",
            f"cache {size(fit.token.cache)}",
            f"others {size(fit.token.activations)}",
        )


def _stays_in_the_file(fit: DeviceFit) -> bool:
    """Whether loading leaves weights in blocks where they are: on a CPU without memory for them."""
    need, free = fit.need, fit.device.free_bytes
    packed = need.formats["product_format"].startswith("int") and fit.device.device == "cpu"
    return packed and free is not None and need.weights_bytes > free


def _size(nbytes: int | None) -> str:
    return "unknown" if nbytes is None else size(nbytes)

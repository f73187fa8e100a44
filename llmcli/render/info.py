"""What a model is, in facts by subject, and a table of whether it fits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.text import Text

from llmcli.render.checks import render_checks
from llmcli.render.layout import filled
from llmcli.render.memory import render_memory
from llmcli.render.numbers import scaled
from llmcli.render.stats import size
from llmcli.render.theme import FAINT, HEADING, one_line, quoted
from llmcli.reports.info import (
    About,
    FamilyFacts,
    FileFacts,
    FlopsNeed,
    InfoReport,
    LayerType,
    ModelFacts,
    TokenizerFacts,
)
from llmcli.reports.numbers import spans

_LONG_TEXT, _LONG_LIST = 200, 6  # of metadata: characters of a text, entries of a list


def render_info(report: InfoReport, *, metadata: bool = False) -> RenderableType:
    """The model, its tokenizer and its file, then memory; `metadata`: the file's own, too."""
    facts: list[tuple[str, Sequence[str]]] = [*_about(report.about)]
    if report.model is not None:
        facts += _model(report.model)
    if report.tokenizer is not None:
        facts += _tokenizer(report.tokenizer)
    facts += _file(report.file, None if report.model is None else report.model.declared)
    facts += [
        ("ignored", (one_line(f"{key} = {value}"), "llama.cpp does not read it here either"))
        for key, value in report.ignored.items()
    ]
    facts += [("unknown", (one_line(reason),)) for reason in report.unknown]
    parts: list[RenderableType] = [Text(one_line(report.name), style=HEADING), Facts(facts)]
    if report.model is not None:
        parts += render_memory(report.model.fits)
    if metadata:
        parts += _metadata(report.file)
    if report.checks:
        parts += [Text(""), render_checks(report.checks)]
    return Group(*parts)


def render_families(families: Sequence[FamilyFacts]) -> RenderableType:
    """Each family: what it is made of, and the names by which checkpoints ask for it."""
    rows: list[tuple[str, Sequence[str]]] = []
    for family in families:
        rows.append((family.name, (family.words,)))
        rows.append(("", (" + ".join((", ".join(family.mixers), *family.feed_forwards)),)))
        rows.append(("", (f"model_type of config.json: {', '.join(family.hf_types)}",)))
        rows.append(("", (f"GGUF architecture: {', '.join(family.gguf_architectures) or 'none'}",)))
        rows.append(("", (f"checked: {family.checked}",)))
    return Facts(rows)


@dataclass(frozen=True)
class Facts:
    """A subject a row and what is said of it, parts joined by dots, beside each other.

    Lines break between parts; a part that is wider than the room breaks between words.
    """

    rows: Sequence[tuple[str, Sequence[str]]]

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


def _about(about: About) -> Iterator[tuple[str, Sequence[str]]]:
    """What our catalog says, then what the model says of itself."""
    named = [
        about.name,
        about.kind,
        about.organization and f"by {about.organization}",
        about.license and f"license {about.license}",
        about.languages
        and f"language{'s' * (len(about.languages) > 1)} " + ", ".join(about.languages),
    ]
    lines = [[about.summary], [one_line(str(words)) for words in named if words]]
    for number, words in enumerate(line for line in lines if any(line)):
        yield "" if number else "name", words


def _model(model: ModelFacts) -> Iterator[tuple[str, Sequence[str]]]:
    counts = model.counts
    yield (
        "family",
        (
            one_line(model.family),
            f"type {one_line(model.model_type)}",
            f"width {model.width}",
            f"vocabulary {count(model.vocabulary)}",
        ),
    )
    words = [f"{count(counts.total)} ({_short(counts.total)})"]
    words.append(
        "all active" if counts.active == counts.total else f"{count(counts.active)} active"
    )
    yield "parameters", words
    parts = {
        "embedding": counts.embedding,
        "attention": counts.attention,
        "other mixers": counts.mixers,
        "MLP": counts.mlp,
        "norms": counts.norms,
        "head": counts.head,
    }
    shown = [f"{name} {count(number)}" for name, number in parts.items() if number]
    if model.tied:
        shown.append("head tied to the embedding")
    if model.embedding_scale != 1:
        shown.append(f"embeddings × {model.embedding_scale:.4g}")
    if model.logit_scale != 1:
        shown.append(f"logits × {model.logit_scale:.4g}")
    if model.logit_cap is not None:
        shown.append(f"logits capped at {model.logit_cap:g}")
    yield "", shown
    for number, layers in enumerate(model.layers):
        yield "" if number else "layers", _layers(layers, len(model.layers) > 1)
    yield "FLOPs", _flops(model.flops)
    limit = " learned positions" if model.positions is not None else ""
    yield "context", (f"{count(model.context)} tokens{' =' + limit if limit else ''}",)


def _flops(flops: FlopsNeed) -> list[str]:
    end = count(flops.context)
    return [
        f"{scaled(flops.first)} the first token",
        f"{scaled(flops.last)} token {end}",
        f"{scaled(flops.prompt)} a prompt of {end}",
        f"{scaled(flops.prompt_full)} as the full square",
    ]


def _layers(kind: LayerType, numbered: bool) -> list[str]:
    times = len(kind.layers)
    window = f" of {count(kind.window)} keys" if kind.window is not None else ""
    parts = [f"{times} × {kind.kind}{window}"]
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
        parts.append(f"layer{'s' if times > 1 else ''} {spans(kind.layers)}")
    return parts


def _tokenizer(facts: TokenizerFacts) -> Iterator[tuple[str, Sequence[str]]]:
    template = "chat template" if facts.chat_template else "no chat template"
    yield "tokenizer", (one_line(facts.kind), f"{count(facts.vocabulary)} tokens", template)
    ends = [f"EOS {token} {quoted(text)}" for token, text in facts.eos] or ["no EOS"]
    if facts.bos is None:
        yield "", ("no BOS", *ends)
    else:
        added = "put in front" if facts.adds_bos else "not put in front"
        yield "", (f"BOS {facts.bos[0]} {quoted(facts.bos[1])} ({added})", *ends)


def _file(file: FileFacts, declared: tuple[str, int] | None) -> Iterator[tuple[str, Sequence[str]]]:
    kind = {"gguf": "GGUF", "safetensors": "safetensors"}[file.kind]
    if file.files:
        number = "1 file" if file.files == 1 else f"{file.files} files"
        tensors = "1 tensor" if file.tensors == 1 else f"{count(file.tensors)} tensors"
        held = size(sum(stored.bytes for stored in file.formats))
        yield "stored", (f"{kind}, {number}", f"{size(file.bytes)} on disk", f"{tensors} of {held}")
    else:
        yield "stored", ("a configuration without weights",)
        if declared is not None:
            yield "", (f"says {declared[0]}, in which the weights have {size(declared[1])}",)
    for stored in file.formats:
        each = 8 * stored.bytes / stored.numbers if stored.numbers else 0
        yield (
            "",
            (
                f"{one_line(stored.format)} {size(stored.bytes)}",
                f"{count(stored.numbers)} numbers of {each:g} bits",
                "1 tensor" if stored.tensors == 1 else f"{count(stored.tensors)} tensors",
            ),
        )
    if file.metadata:
        keys = len(file.metadata)
        yield "", (f"{keys} metadata key{'s' if keys > 1 else ''}",)
    yield "path", (one_line(file.path),)


def _metadata(file: FileFacts) -> list[RenderableType]:
    heading = Text("\nmetadata", style=HEADING)
    if not file.metadata:
        return [heading, Text("none")]
    rows = [f"{one_line(key)} = {_value(value)}" for key, value in file.metadata.items()]
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

"""The statistics of a run in plain words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from llmcli.reports.environment import Environment
from llmcli.reports.text import NearTie, Timings
from llmcli.ui.layout import SEPARATOR, filled
from llmcli.ui.theme import CONFIDENCE, FAINT, quoted

MOST_TIES = 8  # near ties that are listed one by one
SHORT = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "float64": "F64"}


def short_stats(
    timings: Timings, format: str, seed: int | None, width: int,
    drafted: Mapping[str, Any] | None = None, *, ended: str = "",
) -> Text:  # fmt: skip
    """One line (more where `width` columns are too few): tokens, speeds, memory, load, seed.

    `format`: that of the weights. `drafted`: the `speculation` of a document. `ended`: why the
    text ends where it does, where that is to be said.
    """
    parts = [
        f"prompt {_count(timings.prompt_tokens)}{_speed(timings.prompt_tokens_per_s)}",
        f"generated {_count(timings.generated_tokens)}{_speed(timings.generated_tokens_per_s)}",
        *filter(None, [ended]),
        format,
    ]
    if drafted is not None:
        parts.insert(-1, f"draft {draft_words(drafted)}")
    if timings.first_token_s is not None:
        parts.insert(1, f"first token {duration(timings.first_token_s)}")
    if timings.peak_memory_bytes is not None:
        parts.append(f"peak memory {size(timings.peak_memory_bytes)}")
    parts.append(f"load {duration(timings.import_s + timings.load_s)}")
    if seed is not None:
        parts.append(f"seed {seed}")
    return Text("\n".join(filled(parts, width)), style=FAINT)


def full_stats(
    timings: Timings,
    sampling: Mapping[str, tuple[float, str]],
    seed: int | None,
    model: str,
    environment: Environment | None = None,
    ties: Sequence[NearTie] | None = None,
    together: int = 1,
    drafted: Mapping[str, Any] | None = None,
) -> RenderableType:
    """Everything in two columns: timings, then each sampling value with where it comes from.

    `ties`: the near ties of a greedy run. `together`: how many texts were written side by side.
    """
    table = Table.grid(padding=(0, 2))
    rows = [("model", model)]
    if environment is not None:
        rows.append(("threads", str(environment.threads)))
        rows.append(("PyTorch", str(environment.torch)))
        several = f"{together} texts side by side" if together > 1 else "one text at a time"
        rows.append(("path", SEPARATOR.join((*environment.kernels, several))))
    rows += [
        ("import of torch", duration(timings.import_s)),
        ("load", duration(timings.load_s)),
        ("prompt", f"{_count(timings.prompt_tokens)}{_speed(timings.prompt_tokens_per_s)}"),
        ("first token", _or_none(timings.first_token_s)),
        (
            "generated",
            f"{_count(timings.generated_tokens)}{_speed(timings.generated_tokens_per_s)}",
        ),
    ]
    if drafted is not None:
        rows.append(("draft", f"{drafted['draft']}: {draft_words(drafted)}"))
    if timings.peak_memory_bytes is not None:
        rows.append(("peak memory", size(timings.peak_memory_bytes)))
    rows += _peaks(timings)
    for name, (value, origin) in sampling.items():
        rows.append((name.replace("_", " "), f"{value:g}  ({origin})"))
    rows.append(("seed", "none: greedy" if seed is None else str(seed)))
    if ties is not None:
        rows.append(("near ties", _ties(ties, timings.generated_tokens)))
    for label, words in rows:
        table.add_row(Text(label, style=FAINT), Text(words))
    return Group(table)


def draft_words(drafted: Mapping[str, Any]) -> str:
    """`61 of 96 tokens right (64 %), 1.8 times as fast`, of the `speculation` of a document."""
    proposed, accepted = drafted["proposed"], drafted["accepted"]
    if not proposed:
        return "proposed nothing"
    words = f"{accepted} of {_count(proposed)} right ({accepted / proposed:.0%})"
    if drafted["speedup"] is not None:
        words += f", {drafted['speedup']:.2f} times as fast"
    return words


def _ties(ties: Sequence[NearTie], tokens: int) -> str:
    """`2 of 40 tokens (margin below rounding): " Paris" at 3, …`, tokens counted from 0."""
    words = f"{len(ties)} of {_count(tokens)} (margin below rounding)"
    shown = [
        f"{quoted(tie.text)} at {tie.index}{f' of text {tie.label}' if tie.label else ''}"
        for tie in ties[:MOST_TIES]
    ]
    shown += ["…"] if len(ties) > MOST_TIES else []
    return f"{words}: {', '.join(shown)}" if ties else words


def _peaks(timings: Timings) -> Iterator[tuple[str, str]]:
    """A line with the phases whose peak is known: of the process, and one of the GPU."""
    for label, sizes in (
        ("  of the process", [(peak.phase, peak.resident_bytes) for peak in timings.peaks]),
        ("  on the GPU", [(peak.phase, peak.device_bytes) for peak in timings.peaks]),
    ):
        known = [f"{phase} {size(nbytes)}" for phase, nbytes in sizes if nbytes]
        if known:
            yield label, SEPARATOR.join(known)


def model_line(model: Mapping[str, Any]) -> str:
    """`smollm2 (Q4_1, Q8_0 → float32 on cpu)` from the `model` object of the JSON documents.

    Of packed weights what else is rounded, too: `(Q4_1 + Q8_0 on cpu: int8 products, …)`.
    """
    used, activations = model["weight_format"], model["activation_format"]
    held = ("F32", SHORT.get(used), *used.split(" + "))
    stored = [name for name in model["stored_formats"] if name not in held]
    formats = f"{', '.join(stored)} → {used}" if stored else used
    how = ""
    if model["product_format"] != activations:
        how = (f": {model['product_format']} products, {activations} activations, "
               f"{model['cache_format']} cache")  # fmt: skip
    return f"{model['name']} ({formats} on {model['device']}{how})"


def confidence_legend(*, ties: bool = False) -> Text:
    """What the colours of `--logprobs` mean; `ties`: and the lines under near ties."""
    legend = Text("probability of each token: ", style=FAINT)
    for position, (_, style, words) in enumerate(CONFIDENCE):
        legend.append((SEPARATOR if position else "") + words, style=style)
    if ties:
        legend.append(SEPARATOR)
        legend.append("near tie: the margin is below rounding", style="underline")
    return legend


def template_line() -> Text:
    """That the text went through the model's chat template, and how it does not."""
    return Text("chat template applied · `--raw` continues the text as it stands", style=FAINT)


def better_model_line(name: str, better: str, nbytes: int, license: str) -> Text:
    """That `better`, a download of `nbytes`, answers better than the model `name`."""
    words = f"`{name}` is small and often wrong: try `-m {better}` ({size(nbytes)}, {license})"
    return Text(f"{words}; `llmcli models` lists more", style=FAINT)


def duration(seconds: float) -> str:
    """`52 ms`, `1.24 s` or `2 min 5 s`."""
    if seconds < 0.9995:
        return f"{seconds * 1000:.3g} ms" if seconds < 0.1 else f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.2f} s"
    return f"{int(seconds // 60)} min {int(seconds % 60)} s"


def size(nbytes: int) -> str:
    """`412 MiB` or `1.25 GiB`."""
    if nbytes < 2**10:
        return f"{nbytes} B"
    for unit, scale in (("KiB", 2**10), ("MiB", 2**20), ("GiB", 2**30)):
        value = nbytes / scale
        if value < 999.5 or unit == "GiB":
            return f"{value:.3g} {unit}" if value < 999.5 else f"{value:.0f} {unit}"
    raise AssertionError("the last unit takes everything")


def _count(tokens: int) -> str:
    return "1 token" if tokens == 1 else f"{tokens} tokens"


def _speed(rate: float | None) -> str:
    if rate is None:
        return ""
    return f", {rate:.0f} tok/s" if rate >= 100 else f", {rate:.1f} tok/s"


def _or_none(seconds: float | None) -> str:
    return "none" if seconds is None else duration(seconds)

"""The statistics of a run of `generate`, for stderr."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from llmcli.commands.generate.report import RunReport
from llmcli.records.machine import Environment
from llmcli.records.numbers import counted
from llmcli.ui.facts import draft_words, model_line
from llmcli.ui.layout import SEPARATOR, filled
from llmcli.ui.numbers import duration, size, speed
from llmcli.ui.theme import FAINT, quoted

MOST_TIES = 8  # near ties that are listed one by one
TEMPLATE = Text("chat template applied · `--raw` continues the text as it stands", style=FAINT)


def short_stats(run: RunReport, ended: str, width: int) -> Text:
    """One line (more where `width` columns are too few): tokens, times, seed.

    `prompt 37 tokens, 201 ms · generated 64 (-n 64), 41.2 tok/s · 432 MiB · seed 7`; the memory
    only where the line has room for it. `ended`: what ended a text before the model did.
    """
    timings = run.timings
    first, peak = timings.first_token_s or 0.0, timings.peak_memory_bytes
    ended = f" ({ended})" if ended else ""
    memory = "" if peak is None else size(peak)
    parts = [
        f"prompt {counted(timings.prompt_tokens, 'token')}, {duration(first)}",
        f"generated {timings.generated_tokens:,}{ended}{_speed(timings.generated_tokens_per_s)}",
        "" if run.speculation is None else f"draft {draft_words(run.speculation)}",
        memory,
        "" if run.sampling.greedy else f"seed {run.sampling.seed}",
    ]
    lines = filled(list(filter(None, parts)), width)
    if len(lines) > 1:
        lines = filled([part for part in parts if part not in ("", memory)], width)
    return Text("\n".join(lines), style=FAINT)


def full_stats(
    run: RunReport,
    ties: Sequence[tuple[str, int, str]],
    *,
    model: Mapping[str, Any],
    environment: Environment,
) -> RenderableType:
    """Everything in two columns: timings, then each sampling value with where it comes from.

    `ties`: texts of the near ties, their places counted from 0, and the names of their sequences.
    """
    timings, sampling, texts = run.timings, run.sampling, run.path.sequences
    generated = timings.generated_tokens
    path = "one text at a time" if texts == 1 else f"{texts} texts side by side"
    rows = [
        ("model", model_line(model)),
        ("threads", str(environment.threads)),
        ("PyTorch", str(environment.torch)),
        ("path", SEPARATOR.join((*run.path.kernels, path))),
        ("import of torch", duration(timings.import_s)),
        ("load", duration(timings.load_s)),
        ("prompt", counted(timings.prompt_tokens, "token") + _speed(timings.prompt_tokens_per_s)),
        ("first token", duration(timings.first_token_s or 0.0)),
        ("generated", counted(generated, "token") + _speed(timings.generated_tokens_per_s)),
    ]
    if run.speculation is not None:
        rows.append(("draft", f"{run.speculation['draft']}: {draft_words(run.speculation)}"))
    if timings.peak_memory_bytes is not None:
        rows.append(("peak memory", size(timings.peak_memory_bytes)))
    for label, of in (("  of the process", "resident_bytes"), ("  on the GPU", "device_bytes")):
        peaks = [(peak.phase, getattr(peak, of)) for peak in timings.peaks]
        if known := [f"{phase} {size(nbytes)}" for phase, nbytes in peaks if nbytes]:
            rows.append((label, SEPARATOR.join(known)))
    for name, origin in sampling.origins.items():
        rows.append((name.replace("_", " "), f"{getattr(sampling, name):g}  ({origin})"))
    rows.append(("seed", "none: greedy" if sampling.greedy else str(sampling.seed)))
    if sampling.greedy:  # `2 of 40 tokens (margin below rounding): " Paris" at 3, …`
        words = f"{len(ties)} of {counted(generated, 'token')} (margin below rounding)"
        shown = [
            f"{quoted(text)} at {index}{f' of text {label}' if label else ''}"
            for text, index, label in ties[:MOST_TIES]
        ]
        shown += ["…"] if len(ties) > MOST_TIES else []
        rows.append(("near ties", f"{words}: {', '.join(shown)}" if ties else words))
    table = Table.grid(padding=(0, 2))
    for label, words in rows:
        table.add_row(Text(label, style=FAINT), Text(words))
    return table


def _speed(per_s: float | None) -> str:
    return "" if per_s is None else f", {speed(per_s)}"

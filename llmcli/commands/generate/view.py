"""The statistics of a run of `generate`, for stderr."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from llmcli.commands.generate.report import Statistics
from llmcli.records.numbers import counted
from llmcli.records.text import NearTie, Timings
from llmcli.ui.facts import draft_words, model_line
from llmcli.ui.layout import SEPARATOR, filled
from llmcli.ui.numbers import duration, size, speed
from llmcli.ui.theme import FAINT, quoted

MOST_TIES = 8  # near ties that are listed one by one


def short_stats(run: Statistics, width: int) -> Text:
    """One line (more where `width` columns are too few): tokens, times, seed.

    `prompt 37 tokens, 201 ms · generated 64 (-n 64), 41.2 tok/s · 432 MiB · seed 7`; the memory
    only where the line has room for it.
    """
    timings = run.timings
    first, peak = timings.first_token_s, timings.peak_memory_bytes
    read = "" if first is None else f", {duration(first)}"
    ended = f" ({run.ended})" if run.ended else ""
    memory = "" if peak is None else size(peak)
    parts = [
        f"prompt {counted(timings.prompt_tokens, 'token')}{read}",
        f"generated {timings.generated_tokens:,}{ended}{_speed(timings.generated_tokens_per_s)}",
        "" if run.speculation is None else f"draft {draft_words(run.speculation)}",
        memory,
        "" if run.seed is None else f"seed {run.seed}",
    ]
    lines = filled(list(filter(None, parts)), width)
    if len(lines) > 1:
        lines = filled([part for part in parts if part not in ("", memory)], width)
    return Text("\n".join(lines), style=FAINT)


def full_stats(run: Statistics) -> RenderableType:
    """Everything in two columns: timings, then each sampling value with where it comes from."""
    timings, machine = run.timings, run.environment
    several = run.side_by_side > 1
    path = f"{run.side_by_side} texts side by side" if several else "one text at a time"
    first = timings.first_token_s
    rows = [
        ("model", model_line(run.model)),
        ("threads", str(machine.threads)),
        ("PyTorch", str(machine.torch)),
        ("path", SEPARATOR.join((*machine.kernels, path))),
        ("import of torch", duration(timings.import_s)),
        ("load", duration(timings.load_s)),
        ("prompt", _tokens(timings.prompt_tokens, timings.prompt_tokens_per_s)),
        ("first token", "none" if first is None else duration(first)),
        ("generated", _tokens(timings.generated_tokens, timings.generated_tokens_per_s)),
    ]
    if run.speculation is not None:
        rows.append(("draft", f"{run.speculation['draft']}: {draft_words(run.speculation)}"))
    if timings.peak_memory_bytes is not None:
        rows.append(("peak memory", size(timings.peak_memory_bytes)))
    rows += _peaks(timings)
    for name, (value, origin) in run.sampling.items():
        rows.append((name.replace("_", " "), f"{value:g}  ({origin})"))
    rows.append(("seed", "none: greedy" if run.seed is None else str(run.seed)))
    if run.ties is not None:
        rows.append(("near ties", _ties(run.ties, timings.generated_tokens)))
    table = Table.grid(padding=(0, 2))
    for label, words in rows:
        table.add_row(Text(label, style=FAINT), Text(words))
    return table


def _ties(ties: Sequence[NearTie], tokens: int) -> str:
    """`2 of 40 tokens (margin below rounding): " Paris" at 3, …`, tokens counted from 0."""
    words = f"{len(ties)} of {counted(tokens, 'token')} (margin below rounding)"
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


def template_line() -> Text:
    """Says that the chat template was applied, and how to go without it."""
    return Text("chat template applied · `--raw` continues the text as it stands", style=FAINT)


def _tokens(count: int, per_s: float | None) -> str:
    return counted(count, "token") + _speed(per_s)


def _speed(per_s: float | None) -> str:
    return "" if per_s is None else f", {speed(per_s)}"

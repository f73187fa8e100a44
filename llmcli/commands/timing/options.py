"""What `llmcli timing` can be asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from llmcli.anatomy.counts import PROMPT_CHUNK
from llmcli.cli.files import check_size, kind_of_file
from llmcli.cli.params import opt
from llmcli.commands.timing.view.trace import trace_size
from llmcli.errors import UsageError

TIMING = "Timing"


@dataclass(frozen=True, kw_only=True)
class TimingOptions:
    """What is run how often, what is shown of it, and where the trace goes."""

    panel: ClassVar[str] = TIMING
    phase: Literal["prefill", "decode", "both"] = opt(
        "both", "--phase", "PHASE",
        "Time reading the prompt (prefill), writing after it (decode), or both.",
    )  # fmt: skip
    max_tokens: int = opt(
        16, "-n", "--max-tokens", "N",
        "Tokens that are written after the prompt, end of text or not.", at_least=1,
    )  # fmt: skip
    pairs: int = opt(
        10, "--pairs", "N",
        "Runs with clocks, and as many without, in turns; the median one is shown.",
        at_least=1, at_most=10_000,
    )  # fmt: skip
    layers: bool = opt(False, "--layers", "Also the parts of every layer.")
    unfused: bool = opt(
        False, "--unfused",
        "Also compute in pieces what a fused kernel does at once, and time these apart.",
    )  # fmt: skip
    trace: str | None = opt(
        None, "--trace", "FILE",
        "Write the run to FILE.json, for ui.perfetto.dev or chrome://tracing.",
    )  # fmt: skip
    force: bool = opt(False, "--force", "Write the trace however large it gets.")

    def check(self) -> None:
        """Raises UsageError or WriteFailed for what can be refused before anything is loaded."""
        if self.trace is not None:
            kind_of_file(self.trace, ("json",), option="--trace")
        elif self.force:
            raise UsageError(
                "`--force` is about the size of a file, and none is written",
                hint="add `--trace FILE.json`, or leave it out",
            )

    def check_trace(self, layers: int, tokens: int) -> None:
        """Raises UsageError or WriteFailed where the trace of a run gets too large.

        Of a prompt of so many `tokens`.
        """
        if self.trace is not None:
            calls = self.new_tokens
            if "prefill" in self.phases:
                calls += -(-tokens // PROMPT_CHUNK)
            smaller = "write fewer tokens with --max-tokens"
            nbytes = trace_size(layers, calls)
            check_size(self.trace, nbytes, force=self.force, smaller=smaller)

    @property
    def phases(self) -> tuple[Literal["prefill", "decode"], ...]:
        """The phases that are timed."""
        return ("prefill", "decode") if self.phase == "both" else (self.phase,)

    @property
    def new_tokens(self) -> int:
        """How many are written: none where only reading is timed."""
        return 0 if self.phase == "prefill" else self.max_tokens

"""`llmcli ablate`: what changes without a head, an MLP, an expert or a layer."""

from __future__ import annotations

from dataclasses import dataclass
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Any, ClassVar

from llmcli.commands.ablate.report import By
from llmcli.errors import UsageError
from llmcli.records.numbers import counted
from llmcli.shell.answer import AnswerOptions
from llmcli.shell.batch import read_batch
from llmcli.shell.encoding import ChatOptions, TemplateOptions, encode
from llmcli.shell.inspection import (
    OPEN,
    Export,
    FileOptions,
    InChat,
    Inspection,
    NewTokensOptions,
    Shown,
    Subject,
    check_span,
)
from llmcli.shell.options import ModelOptions, PromptOptions, ViewOutputOptions
from llmcli.shell.params import opt
from llmcli.shell.prompts import Prompt, prompt_or_default

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmcli.commands.ablate.report import AblateReport
    from llmcli.config.model import ModelConfig

FILES = ("html", "png", "json")

EPILOG = """
An effect is the number with the ablation minus the number without: a loss that
grows, or a logit that falls, was helped by that part. Parts that back each
other up each have less effect than both together.

Examples:

  llmcli ablate "The capital of France is Paris, of Italy it is Rome"
  llmcli ablate "The capital of France is" --answer " Paris"
  llmcli ablate -f text.txt --by zero --what "*.attn.z"
  llmcli ablate "A red cat" --by resample --other "A red dog"
  llmcli ablate --batch prompts.jsonl -o ablation.html
"""


@dataclass(frozen=True, kw_only=True)
class ChangedAnswerOptions(AnswerOptions):
    """The token whose logit is compared instead of the loss."""

    answer: str | None = opt(
        None,
        "--answer TOKEN",
        "The effect on this token's logit after the prompt, in quotes to keep a space. [default: "
        "on the loss, the mean −log p of the prompt's own tokens]",
    )


@dataclass(frozen=True, kw_only=True)
class AblateOptions(FileOptions):
    """What is ablated, by what, and how much is shown."""

    panel: ClassVar[str] = "Ablate"
    what: str | None = opt(
        None,
        "--what NAME",
        "Any activation instead, each of its heads alone; globs and ranges of layers as in "
        "`--edit`. [default: every head, expert, MLP and layer]",
    )
    by: By = opt(
        "mean",
        "--by mean|zero|resample",
        "What takes its place: its mean over all tokens of the prompts, which keeps what is the "
        "same for every token and which later layers rely on; zero; or its values in another "
        "prompt.",
    )
    other: str | None = opt(
        None,
        "--other PROMPT",
        "The other prompt of `--by resample`. [default: the line before in --batch]",
    )
    position: str | None = opt(
        None,
        "--position SPAN",
        "Only the loss of these tokens: 40:80, :10, -5: or 7. [default: all but the first]",
        excludes=("--answer", "--versus"),
    )
    batch: str | None = opt(
        None,
        "--batch FILE.jsonl",
        "The mean effect on many prompts, with its 95 % interval: a line each, as of `generate`.",
        excludes=("PROMPT", "--file", "--ids"),
    )
    top: int = opt(10, "-k --top K", "How many parts are shown in words.", at_least=1, at_most=1000)
    save: str | None = opt(
        None,
        "-o --output FILE",
        f"Also write all effects to a file, its format by extension: {', '.join(FILES)}.",
    )
    open: bool = opt(False, *OPEN)
    every: bool = opt(False, "--all", "Show every head, at any height.")
    force = False  # a file has some numbers of each part of the model: it is never too large

    def check_other(self, prompts: int) -> None:
        """Refuses `--by resample` without another prompt, and another prompt without it."""
        if (self.by == "resample") != (self.other is not None) and not (
            self.by == "resample" and prompts > 1
        ):
            raise UsageError(
                "`--by resample` and `--other PROMPT` need each other",
                hint="give both, or `--by resample` and `--batch` with several prompts",
            )

    def check(self, config: ModelConfig) -> None:
        """Refuses what is wrong for any text, before the weights are read."""
        from llmcli.commands.ablate.measure import places

        places(config, self.names(config))
        if self.position is not None:
            check_span(self.position, "--position")

    def names(self, config: ModelConfig) -> Sequence[str] | None:
        """The activations of `--what`. Raises UsageError."""
        if self.what is None:
            return None
        from llmcli.families.sources import sources
        from llmcli.graph.names import Names

        return Names(config, sources(config)).select(self.what, ("activation",))

    def measure(
        self, look: Subject, prompts: Sequence[Sequence[int]], asked: AnswerOptions,
        chat: ChatOptions,
    ) -> AblateReport:  # fmt: skip
        """Measures these prompts, with notes about the answer."""
        from llmcli.commands.ablate.measure import measure_ablation
        from llmcli.shell.progress import Progress

        model, other, answer = look.model, None, asked.parse(look.model)
        if self.other is not None:
            other = encode(Prompt(self.other), chat, model).ids
        of_loss = answer.answer is None and answer.versus is None
        with Progress(look.out) as progress:
            report = measure_ablation(
                model, prompts, None if of_loss else answer, span=self.position,
                by=self.by, what=self.names(model.config), other=other, progress=progress,
            )  # fmt: skip
        for note in asked.notes(answer, model):
            look.out.note(note)
        return report


def command(
    prompt: PromptOptions,
    template: TemplateOptions,
    answer: ChangedAnswerOptions,
    ablate: AblateOptions,
    model: ModelOptions,
    output: ViewOutputOptions,
) -> None:
    """Ablate every head, MLP, expert and layer: what the loss or a logit becomes without it.

    One part at a time is replaced by its mean over the tokens (after Wang et al. 2022: a zero is
    unlike anything that later layers know), by zero, or by its values in another prompt. The
    part that matters most is checked by `--edit` in a run of its own, or the command exits 1.
    """
    from llmcli.commands.ablate.view import ablation_page, ablation_png, render_ablation

    look, chat = Inspection("ablate", ablate, FILES, output), template.options()
    if ablate.batch is None:
        prompts = [prompt_or_default(prompt, look.out.note)]
    else:
        prompts = read_batch(ablate.batch)
    ablate.check_other(len(prompts))
    chat.check_conversations(prompts)
    look.load(model, ablate.check, text=any(not one.ids for one in prompts))
    ids = [look.encode(one, template, NewTokensOptions(), model).ids for one in prompts]
    page, png = Export(make=ablation_page), Export(make=ablation_png)
    look.plan({"html": page, "png": png, "json": Export()}, "choose parts with `--what`")
    report = ablate.measure(look, ids, answer, chat)
    height = None if ablate.every or not look.out.out.terminal else get_terminal_size().lines
    look.present(
        lambda: render_ablation(
            report, look.title, top=ablate.top, height=height, whole="--all"
        ),
        report,
        counted(len(report.effects), "effect"),
    )


def look(chat: InChat, given: dict[str, str]) -> Shown:
    """Shows in `/look` the map of the conversation so far."""
    from llmcli.commands.ablate.view import render_ablation

    answer = ChangedAnswerOptions(**{k: given.pop(k) for k in ("answer", "versus") if k in given})
    options = AblateOptions(**dict[str, Any](given))
    options.check_other(1)
    options.check(chat.model.config)
    report = options.measure(chat, [chat.ids], answer, ChatOptions(raw=True))
    height = get_terminal_size().lines
    return render_ablation(report, chat.title, top=options.top, height=height), report.checks

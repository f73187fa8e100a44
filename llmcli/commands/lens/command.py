"""`llmcli lens`: what every layer of a model would say, were it the last one."""

from __future__ import annotations

from dataclasses import dataclass
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Any, ClassVar

from llmcli.records.numbers import counted
from llmcli.shell.answer import parse_token, space_note
from llmcli.shell.encoding import TemplateOptions
from llmcli.shell.inspection import (
    FORCE,
    OPEN,
    Export,
    InChat,
    Inspection,
    NewTokensOptions,
    PlacesOptions,
    Shown,
    Subject,
)
from llmcli.shell.options import ModelOptions, PromptOptions, ViewOutputOptions
from llmcli.shell.params import opt

if TYPE_CHECKING:
    from llmcli.commands.lens.measure import Target
    from llmcli.commands.lens.report import LensReport
    from llmcli.text import Tokenizer

FILES = ("html", "png", "json")

EPILOG = """
Early layers do not yet use the basis that the output is decoded from, so their
tokens are less meaningful than those of the last layers (Belrose et al. 2023).

Examples:

  llmcli lens "The capital of France is"
  llmcli lens "The capital of France is" --position -1 --target " Paris"
  llmcli lens --layer 20-29 --mid
  llmcli lens "Once upon a time" --generate 8 -o lens.html
  llmcli lens "Once upon a time" --open
"""


@dataclass(frozen=True, kw_only=True)
class LensOptions(PlacesOptions):
    """Which cells, how many tokens of each, whose rank, and where the file goes."""

    panel: ClassVar[str] = "Lens"
    position: str | None = opt(
        None,
        "--position SPAN",
        "Positions such as 40:48, :10, -5: or -1; a single one is shown in detail. [default: the "
        "last that fit the screen, else all]",
    )
    layer: str | None = opt(
        None,
        "--layer LAYERS",
        "Layers such as 0,3-5,-1; the last is always included. [default: the embedding and all]",
    )
    mid: bool = opt(
        False, "--mid", "Also inside a layer, between attention and feed-forward part (resid_mid)."
    )
    top: int = opt(
        5,
        "-k --top K",
        "Top tokens of each cell: shown for a single position, in JSON and files.",
        at_least=1,
        at_most=1000,
    )
    target: str = opt(
        "output",
        "--target TOKEN|next|output",
        "The token whose rank is tracked: one of the vocabulary (in quotes if it is itself next "
        "or output; an id without a tokenizer), the text's next token, or the model's top token. "
        "Except with `output`, cells show ranks.",
    )
    save: str | None = opt(
        None,
        "-o --output FILE",
        f"Also write all cells to a file, its format by extension: {', '.join(FILES)}.",
    )
    open: bool = opt(False, *OPEN)
    every: bool = opt(
        False,
        "--all",
        "Show every layer, and all details of a single position, at any height.",
    )
    force: bool = opt(False, *FORCE)

    @property
    def ranks(self) -> bool:
        """Whether cells show the rank of the target."""
        return self.target != "output"

    def measure(self, look: Subject, *, whole: bool = False) -> LensReport:
        """Measures a text; not `whole`: at as many positions as a screen holds."""
        from llmcli.commands.lens.measure import measure_lens
        from llmcli.commands.lens.view import room
        from llmcli.inspect.passes import passes_over

        config, tokenizer = look.model.config, look.model.tokenizer
        target = parse_target(self.target, tokenizer, config.vocab)

        def span(total: int) -> range:
            return self.span(total)[0 if whole else -room(look.out.out.width) :]

        with passes_over(look) as passes:
            report = measure_lens(
                passes,
                span=span,
                layers=self.layers(config),
                mid=self.mid,
                top=self.top,
                target=target,
            )
        if isinstance(target, int):
            likeliest = {cell.top[0].id for cell in report.rows[-1].cells}
            if note := space_note(self.target, "--target", target, likeliest, tokenizer):
                look.out.note(note)
        return report


def command(
    prompt: PromptOptions,
    template: TemplateOptions,
    new: NewTokensOptions,
    lens: LensOptions,
    model: ModelOptions,
    output: ViewOutputOptions,
) -> None:
    """Logit lens: the top tokens after every layer, at every position.

    The residual stream after each layer is decoded as if the model ended there: through the model's
    final norm, with each row's own statistics, and its output head. Also shown are probability,
    rank of a target, entropy and the divergence from the model's output. The last row must equal
    the model's output as a distribution, or the command exits 1.
    """
    from llmcli.commands.lens.view import render_lens

    look = Inspection("lens", lens, FILES, output)
    look.read(prompt, template, new, model, lens.check)
    look.plan(exports(look, lens), lens.smaller)
    report = lens.measure(look, whole=look.out.json or look.path is not None)
    height = None if lens.every or not look.out.out.terminal else get_terminal_size().lines
    look.present(
        lambda: render_lens(report, look.title, ranks=lens.ranks, whole="--all", height=height),
        report,
        f"{counted(len(report.rows), 'row')} at {counted(len(report.positions), 'position')}",
    )


def exports(look: Subject, lens: LensOptions) -> dict[str, Export]:
    """The files, by their kinds. Sizes were measured on ordinary texts.

    A heading, and for each cell some numbers and `top` tokens. A picture has a bounded size.
    """
    from llmcli.commands.lens.measure import places
    from llmcli.commands.lens.view import lens_page, lens_png

    config, tokens = look.model.config, len(look.ids) + look.generate
    rows = places(config, lens.layers(config), mid=lens.mid)
    cells = len(rows) * len(lens.span(tokens))
    return {
        "html": Export(size=(29 << 10) + cells * (31 + 16 * lens.top), make=lens_page),
        "png": Export(make=lens_png),
        "json": Export(size=2450 + cells * (142 + 65 * lens.top)),
    }


def parse_target(text: str, tokenizer: Tokenizer | None, vocabulary: int) -> Target:
    """`output`, `next`, or a token as `parse_token` takes it. Raises UsageError."""
    if text == "output":
        return "output"
    if text == "next":
        return "next"
    return parse_token(text, "--target", tokenizer, vocabulary, ", next or output")


def look(chat: InChat, given: dict[str, str]) -> Shown:
    """Shows in `/look` the last positions that fit the screen, unless others are named."""
    from llmcli.commands.lens.view import render_lens

    options = LensOptions(**dict[str, Any](given))
    options.check(chat.model.config)
    report = options.measure(chat)
    height = get_terminal_size().lines
    return render_lens(report, chat.title, ranks=options.ranks, height=height), report.checks

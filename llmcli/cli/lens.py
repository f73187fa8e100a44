"""`llmcli lens`: what every layer of a model would say, were it the last one."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmcli.cli.files import kind_of_file
from llmcli.cli.looking import (
    NewTokensOptions,
    TemplateOptions,
    encode_look,
    greedy,
    parse_numbers,
    parse_span,
)
from llmcli.cli.options import ModelOptions, OutputOptions, PromptOptions
from llmcli.cli.output import Output, write_document, write_file
from llmcli.cli.params import Range
from llmcli.cli.progress import Progress
from llmcli.cli.prompts import Prompt, looked_at
from llmcli.cli.running import KERNELS, load_model
from llmcli.errors import CheckFailed, UsageError
from llmcli.measure.environment import environment
from llmcli.reports.checks import checks_document
from llmcli.reports.lens import LensReport

if TYPE_CHECKING:
    from llmcli.measure.lens import Target
    from llmcli.model import Model
    from llmcli.text import Tokenizer

LENS = "Lens"
FILES = ("csv", "json")

EPILOG = """
Examples:

  llmcli lens "The capital of France is"
  llmcli lens "The capital of France is" --position -1 --target " Paris"
  llmcli lens --layer 20-29 --mid
  llmcli lens "Once upon a time" --generate 8 -o lens.csv
"""


@dataclass(frozen=True, kw_only=True)
class LensOptions:
    """Which cells, how many tokens of each, whose rank, and where the file goes."""

    position: Annotated[
        str | None,
        typer.Option(
            "--position",
            metavar="SPAN",
            rich_help_panel=LENS,
            help="Positions such as 40:48, :10, -5: or -1; one alone is shown with everything "
            "about it. [default: on the screen the last that fit, else all]",
        ),
    ] = None
    layer: Annotated[
        str | None,
        typer.Option(
            "--layer",
            metavar="LAYERS",
            rich_help_panel=LENS,
            help="Layers such as 0,3-5,-1; the last one is always there. [default: the "
            "embedding and all]",
        ),
    ] = None
    mid: Annotated[
        bool,
        typer.Option(
            "--mid",
            rich_help_panel=LENS,
            help="Also inside a layer, between attention and feed-forward part (resid_mid).",
        ),
    ] = False
    top: Annotated[
        int,
        typer.Option(
            "-k",
            "--top",
            metavar="K",
            rich_help_panel=LENS,
            help="Likeliest tokens of a cell: shown for a single position, in JSON and files.",
        ),
        Range(1, 1000),
    ] = 5
    target: Annotated[
        str,
        typer.Option(
            "--target",
            metavar="TOKEN|next|output",
            rich_help_panel=LENS,
            help="The token whose rank is followed: one of the vocabulary (quoted where it is "
            "called next or output, an id without a tokenizer), the text's next one, or the "
            "likeliest of the model's output. But for the last, cells show ranks.",
        ),
    ] = "output"
    to: Annotated[
        str | None,
        typer.Option(
            "-o",
            "--output",
            metavar="FILE",
            rich_help_panel=LENS,
            help=f"Also write all cells to a file, by its ending: {', '.join(FILES)}.",
        ),
    ] = None


def command(
    prompt: PromptOptions,
    template: TemplateOptions,
    new: NewTokensOptions,
    lens: LensOptions,
    model: ModelOptions,
    output: OutputOptions,
) -> None:
    """Logit lens: the likeliest tokens after every layer, at every position.

    The residual stream after each layer is read as if the model ended there: through its own
    final norm, with that row's own statistics, and its own head. With probability, rank of a
    target, entropy and the divergence from the model's output. The last row has to be the
    model's output as a distribution, or the command exits 1.
    """
    out = Output("lens", output)
    kind = None if lens.to is None else kind_of_file(lens.to, FILES)
    given = looked_at(prompt, out.note)
    loaded = load_model(model, out, text=given.ids is None).model
    report, count = _measured(loaded, given, template, new, lens, model, out)
    about = loaded.describe()
    body = {"prompt_tokens": count, **_body(report)}
    header = environment(kernels=KERNELS)
    if lens.to is not None:
        _write(lens.to, kind, report, out.envelope(body, model=about, environment=header))
        out.note(f"wrote `{lens.to}`")
    if out.json:
        out.document(body, model=about, environment=header)
    else:
        from llmcli.render.lens import render_lens
        from llmcli.render.stats import model_line

        ranks = lens.target != "output"
        out.show(render_lens(report, model_line(about), ranks=ranks))
    if not report.ok:
        wrong = next(check for check in report.checks if not check.ok)
        raise CheckFailed(
            f"it is not so that {wrong.words}: {wrong.value:.2g}, allowed {wrong.tolerance:.2g}",
            hint=f"worst at {wrong.where}; `llmcli explain` finds the formula that does not hold",
        )


def _measured(
    model: Model,
    given: Prompt,
    template: TemplateOptions,
    new: NewTokensOptions,
    lens: LensOptions,
    options: ModelOptions,
    out: Output,
) -> tuple[LensReport, int]:
    """The report, and how many of its tokens are the prompt's."""
    from llmcli.measure.lens import Places, measure_lens
    from llmcli.render.lens import room

    layers = len(model.config.layers)
    chosen = None if lens.layer is None else parse_numbers(lens.layer, layers, "--layer", "layers")
    target = parse_target(lens.target, model.tokenizer, model.config.vocab)
    ids = encode_look(given, template, options, model, new=new.generate).ids
    on_screen = None if out.json or lens.to is not None else room(out.out.width)

    def span(total: int) -> range:
        first, last = parse_span(lens.position, total, "--position")
        return range(first if on_screen is None else max(first, last - on_screen), last)

    with Progress(out) as progress:
        report = measure_lens(
            model,
            ids,
            span=span,
            places=Places(layers=chosen, mid=lens.mid),
            top=lens.top,
            target=target,
            generate=new.generate,
            sampling=greedy(),
            progress=progress,
        )
    return report, len(ids)


def parse_target(text: str, tokenizer: Tokenizer | None, vocabulary: int) -> Target:
    """`output`, `next`, a token of the vocabulary (which may stand in quotes), or its id.

    An id is meant only where there is no tokenizer. Raises UsageError for anything else.
    """
    if text == "output":
        return "output"
    if text == "next":
        return "next"
    if tokenizer is None:
        if re.fullmatch(r"\d{1,9}", text, re.ASCII) and int(text) < vocabulary:
            return int(text)
        raise UsageError(
            f"`--target {text}`: the model has no tokenizer, so it takes an id, next or output",
            hint=f"ids go from 0 to {vocabulary - 1}",
        )
    inside = re.fullmatch(r"(['\"])(.+)\1", text, re.DOTALL)
    token = inside[2] if inside else text
    ids = tokenizer.encode(token, add_bos=False)
    if len(ids) == 1:
        return ids[0]
    split = ", ".join(f"`{tokenizer.token_text(id)}`" for id in ids[:8])
    spaced = tokenizer.encode(f" {token}", add_bos=False)
    raise UsageError(
        f"`--target {text}` is {len(ids)} tokens, not one" + (f": {split}" if ids else ""),
        hint=f'did you mean `--target " {token}"`? a word in a text begins with its space'
        if len(spaced) == 1 and token
        else "give one of them; a word in a text usually begins with its space",
    )


def _write(file: str, kind: str | None, report: LensReport, document: dict[str, Any]) -> None:
    if kind == "json":
        write_document(file, document)
        return
    from llmcli.render.lens_csv import lens_csv

    write_file(file, lens_csv(report))


def _body(report: LensReport) -> dict[str, Any]:
    """The report as JSON has it: tokens as objects, checks by name, settled by the row's name."""
    return vars(report) | {
        "tokens": [{"id": id, "text": text} for id, text in report.tokens],
        "settled": [report.rows[row].name for row in report.settled],
        "checks": checks_document(report.checks),
        "ok": report.ok,
    }

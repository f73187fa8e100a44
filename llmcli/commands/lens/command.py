"""`llmcli lens`: what every layer of a model would say, were it the last one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from llmcli.cli.files import kind_of_file
from llmcli.cli.looking import NewTokensOptions, encode_look, greedy, parse_span
from llmcli.cli.options import ModelOptions, OutputOptions, PromptOptions
from llmcli.cli.output import Output, require
from llmcli.cli.progress import Progress
from llmcli.cli.prompts import looked_at
from llmcli.cli.running import kernels_of, load_model
from llmcli.cli.template import TemplateOptions
from llmcli.commands.lens.files import FILES, check_lens_size, write_lens
from llmcli.commands.lens.options import LensOptions, parse_target, space_note
from llmcli.commands.lens.report import LensReport
from llmcli.observe.environment import environment
from llmcli.reports.checks import checks_document

if TYPE_CHECKING:
    from llmcli.model import Model

EPILOG = """
Examples:

  llmcli lens "The capital of France is"
  llmcli lens "The capital of France is" --position -1 --target " Paris"
  llmcli lens --layer 20-29 --mid
  llmcli lens "Once upon a time" --generate 8 -o lens.html
"""


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
    from llmcli.ui.stats import model_line

    out = Output("lens", output)
    kind = "" if lens.save is None else kind_of_file(lens.save, FILES)
    given = looked_at(prompt, out.note)
    loaded = load_model(model, out, text=given.ids is None, check=lens.check).model
    ids = encode_look(given, template, model, loaded, new=new.generate).ids
    report = lens_report(loaded, ids, new, lens, kind, out)
    about = loaded.describe()
    header = environment(kernels=kernels_of(about))
    body = _body(report)
    if lens.save is not None:
        document = out.envelope(body, model=about, environment=header)
        write_lens(lens.save, kind, report, model_line(about), document)
        out.note(f"wrote `{lens.save}`")
    if out.json:
        out.document(body, model=about, environment=header)
    else:
        from llmcli.commands.lens.view.screen import render_lens

        ranks = lens.target != "output"
        out.show(
            render_lens(report, model_line(about), ranks=ranks, whole="--json and -o have all")
        )
    require(report.checks, "`llmcli explain` finds the formula that does not hold")


def lens_report(
    model: Model,
    ids: Sequence[int],
    new: NewTokensOptions,
    lens: LensOptions,
    kind: str,
    out: Output,
) -> LensReport:
    """What the options ask of a model; `kind` is that of the file they name, if any."""
    from llmcli.commands.lens.measure.run import Places, measure_lens
    from llmcli.commands.lens.view.grid import room

    layers = len(model.config.layers)
    places = Places(layers=lens.layers(layers), mid=lens.mid)
    target = parse_target(lens.target, model.tokenizer, model.config.vocab)
    on_screen = None if out.json or lens.save is not None else room(out.out.width)

    def span(total: int) -> range:
        first, last = parse_span(lens.position, total, "--position")
        return range(first if on_screen is None else max(first, last - on_screen), last)

    if lens.save is not None:
        count = len(places.names(model.config)), len(span(len(ids) + new.generate))
        check_lens_size(lens.save, kind, *count, lens.top, force=lens.force)
    with Progress(out) as progress:
        report = measure_lens(
            model,
            ids,
            span=span,
            places=places,
            top=lens.top,
            target=target,
            generate=new.generate,
            sampling=greedy(),
            progress=progress,
        )
    if isinstance(target, int):
        note = space_note(lens.target, target, report, model.tokenizer)
        if note is not None:
            out.note(note)
    return report


def _body(report: LensReport) -> dict[str, Any]:
    """The report as JSON has it: tokens as objects, checks by name."""
    return vars(report) | {
        "tokens": [{"id": id, "text": text} for id, text in report.tokens],
        "checks": checks_document(report.checks),
        "ok": report.ok,
    }

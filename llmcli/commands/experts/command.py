"""`llmcli experts`: which experts every token takes, in every layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from llmcli.anatomy.graph import graph
from llmcli.commands.experts.report import ExpertsReport
from llmcli.errors import UsageError
from llmcli.graph.routing import Choose
from llmcli.measure.environment import environment
from llmcli.records.numbers import counted, spans
from llmcli.shell.files import check_export, check_size, kind_of_file, page_to_open
from llmcli.shell.looking import (
    NewTokensOptions,
    check_span,
    encode_prompt,
    parse_numbers,
    parse_span,
)
from llmcli.shell.options import ModelOptions, PromptOptions, ViewOutputOptions
from llmcli.shell.output import ExportFile, Output
from llmcli.shell.params import opt
from llmcli.shell.progress import Progress
from llmcli.shell.prompts import prompt_or_default
from llmcli.shell.running import kernels_of, load_model
from llmcli.shell.template import TemplateOptions

if TYPE_CHECKING:
    from llmcli.config import ModelConfig
    from llmcli.model import Model

EXPERTS = "Experts"
FILES = ("html", "png", "json", "csv")
# bytes, measured: of a choice, of a layer's token besides, and of what the file has besides
SIZES = {"json": (28, 24, 4000), "csv": (66, 0, 120), "html": (9, 14, 40_000)}

EPILOG = """
A cell of the map has the numbers of the chosen experts, the largest score
first, coloured by what they count. Below it, for every layer: the load of each
expert, how even it is, the margin between the last expert chosen and the first
refused (in the scores that choose), and the share of the shared expert.

Examples:

  llmcli experts "def f(x): return 3 * x" -m ./mixture
  llmcli experts -f page.txt --layer 0,8-11
  llmcli experts "Once upon a time" --generate 16 --position -16:
  llmcli experts "2 + 2 = 4" --position -1
  llmcli experts -f page.txt -o experts.html
  llmcli experts -f page.txt --open
"""


@dataclass(frozen=True, kw_only=True)
class ExpertsOptions:
    """Which layers and positions, and where the file goes."""

    panel: ClassVar[str] = EXPERTS
    position: str | None = opt(
        None, "--position", "SPAN",
        "Positions such as 40:48, :10, -5: or -1, of which loads and means are, too; one alone is "
        "shown in detail. [default: all; on the map the last that fit]",
    )  # fmt: skip
    layer: str | None = opt(
        None, "--layer", "LAYERS",
        "Layers such as 0,3-5,-1. [default: all that have experts]",
    )  # fmt: skip
    save: str | None = opt(
        None, "-o", "--output", "FILE",
        f"Also write every choice to a file, by its ending: {', '.join(FILES)}.",
    )  # fmt: skip
    open: bool = opt(
        False, "--open",
        "Show it in a browser: the .html or .png of -o, without that a page made for it.",
    )  # fmt: skip
    force: bool = opt(False, "--force", "Write a file however large it gets.")

    def check(self, config: ModelConfig) -> None:
        """Refuses, before the weights are read, what is wrong whatever the tokens are."""
        self.layers(config)
        if self.position is not None:
            check_span(self.position, "--position")

    def layers(self, config: ModelConfig) -> tuple[int, ...]:
        """Those requested, in order. Raises UsageError for a layer without experts."""
        nodes = graph(config).nodes.values()
        routed = [node.layer for node in nodes if isinstance(node.op, Choose)]
        having = tuple(layer for layer in routed if layer is not None)
        if not having:
            raise UsageError(
                "no layer of this model has experts to choose from",
                hint="`llmcli info --families` lists what has a mixture of experts",
            )
        if self.layer is None:
            return having
        named = parse_numbers(self.layer, len(config.layers), "--layer", "layers")
        without = [layer for layer in named if layer not in having]
        if without:
            raise UsageError(
                f"layer {without[0]} has no experts", hint=f"layers that have: {spans(having)}"
            )
        return tuple(sorted(named))


def command(
    prompt: PromptOptions,
    template: TemplateOptions,
    new: NewTokensOptions,
    experts: ExpertsOptions,
    model: ModelOptions,
    output: ViewOutputOptions,
) -> None:
    """Mixtures of experts: which experts every token takes in every layer, and with what weight.

    With the load of every expert, the margins of the choices, and the share of the shared expert.
    The pass is the usual one, read as `generate` reads it. What is shown is checked: the chosen
    are the top of the scores that were emitted, the weights follow from these, the weighted sum
    and the shared expert is what the layer adds, and loads count every choice once; or the command
    exits 1.
    """
    from llmcli.commands.experts.view.screen import render_experts
    from llmcli.ui.stats import model_line

    out = Output("experts", output)
    check_export(experts.save, FILES, show=experts.open)
    path = page_to_open("experts") if experts.open and experts.save is None else experts.save
    given = prompt_or_default(prompt, out.note)
    loaded = load_model(model, out, text=given.ids is None, check=experts.check).model
    ids = encode_prompt(given, template, model, loaded, new=new.generate).ids
    report = experts_report(loaded, ids, new.generate, experts, path, out)
    about = loaded.describe()
    title = model_line(about)
    out.present(
        lambda: render_experts(report, title),
        _body(report),
        model=about,
        environment=environment(kernels=kernels_of(about)),
        checks=report.checks,
        file=None if path is None else _file(path, report, title, show=experts.open),
    )


def experts_report(
    model: Model, ids: Sequence[int], generate: int, experts: ExpertsOptions, path: str | None,
    out: Output,
) -> ExpertsReport:  # fmt: skip
    """What the options request of a model; `path` of the file that will hold it, if any."""
    from llmcli.commands.experts.measure import measure_experts

    layers = experts.layers(model.config)

    def span(total: int) -> range:
        return range(*parse_span(experts.position, total, "--position"))

    positions = span(len(ids) + generate)
    if path is not None and (sizes := SIZES.get(kind_of_file(path, FILES))):
        choice, cell, besides = sizes
        chosen = max(graph(model.config).sizes(layer)["K"] for layer in layers)
        size = besides + len(layers) * len(positions) * (cell + chosen * choice)
        smaller = "choose fewer positions with `--position` or layers with `--layer`"
        check_size(path, size, force=experts.force, smaller=smaller)
    with Progress(out) as progress:
        return measure_experts(
            model, ids, layers, span=span, generate=generate, progress=progress
        )


def _file(path: str, report: ExpertsReport, title: str, *, show: bool) -> ExportFile:
    """`report` as a file; `title` names the model."""
    from llmcli.commands.experts.view import export, picture

    makers = {"csv": export.experts_csv, "png": picture.experts_png, "html": export.experts_page}
    kind = kind_of_file(path, FILES)
    make = None if kind == "json" else partial(makers[kind], report, title)
    holds = counted(len(report.positions), "position")
    return ExportFile(path=path, holds=f"the choices at {holds}", make=make, open=show)


def _body(report: ExpertsReport) -> dict[str, Any]:
    """The report as JSON has it, but for the checks: tokens as objects."""
    return vars(report) | {"tokens": [{"id": id, "text": text} for id, text in report.tokens]}

"""`llmcli experts`: which experts each token is routed to, in every layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from llmcli.errors import UsageError
from llmcli.records.numbers import counted, spans
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
    from llmcli.commands.experts.report import ExpertsReport
    from llmcli.config.model import ModelConfig

FILES = ("html", "png", "json")

EPILOG = """
A cell of the map lists the chosen experts, highest score first, coloured by
weight. Below it, for every layer: the load of each expert, how balanced it is,
the margin between the last expert chosen and the first one not chosen (in
routing scores), and the share of the shared expert.

Examples:

  llmcli experts "def f(x): return 3 * x" -m ./mixture
  llmcli experts -f page.txt --layer 0,8-11
  llmcli experts "Once upon a time" --generate 16 --position -16:
  llmcli experts "2 + 2 = 4" --position -1
  llmcli experts -f page.txt -o experts.html
  llmcli experts -f page.txt --open
"""


@dataclass(frozen=True, kw_only=True)
class ExpertsOptions(PlacesOptions):
    """Which layers and positions, and where the file goes."""

    panel: ClassVar[str] = "Experts"
    position: str | None = opt(
        None,
        "--position SPAN",
        "Positions such as 40:48, :10, -5: or -1, to which loads and means are also restricted; a "
        "single one is shown in detail. [default: all; on the map, the last that fit]",
    )
    layer: str | None = opt(
        None, "--layer LAYERS", "Layers such as 0,3-5,-1. [default: all that have experts]"
    )
    save: str | None = opt(
        None,
        "-o --output FILE",
        f"Also write every choice to a file, its format by extension: {', '.join(FILES)}.",
    )
    open: bool = opt(False, *OPEN)
    force: bool = opt(False, *FORCE)

    def layers(self, config: ModelConfig) -> tuple[int, ...]:
        """The chosen layers in order. Raises UsageError for a layer without experts."""
        from llmcli.graph.graph import graph
        from llmcli.graph.routing import Choose

        nodes = graph(config).nodes.values()
        routed = [node.layer for node in nodes if isinstance(node.op, Choose)]
        having = tuple(layer for layer in routed if layer is not None)
        if not having:
            raise UsageError(
                "no layer of this model has experts to choose from",
                hint="try `-m allenai/OLMoE-1B-7B-0924` (14 GB); "
                "`llmcli info --families` lists what has a mixture of experts",
            )
        named = super().layers(config)
        if named is None:
            return having
        without = [layer for layer in named if layer not in having]
        if without:
            raise UsageError(
                f"layer {without[0]} has no experts", hint=f"layers that have: {spans(having)}"
            )
        return tuple(sorted(named))

    def measure(self, look: Subject) -> ExpertsReport:
        """Measures a text."""
        from llmcli.commands.experts.measure import measure_experts
        from llmcli.inspect.passes import passes_over

        with passes_over(look) as passes:
            return measure_experts(passes, self.layers(look.model.config), span=self.span)


def command(
    prompt: PromptOptions,
    template: TemplateOptions,
    new: NewTokensOptions,
    experts: ExpertsOptions,
    model: ModelOptions,
    output: ViewOutputOptions,
) -> None:
    """Mixtures of experts: which experts each token is routed to in each layer, with what weight.

    Also the load of every expert, the margins of the choices, and the share of the shared expert.
    The forward pass is that of `generate`. Checks: the chosen experts have the top router scores,
    the weights follow from the scores, the weighted sum plus the shared expert is what the layer
    adds, and loads count every choice once; otherwise the command exits 1.
    """
    from llmcli.commands.experts.view import render_experts

    look = Inspection("experts", experts, FILES, output)
    look.read(prompt, template, new, model, experts.check)
    look.plan(exports(look, experts), experts.smaller)
    report = experts.measure(look)
    look.present(
        lambda: render_experts(report, look.title),
        report,
        f"the choices at {counted(len(report.positions), 'position')}",
    )


def exports(look: Subject, experts: ExpertsOptions) -> dict[str, Export]:
    """The files, by their kinds. Sizes are as measured.

    What a file has besides, and for each token in each layer some numbers and K experts. A picture
    has a bounded size.
    """
    from llmcli.commands.experts.view import experts_page, experts_png
    from llmcli.graph.graph import graph

    layers, tokens = experts.layers(look.model.config), len(look.ids) + look.generate
    cells = len(layers) * len(experts.span(tokens))
    chosen = max(graph(look.model.config).sizes(layer)["K"] for layer in layers)
    return {
        "html": Export(size=40_000 + cells * (14 + 9 * chosen), make=experts_page),
        "png": Export(make=experts_png),
        "json": Export(size=4000 + cells * (24 + 28 * chosen)),
    }


def look(chat: InChat, given: dict[str, str]) -> Shown:
    """Shows in `/look` the experts of the last answer, unless positions are named."""
    from llmcli.commands.experts.view import render_experts

    answer = min(chat.answer, len(chat.ids))
    last = {"position": f"-{answer}:"} if answer else {}
    options = ExpertsOptions(**dict[str, Any](last | given))
    options.check(chat.model.config)
    report = options.measure(chat)
    return render_experts(report, chat.title), report.checks

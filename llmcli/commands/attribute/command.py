"""`llmcli attribute`: what adds up to a logit, head by head and layer by layer."""

from __future__ import annotations

from dataclasses import dataclass
from shutil import get_terminal_size
from typing import TYPE_CHECKING, ClassVar, Literal

from llmcli.errors import UsageError
from llmcli.records.numbers import counted
from llmcli.shell.answer import AnswerOptions
from llmcli.shell.encoding import TemplateOptions, encode
from llmcli.shell.inspection import (
    Export,
    FileOptions,
    Inspection,
    NewTokensOptions,
    parse_span,
)
from llmcli.shell.options import ModelOptions, PromptOptions, ViewOutputOptions
from llmcli.shell.params import opt
from llmcli.shell.prompts import Prompt

if TYPE_CHECKING:
    from llmcli.commands.attribute.report import AttributeReport
    from llmcli.config.model import ModelConfig

FILES = ("html", "png", "json")

EPILOG = """
Terms are direct: what a head adds to the stream by way of later layers counts
as theirs. With the norms' divisors as they were the sum is exact; it says
nothing of what would happen without a term (that is what `--method gradient`
estimates).

Examples:

  llmcli attribute "The capital of France is"
  llmcli attribute "The capital of France is" --answer " Paris"
  llmcli attribute "Now in Paris" --answer "," --versus " and" --position 2
  llmcli attribute "Fame is" --method gradient --corrupted "Life is"
  llmcli attribute "Once upon a time" --of "blocks.3.attn.q[2,-1,5]"
  llmcli attribute "Once upon a time" -o attribution.html
"""


@dataclass(frozen=True, kw_only=True)
class AttributeOptions(FileOptions):
    """Of what, by which method, and how much is shown."""

    panel: ClassVar[str] = "Attribute"
    position: str | None = opt(
        None,
        "--position N",
        "The position whose logits count; -1 is the last. [default: the last]",
    )
    of: str | None = opt(
        None,
        "--of NAME[INDEX]",
        "Instead of a logit any number that is linear in the residual stream, as `explain` names "
        "it: queries, keys, values, neurons before their activation, the stream.",
        excludes=("--answer", "--versus", "--position", "--method=gradient"),
    )
    method: Literal["direct", "gradient"] = opt(
        "direct",
        "--method direct|gradient",
        "The terms that add up to the number, or of every activation (clean − corrupted) × "
        "gradient: attribution patching.",
    )
    corrupted: str | None = opt(
        None,
        "--corrupted PROMPT",
        "For `--method gradient`: another prompt of as many tokens.",
        needs=("--method",),
    )
    top: int = opt(
        10, "-k --top K", "How many terms are shown in words.", at_least=1, at_most=1000
    )
    save: str | None = opt(
        None,
        "-o --output FILE",
        f"Also write all terms to a file, its format by extension: {', '.join(FILES)}.",
    )
    open: bool = opt(
        False,
        "--open",
        "Open the .html or .png of -o in a browser; without -o, a temporary page.",
    )
    every: bool = opt(False, "--all", "Show every head, or every position, at any height.")
    force: bool = opt(False, "--force", "Write the file even if it is very large.")

    def check(self, config: ModelConfig) -> None:
        """Refuses a method without its prompt, before the weights are read."""
        if (self.method == "gradient") != (self.corrupted is not None):
            raise UsageError(
                "`--method gradient` and `--corrupted PROMPT` need each other",
                hint="give both: a prompt whose tokens stand at the same positions",
            )

    def end(self, tokens: int) -> int:
        """The number of tokens up to the position. Raises UsageError for a span."""
        first, end = parse_span("-1" if self.position is None else self.position, tokens,
                                "--position")  # fmt: skip
        if end - first > 1:
            raise UsageError(
                f"`--position {self.position}` is {counted(end - first, 'position')}, not one",
                hint=f"for example `--position {end - 1}`",
            )
        return end


def command(
    prompt: PromptOptions,
    template: TemplateOptions,
    answer: AnswerOptions,
    attribute: AttributeOptions,
    model: ModelOptions,
    output: ViewOutputOptions,
) -> None:
    """Attribute a logit to what adds up to it: embeddings, heads, MLPs, experts and biases.

    Direct logit attribution, with the norms' divisors as they were: the terms add up to the logit
    that the model computed, or the command exits 1. Of models with recurrent layers, latent
    attention, experts and packed weights too. `--method gradient` approximates, with one pass
    backwards, what every activation of a second prompt changes.
    """
    from llmcli.commands.attribute.view import render_attribution

    look = Inspection("attribute", attribute, FILES, output)
    look.read(prompt, template, NewTokensOptions(), model, attribute.check)
    look.plan(exports(look, attribute), "use a shorter prompt")
    report = measured(look, template, answer, attribute)
    height = None if attribute.every or not look.out.out.terminal else get_terminal_size().lines
    look.present(
        lambda: render_attribution(
            report, look.title, top=attribute.top, height=height, whole="--all"
        ),
        report,
        counted(len(report.terms), "term"),
    )


def measured(
    look: Inspection, template: TemplateOptions, asked: AnswerOptions, attribute: AttributeOptions
) -> AttributeReport:
    """Measures the prompt up to the position."""
    from llmcli.commands.attribute.measure import measure_direct, measure_gradient
    from llmcli.inspect.passes import passes_over

    model, answer, number = look.model, asked.parse(look.model), None
    if attribute.of is not None:
        number = _number(look, attribute.of)
        look.ids = look.ids[: number[2]]
    else:
        look.ids = look.ids[: attribute.end(len(look.ids))]
    with passes_over(look) as passes:
        if attribute.corrupted is not None:
            chat = template.options()
            other = encode(Prompt(attribute.corrupted), chat, model).ids
            end = None if attribute.position is None else attribute.end(len(other))
            report = measure_gradient(passes, other[:end], answer)
        else:
            report = measure_direct(passes, number[:2] if number is not None else answer)
    likeliest = [report.answer.id] if report.answer is not None and answer.answer is None else []
    for note in asked.notes(answer, model, likeliest):
        look.out.note(note)
    return report


def _number(look: Inspection, text: str) -> tuple[str, tuple[int, ...], int]:
    """The activation, the index, and the number of tokens up to it. Raises UsageError."""
    from llmcli.graph.indexed import parse
    from llmcli.inspect.numbers import find, names, place

    model, wanted = look.model, parse(text)
    specs = names(model.config, len(look.ids))
    spec = find(wanted, specs, model.config)
    texts = [token.text for token in model.tokens(look.ids)]
    index = place(wanted, spec, texts, model.tokenizer)
    if spec.kind == "parameter":
        raise UsageError(f"`{spec.name}` is a parameter: nothing adds up to it")
    return spec.name, index, index[spec.axes.index("T")] + 1


def exports(look: Inspection, attribute: AttributeOptions) -> dict[str, Export]:
    """The files, by their kinds. Sizes are as measured: of every term about so many bytes."""
    from llmcli.commands.attribute.view import attribution_page, attribution_png
    from llmcli.graph.graph import graph

    config = look.model.config
    layers = range(len(config.layers))
    heads = sum(graph(config).sizes(layer).get("H", 0) for layer in layers)
    cells = heads + 3 * len(layers)
    html, terms = cells, cells
    if attribute.method == "gradient":
        html, terms = heads + 3 * len(layers) * len(look.ids), cells * len(look.ids)
    return {
        "html": Export(size=30_000 + 22 * html, make=attribution_page),
        "png": Export(make=attribution_png),
        "json": Export(size=3000 + 130 * terms),
    }

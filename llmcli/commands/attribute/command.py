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
    FORCE,
    OPEN,
    Export,
    FileOptions,
    Inspection,
    NewTokensOptions,
    parse_numbers,
)
from llmcli.shell.options import ModelOptions, PromptOptions, ViewOutputOptions
from llmcli.shell.params import opt
from llmcli.shell.prompts import Prompt

if TYPE_CHECKING:
    from llmcli.commands.attribute.measure import Number
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
  llmcli attribute "He said" --answer " to" --versus " that"
  llmcli attribute "Fame is" --method gradient --corrupted "Life is"
  llmcli attribute "Once upon a time" --of "blocks.3.attn.q[2,-1,5]"
  llmcli attribute "Once upon a time" -o attribution.html
"""


@dataclass(frozen=True, kw_only=True)
class AttributeOptions(FileOptions):
    """Of what, by which method, and how much is shown."""

    panel: ClassVar[str] = "Attribute"
    position: int = opt(
        -1, "--position N", "The position whose logits count; negative ones count from the end."
    )
    of: str | None = opt(
        None,
        "--of NAME[INDEX]",
        "Instead of a logit any number that is linear in the residual stream, as `explain` names "
        "it: queries, keys, values, neurons before their activation, the stream.",
        excludes=("--answer", "--versus", "--position", "--corrupted"),
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
    )
    top: int = opt(
        10, "-k --top K", "How many terms are shown in words.", at_least=1, at_most=1000
    )
    save: str | None = opt(
        None,
        "-o --output FILE",
        f"Also write all terms to a file, its format by extension: {', '.join(FILES)}.",
    )
    open: bool = opt(False, *OPEN)
    every: bool = opt(False, "--all", "Show every head, or every position, at any height.")
    force: bool = opt(False, *FORCE)

    def check(self, config: ModelConfig) -> None:
        """Refuses a method without its prompt, and a prompt without its method."""
        if (self.method == "gradient") != (self.corrupted is not None):
            raise UsageError(
                "`--method gradient` and `--corrupted` need each other",
                hint="for example `--method gradient --corrupted \"Life is\"`",
            )

    def end(self, tokens: int) -> int:
        """The number of tokens up to the position. Raises UsageError where it is none of them."""
        return 1 + parse_numbers(str(self.position), tokens, "--position", "tokens")[0]


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
    backwards, what every activation of a second prompt changes; the strongest are patched as well.
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

    model, answer = look.model, asked.parse(look.model)
    number, end = None, attribute.end(len(look.ids))
    if attribute.of is not None:
        number, end = _number(look, attribute.of)
    look.ids = look.ids[:end]
    for note in asked.notes(answer, model):
        look.out.note(note)
    with passes_over(look) as passes:
        if attribute.corrupted is None:
            return measure_direct(passes, answer if number is None else number)
        other = encode(Prompt(attribute.corrupted), template.options(), model).ids
        return measure_gradient(passes, other[: attribute.end(len(other))], answer)


def _number(look: Inspection, text: str) -> tuple[Number, int]:
    """The activation and the index, and the number of tokens up to it. Raises UsageError."""
    from llmcli.graph.indexed import parse
    from llmcli.inspect.numbers import find, names, place

    model, wanted = look.model, parse(text)
    spec = find(wanted, names(model.config, len(look.ids)), model.config)
    texts = [token.text for token in model.tokens(look.ids)]
    index = place(wanted, spec, texts, model.tokenizer)
    if spec.kind == "parameter":
        raise UsageError(f"`{spec.name}` is a parameter: nothing adds up to it")
    return (spec.name, index), index[spec.axes.index("T")] + 1


def exports(look: Inspection, attribute: AttributeOptions) -> dict[str, Export]:
    """The files, by their kinds. Sizes are as measured: of every term about so many bytes."""
    from llmcli.commands.attribute.view import attribution_page, attribution_png
    from llmcli.graph.graph import graph

    whole, layers = graph(look.model.config), len(look.model.config.layers)
    heads = sum(whole.sizes(layer).get("H", 0) for layer in range(layers))
    each = 1 if attribute.corrupted is None else len(look.ids)
    return {
        "html": Export(size=30_000 + 22 * (heads + 3 * layers * each), make=attribution_page),
        "png": Export(make=attribution_png),
        "json": Export(size=3000 + 130 * (heads + 3 * layers) * each),
    }

"""`llmcli attention`: what each head of a model attends to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmcli.commands.attention.options import (
    FILES,
    MOST_DRAWN,
    HeadOptions,
    ViewOptions,
    at_positions,
    request_of,
)
from llmcli.errors import UsageError
from llmcli.shell.inspection import Inspection
from llmcli.shell.looking import NewTokensOptions
from llmcli.shell.options import ModelOptions, PromptOptions, ViewOutputOptions
from llmcli.shell.output import Output
from llmcli.shell.progress import Progress
from llmcli.shell.template import TemplateOptions

if TYPE_CHECKING:
    from rich.console import RenderableType

    from llmcli.commands.attention.exports import OnMatrix
    from llmcli.commands.attention.report.heads import AttentionReport
    from llmcli.commands.attention.report.request import AttentionRequest
    from llmcli.config import ModelConfig
    from llmcli.model import Model

EPILOG = """
What is shown: without --layer and --head a map of all heads with the kinds
that were found; of one head its heatmap, its kinds and its metrics; of several
(up to 12) their heatmaps. --map, --metrics and --top-pairs stand instead of
these, but below the heatmap of one head. --query and --key cut heatmaps and
pairs alike: `--generate 8 --query -8: --top-pairs 20` are pairs of new tokens.

Kinds of heads: previous-token, induction, duplicate, sink, local, broad. A
head is written layer.head; those that share keys and values stand together.
Kinds that many heads are of are a dot on the map, so that others stand out.

Metrics: entropy, normalized_entropy, effective_keys, max_weight,
current_token, previous_token, sink, sink_rate, learned_sink, negative,
half_life, overwritten, induction, duplicate, distance, distance_without_sink,
locality_8, locality_64, effective_rank. Their formulas stand below what --map
and --metrics show.

Gated DeltaNet and Mamba-2 layers have no softmax: their map is the exact
matrix that is equivalent to the recurrence. Its weights have signs, and its
rows do not sum to 1: metrics are of |A| / Σ|A|, colours go both ways from 0,
entropy determines no kind, and instead of row sums it is checked that no later
token counts. Column j is a value behind the convolution, a mix of tokens up
to j. `--what state` shows what they remember.

Examples:

  llmcli attention "The cat sat on the mat because the cat was tired"
  llmcli attention --layer 3 --head 2
  llmcli attention -f page.txt --layer 3 --head 2 --query 40:80
  llmcli attention --synthetic 32 --map induction
  llmcli attention --top-pairs 20
  llmcli attention -f page.txt --what state
  llmcli attention "Once upon a time" --generate 8 -o heads.html
  llmcli attention "Once upon a time" --open
"""


def command(
    prompt: PromptOptions,
    template: TemplateOptions,
    new: NewTokensOptions,
    heads: HeadOptions,
    view: ViewOptions,
    model: ModelOptions,
    output: ViewOutputOptions,
) -> None:
    """What each head attends to: a map of all heads, heatmaps, metrics, the strongest pairs.

    The forward pass is the usual one; weights are computed from its queries and keys in blocks
    of rows, so that a long prompt takes memory as its length, not its square. Every view is
    checked: rows sum to 1 (with a head's learned sink, if any), masked weights are 0, the pattern
    times the values is what the layer itself computed, and that follows from the formulas; or the
    command exits 1. Only what is looked at counts: without --generate there are no logits, and a
    NaN in them goes unseen.
    """
    from llmcli.commands.attention import states
    from llmcli.commands.attention.exports import exporting
    from llmcli.commands.attention.prompt import Reading
    from llmcli.commands.attention.report.request import AttentionRequest

    if heads.what == "state":
        states.check_options(heads, view)
        look = Inspection("attention", view, states.FILES, output)
        states.show(look, Reading.of(prompt, template, new, heads, model, look.out), heads)
        return
    view.check(heads)
    look = Inspection("attention", view, FILES, output)
    reading = Reading.of(prompt, template, new, heads, model, look.out)

    request = AttentionRequest()

    def check(config: ModelConfig) -> None:
        nonlocal request
        request = request_of(heads, view, config)

    loaded = look.load(model, check, text=reading.is_text)
    ids = reading.ids(loaded)
    request = at_positions(request, view, len(ids), new.generate)
    if view.draws(heads) and not request.drawn:
        look.out.note(f"the map is shown: of so many matrices at most {MOST_DRAWN} are drawn")
    with exporting(look, view, request, ids) as export:
        report = measured(loaded, ids, request, look.out, export.on_matrix)

        from llmcli.commands.attention.view.screen import attention_views, render_attention

        def screen() -> RenderableType:
            views = attention_views(report, request, reading.calls())
            return render_attention(report, look.title, views)

        look.present(screen, report, export.file(report), export.body(report))


def measured(
    model: Model,
    ids: tuple[int, ...],
    request: AttentionRequest,
    out: Output,
    on_matrix: OnMatrix | None = None,
) -> AttentionReport:
    """One pass over the prompt. Raises UsageError for spans behind the end of what was written."""
    from llmcli.commands.attention.measure.run import measure_attention

    with Progress(out) as progress:
        report = measure_attention(model, ids, request, on_matrix=on_matrix, progress=progress)
    written = len(report.tokens)
    for option, span in (("--query", request.queries), ("--key", request.keys)):
        if span is not None and span[0] >= written:
            raise UsageError(
                f"`{option}` from {span[0]} on selects no tokens: the model ended its text after "
                f"{written - len(ids)} of {request.generate} tokens",
                hint=f"positions go from 0 to {written - 1}",
            )
    return report

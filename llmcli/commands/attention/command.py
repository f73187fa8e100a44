"""`llmcli attention`: what each head of a model attends to."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from llmcli.cli.files import kind_of_file, written
from llmcli.cli.looking import NewTokensOptions, encode_look, room_for
from llmcli.cli.options import ModelOptions, OutputOptions, PromptOptions
from llmcli.cli.output import Output, require
from llmcli.cli.prompts import LOOKED_AT, Prompt, looked_at
from llmcli.cli.running import kernels_of, load_model
from llmcli.cli.template import TemplateOptions
from llmcli.commands.attention.exports import Matrices, opened
from llmcli.commands.attention.files import check_text_size
from llmcli.commands.attention.options import FILES, HeadOptions, ViewOptions
from llmcli.commands.attention.replay_command import again
from llmcli.commands.attention.report.heads import AttentionReport
from llmcli.commands.attention.request import MOST_DRAWN, Asked
from llmcli.commands.attention.run import Run
from llmcli.commands.attention.states import check_options, chosen, shown_states
from llmcli.errors import PromptTooLong, UsageError
from llmcli.observe.environment import environment
from llmcli.reports.checks import checks_document

if TYPE_CHECKING:
    import numpy as np

    from llmcli.commands.attention.view.screen import Calls
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

Metrics: entropy, normalized_entropy, effective_keys, max_weight,
current_token, previous_token, sink, sink_rate, learned_sink, negative,
half_life, overwritten, induction, duplicate, distance, distance_without_sink,
locality_8, locality_64, effective_rank. Their formulas stand below what --map
and --metrics show.

Gated DeltaNet and Mamba-2 layers have no softmax: their map is the exact
matrix that is equivalent to the recurrence. Its weights have signs, and its
rows do not sum to 1: metrics are of |A| / Σ|A|, colours go both ways from 0,
no kind is told by entropy, and instead of row sums is proven that no later
token counts. Column j is a value behind the convolution, a mix of tokens up
to j. `--what state` shows what they remember.

Examples:

  llmcli attention "The cat sat on the mat because the cat was tired"
  llmcli attention --layer 3 --head 2
  llmcli attention -f page.txt --layer 3 --head 2 --query 40:80
  llmcli attention --synthetic 32 --map induction
  llmcli attention --top-pairs 20 --weighted
  llmcli attention -f page.txt --what state
  llmcli attention "Once upon a time" --generate 8 -o heads.html
"""


def command(
    prompt: PromptOptions,
    template: TemplateOptions,
    new: NewTokensOptions,
    heads: HeadOptions,
    view: ViewOptions,
    model: ModelOptions,
    output: OutputOptions,
) -> None:
    """What each head attends to: a map of all heads, heatmaps, metrics, the strongest pairs.

    The forward pass is the usual one; weights are computed from its queries and keys in blocks
    of rows, so that a long prompt takes memory as its length, not its square. Every view proves
    itself: rows sum to 1 (with a head's learned sink, if any), masked weights are 0, the pattern
    times the values is what the layer itself computed, and that follows from the formulas; or the
    command exits 1. Only what is looked at counts: without --generate there are no logits, and a
    NaN in them goes unseen.
    """
    out = Output("attention", output)
    if heads.what == "state":
        _states(prompt, template, new, heads, view, model, out)
        return
    asked = Asked.of(heads, view, json=out.json)
    kind = None if view.save is None else kind_of_file(view.save, FILES)
    given = _given(prompt, template, heads, out)

    def check(config: ModelConfig) -> None:
        asked.heads(heads, config)

    text = given is not None and given.ids is None
    loaded = load_model(model, out, text=text, check=check).model
    ids = _ids(given, template, new, heads, model, loaded)
    run = Run(loaded, ids, new.generate, heads, view, asked)
    if asked.drawn and not run.asked.drawn:
        out.note(f"the map is shown: of so many matrices at most {MOST_DRAWN} are drawn")
    report, body = _looked(run, kind, out)
    if out.json:
        about = loaded.describe()
        out.document(body, model=about, environment=environment(kernels=kernels_of(about)))
    else:
        from llmcli.commands.attention.view.screen import render_attention

        calls = _calls(given, prompt, template, new, heads, model)
        out.show(render_attention(report, run.title, run.views(report, calls)))
    require(report.checks, "`llmcli explain` finds the formula that does not hold")


def _states(
    prompt: PromptOptions,
    template: TemplateOptions,
    new: NewTokensOptions,
    heads: HeadOptions,
    view: ViewOptions,
    model: ModelOptions,
    out: Output,
) -> None:
    """`--what state`."""
    check_options(heads, view)
    given = _given(prompt, template, heads, out)

    def check(config: ModelConfig) -> None:
        chosen(heads, config)

    text = given is not None and given.ids is None
    loaded = load_model(model, out, text=text, check=check).model
    ids = _ids(given, template, new, heads, model, loaded)
    report = shown_states(loaded, ids, new.generate, heads, view, out)
    require(report.checks, "`llmcli explain` finds the formula that does not hold")


def _calls(
    given: Prompt | None,
    prompt: PromptOptions,
    template: TemplateOptions,
    new: NewTokensOptions,
    heads: HeadOptions,
    model: ModelOptions,
) -> Calls:
    """The command lines that hints begin with; a pipe stands before them as `… |`."""
    from llmcli.commands.attention.view.screen import Calls

    everywhere = replace(heads, layer=None, head=None, what="pattern")
    same = again("attention", prompt, template, new, everywhere, model)
    if given is not None and given.ids is None and prompt.file is None:
        piped = given.text != (prompt.prompt or LOOKED_AT)
        same = f"… | {same}" if piped else same
    repeated = again("attention", HeadOptions(synthetic=32, weighted=heads.weighted), model)
    return Calls(same=same, repeated=None if heads.synthetic is not None else repeated)


def _given(
    prompt: PromptOptions, template: TemplateOptions, heads: HeadOptions, out: Output
) -> Prompt | None:
    """The prompt, None where random tokens are asked for instead."""
    if heads.synthetic is None:
        return looked_at(prompt, out.note)
    named = (prompt.prompt, prompt.file, prompt.ids)
    if not template.options().raw or any(option is not None for option in named):
        raise UsageError(
            "`--synthetic` makes its own prompt and goes without any other",
            hint="leave one of them out",
        )
    return None


def _ids(
    given: Prompt | None,
    template: TemplateOptions,
    new: NewTokensOptions,
    heads: HeadOptions,
    options: ModelOptions,
    model: Model,
) -> tuple[int, ...]:
    if given is None:
        from llmcli.commands.attention.measure.synthetic import synthetic

        assert heads.synthetic is not None
        given = Prompt(None, tuple(synthetic(model, heads.synthetic, options.seed or 0)))
        made, room = len(given.ids or ()), room_for(options, model)
        if (over := made - room) > 0:
            raise PromptTooLong(
                f"`--synthetic {heads.synthetic}` makes {made} tokens, and the context is {room}",
                hint=f"use `--synthetic {heads.synthetic - (over + 1) // 2}` at most",
            )
    return encode_look(given, template, options, model, new=new.generate).ids


def _looked(run: Run, kind: str | None, out: Output) -> tuple[AttentionReport, dict[str, Any]]:
    """The report and its JSON; the file is written where one is asked for."""
    kept = Matrices(run.heads.matrices) if out.json and run.view.patterns else None
    if kept is not None:
        check_text_size(run.chosen, run.tokens, force=run.view.force)
    if kind is None:
        report = run.measured(None if kept is None else kept.add, out)
        return report, _body(report, kept)
    planned = run.planned(kind)
    planned.check()
    with opened(planned) as export:
        wanting = [None if kept is None else kept.add, export.add]
        sinks = [sink for sink in wanting if sink is not None]

        def add(layer: int, values_HTS: np.ndarray) -> None:
            for sink in sinks:
                sink(layer, values_HTS)

        report = run.measured(add if sinks else None, out)
        about = run.model.describe()
        machine = environment(kernels=kernels_of(about))
        export.finish(report, out.envelope(_body(report, None), model=about, environment=machine))
    out.note(written(planned.file, planned.holds(len(report.tokens))))
    return report, _body(report, kept)


def _body(report: AttentionReport, kept: Matrices | None) -> dict[str, Any]:
    """The report as JSON has it; with `kept` each head has its matrix."""
    body = {name: value for name, value in vars(report).items() if name != "matrices"} | {
        "tokens": [{"id": id, "text": text} for id, text in report.tokens],
        "layers": [
            vars(layer) | {"heads": [dict(vars(head)) for head in layer.heads]}
            for layer in report.layers
        ],
        "skipped": dict(report.skipped),
        "unlabelled": dict(report.unlabelled),
        "checks": checks_document(report.checks),
        "ok": report.ok,
    }
    return body if kept is None else kept.into(body)

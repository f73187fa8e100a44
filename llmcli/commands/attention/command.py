"""`llmcli attention`: what each head of a model attends to, or what its states remember."""

from __future__ import annotations

import random
import re
import shlex
from contextlib import ExitStack
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from llmcli.commands.attention.options import FILES, MOST_DRAWN, AttentionOptions
from llmcli.errors import PromptTooLong, UsageError
from llmcli.records.numbers import spans
from llmcli.shell.encoding import TemplateOptions
from llmcli.shell.inspection import InChat, Inspection, NewTokensOptions, Shown
from llmcli.shell.options import ModelOptions, PromptOptions, ViewOutputOptions
from llmcli.shell.prompts import LOOKED_AT, Prompt, prompt_or_default

if TYPE_CHECKING:
    from llmcli.model import Model

LONG = 40  # characters of a text that is repeated; a longer one stands as its name
EPILOG = """
What is shown: without --layer and --head a map of all heads with the kinds
that were found; of one head its heatmap, its kinds and its metrics; of several
(up to 12) their heatmaps. --map, --metrics and --top-pairs replace these, but
follow the heatmap of a single head. --query and --key restrict both heatmaps
and pairs: `--generate 8 --query -8: --top-pairs 20` shows the pairs of new
tokens.

Kinds of heads: previous-token, induction, duplicate, sink, local, broad. A
head is written layer.head; heads that share keys and values are adjacent. A
kind that many heads have is a dot on the map, so that the others stand out.

Metrics: entropy, normalized_entropy, effective_keys, max_weight,
current_token, previous_token, sink, sink_rate, learned_sink, negative,
half_life, overwritten, induction, duplicate, distance, distance_without_sink,
locality_8, locality_64, effective_rank. --map and --metrics print their
formulas.

Gated DeltaNet and Mamba-2 layers have no softmax: their map is the exact
matrix that is equivalent to the recurrence. Its weights are signed and its
rows do not sum to 1: metrics use |A| / Σ|A|, the colour scale diverges from 0,
no head is classified by entropy, and a check of causality replaces that of row
sums. Column j is a value after the convolution, a mix of tokens up to j.
`--what state` shows the states.

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
    heads: AttentionOptions,
    model: ModelOptions,
    output: ViewOutputOptions,
) -> None:
    """What each head attends to: a map of all heads, heatmaps, metrics, the strongest pairs.

    The forward pass is the usual one; weights are computed from its queries and keys in blocks of
    rows, so that memory grows linearly with the length of the prompt. Every view is checked: rows
    sum to 1 (including a head's learned sink, if any), masked weights are 0, pattern times values
    equals the layer's own output, and that output follows from the formulas; otherwise the command
    exits 1. Checks cover what is shown: without --generate no logits are computed, and a NaN in
    them goes unseen.
    """
    heads.check()
    state = heads.what == "state"
    look = Inspection("attention", heads, ("json",) if state else FILES, output)
    given = None if heads.synthetic is not None else prompt_or_default(prompt, look.out.note)
    is_text = given is not None and not given.ids
    loaded = look.load(model, heads.check_model, text=is_text)
    read = given or random_prompt(heads, model, loaded)
    look.encode(read, template, new, model)
    if state:
        _show_states(look, heads)
        return
    heads.check_tokens(len(look.ids) + look.generate)
    if heads.draws and not heads.drawn(heads.heads_of(loaded.config)):
        look.out.note(f"the map is shown: at most {MOST_DRAWN} matrices can be drawn")

    from llmcli.commands.attention.exports import MatrixExports
    from llmcli.commands.attention.measure.layers import measure_attention
    from llmcli.commands.attention.view.screen import FollowUps, render_attention
    from llmcli.inspect.passes import passes_over

    with ExitStack() as stack:
        exports = MatrixExports(look, heads, stack)
        with passes_over(look) as passes:
            report = measure_attention(passes, heads, on_matrix=exports.on_matrix)
        everywhere = AttentionOptions(synthetic=heads.synthetic)
        same = replay_command(prompt, template, new, everywhere, model)
        piped = is_text and prompt.file is None and read.text != (prompt.prompt or LOOKED_AT)
        repeated = replay_command(AttentionOptions(synthetic=32), model)
        calls = FollowUps(same="… | " * piped + same, repeated=None if given is None else repeated)
        look.present(
            lambda: render_attention(report, look.title, heads, calls),
            report,
            exports.holds(report),
            exports.body(report),
        )


def _show_states(look: Inspection, heads: AttentionOptions) -> None:
    """Measures what layers with a state remember over time, writes the file, and shows it."""
    from llmcli.commands.attention.measure.layers import measure_states
    from llmcli.commands.attention.view.screen import render_states
    from llmcli.inspect.passes import passes_over

    chosen = heads.heads_of(look.model.config)
    with passes_over(look) as passes:
        report = measure_states(passes, chosen)
    holds = f"states of layers {spans(tuple(chosen))}"
    look.present(lambda: render_states(report, look.title), report, holds)


def random_prompt(heads: AttentionOptions, options: ModelOptions, model: Model) -> Prompt:
    """The tokens of `--synthetic`. Raises PromptTooLong where they do not fit the context."""
    count = heads.synthetic
    assert count is not None
    ids = synthetic(model, count, options.seed or 0)
    room = model.config.room(options.context_length)
    if (over := len(ids) - room) > 0:
        raise PromptTooLong(
            f"`--synthetic {count}` makes {len(ids)} tokens, and the context is {room}",
            hint=f"use `--synthetic {count - (over + 1) // 2}` at most",
        )
    return Prompt(None, tuple(ids))


def synthetic(model: Model, count: int, seed: int) -> list[int]:
    """BOS where the model has one, `count` different random tokens, then these again.

    None of them is special, so that repetition is all there is to see (Olsson et al. 2022,
    appendix: "prefix matching"). Equal seeds give equal tokens. Raises UsageError where the
    vocabulary has fewer, or `count` is below 1.
    """
    known, bos = model.tokenizer, model.config.bos
    front = [] if bos is None else [bos]
    special = {*model.config.eos, *front, *(known.special_ids if known else ())}
    plain = [
        id
        for id in range(model.config.vocab)
        if id not in special and (known is None or known.has(id))
    ]
    if not 1 <= count <= len(plain):
        raise UsageError(
            f"`--synthetic {count}` needs as many different tokens",
            hint=f"use a number from 1 to {len(plain)}",
        )
    drawn = random.Random(seed).sample(plain, count)
    return [*front, *drawn, *drawn]


def replay_command(*given: Any) -> str:
    """`llmcli attention "a b" -m tiny`: dataclasses of options, as they are typed.

    Only what is not as it is by default, quoted for a shell. A long text, or one of several
    lines, is not repeated: its name stands there.
    """
    parts = ["llmcli attention"]
    for options, field in ((one, field) for one in given for field in fields(one)):
        value, declared = getattr(options, field.name), field.metadata["declared"]
        if value != field.default:
            for one in value if isinstance(value, list) else [value]:
                parts += declared.names[:1]
                if one is not True:
                    parts.append(_quoted(str(one), declared.metavar))
    return " ".join(parts)


def _quoted(value: str, metavar: str | None) -> str:
    long = len(value) > LONG and re.search(r"[\s,]", value)
    return (metavar or "…").strip("[]") if long or not value.isprintable() else shlex.quote(value)


def look(chat: InChat, given: dict[str, str]) -> Shown:
    """Shows in `/look` metrics, or matrices of the heads that are named."""
    from llmcli.commands.attention.measure.layers import measure_attention
    from llmcli.commands.attention.view.screen import FollowUps, render_attention
    from llmcli.inspect.passes import passes_over

    heads = AttentionOptions(**dict[str, Any](given))
    heads.check()
    heads.check_model(chat.model.config)
    heads.check_tokens(len(chat.ids))
    with passes_over(chat) as passes:
        report = measure_attention(passes, heads)
    repeated = shlex.join(["llmcli", "attention", "--synthetic", "32", "-m", chat.model.name])
    calls = FollowUps(same="/look attention", repeated=repeated, answer=chat.answer)
    return render_attention(report, chat.title, heads, calls), report.checks

"""`llmcli explain`: one number of a model, derived step by step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from llmcli.errors import CheckFailed, UsageError
from llmcli.records.document import members
from llmcli.records.ranges import LARGEST
from llmcli.shell.encoding import ChatOptions, check_fits, encode
from llmcli.shell.options import GivenPromptOptions, ModelOptions, ViewOutputOptions
from llmcli.shell.output import Output
from llmcli.shell.params import Without, arg, opt
from llmcli.shell.progress import Progress
from llmcli.shell.prompts import BUILTIN, prompt_or_default
from llmcli.shell.running import header, load_model

EPILOG = """
Names, with a block's number for N and one of those in braces:

  embed  pos_embed                           E, P   rows of a table
  blocks.N.resid_pre                         X      what comes in
  blocks.N.ln1.{scale,out}                   s, T¹  its norm
  blocks.N.attn.{q,k,v}                      Q K V  head by head
  blocks.N.attn.{q_norm,k_norm,q_rot,k_rot}         where there are any
  blocks.N.attn.{scores,pattern}             S A    [head,query,key]
  blocks.N.attn.{z,result}                   C R    A V, a head's share
  blocks.N.{attn_out,resid_mid}              T² T³
  blocks.N.ln2.{scale,out}                   s, T⁴
  blocks.N.mlp.{pre,post}                    U L    neurons
  blocks.N.mlp.{gate,up,act,post}            G U L  the same, gated
  blocks.N.{mlp_out,resid_post}              T⁵ H
  ln_final.{scale,out}  logits               s, H′

And every parameter: `embed.W`, `blocks.N.attn.W_q`, `blocks.N.attn.b_q`, `blocks.N.mlp.W_up`,
`blocks.N.ln1.w` …

Examples:

  llmcli explain
  llmcli explain "blocks.3.attn.pattern[2,-1,0]"
  llmcli explain "logits[-1,' the']" "And God said" --depth all
  llmcli explain "blocks.0.ln1.out[' the',5]" --full -m tiny
  echo "And God said" | llmcli explain "blocks.1.resid_post[-1,3]" -
"""


@dataclass(frozen=True, kw_only=True)
class NumberArgument:
    """Which number."""

    number: str | None = arg(
        None,
        "[NAME[INDEX]]",
        "The number; a name may be its end (3.attn.z) or TransformerLens' (hook_embed). Quote all "
        "of it for the shell, with single quotes inside: \"logits[-1,' the']\". From 0; -1 is the "
        "last; a quoted token stands for its position, in the vocabulary for its id. [default: the "
        "top logit of the last token]",
    )


@dataclass(frozen=True, kw_only=True)
class ExplainOptions:
    """How far back, and how much of it is written."""

    panel: ClassVar[str] = "Explain"
    depth: str = opt(
        "4",
        "--depth N|all",
        "How many formulas to trace back; all: to the embedding rows and weights.",
    )
    full: bool = opt(False, "--full", "Write out every term of every sum.")

    def formulas(self) -> int | None:
        """The depth as a number, None for all; raises UsageError for anything else."""
        if self.depth == "all":
            return None
        given = self.depth
        digits = given.isascii() and given.isdecimal() and len(given) <= 19
        if digits and 1 <= int(given) <= LARGEST:
            return int(given)
        shown = given if len(given) <= 40 else f"{given[:40]}…"
        raise UsageError(
            f"`--depth` takes a number of formulas from 1 on, or all, not `{shown}`",
            hint="for example `--depth 4`",
        )


def command(
    number: NumberArgument,
    prompt: GivenPromptOptions,
    explain: ExplainOptions,
    model: Annotated[ModelOptions, Without(("edit",))],
    output: ViewOutputOptions,
) -> None:
    """One number of a model, derived step by step and equal to what the fast kernel computed.

    Every step has its formula in the notation of the papers and the prompt's own numbers, from
    embedding rows through dot products, scaling, mask and softmax. The derivation is independent of
    the kernels and in float64; where it differs from them by more than rounding, the command exits
    1. The text is used as it stands, without chat template; a parameter needs no text. The default
    number is the top logit of the last token.
    """
    from llmcli.commands.explain.view import render_explanation
    from llmcli.graph.indexed import parse
    from llmcli.ui.facts import LETTERS, model_line

    out = Output("explain", output)
    wanted = None if number.number is None else parse(number.number)
    depth, given = explain.formulas(), []
    if wanted is None or not wanted.parameter:
        given = [prompt_or_default(prompt, out.note, BUILTIN)]
    model.require_exact()
    text = any(not one.ids for one in given)
    loaded = load_model(model, out, text=text, wide=True).model
    from llmcli.commands.explain.measure import derive, top_logit
    from llmcli.inspect.numbers import find, names, place

    config = loaded.config
    encoded = [encode(one, ChatOptions(raw=True), loaded) for one in given]
    tokens = loaded.tokens(encoded[0].ids if encoded else ())
    check_fits(encoded, config, model.context_length)
    with Progress(out) as progress:
        if wanted is None:
            wanted = top_logit(loaded, tokens)
            shown = ",".join(map(str, wanted.items or ()))
            out.note(f"no number was given: `logits[{shown}]` is the top logit of the last token")
        specs = names(config, max(1, len(tokens)))
        spec = find(wanted, specs, config)
        index = place(wanted, spec, [token.text for token in tokens], loaded.tokenizer)
        report = derive(loaded, tokens, specs, (spec.name, index), depth=depth, progress=progress)
    about = loaded.describe()
    letters = [members(one) | {"words": LETTERS[one.letter][0]} for one in report.letters]
    out.present(
        lambda: render_explanation(
            report, model_line(about), full=explain.full, checks=output.checks
        ),
        members(report) | {"letters": letters},
        **header(about),
    )
    if report.local is not None and not report.local.ok:
        raise CheckFailed(
            f"`{report.local.name}` is not what its formula makes of the kernel's own inputs",
            hint="it is the first failing tensor, in execution order",
        )
    if not report.ok:
        raise CheckFailed(
            f"the derivation of `{report.name}` and the kernel differ by more than rounding",
            hint="the first step with a ✗ has the difference; `--depth all` derives everything",
        )

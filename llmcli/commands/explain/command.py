"""`llmcli explain`: one number of a model, derived step by step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from llmcli.cli.encoding import check_fits, encode
from llmcli.cli.options import GivenPromptOptions, ModelOptions, OutputOptions
from llmcli.cli.output import Output
from llmcli.cli.params import LARGEST, arg, opt
from llmcli.cli.progress import Progress
from llmcli.cli.prompts import BUILTIN, Prompt, prompt_or_builtin
from llmcli.cli.running import kernels_of, load_model
from llmcli.cli.template import ChatOptions
from llmcli.errors import CheckFailed, UsageError
from llmcli.observe.environment import environment
from llmcli.reports.explanation import Explanation

if TYPE_CHECKING:
    from llmcli.anatomy.indexed import Wanted
    from llmcli.model import Model

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

  llmcli explain "blocks.3.attn.pattern[2,-1,0]"
  llmcli explain "logits[-1,' the']" "And God said" --depth all
  llmcli explain "blocks.0.ln1.out[' the',5]" --full -m tiny
  echo "And God said" | llmcli explain "blocks.1.resid_post[-1,3]" -
"""


@dataclass(frozen=True, kw_only=True)
class NumberArgument:
    """Which number."""

    number: str = arg(
        ..., "NAME[INDEX]",
        "The number. Quote all of it for the shell, with single quotes inside: \"logits[-1,' "
        "the']\". From 0; -1 is the last; a quoted token stands for its position, in the "
        "vocabulary for its id.",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ExplainOptions:
    """How far back, and how much of it is written."""

    panel: ClassVar[str] = "Explain"
    depth: str = opt(
        "4", "--depth", "N|all",
        "How many formulas are followed back; all: to the embedding rows and weights.",
    )  # fmt: skip
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
    model: ModelOptions,
    output: OutputOptions,
) -> None:
    """One number of a model, derived step by step and equal to what the fast kernel computed.

    Every step has its formula in the letters of the papers and the prompt's own numbers, from
    embedding rows through dot products, scaling, mask and softmax. The derivation is done in
    float64 with formulas of its own; where it differs from the kernel by more than rounding, the
    command exits 1. The text is taken as it stands, without chat template; a parameter needs none.
    """
    from llmcli.anatomy.indexed import parse

    out = Output("explain", output)
    wanted, depth = parse(number.number), explain.formulas()
    given = None if wanted.parameter else prompt_or_builtin(prompt, BUILTIN, out.note)
    text = given is not None and given.ids is None
    model.require_exact()
    loaded = load_model(model, out, text=text, wide=True).model
    report = _derived(loaded, wanted, given, depth, model, out)
    about = loaded.describe()
    if out.json:
        out.document(_body(report), model=about, environment=environment(kernels=kernels_of(about)))
    else:
        from llmcli.commands.explain.view import render_explanation
        from llmcli.ui.stats import model_line

        out.show(render_explanation(report, model_line(about), full=explain.full))
    if not report.ok:
        if report.local is not None and not report.local.ok:
            raise CheckFailed(
                f"`{report.local.name}` is not what its formula makes of the kernel's own inputs",
                hint="of the tensors that were checked it is the first, in the order of execution",
            )
        raise CheckFailed(
            f"the derivation of `{report.name}` and the kernel differ by more than rounding",
            hint="the first step with a ✗ has the difference; `--depth all` derives everything",
        )


def _derived(
    model: Model,
    wanted: Wanted,
    given: Prompt | None,
    depth: int | None,
    options: ModelOptions,
    out: Output,
) -> Explanation:
    from llmcli.commands.explain.measure.derive import explain
    from llmcli.commands.explain.measure.find import find
    from llmcli.commands.explain.measure.index import place
    from llmcli.commands.explain.measure.names import names

    encoded = [] if given is None else [encode(given, ChatOptions(raw=True), model)]
    ids = encoded[0].ids if encoded else ()
    texts = [model.token_text(id) for id in ids]
    room = options.context_length or model.config.context
    # of the notes there is none: nothing is generated
    list(check_fits(encoded, 1, room, largest=model.config.embedding.positions))
    axes = find(wanted, names(model.config, max(1, len(ids))), model.config)
    index = place(wanted, axes, texts, model.tokenizer)
    with Progress(out) as progress:
        return explain(model, ids, texts, axes, index, depth=depth, progress=progress)


def _body(report: Explanation) -> dict[str, Any]:
    """The report as JSON has it: tokens as objects, letters with their words."""
    from llmcli.ui.letters import LETTERS

    words = [vars(letter) | {"words": LETTERS[letter.letter][0]} for letter in report.letters]
    tokens = [{"id": id, "text": text} for id, text in report.tokens]
    return vars(report) | {"tokens": tokens, "letters": words}

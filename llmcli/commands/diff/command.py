"""`llmcli diff`: two models, or one model in two ways: where they differ, and by how much."""

from __future__ import annotations

from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

from llmcli.errors import UsageError
from llmcli.records.document import members
from llmcli.records.numbers import counted
from llmcli.shell.encoding import as_it_stands
from llmcli.shell.inspection import FORCE, Export, FileOptions, Inspection
from llmcli.shell.options import ModelOptions, PromptOptions, SpecialOptions, ViewOutputOptions
from llmcli.shell.output import jsonable
from llmcli.shell.params import arg, opt
from llmcli.shell.progress import Progress
from llmcli.shell.prompts import Prompt, prompt_or_default, text_argument
from llmcli.shell.running import load_model, note_edits, require_supported

if TYPE_CHECKING:
    from llmcli.commands.diff.report import DiffReport
    from llmcli.model import Model

FILES = ("html", "json")
# the options of a model that tell B from A, which has their defaults
VARIED = ("quantize", "dtype", "activations", "cache_type", "device", "edit")

EPILOG = """
An activation of B differs by itself if rounding does not explain how far it is
from what A's formula and parameters make of B's own inputs; what only follows
from earlier differences is not named. Where formats differ (int4), every
product differs: the largest errors are named. The kernels' level
($LLMCLI_KERNELS) is that of the process, and so the same for A and B.

Examples:

  llmcli diff smollm2 ./finetuned -f page.txt
  llmcli diff -m smollm2 --quantize int4 -f wiki.txt
  llmcli diff "2 + 2 =" --edit blocks.3.mlp_out=zero
  llmcli diff "Paris is in" --prompt-b "Rome is in"
  llmcli diff "Hello" -m model.gguf --against llama.cpp
  llmcli diff smollm2 ./finetuned --weights
"""


@dataclass(frozen=True, kw_only=True)
class SidesArguments:
    """Two models, before the text; without them `--model` is both."""

    panel: ClassVar[str] = "Diff"
    first: str | None = arg(None, "[A]", "The first model, in place of -m.")
    second: str | None = arg(
        None, "[B]", "The second model; without A and B it is A with the options given."
    )


@dataclass(frozen=True, kw_only=True)
class DiffOptions(FileOptions):
    """What B is, if no other model, and what is shown."""

    panel: ClassVar[str] = "Diff"
    prompt_b: str | None = opt(
        None, "--prompt-b TEXT", "B is the same model with another prompt.",
        excludes=("--against", "--weights"),
    )  # fmt: skip
    against: Literal["transformers", "llama.cpp"] | None = opt(
        None, "--against ENGINE", "B is another engine with the same weights.",
        excludes=("--weights",),
    )  # fmt: skip
    weights: bool = opt(False, "--weights", "Compare the parameters, without a text.")
    every: bool = opt(False, "--all", "Show every layer, token and parameter.")
    save: str | None = opt(
        None,
        "-o --output FILE",
        f"Also write everything to a file, its format by extension: {', '.join(FILES)}.",
    )
    open: bool = opt(
        False, "--open", "Open the .html of -o in a browser; without -o, a temporary page."
    )
    force: bool = opt(False, *FORCE)


def command(
    sides: SidesArguments,
    prompt: PromptOptions,
    special: SpecialOptions,
    diff: DiffOptions,
    model: ModelOptions,
    output: ViewOutputOptions,
) -> None:
    """Two models, or one in two ways: predictions, activations and parameters side by side.

    Per token KL both ways and the likeliest tokens; per layer how far the residual streams are
    apart; the first activation whose difference rounding does not explain. A long text is read in
    windows, with the figures of both scores; activations are those of its first 256 tokens.
    Checks: A read twice is A, no divergence is negative, and B follows from its formulas.
    """
    from llmcli.commands.diff.view import render_diff

    look = Inspection("diff", diff, FILES, output)
    first, second, prompt, how = _sides(sides, prompt, model, diff)
    given = Prompt(None) if diff.weights else prompt_or_default(prompt, look.out.note)
    if sides.second is not None:
        if given.conversation is not None:
            raise UsageError(
                f"{given.where} is a conversation, of which each model's template makes another "
                "text, and `diff` compares on one",
                hint="give a text, or one model with two settings",
            )
        require_supported(second, look.out, sides.second)
    text = not given.ids and not diff.weights
    a = look.load(first, lambda config: None, text=text)
    b = a if first is second else load_model(second, look.out, text=text).model
    look.others = () if b is a else (b,)

    from llmcli.commands.diff.measure import Side, measure_diff, measure_weights
    from llmcli.inspect.windows import CHUNK, edit_windows
    from llmcli.measure.peers import open_peer, read_by

    engine, found, tokens = None, [], 0
    window, aligned = min(one.config.room(model.context_length) for one in (a, b)), False
    if not diff.weights:
        aligned, most = diff.prompt_b is not None, min(CHUNK, window)
        if window < 2:
            raise UsageError("a context of 1 token leaves nothing to predict from")
        other = given
        if diff.prompt_b is not None:
            other = Prompt(text_argument(diff.prompt_b, "`--prompt-b`"))
        for one, of in ((given, a), (other, b)):
            ids, _, spans = as_it_stands(one, of, parse_special=not special.no_special)
            if not ids or (aligned and len(ids) > most):
                raise UsageError(
                    f"the prompt has {len(ids)} tokens",
                    hint=f"give 1 to {most}" if aligned else "give at least one character",
                )
            edit_windows(of, ids, most)
            found.append(Side(model=of, ids=ids, spans=spans))
        tokens = len(found[0].ids)
    look.plan(exports(a, tokens), "use a shorter text")
    with ExitStack() as stack:
        if diff.against is not None:
            peer = stack.enter_context(closing(open_peer(diff.against, a)))
            engine, found[1] = members(peer.info), replace(found[1], read=read_by(peer))
        progress = stack.enter_context(Progress(look.out))
        report = (
            measure_weights(a, b, progress)
            if diff.weights
            else measure_diff(
                *found, window=window, stride=window // 2, aligned=aligned, progress=progress
            )
        )
    report = replace(report, b=engine or b.describe(), how=how)
    for of in look.others:
        note_edits(of, look.out)
    parameters = counted(len(report.parameters), "parameter")
    look.present(
        lambda: render_diff(report, look.title, every=diff.every),
        report,
        parameters if diff.weights else counted(len(report.tokens), "prediction"),
    )


def _sides(
    sides: SidesArguments, prompt: PromptOptions, model: ModelOptions, diff: DiffOptions
) -> tuple[ModelOptions, ModelOptions, PromptOptions, str]:
    """The options of A and B, one object for one model; the text; what tells B from A.

    A single argument is the text. Raises UsageError for what is named twice, and where nothing
    tells A from B.
    """
    if sides.second is not None:
        named = {"-m": model.model, "--prompt-b": diff.prompt_b, "--against": diff.against}
        if twice := next((name for name, value in named.items() if value is not None), None):
            raise UsageError(
                f"A and B are named already, and so `{twice}` is one too many",
                hint="leave it out, or put a text of several words in quotes",
            )
        a, b = replace(model, model=sides.first), replace(model, model=sides.second, revision=None)
        return a, b, prompt, ""
    if sides.first is not None and (diff.weights or prompt.ids is not None):
        raise UsageError(
            f"`{'--weights' if diff.weights else '--ids'}` takes no text: `{sides.first}`",
            hint="name two models, A and B",
        )
    prompt = replace(prompt, prompt=sides.first)
    if diff.prompt_b is not None or diff.against is not None:
        return model, model, prompt, f"--against {diff.against}" if diff.against else "--prompt-b"
    plain = {name: getattr(ModelOptions(), name) for name in VARIED}
    changed = {name: getattr(model, name) for name in VARIED if getattr(model, name) != plain[name]}
    if not changed:
        raise UsageError(
            "A and B are the same: no option tells them apart",
            hint="name two models, or give for example `--quantize int4`, `--prompt-b` or "
            "`--against`",
        )
    how = [
        f"--{name.replace('_', '-')} {one}"
        for name, value in changed.items()
        for one in (value if isinstance(value, list) else [value])
    ]
    return replace(model, **plain), model, prompt, " ".join(how)


def exports(model: Model, tokens: int) -> dict[str, Export]:
    """The files, by their kinds, of a text of so many tokens, or of parameters (0), as measured."""
    from llmcli.commands.diff.view import diff_page
    from llmcli.graph.graph import graph
    from llmcli.inspect.windows import CHUNK

    def make(report: DiffReport, title: str) -> bytes:
        return diff_page(report, title, jsonable(members(report)))

    of = graph(model.config)
    written = [name for name in of.nodes if of.written(name)]
    streams = sum(".resid_" in name for name in written)
    size = 2700 + 295 * tokens + streams * (125 + 23 * min(tokens, CHUNK)) + 160 * len(written)
    size = size if tokens else 2700 + 145 * len(of.parameters)
    return {"html": Export(size=17_000 + size * 12 // 13, make=make), "json": Export(size=size)}

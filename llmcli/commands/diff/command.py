"""`llmcli diff`: two models, or one model in two ways: where they differ, and by how much."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from llmcli.errors import UsageError
from llmcli.records.document import members
from llmcli.records.numbers import counted
from llmcli.shell.encoding import as_it_stands
from llmcli.shell.inspection import Export, FileOptions, Inspection
from llmcli.shell.options import ModelOptions, PromptOptions, SpecialOptions, ViewOutputOptions
from llmcli.shell.output import jsonable, write_file
from llmcli.shell.params import arg, opt
from llmcli.shell.progress import Progress
from llmcli.shell.prompts import Prompt, prompt_or_default, text_argument
from llmcli.shell.running import load_model, require_supported

if TYPE_CHECKING:
    from llmcli.commands.diff.measure import Side
    from llmcli.commands.diff.report import DiffReport
    from llmcli.config.model import ModelConfig
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
  llmcli diff "2 + 2 =" --dtype bfloat16
  llmcli diff "Paris is in" --prompt-b "Rome is in"
  llmcli diff -m model.gguf --against llama.cpp "Once upon a time"
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
        None, "-o --output FILE",
        f"Also write everything to a file, its format by extension: {', '.join(FILES)}.",
    )  # fmt: skip
    open: bool = opt(
        False, "--open", "Open the .html of -o in a browser; without -o, a temporary page."
    )
    force: bool = opt(False, "--force", "Write the file even if it is very large.")


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
    first, second, prompt = _sides(sides, prompt, model, diff)
    apart = first == second == model and diff.prompt_b is diff.against is None
    if apart:  # one model, with and without the options
        first = replace(model, **{name: getattr(ModelOptions(), name) for name in VARIED})
    names = [name for name in VARIED if getattr(first, name) != getattr(second, name)]
    if apart and not names:
        raise UsageError(
            "A and B are the same: no option tells them apart",
            hint="name two models, or give for example `--quantize int4`, `--prompt-b` or "
            "`--against`",
        )
    given = Prompt(None) if diff.weights else prompt_or_default(prompt, look.out.note)
    if first.model != second.model and second.model is not None:
        if given.conversation is not None:
            raise UsageError(
                f"{given.where} is a conversation, of which each model's template makes another "
                "text, and `diff` compares on one",
                hint="give a text, or one model with two settings",
            )
        require_supported(second, look.out, second.model)
    text = not given.ids and not diff.weights
    a = look.load(first, _no_check, text=text)
    b = a if first is second else load_model(second, look.out, text=text).model
    values = {name: getattr(second, name) for name in names}
    how = " ".join(
        f"--{name.replace('_', '-')} {one}"
        for name, value in values.items()
        for one in (value if isinstance(value, list) else [value])
    )
    report = _report(look, a, b, given, diff, special, model)
    described = b.describe() if report.b == {} else report.b
    report = replace(report, b=described, how=report.how or how)
    look.plan(exports(look, report), "use a shorter text")
    look.others = () if b is a else (b,)
    look.present(
        lambda: render_diff(report, look.title, every=diff.every),
        report,
        counted(len(report.parameters), "parameter")
        if diff.weights
        else counted(len(report.tokens), "prediction"),
        members(report),
    )


def _no_check(config: ModelConfig) -> None:
    """Nothing is refused for a model's configuration."""


def _sides(
    sides: SidesArguments, prompt: PromptOptions, model: ModelOptions, diff: DiffOptions
) -> tuple[ModelOptions, ModelOptions, PromptOptions]:
    """The options of A and B, and the text: a single argument is the text.

    Raises UsageError for arguments that are too many.
    """
    if sides.second is None:
        if sides.first is not None:
            if diff.weights or prompt.ids is not None:
                other = "--weights" if diff.weights else "--ids"
                raise UsageError(
                    f"`{other}` takes no text: `{sides.first}`", hint="name two models, A and B"
                )
            prompt = replace(prompt, prompt=sides.first)
        return model, model, prompt
    for option, value in (
        ("-m", model.model), ("--prompt-b", diff.prompt_b), ("--against", diff.against)
    ):  # fmt: skip
        if value is not None:
            raise UsageError(
                f"A and B are named already, and so `{option}` is one too many",
                hint="leave it out, or put a text of several words in quotes",
            )
    return (
        replace(model, model=sides.first), replace(model, model=sides.second, revision=None), prompt
    )  # fmt: skip


def _report(
    look: Inspection,
    a: Model,
    b: Model,
    given: Prompt,
    diff: DiffOptions,
    special: SpecialOptions,
    options: ModelOptions,
) -> DiffReport:
    """Measured; its `b` is empty where B is a model."""
    from llmcli.commands.diff.measure import Side, measure_diff, measure_weights
    from llmcli.inspect.windows import CHUNK, edit_windows

    def side(prompt: Prompt, model: Model, **more: Any) -> Side:
        ids, texts, spans = as_it_stands(prompt, model, parse_special=not special.no_special)
        if not ids:
            raise UsageError("the prompt has no tokens", hint="give at least one character")
        return Side(model=model, ids=ids, texts=texts, spans=spans, **more)

    if diff.weights:
        with Progress(look.out) as progress:
            return measure_weights(a, b, progress)
    window = min(one.config.room(options.context_length) for one in (a, b))
    if window < 2:
        raise UsageError("a context of 1 token leaves nothing to predict from")
    read, peer, other = None, None, given
    if diff.prompt_b is not None:
        other = Prompt(text_argument(diff.prompt_b, "`--prompt-b`"))
    if diff.against is not None:
        from llmcli.measure.peers import open_peer, read_by

        peer = open_peer(diff.against, a)
        read = read_by(peer)
    first, second = side(given, a), side(other, b, read=read)
    for one in (first, second):
        edit_windows(one.model, one.ids, min(CHUNK, window))
    if diff.prompt_b is not None and (most := max(len(first.ids), len(second.ids))) > min(
        CHUNK, window
    ):
        raise UsageError(
            f"two prompts have at most {min(CHUNK, window)} tokens, and one of these has {most}",
            hint="shorten it",
        )
    try:
        with Progress(look.out) as progress:
            report = measure_diff(
                first,
                second,
                window=window,
                stride=max(1, window // 2),
                aligned=diff.prompt_b is not None,
                progress=progress,
            )
    finally:
        if peer is not None:
            peer.close()
    if peer is not None:
        return replace(report, b=members(peer.info), how=f"--against {diff.against}")
    return replace(report, how="" if diff.prompt_b is None else "--prompt-b")


def exports(look: Inspection, report: DiffReport) -> dict[str, Export]:
    """The files, by their kinds; sizes as measured."""
    from llmcli.commands.diff.view import diff_page

    def write(report: DiffReport, document: Mapping[str, Any]) -> None:
        assert look.path is not None
        write_file(look.path, diff_page(report, look.title, jsonable(members(report))))

    size = 5000 + 330 * len(report.tokens) + 16 * len(report.streams) * report.activations
    size += 350 * len(report.nodes) + 200 * len(report.parameters)
    return {"html": Export(size=30_000 + size, write=write), "json": Export(size=size)}

"""`/look`: what `attention`, `experts`, `lens` and `timing` show, of the conversation."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from typing import Any

from llmcli.cli.chat.talk import Talk
from llmcli.cli.exits import SIGNALS
from llmcli.cli.looking import require
from llmcli.cli.progress import Progress
from llmcli.errors import UsageError
from llmcli.render.theme import one_line
from llmcli.reports.checks import ViewCheck

MOST = 1024  # tokens that are looked at, the last ones
WRITTEN, PAIRS = 8, 3  # of `timing`: tokens that it writes, and runs with and without clocks
_HINT = "`llmcli explain` finds the formula that does not hold"

Options = dict[str, str]
# given what is to be shown, returns the checks of the view
View = Callable[[Talk, Sequence[int], Options], tuple[Any, Sequence[ViewCheck]]]


def look(talk: Talk, argument: str) -> None:
    """Shows one of `VIEWS` of the conversation so far, which a pass of its own reads once more.

    Raises UsageError for another name or option, and what measuring raises.
    """
    try:
        name, *words = shlex.split(argument) or [""]
    except ValueError:  # a quote without its other half
        name, words = "", []
    if name not in VIEWS:
        raise UsageError(f"`/look` takes {', '.join(VIEWS)}", hint="such as `/look attention`")
    view, allowed = VIEWS[name]
    given = _options(name, words, allowed)
    ids = talk.conversation.ids()
    if not ids:
        raise UsageError("there is nothing to look at: nothing was said yet")
    if len(ids) > MOST:
        talk.out.note(f"the last {MOST:,} of {len(ids):,} tokens are looked at, on their own")
    shown, checks = view(talk, ids[-MOST:], given)
    with SIGNALS.held():  # stdout is needed for the next answer
        (talk.out.aside if talk.out.json else talk.out.show)(shown)
    require(checks, _HINT)


def _options(name: str, words: Sequence[str], allowed: Sequence[str]) -> Options:
    """`--layer 3 --head 2` → by name."""
    pairs = dict(zip(words[::2], words[1::2], strict=False))
    flags = {f"--{option.replace('_', '-')}": option for option in allowed}
    wrong = next((flag for flag in words[::2] if flag not in flags), None)
    if wrong is not None or len(words) % 2:
        takes = ", ".join(f"`{flag} …`" for flag in flags) or "no options"
        raise UsageError(f"`/look {name}` takes {takes}, not `{one_line(' '.join(words))}`")
    return {flags[flag]: value for flag, value in pairs.items()}


def _attention(
    talk: Talk, ids: Sequence[int], given: Options
) -> tuple[Any, Sequence[ViewCheck]]:
    from llmcli.cli.attention.asked import Asked
    from llmcli.cli.attention.options import HeadOptions, ViewOptions
    from llmcli.cli.attention.run import Run
    from llmcli.render.attention.view import Calls, render_attention

    model = talk.conversation.model
    named: dict[str, Any] = {name: given.pop(name) for name in ("layer", "head") if name in given}
    rest: dict[str, Any] = dict(given)
    heads, view = HeadOptions(**named), ViewOptions(**rest)
    run = Run(model, tuple(ids), 0, heads, view, Asked.of(heads, view, json=False))
    report = run.measured(None, talk.out)
    repeated = shlex.join(["llmcli", "attention", "--synthetic", "32", "-m", model.name])
    calls = Calls(same="/look attention", repeated=repeated)
    return render_attention(report, run.title, run.views(report, calls)), report.checks


def _experts(talk: Talk, ids: Sequence[int], given: Options) -> tuple[Any, Sequence[ViewCheck]]:
    """Those that the tokens of the last answer took, its end included, unless others are named."""
    from llmcli.commands.experts.command import ExpertsOptions, experts_report
    from llmcli.commands.experts.view import render_experts
    from llmcli.render.stats import model_line

    model = talk.conversation.model
    answer = min(talk.conversation.last_answer, len(ids))
    last = {"position": f"-{answer}:"} if answer else {}
    options = ExpertsOptions(**dict[str, Any](last | given))
    options.check(model.config)
    report = experts_report(model, ids, 0, options, "", talk.out)
    return render_experts(report, model_line(model.describe())), report.checks


def _lens(talk: Talk, ids: Sequence[int], given: Options) -> tuple[Any, Sequence[ViewCheck]]:
    from llmcli.cli.lens.command import lens_report
    from llmcli.cli.lens.options import LensOptions
    from llmcli.cli.looking import NewTokensOptions
    from llmcli.render.lens.view import render_lens
    from llmcli.render.stats import model_line

    model, options = talk.conversation.model, LensOptions(**dict[str, Any](given))
    options.check(model.config)
    report = lens_report(model, ids, NewTokensOptions(), options, "", talk.out)
    title = model_line(model.describe())
    return render_lens(report, title, ranks=options.target != "output"), report.checks


def _timing(talk: Talk, ids: Sequence[int], given: Options) -> tuple[Any, Sequence[ViewCheck]]:
    import torch

    from llmcli.anatomy.work import step_bytes
    from llmcli.measure.ceilings import measure_ceilings
    from llmcli.measure.timing import measure_timing
    from llmcli.render.timing.view import render_timing

    model = talk.conversation.model
    tokens = min(len(ids), talk.conversation.room - WRITTEN)
    with Progress(talk.out) as progress:
        ceilings = measure_ceilings(
            model.device, model.arithmetic, threads=torch.get_num_threads(), progress=progress,
            working_set=step_bytes(model.config, tokens + WRITTEN, numbers=model.arithmetic),
        )  # fmt: skip
        report = measure_timing(
            model, ids[-tokens:], new_tokens=WRITTEN, pairs=PAIRS, ceilings=ceilings, stages=(),
            progress=progress,
        )  # fmt: skip
    if report.interrupted:
        raise KeyboardInterrupt
    return render_timing(report, layers=False), report.checks


VIEWS: dict[str, tuple[View, tuple[str, ...]]] = {
    "attention": (_attention, ("layer", "head", "query", "key", "map", "metrics")),
    "experts": (_experts, ("layer", "position")),
    "lens": (_lens, ("layer", "position", "target")),
    "timing": (_timing, ()),
}

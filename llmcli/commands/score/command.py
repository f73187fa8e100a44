"""`llmcli score`: how well a model predicts a text."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from llmcli.errors import UsageError
from llmcli.measure.environment import environment
from llmcli.shell.encoding import pieces
from llmcli.shell.options import ModelOptions, PagedOutputOptions, PromptOptions, SpecialOptions
from llmcli.shell.output import Output
from llmcli.shell.params import opt
from llmcli.shell.progress import Progress
from llmcli.shell.prompts import Prompt, check_ids, need_tokenizer, prompt_or_default, read_prompt
from llmcli.shell.running import kernels_of, load_model, require_supported
from llmcli.shell.template import ChatOptions

if TYPE_CHECKING:
    from llmcli.commands.score.report import Score
    from llmcli.model import Model
    from llmcli.text import Tokenizer


@dataclass(frozen=True, kw_only=True)
class ScoreOptions:
    """What is compared, and how long texts are cut."""

    panel: ClassVar[str] = "Score"
    versus: str | None = opt(
        None, "--versus", "MODEL",
        "Score the text with a second model too, and compare.",
    )  # fmt: skip
    stride: int | None = opt(
        None, "--stride", "N",
        "By how many tokens the window moves over a text longer than the context. [default: half "
        "the context]", at_least=1,
    )  # fmt: skip
    every: bool = opt(
        False, "--all",
        "Show all tokens of a long text, not the most surprising ones.",
    )  # fmt: skip


@dataclass(frozen=True)
class ScoreRequest:
    """One text, and how it is read; every model cuts it into its own tokens."""

    text: Prompt
    parse_special: bool
    window: int | None  # the most tokens at once; None: the model's context
    stride: int | None

    def windows(self, model: Model) -> tuple[int, int]:
        """Window and stride for `model`; raises UsageError where they do not overlap."""
        window = self.window or model.config.context
        stride = self.stride or max(1, window // 2)
        if window < 2:
            raise UsageError("a context of 1 token leaves nothing to predict from")
        if stride >= window:
            raise UsageError(
                f"`--stride {stride}` is not less than the context of {window} tokens",
                hint="windows have to overlap, for a token needs others before it",
            )
        return window, stride


def command(
    prompt: PromptOptions,
    special: SpecialOptions,
    score: ScoreOptions,
    model: ModelOptions,
    output: PagedOutputOptions,
) -> None:
    """Log-probability of every token of a text, its perplexity and bits per byte.

    The text is taken as it stands: the tokenizer's own BOS rule, no EOS, no chat template (except
    for a .json file with `messages`, which is a conversation).
    Logarithms are natural; rank 1 is the likeliest token. A text longer than the context is
    read in overlapping windows.
    """
    from llmcli.commands.score.measure import compare
    from llmcli.commands.score.view import render_score, render_versus
    from llmcli.ui.stats import model_line

    out = Output("score", output)
    on_terminal = out.out.terminal and sys.stdin is not None and sys.stdin.isatty()
    text = prompt_or_default(prompt, out.note) if on_terminal else read_prompt(prompt)
    request = ScoreRequest(text, not special.no_special, model.context_length, score.stride)
    if score.versus is not None:
        if text.conversation is not None:
            raise UsageError(
                f"{text.where} is a conversation, of which each model's template makes another "
                "text, and `--versus` compares on one",
                hint="leave one of them out",
            )
        require_supported(model, out, score.versus)
    ours, about, body = _scored(request, model, None, out)
    if score.versus is None:
        out.present(
            lambda: render_score(ours, model_line(about), every=score.every),
            body,
            model=about,
            environment=environment(kernels=kernels_of(about)),
        )
        return
    theirs, other, theirs_body = _scored(request, model, score.versus, out)
    comparison = compare(ours, theirs)
    out.present(
        lambda: render_versus(
            (ours, model_line(about)), (theirs, model_line(other)), comparison,
            (str(about["name"]), str(other["name"])), every=score.every,
        ),
        body | {"versus": {"model": other, **theirs_body, "difference": comparison}},
        model=about,
        environment=environment(kernels=kernels_of(about, other)),
    )  # fmt: skip


def _scored(
    request: ScoreRequest, options: ModelOptions, spec: str | None, out: Output
) -> tuple[Score, dict[str, Any], dict[str, Any]]:
    """The score of one model (`spec` instead of `--model`), what the model is, and the score as
    JSON has it; the model is freed then.
    """
    from llmcli.commands.score.measure import measure_score

    model = load_model(options, out, text=request.text.ids is None, spec=spec).model
    window, stride = request.windows(model)
    if request.text.ids is not None:
        check_ids(request.text.ids, model.config.vocab)
        ids = list(request.text.ids)
        known = model.tokenizer
        texts = [model.token_text(id) for id in ids]
        found = [] if known is None else known.spelled(ids)
    else:
        tokenizer = need_tokenizer(model.tokenizer, model.name)
        _, found = pieces(
            request.text, ChatOptions(raw=True), tokenizer, model.name,
            parse_special=request.parse_special,
        )  # fmt: skip
        ids = [piece.id for piece in found]
        model.check_tokenized(ids)
        texts = [piece.text for piece in found]
    spans = [(piece.start, piece.end) for piece in found] or [(0, 0)] * len(ids)
    del found  # of a long text more than all the rest
    if len(ids) < 2:
        out.note("the text is a single token, and the first token has nothing to be predicted from")
    with Progress(out) as progress:
        score = measure_score(
            model, ids, texts, spans, window=window, stride=stride, progress=progress
        )
    return score, model.describe(), _body(score, model.tokenizer)


def _body(score: Score, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """The report as JSON has it: tokens with their bytes, its time under `timings`.

    The tokens can be read once: where nothing is written, they are not made.
    """
    from llmcli.commands.score.report import ScoredToken

    fields = {name: value for name, value in vars(score).items() if name != "seconds"}
    names = ScoredToken.__slots__
    fields["tokens"] = (
        {name: getattr(token, name) for name in names}
        | {"bytes": tokenizer.token_bytes(token.id).hex() if tokenizer else None}
        for token in score.tokens
    )
    return fields | {"timings": {"score_s": score.seconds}}

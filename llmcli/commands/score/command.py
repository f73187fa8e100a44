"""`llmcli score`: how well a model predicts a text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from llmcli.cli.encoding import pieces
from llmcli.cli.options import ModelOptions, OutputOptions, PromptOptions, SpecialOptions
from llmcli.cli.output import Output
from llmcli.cli.params import opt
from llmcli.cli.progress import Progress
from llmcli.cli.prompts import Prompt, check_ids, need_tokenizer, read_prompt
from llmcli.cli.running import kernels_of, load_model, require_supported
from llmcli.cli.template import ChatOptions
from llmcli.commands.score.measure import compare, measure_score
from llmcli.errors import UsageError
from llmcli.observe.environment import environment
from llmcli.reports.text import Score

if TYPE_CHECKING:
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
    every: bool = opt(False, "--all", "Show all tokens of a long text.")


def command(
    prompt: PromptOptions,
    special: SpecialOptions,
    score: ScoreOptions,
    model: ModelOptions,
    output: OutputOptions,
) -> None:
    """Log-probability of every token of a text, its perplexity and bits per byte.

    The text is taken as it stands: the tokenizer's own BOS rule, no EOS, no chat template (but
    for a .json file with `messages`, which is a conversation).
    Logarithms are natural; rank 1 is the likeliest token. A text longer than the context is
    read in overlapping windows.
    """
    out = Output("score", output)
    given = read_prompt(prompt)
    if score.versus is not None:
        if given.conversation is not None:
            raise UsageError(
                f"{given.where} is a conversation, of which each model's template makes another "
                "text, and `--versus` compares on one",
                hint="leave one of them out",
            )
        require_supported(model, out, score.versus)
    loaded = load_model(model, out, text=given.ids is None).model
    about, ours = loaded.describe(), _scored(loaded, given, special, score, model, out)
    body = _body(ours, loaded.tokenizer)
    if score.versus is None:
        if out.json:
            out.document(body, model=about, environment=environment(kernels=kernels_of(about)))
            return
        from llmcli.ui.stats import model_line
        from llmcli.ui.tokens import render_score

        out.show(render_score(ours, model_line(about), every=score.every))
        return
    del loaded
    other = load_model(model, out, text=given.ids is None, spec=score.versus).model
    theirs = _scored(other, given, special, score, model, out)
    comparison = compare(ours, theirs)
    if out.json:
        body["versus"] = {
            "model": other.describe(),
            **_body(theirs, other.tokenizer),
            "difference": comparison,
        }
        header = environment(kernels=kernels_of(about, other.describe()))
        out.document(body, model=about, environment=header)
        return
    from llmcli.ui.stats import model_line
    from llmcli.ui.tokens import render_comparison, render_score, render_summary

    out.show(
        render_score(ours, model_line(about), every=score.every),
        "",
        render_summary(theirs, model_line(other.describe())),
        "",
        render_comparison(comparison, str(about["name"]), other.name),
    )


def _body(score: Score, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """The report as JSON has it: tokens with their bytes, its time under `timings`."""
    fields = {name: value for name, value in vars(score).items() if name != "seconds"}
    fields["tokens"] = [
        vars(token) | {"bytes": tokenizer.token_bytes(token.id).hex() if tokenizer else None}
        for token in score.tokens
    ]
    return fields | {"timings": {"score_s": score.seconds}}


def _scored(
    model: Model,
    given: Prompt,
    special: SpecialOptions,
    options: ScoreOptions,
    common: ModelOptions,
    out: Output,
) -> Score:
    """The score of one model, with its own tokens; raises UsageError for a bad window."""
    window = common.context_length or model.config.context
    stride = options.stride or max(1, window // 2)
    if window < 2:
        raise UsageError("a context of 1 token leaves nothing to predict from")
    if stride >= window:
        raise UsageError(
            f"`--stride {stride}` is not less than the context of {window} tokens",
            hint="windows have to overlap, for a token needs others before it",
        )
    if given.ids is not None:
        check_ids(given.ids, model.config.vocab)
        ids = list(given.ids)
        known = model.tokenizer
        texts = [model.token_text(id) for id in ids]
        found = [] if known is None else known.spelled(ids)
    else:
        tokenizer = need_tokenizer(model.tokenizer, model.name)
        _, found = pieces(
            given, ChatOptions(raw=True), tokenizer, model.name,
            parse_special=not special.no_special,
        )  # fmt: skip
        ids = [piece.id for piece in found]
        model.check_tokenized(ids)
        texts = [piece.text for piece in found]
    spans = [(piece.start, piece.end) for piece in found] or [(0, 0)] * len(ids)
    if len(ids) < 2:
        out.note("the text is a single token, and the first token has nothing to be predicted from")
    with Progress(out) as progress:
        return measure_score(
            model, ids, texts, spans, window=window, stride=stride, progress=progress
        )

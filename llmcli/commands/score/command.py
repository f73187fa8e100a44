"""`llmcli score`: how well a model predicts a text."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, ClassVar

from llmcli.errors import UsageError
from llmcli.records.document import members
from llmcli.shell.encoding import ChatOptions, pieces
from llmcli.shell.options import ModelOptions, PagedOutputOptions, PromptOptions, SpecialOptions
from llmcli.shell.output import Output
from llmcli.shell.params import opt
from llmcli.shell.progress import Progress
from llmcli.shell.prompts import Prompt, check_ids, need_tokenizer, prompt_or_default, read_prompt
from llmcli.shell.running import header, load_model, note_edits, require_supported

if TYPE_CHECKING:
    from llmcli.commands.score.report import Score
    from llmcli.model import Model


@dataclass(frozen=True, kw_only=True)
class ScoreOptions:
    """What is compared, and how the window moves over a long text."""

    panel: ClassVar[str] = "Score"
    versus: str | None = opt(
        None, "--versus MODEL", "Score the text with a second model too, and compare."
    )
    stride: int | None = opt(
        None,
        "--stride N",
        "By how many tokens the window moves over a text longer than the context. [default: half "
        "the context]",
        at_least=1,
    )
    every: bool = opt(
        False, "--all", "Show all tokens of a long text, not the most surprising ones."
    )

    def windows(self, context: int) -> tuple[int, int]:
        """Window and stride in tokens. Raises UsageError where the windows do not overlap."""
        stride = self.stride or max(1, context // 2)
        if context < 2:
            raise UsageError("a context of 1 token leaves nothing to predict from")
        if stride >= context:
            raise UsageError(
                f"`--stride {stride}` is not less than the context of {context} tokens",
                hint="windows have to overlap, for a token needs others before it",
            )
        return context, stride


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
    from llmcli.commands.score.view import render_scores

    out = Output("score", output)
    on_terminal = out.out.terminal and sys.stdin is not None and sys.stdin.isatty()
    read = prompt_or_default if on_terminal else read_prompt
    text = read(prompt, out.note)
    specs = [None] if score.versus is None else [None, score.versus]  # None: `--model`
    if score.versus is not None:
        if text.conversation is not None:
            raise UsageError(
                f"{text.where} is a conversation, of which each model's template makes another "
                "text, and `--versus` compares on one",
                hint="leave one of them out",
            )
        require_supported(model, out, score.versus)
    scores, models = [], []
    for spec in specs:
        loaded = load_model(model, out, text=not text.ids, spec=spec).model
        window, stride = score.windows(loaded.config.room(model.context_length))
        parsed = not special.no_special
        scores.append(_score(text, loaded, out, window, stride, parse_special=parsed))
        models.append(loaded.describe())
        note_edits(loaded, out)
        del loaded  # before the next one is loaded
    comparison = None if score.versus is None else compare(*scores)
    body = members(scores[0])
    if comparison is not None:
        body["versus"] = {"model": models[1], **members(scores[1]), "difference": comparison}
    out.present(
        lambda: render_scores(scores, models, comparison, every=score.every),
        body,
        **header(*models),
    )


def _score(
    text: Prompt, model: Model, out: Output, window: int, stride: int, *, parse_special: bool
) -> Score:
    """The score of a text, encoded by the model's own tokenizer."""
    from llmcli.commands.score.measure import measure_score
    from llmcli.inspect.edits import apply_edits

    tokenizer = model.tokenizer
    if text.ids:
        check_ids(text.ids, model.config.vocab)
        ids = list(text.ids)
        texts = [model.token_text(id) for id in ids]
        found = [] if tokenizer is None else tokenizer.spelled(ids)
    else:
        _, found = pieces(
            text,
            ChatOptions(raw=True),
            need_tokenizer(tokenizer, model.name),
            model.name,
            parse_special=parse_special,
        )
        ids = [piece.id for piece in found]
        model.check_tokenized(ids)
        texts = [piece.text for piece in found]
    spans = [(piece.start, piece.end) for piece in found] or [(0, 0)] * len(ids)
    del found  # of a long text more than all the rest
    if len(ids) < 2:
        out.note("the text is a single token, and the first token has nothing to be predicted from")

    apply_edits(model, [ids], window)
    for edit in model.edits:
        positions = edit.prompt is not None or any(map(edit.ends, edit.places))
        if len(ids) > window and positions:
            raise UsageError(
                f"`--edit {edit.text}` names positions, and a window has only {window} tokens",
                hint="name none, or give a text that fits the context",
            )

    @cache  # tokens of one id share their text
    def spelled(id: int) -> str | None:
        return None if tokenizer is None else tokenizer.token_bytes(id).hex()

    with Progress(out) as progress:
        return measure_score(
            model,
            ids,
            texts,
            spans,
            window=window,
            stride=stride,
            spelled=spelled,
            progress=progress,
        )

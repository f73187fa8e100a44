"""`llmcli score`: how well a model predicts a text."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

from llmcli.errors import UsageError
from llmcli.records.document import members
from llmcli.shell.encoding import as_it_stands
from llmcli.shell.options import ModelOptions, PagedOutputOptions, PromptOptions, SpecialOptions
from llmcli.shell.output import Output
from llmcli.shell.params import opt
from llmcli.shell.progress import Progress
from llmcli.shell.prompts import prompt_or_default, read_prompt
from llmcli.shell.running import header, load_model, note_edits

ELSEWHERE = {"--versus": "`llmcli diff A B` compares two models on a text"}


@dataclass(frozen=True, kw_only=True)
class ScoreOptions:
    """How the window moves over a long text, and what is shown of it."""

    panel: ClassVar[str] = "Score"
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
    from llmcli.commands.score.view import render_score

    out = Output("score", output)
    on_terminal = out.out.terminal and sys.stdin is not None and sys.stdin.isatty()
    text = (prompt_or_default if on_terminal else read_prompt)(prompt, out.note)
    loaded = load_model(model, out, text=not text.ids).model
    from llmcli.commands.score.measure import measure_score
    from llmcli.inspect.windows import edit_windows

    window, stride = score.windows(loaded.config.room(model.context_length))
    ids, texts, spans = as_it_stands(text, loaded, parse_special=not special.no_special)
    tokenizer = loaded.tokenizer
    if len(ids) < 2:
        out.note("the text is a single token, and the first token has nothing to be predicted from")

    edit_windows(loaded, ids, window)

    @cache  # tokens of one id share their text
    def spelled(id: int) -> str | None:
        return None if tokenizer is None else tokenizer.token_bytes(id).hex()

    with Progress(out) as progress:
        found = measure_score(
            loaded,
            ids,
            texts,
            spans,
            window=window,
            stride=stride,
            spelled=spelled,
            progress=progress,
        )
    note_edits(loaded, out)
    shown = loaded.describe()
    out.present(
        lambda: render_score(found, shown, every=score.every), members(found), **header(shown)
    )

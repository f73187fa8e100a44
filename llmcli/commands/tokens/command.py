"""`llmcli tokens`: the tokens of a text as the model would be given it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from llmcli.errors import CheckpointError
from llmcli.records.document import members
from llmcli.shell.encoding import TemplateOptions, pieces
from llmcli.shell.options import ModelOptions, PagedOutputOptions, PromptOptions, SpecialOptions
from llmcli.shell.output import Output
from llmcli.shell.params import Without, opt
from llmcli.shell.prompts import check_ids, read_prompt
from llmcli.shell.running import opened_headers


@dataclass(frozen=True, kw_only=True)
class TokensOptions:
    """How much is shown."""

    panel: ClassVar[str] = "Tokens"
    every: bool = opt(False, "--all", "Show all tokens of a long text.")


def command(
    prompt: PromptOptions,
    special: SpecialOptions,
    template: TemplateOptions,
    tokens: TokensOptions,
    model: Annotated[ModelOptions, Without(("edit",))],
    output: PagedOutputOptions,
) -> None:
    """The tokens of a text: ids, pieces, byte offsets, and what the model adds in front.

    The text is taken as it stands, with the tokenizer's own BOS rule; `--chat` shows what the
    chat template makes of it. Reads no weights and never imports PyTorch.
    """
    from llmcli.commands.tokens.view import TokensReport, render_tokens
    from llmcli.records.info import NO_FORMATS
    from llmcli.text import load_tokenizer

    out = Output("tokens", output)
    chat = template.options()
    chat.check()
    given = read_prompt(prompt, out.note)
    with chat.renderer([given]):
        with opened_headers(model, out, weights=False) as (checkpoint, place):
            tokenizer = load_tokenizer(checkpoint)
        if tokenizer is None:
            raise CheckpointError(
                f"`{checkpoint.name}` has no tokenizer, so there is nothing for `tokens` to show"
            )
        for note in tokenizer.notes:
            out.note(note)
        rendered = None
        if given.ids:
            check_ids(given.ids, tokenizer.vocab_size)
            found = tokenizer.spelled(given.ids)
            size = found[-1].end
        else:
            rendered, found = pieces(
                given, chat, tokenizer, checkpoint.name, parse_special=not special.no_special
            )
            size = len((given.text or "" if rendered is None else rendered).encode())
    report = TokensReport(
        text=None if given.conversation else given.text,
        rendered=rendered,
        tokens=tuple(found),
        bytes=size,
        vocabulary=tokenizer.vocab_size,
        bos=tokenizer.bos_id,
        adds_bos=tokenizer.add_bos,
        eos=tuple(sorted(tokenizer.eos_ids)),
    )
    about = {
        "name": checkpoint.name,
        "path": place,
        "model_type": checkpoint.model_type if checkpoint.config else None,
        "tokenizer": tokenizer.name,
        **NO_FORMATS,
    }
    out.present(
        lambda: render_tokens(report, every=tokens.every),
        members(report),
        model=about,
    )

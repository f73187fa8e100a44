"""What is read: a prompt, or random tokens twice; and the command line that reads it once more."""

from __future__ import annotations

import random
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, get_type_hints

from typer.models import ArgumentInfo, OptionInfo

from llmcli.commands.attention.options import HeadOptions
from llmcli.errors import PromptTooLong, UsageError
from llmcli.shell.looking import NewTokensOptions, encode_prompt, room_for
from llmcli.shell.options import ModelOptions, PromptOptions
from llmcli.shell.prompts import LOOKED_AT, Prompt, prompt_or_default
from llmcli.shell.template import TemplateOptions

if TYPE_CHECKING:
    from llmcli.commands.attention.view.screen import Calls
    from llmcli.model import Model
    from llmcli.shell.output import Output

LONG = 40  # characters of a text that is repeated; a longer one stands as its name


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The options that say what is read, and what was given: None for random tokens."""

    prompt: PromptOptions
    template: TemplateOptions
    new: NewTokensOptions
    heads: HeadOptions
    model: ModelOptions
    given: Prompt | None

    @classmethod
    def of(
        cls, prompt: PromptOptions, template: TemplateOptions, new: NewTokensOptions,
        heads: HeadOptions, model: ModelOptions, out: Output,
    ) -> Reading:  # fmt: skip
        """Reads the prompt; with `--synthetic` there is none."""
        given = None if heads.synthetic is not None else prompt_or_default(prompt, out.note)
        return cls(
            prompt=prompt, template=template, new=new, heads=heads, model=model, given=given
        )

    @property
    def is_text(self) -> bool:
        """Whether a tokenizer is needed."""
        return self.given is not None and self.given.ids is None

    def ids(self, model: Model) -> tuple[int, ...]:
        """The tokens. Raises PromptTooLong and UsageError where they do not fit the context."""
        given, count = self.given, self.heads.synthetic
        if given is None:
            assert count is not None
            given = Prompt(None, tuple(synthetic(model, count, self.model.seed or 0)))
            made, room = len(given.ids or ()), room_for(self.model, model)
            if (over := made - room) > 0:
                raise PromptTooLong(
                    f"`--synthetic {count}` makes {made} tokens, and the context is {room}",
                    hint=f"use `--synthetic {count - (over + 1) // 2}` at most",
                )
        return encode_prompt(
            given, self.template, self.model, model, new=self.new.generate
        ).ids

    def calls(self) -> Calls:
        """The command lines that hints begin with; a pipe stands before them as `… |`."""
        from llmcli.commands.attention.view.screen import Calls

        everywhere = replace(self.heads, layer=None, head=None, what="pattern")
        same = again(
            "attention", self.prompt, self.template, self.new, everywhere, self.model
        )
        if self.is_text and self.given is not None and self.prompt.file is None:
            piped = self.given.text != (self.prompt.prompt or LOOKED_AT)
            same = f"… | {same}" if piped else same
        repeated = HeadOptions(synthetic=32)
        call = None if self.given is None else again("attention", repeated, self.model)
        return Calls(same=same, repeated=call)


def synthetic(model: Model, count: int, seed: int) -> list[int]:
    """BOS where the model has one, `count` different random tokens, then these again.

    None of them is special, so that a text that repeats is all there is to see (Olsson et al.
    2022, appendix: "prefix matching"). The same `seed`, the same tokens. Raises UsageError where
    the vocabulary has fewer, or `count` is below 1.
    """
    known, special = model.tokenizer, set(model.config.eos)
    if model.config.bos is not None:
        special.add(model.config.bos)
    if known is not None:
        special |= known.special_ids
    plain = [
        id
        for id in range(model.config.vocab)
        if id not in special and (known is None or known.has(id))
    ]
    if not 1 <= count <= len(plain):
        raise UsageError(
            f"`--synthetic {count}` needs as many different tokens",
            hint=f"use a number from 1 to {len(plain)}",
        )
    drawn = random.Random(seed).sample(plain, count)
    front = [] if model.config.bos is None else [model.config.bos]
    return [*front, *drawn, *drawn]


def again(command: str, *given: Any) -> str:
    """`llmcli attention "a b" -m tiny`: what was `given`, dataclasses of options, set.

    Only what is not as it is by default, quoted for a shell. A long text, or one of several
    lines, is not repeated: its name stands there.
    """
    parts = [part for options in given for part in _set(options)]
    return " ".join(["llmcli", command, *parts])


def _set(options: Any) -> Iterator[str]:
    hints = get_type_hints(type(options), include_extras=True)
    for field in fields(options):
        value, said = getattr(options, field.name), field.metadata.get("declared")
        if value == field.default:
            continue
        hint = hints[field.name] if said is None else said.hint(hints[field.name], type(options))
        for about in hint.__metadata__:
            if isinstance(about, OptionInfo):
                for one in value if isinstance(value, list) else [value]:
                    # typer has the first name of an annotated option where others have its default
                    yield str(about.default)
                    if one is not True:
                        yield _quoted(str(one), about.metavar)
            elif isinstance(about, ArgumentInfo):
                yield _quoted(str(value), about.metavar)


def _quoted(value: str, metavar: str | None) -> str:
    long = len(value) > LONG and re.search(r"[\s,]", value)
    return (metavar or "…").strip("[]") if long or not value.isprintable() else shlex.quote(value)

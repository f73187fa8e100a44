"""Options and parsers that the inspection commands share: prompt, layers, positions."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from llmcli.errors import UsageError
from llmcli.records.checks import ViewCheck
from llmcli.shell.encoding import Encoded, check_fits, encode
from llmcli.shell.options import PROMPT, ModelOptions
from llmcli.shell.params import opt
from llmcli.shell.prompts import Prompt
from llmcli.shell.template import TemplateOptions

if TYPE_CHECKING:
    from rich.console import RenderableType

    from llmcli.model import Model
    from llmcli.records.text import Token
    from llmcli.shell.output import Output

# what `/look` of `chat` can show, and the options that it takes there (see `look` in `command.py`)
IN_CHAT: dict[str, tuple[str, ...]] = {
    "attention": ("layer", "head", "query", "key", "map", "metrics"),
    "experts": ("layer", "position"),
    "lens": ("layer", "position", "target"),
    "timing": (),
}
Shown = tuple["RenderableType", Sequence[ViewCheck]]  # and what the view is checked by


class Subject:
    """What a look reads: the tokens `ids`, and up to `generate` that the model writes after them.

    `out` is where its progress and its notes go.
    """

    model: Model
    ids: Sequence[int] = ()
    generate: int = 0
    out: Output

    @property
    def title(self) -> str:
        """The model's line."""
        from llmcli.ui.facts import model_line

        return model_line(self.model.describe())


@dataclass(frozen=True, kw_only=True)
class InChat(Subject):
    """The tokens of a conversation; its last `answer` tokens are the model's last answer.

    `room`: the most tokens of the context.
    """

    model: Model
    ids: Sequence[int]
    answer: int
    room: int
    out: Output


@dataclass(frozen=True, kw_only=True)
class NewTokensOptions:
    """How many tokens the model generates after the prompt, to inspect them too."""

    panel: ClassVar[str] = PROMPT
    generate: int = opt(
        0, "--generate", "N",
        "Let the model write up to N tokens (the likeliest ones), and look at them too.",
        at_least=0,
    )  # fmt: skip


def encode_prompt(
    given: Prompt, template: TemplateOptions, options: ModelOptions, model: Model, *, new: int = 0
) -> Encoded:
    """The ids of the prompt; checks that `new` more tokens fit the context.

    Raises UsageError, PromptTooLong where they do not fit the context, and CheckpointError
    without a tokenizer.
    """
    chat = template.options()
    chat.check()
    encoded = encode(given, chat, model)
    room = room_for(options, model)
    list(check_fits([encoded], 1, room, largest=model.config.embedding.positions))
    if len(encoded.ids) + new > room:
        left = room - len(encoded.ids)
        raise UsageError(
            f"`--generate {new}` does not fit: the prompt has {len(encoded.ids)} tokens and the "
            f"context is {room}",
            hint=f"use `--generate {left}` at most" if left else "shorten the prompt",
        )
    return encoded


def room_for(options: ModelOptions, model: Model) -> int:
    """The most tokens: of the options, else of the model, and never more than it has learned."""
    room = options.context_length or model.config.context
    positions = model.config.embedding.positions
    return room if positions is None else min(room, positions)


def tokens_metadata(tokens: Sequence[Token], prompt_tokens: int) -> dict[str, str]:
    """What a file of arrays says of its tokens, the first `prompt_tokens` given: lists as JSON."""
    return {
        "ids": json.dumps([one.id for one in tokens]),
        "tokens": json.dumps([one.text for one in tokens]),
        "prompt_tokens": str(prompt_tokens),
    }


def parse_numbers(text: str, size: int, option: str, what: str) -> tuple[int, ...]:
    """`0,3-5,-1` → numbers in that order, each once; negative ones count from the end.

    `what` is what they number (`layers`), of which there are `size`. Raises UsageError naming
    `option` for anything else and for a number that is not there.
    """
    found: dict[int, None] = {}
    for item in (part.strip() for part in text.split(",")):
        match = re.fullmatch(r"(-?\d{1,6})(?:-(-?\d{1,6}))?", item, re.ASCII)
        if not match:
            hint = f"they go from 0 to {size - 1}; -1 is the last"
            if option == "--head" and (both := re.fullmatch(r"(\d+)\.(\d+)", item, re.ASCII)):
                hint = f"head {item} is `--layer {both[1]} --head {both[2]}`"
            raise UsageError(
                f"`{option}` takes numbers and ranges such as 0,3-5,-1, not `{item or text}`",
                hint=hint,
            )
        ends = [_counted(int(end), size, option, what) for end in match.groups() if end]
        if ends[0] > ends[-1]:
            raise UsageError(
                f"`{option} {item}` is an empty range",
                hint=f"use `{option} {ends[1]}-{ends[0]}`",
            )
        found |= dict.fromkeys(range(ends[0], ends[-1] + 1))
    return tuple(found)


def parse_span(text: str | None, size: int, option: str) -> tuple[int, int]:
    """`40:80`, `:10`, `-5:` or `7` → first position and the one after the last, within `size`.

    None is all of them. Raises UsageError for anything else and for an empty span.
    """
    if text is None:
        return 0, size
    match = check_span(text, option, f"positions go from 0 to {size - 1}; -1 is the last")
    if not match[2]:
        at = _counted(int(match[1]), size, option, "tokens")
        return at, at + 1
    first, last = slice(*(int(end) if end else None for end in match.group(1, 3))).indices(size)[:2]
    if first >= last:
        raise UsageError(
            f"`{option} {text}` selects no tokens", hint=f"positions go from 0 to {size - 1}"
        )
    return first, last


def check_span(
    text: str, option: str, hint: str = "positions are counted from 0; -1 is the last"
) -> re.Match[str]:
    """The first position, the colon and the last one of a span, as far as they are there.

    What can be known without the tokens. Raises UsageError for what is no span.
    """
    match = re.fullmatch(r"(-?\d{1,9})?(:)?(-?\d{1,9})?", text.strip(), re.ASCII)
    if not match or not any(match.groups()) or (match[3] and not match[2]):
        raise UsageError(
            f"`{option}` takes positions such as 40:80, :10, -5: or 7, not `{text}`",
            hint=hint,
        )
    return match


def _counted(number: int, size: int, option: str, what: str) -> int:
    if not -size <= number < size:
        raise UsageError(
            f"`{option}`: there is no {number}, for there are {size} {what}",
            hint=f"they go from 0 to {size - 1}; -1 is the last",
        )
    return number % size

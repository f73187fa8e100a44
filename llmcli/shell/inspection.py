"""Commands that look inside a model: what they read, the file they write, what they show.

Their options of layers and positions are parsed here, too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from llmcli.errors import UsageError
from llmcli.records.document import Checked, ViewCheck, members
from llmcli.records.numbers import counted
from llmcli.shell.encoding import TemplateOptions, check_fits, encode
from llmcli.shell.files import check_size, kind_of_file, page_to_open
from llmcli.shell.options import PROMPT, ModelOptions, PromptOptions, ViewOutputOptions
from llmcli.shell.output import EXPLAIN, ExportFile, Output, write_document, write_file
from llmcli.shell.params import opt
from llmcli.shell.prompts import Prompt, prompt_or_default
from llmcli.shell.running import header, load_model, note_edits

if TYPE_CHECKING:
    from rich.console import RenderableType

    from llmcli.config.model import ModelConfig
    from llmcli.model import Model
    from llmcli.records.text import Token

# what `/look` of `chat` can show, and the options that it takes there (see `look` in `command.py`)
IN_CHAT: dict[str, tuple[str, ...]] = {
    "ablate": ("answer", "versus", "what", "by", "position"),
    "attention": ("layer", "head", "query", "key", "map", "metrics"),
    "experts": ("layer", "position"),
    "lens": ("layer", "position", "target"),
    "timing": (),
}
# how options of files are spelled and what they say
OPEN = "--open", "Open the .html or .png of -o in a browser; without -o, a temporary page."
FORCE = "--force", "Write the file even if it is very large."
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
        0,
        "--generate N",
        "Generate up to N tokens greedily, and inspect them too.",
        at_least=0,
    )


@dataclass(frozen=True, kw_only=True)
class Export:
    """How a command writes one kind of file.

    `size`: about how many bytes it takes, known before the run; 0: a small and bounded number.
    `make(report, title)` gives its bytes, or `write(report, document)` writes it, where `document`
    is the report as JSON has it; without either it is that document.
    """

    size: int = 0
    make: Callable[[Any, str], bytes] | None = None
    write: Callable[[Any, Mapping[str, Any]], None] | None = None


class FileOptions:
    """`-o`, `--open` and `--force` of a command that writes a file beside its view."""

    save: str | None
    open: bool = False
    force: bool


class PlacesOptions(FileOptions):
    """`--layer` and `--position` of the commands whose views are layers × positions."""

    layer: str | None
    position: str | None
    # how a file becomes smaller
    smaller: ClassVar[str] = "choose fewer positions with `--position` or layers with `--layer`"

    def check(self, config: ModelConfig) -> None:
        """Refuses options that are wrong for any text, before the weights are read."""
        self.layers(config)
        if self.position is not None:
            check_span(self.position, "--position")

    def layers(self, config: ModelConfig) -> tuple[int, ...] | None:
        """The chosen layers in the order named, None for all. Raises UsageError."""
        if self.layer is None:
            return None
        return parse_numbers(self.layer, len(config.layers), "--layer", "layers")

    def span(self, tokens: int) -> range:
        """The chosen positions of `tokens` tokens: all, unless some are named.

        Raises UsageError where these have no token.
        """
        return range(*parse_span(self.position, tokens, "--position"))


class Inspection(Subject):
    """One run of such a command. `kinds` are the files that it writes, by their endings.

    Raises UsageError for another file and for one that cannot be opened, before anything is read.
    `path` and `kind` are of the file, None and empty without one. `others`: models that ran, too.
    """

    others: Sequence[Model] = ()

    def __init__(
        self, command: str, file: FileOptions, kinds: Sequence[str], output: ViewOutputOptions
    ) -> None:
        self.out = Output(command, output)
        self._file, self._export, self.path = file, Export(), file.save
        self.kind = "" if file.save is None else kind_of_file(file.save, kinds)
        if file.open and self.kind not in ("", "html", "png"):
            raise UsageError(
                f"`--open` shows .html and .png files, and `{file.save}` is neither",
                hint="leave -o out, and a page is made and opened, or name such a file",
            )
        if file.open and file.save is None:
            self.path, self.kind = page_to_open(command), "html"

    def load(
        self, options: ModelOptions, check: Callable[[ModelConfig], None], *, text: bool
    ) -> Model:
        """Loads the model, with its tokenizer for a `text`; `check` comes before the weights."""
        self.model = load_model(options, self.out, text=text, check=check).model
        return self.model

    def read(
        self,
        prompt: PromptOptions,
        template: TemplateOptions,
        new: NewTokensOptions,
        options: ModelOptions,
        check: Callable[[ModelConfig], None],
    ) -> None:
        """Loads the model and reads the prompt, or the usual text without one."""
        given = prompt_or_default(prompt, self.out.note)
        self.load(options, check, text=not given.ids)
        self.encode(given, template, new, options)

    def encode(
        self,
        given: Prompt,
        template: TemplateOptions,
        new: NewTokensOptions,
        options: ModelOptions,
    ) -> Prompt:
        """Encodes the prompt, and sets how many new tokens come after it.

        Raises UsageError and PromptTooLong where they do not fit the context, and CheckpointError
        without a tokenizer.
        """
        chat = template.options()
        chat.check()
        encoded = encode(given, chat, self.model)
        room = check_fits([encoded], self.model.config, options.context_length)
        self.ids, self.generate = encoded.ids, new.generate
        left = room - len(self.ids)
        if self.generate > left:
            raise UsageError(
                f"`--generate {self.generate}` does not fit: the prompt has "
                f"{counted(len(self.ids), 'token')} and the context is {room}",
                hint=f"use `--generate {left}` at most" if left else "shorten the prompt",
            )
        return encoded

    def plan(self, exports: Mapping[str, Export], smaller: str) -> None:
        """Chooses how the file is written, by its kind, and refuses one that gets too large.

        `smaller` says how to get less. Raises UsageError and WriteFailed as `check_size` does.
        """
        if self.path is not None:
            self._export = exports[self.kind]
            check_size(self.path, self._export.size, force=self._file.force, smaller=smaller)

    def present(
        self,
        view: Callable[[], RenderableType],
        report: Checked,
        holds: str | None = None,
        body: Mapping[str, Any] | None = None,
        hint: str = EXPLAIN,
    ) -> None:
        """Writes the file, shows the view or JSON; `body` where it is not the report alone.

        `holds`: what the file contains, in words; None where it is written already. Raises
        CheckFailed with `hint` where a check fails.
        """
        file = None
        if self.path is not None and holds is not None:
            write = partial(self._export.write or self._write, report)
            file = ExportFile(path=self.path, holds=holds, write=write, open=self._file.open)
        note_edits(self.model, self.out)
        self.out.present(
            view,
            members(report) if body is None else body,
            **header(*(model.describe() for model in (self.model, *self.others))),
            checks=report.checks,
            file=file,
            hint=hint,
        )

    def _write(self, report: Checked, document: Mapping[str, Any]) -> None:
        assert self.path is not None
        if self._export.make is None:
            write_document(self.path, document)
        else:
            write_file(self.path, self._export.make(report, self.title))


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
        words, hint = f"are {size} {what}", f"they go from 0 to {size - 1}; -1 is the last"
        if size == 1:
            words, hint = f"is one {what.removesuffix('s')}", "its number is 0"
        raise UsageError(f"`{option}`: there is no {number}, for there {words}", hint=hint)
    return number % size

"""A command that looks inside a model: the file it writes, the model it reads, what it shows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from llmcli.measure.environment import environment
from llmcli.records.checks import ViewCheck
from llmcli.records.document import members
from llmcli.shell.encoding import Encoded
from llmcli.shell.files import check_export, check_size, page_to_open
from llmcli.shell.looking import (
    NewTokensOptions,
    Subject,
    check_span,
    encode_prompt,
    parse_numbers,
    parse_span,
)
from llmcli.shell.options import ModelOptions, PromptOptions, ViewOutputOptions
from llmcli.shell.output import EXPLAIN, ExportFile, Output
from llmcli.shell.prompts import Prompt, prompt_or_default
from llmcli.shell.running import kernels_of, load_model
from llmcli.shell.template import TemplateOptions

if TYPE_CHECKING:
    from rich.console import RenderableType

    from llmcli.config import ModelConfig
    from llmcli.model import Model


@dataclass(frozen=True, kw_only=True)
class Export:
    """How a command writes one kind of file.

    `size`: about how many bytes it takes, known before the run; None: a small and bounded number.
    `make(report, title)` gives its bytes, or `write(report, document)` writes it, where `document`
    is the report as JSON has it; without either it is that document.
    """

    size: Callable[[], int] | None = None
    make: Callable[[Any, str], bytes] | None = None
    write: Callable[[Any, Mapping[str, Any]], None] | None = None


class _FileOptions(Protocol):
    """`-o`, `--open` and `--force`."""

    @property
    def save(self) -> str | None: ...
    @property
    def open(self) -> bool: ...
    @property
    def force(self) -> bool: ...


class _Report(Protocol):
    @property
    def checks(self) -> tuple[ViewCheck, ...]: ...


class PlacesOptions:
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

    Raises UsageError for another file, before anything is read. `path` and `kind` are of the file,
    None and empty without one.
    """

    def __init__(
        self, command: str, file: _FileOptions, kinds: Sequence[str], output: ViewOutputOptions
    ) -> None:
        self.out = Output(command, output)
        self._file, self._export = file, Export()
        self.kind = check_export(file.save, kinds, show=file.open)
        self.path = file.save
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
        self.load(options, check, text=given.ids is None)
        self.encode(given, template, new, options)

    def encode(
        self,
        given: Prompt,
        template: TemplateOptions,
        new: NewTokensOptions,
        options: ModelOptions,
    ) -> Encoded:
        """Encodes the prompt, and sets how many new tokens come after it."""
        encoded = encode_prompt(given, template, options, self.model, new=new.generate)
        self.ids, self.generate = encoded.ids, new.generate
        return encoded

    def plan(self, exports: Mapping[str, Export], smaller: str) -> None:
        """Chooses how the file is written, by its kind, and refuses one that gets too large.

        `smaller` says how to get less. Raises UsageError and WriteFailed as `check_size` does.
        """
        if self.path is not None:
            self._export = exports[self.kind]
            size = 0 if self._export.size is None else self._export.size()
            check_size(self.path, size, force=self._file.force, smaller=smaller)

    def present(
        self,
        view: Callable[[], RenderableType],
        report: _Report,
        holds: str | None = None,
        body: Mapping[str, Any] | None = None,
        hint: str = EXPLAIN,
    ) -> None:
        """Writes the file, shows the view or JSON; `body` where it is not the report alone.

        `holds`: what the file contains, in words; None where it is written already. Raises
        CheckFailed with `hint` where a check fails.
        """
        about, file, export = self.model.describe(), None, self._export
        if self.path is not None and holds is not None:
            make = export.make and partial(export.make, report, self.title)
            write = export.write and partial(export.write, report)
            file = ExportFile(
                path=self.path, holds=holds, make=make, write=write, open=self._file.open
            )
        self.out.present(
            view,
            members(report) if body is None else body,
            model=about,
            environment=environment(kernels=kernels_of(about)),
            checks=report.checks,
            file=file,
            hint=hint,
        )

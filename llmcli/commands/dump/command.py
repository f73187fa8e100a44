"""`llmcli dump`: activations by name, on the screen as statistics, in a file as they are."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from llmcli.errors import CheckFailed, NotFinite, UsageError
from llmcli.records.document import checks_document, members
from llmcli.records.numbers import counted
from llmcli.records.text import Token
from llmcli.shell.encoding import ChatOptions, TemplateOptions, check_fits, encode
from llmcli.shell.files import whole_file, written
from llmcli.shell.inspection import (
    FORCE,
    Export,
    FileOptions,
    Inspection,
    NewTokensOptions,
    tokens_metadata,
)
from llmcli.shell.options import ModelOptions, PromptOptions, ViewOutputOptions
from llmcli.shell.params import opt
from llmcli.shell.prompts import LOOKED_AT, Prompt, prompt_or_default

if TYPE_CHECKING:
    from llmcli.commands.dump.report import DumpReport
    from llmcli.config.model import ModelConfig

FILES = ("safetensors", "npz")
STREAM = "embed,blocks.*.resid_post,ln_final.out"
SMALLER = "name fewer tensors with --name"

EPILOG = """
Names are those of `llmcli shapes --names` or their ends (resid_post, 3.attn.z), and those of
TransformerLens (hook_pattern) and the checkpoint; with a block's number, a range of them (0-3), -1
for the last or * for all; several are separated by commas. A parameter needs no prompt.

Examples:

  llmcli dump
  llmcli dump "And God said" --name attn.pattern --all
  llmcli dump "And God said" --name "blocks.*.resid_post"
  llmcli dump "Once upon" --name "blocks.0-3.attn.*" -o a.safetensors
  llmcli dump "Once upon" --name "cache.*" --generate 8 -o cache.npz
  llmcli dump --name embed.W -m tiny
"""


@dataclass(frozen=True, kw_only=True)
class DumpOptions(FileOptions):
    """Which tensors, and where they go."""

    panel: ClassVar[str] = "Dump"
    name: str = opt(
        STREAM,
        "--name GLOB",
        "The tensors, such as resid_post, blocks.*.attn.pattern or 0-3.mlp_out,logits. [default: "
        "the residual stream after every layer]",
    )
    save: str | None = opt(
        None,
        "-o --output FILE",
        f"Write them as they are, by the file's ending: {', '.join(FILES)}. [default: "
        "statistics only]",
    )
    force: bool = opt(False, *FORCE)
    minus: str | None = opt(
        None,
        "--minus PROMPT",
        "The mean over the tokens less that of another prompt: a steering vector for `--edit "
        "NAME=add FILE`.",
        needs=("--output",),
        excludes=("--generate",),
    )
    no_check: bool = opt(False, "--no-check", "Skip recomputing the tensors from their formulas.")
    every: bool = opt(False, "--all", "Show every tensor of every layer in detail.")

    def check(self, config: ModelConfig) -> None:
        """Refuses names that match nothing, before the weights are read."""
        self.names(config)

    def names(self, config: ModelConfig) -> tuple[str, ...]:
        """The names that match: of activations and states, else of parameters.

        Raises UsageError for a name that matches nothing.
        """
        from llmcli.families.sources import sources
        from llmcli.graph.names import Names

        names = Names(config, sources(config))
        found: set[str] = set()
        items = self.name.split(",")
        for item in items if all(map(str.strip, items)) else [self.name]:
            try:
                found |= set(names.select(item))
            except UsageError as error:
                try:
                    found |= set(names.select(item, ("parameter",)))
                except UsageError:
                    raise error from None
        return tuple(name for name in names.known if name in found)


def command(
    prompt: PromptOptions,
    template: TemplateOptions,
    new: NewTokensOptions,
    dump: DumpOptions,
    model: ModelOptions,
    output: ViewOutputOptions,
) -> None:
    """Any activation by name: shape, mean, deviation, range and norm; export to a file.

    Without `--name`: the residual stream after every layer. The numbers are the fast kernel's own;
    what it never writes (attention scores and pattern, a head's result) is computed from what it
    wrote. Every tensor must equal its formula evaluated on its inputs in float64, and scores and
    pattern must reproduce the kernel's own z from the values; otherwise the command exits 1. NaN
    and infinity (except the −∞ of masked scores) exit 7, after the output is written.
    """
    from llmcli.commands.dump.view import render_dump
    from llmcli.graph.names import known

    look = Inspection("dump", dump, FILES, output)
    notes: list[str] = []
    given = prompt_or_default(prompt, notes.append)
    look.load(model, dump.check, text=not given.ids and given.text != LOOKED_AT)
    names, there = dump.names(look.model.config), known(look.model.config)
    encoded = Prompt("")
    if any(there[name].kind != "parameter" for name in names):  # parameters need no run
        for note in notes:
            look.out.note(note)
        encoded = look.encode(given, template, new, model)
    report, size = _dumped(look, names, encoded, dump)
    if look.path is not None:
        look.out.note(written(look.path, counted(len(report.tensors), "tensor")))
    try:
        look.present(
            lambda: render_dump(report, look.title, every=dump.every),
            report,
            body={
                **members(report),
                "prompt": {"text": encoded.text, "ids": encoded.ids},
                "file": None if look.path is None else {"path": look.path, "bytes": size},
                "checks": checks_document(report.checks),
            },
            hint="`llmcli explain` shows how it is computed",
        )
    except CheckFailed:
        if not report.not_finite:
            raise
    if report.not_finite:
        dumped = any(tensor.first_bad is not None for tensor in report.tensors)
        hint = None  # the default: dump more, for what was dumped is finite
        if dumped and report.dtype != "float16":
            hint = "it is the first one in the dump; `llmcli explain` shows how it is computed"
        raise NotFinite(report.not_finite, hint=hint, dtype=report.dtype)


def _dumped(
    look: Inspection, names: Sequence[str], encoded: Prompt, dump: DumpOptions
) -> tuple[DumpReport, int]:
    """The report, and the bytes of the file, which is whole then."""
    from llmcli.commands.dump.measure import (
        measure_difference,
        measure_dump,
        plan_dump,
        without_tokens,
    )
    from llmcli.inspect.passes import passes_over
    from llmcli.ui.arrays import ArrayPlan, array_file_size, array_writer

    model = look.model
    minus = None
    if dump.minus is not None:
        other = encode(Prompt(dump.minus), ChatOptions(raw=True), model)
        check_fits([other], model.config, None)
        minus = other.ids

    def metadata(tokens: Sequence[Token], prompt_tokens: int) -> dict[str, str]:
        """What the file says of itself."""
        return {
            "schema": "llmcli.dump/1",
            "model": model.name,
            "names": dump.name,
            "prompt": encoded.text or "",
            **tokens_metadata(tokens, prompt_tokens),
        }

    with passes_over(look) as passes, ExitStack() as opened:
        plan = plan_dump(model, names, passes.most)
        if minus is not None:
            plan = without_tokens(plan)
        arrays = [ArrayPlan(one.name, str(one.dtype), one.shape) for one in plan]
        writer = file = None
        if look.path is not None:
            about = metadata(model.tokens(encoded.ids), 0)
            about["tokens"] += " " * 40 * look.generate  # room for those that will be generated
            export = Export(size=array_file_size(look.kind, arrays, about))
            look.plan({look.kind: export}, SMALLER)
            file = opened.enter_context(whole_file(look.path))
            writer = array_writer(look.kind, file, arrays, about)
        write = None if writer is None else writer.write_parts
        if minus is None:
            report = measure_dump(passes, plan, check=not dump.no_check, write=write)
        else:
            report = measure_difference(passes, plan, minus, write)
        size = 0
        if writer is not None and file is not None:
            writer.finish(metadata(report.tokens, len(encoded.ids)))
            size = file.seek(0, os.SEEK_END)  # a pipe does not say it afterwards
    return report, size

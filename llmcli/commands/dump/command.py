"""`llmcli dump`: activations by name, on the screen as statistics, in a file as they are."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from llmcli.errors import CheckFailed, NotFinite, UsageError
from llmcli.measure.environment import environment
from llmcli.records.checks import checks_document
from llmcli.records.document import members
from llmcli.records.numbers import counted
from llmcli.records.text import Token
from llmcli.shell.encoding import Encoded
from llmcli.shell.files import check_size, kind_of_file, whole_file, written
from llmcli.shell.looking import NewTokensOptions, encode_prompt, tokens_metadata
from llmcli.shell.options import ModelOptions, PromptOptions, ViewOutputOptions
from llmcli.shell.output import Output
from llmcli.shell.params import opt
from llmcli.shell.progress import Progress
from llmcli.shell.prompts import LOOKED_AT, prompt_or_default
from llmcli.shell.running import kernels_of, load_model
from llmcli.shell.template import TemplateOptions

if TYPE_CHECKING:
    from llmcli.commands.dump.report import DumpReport
    from llmcli.config import ModelConfig
    from llmcli.model import Model

DUMP = "Dump"
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
class DumpOptions:
    """Which tensors, and where they go."""

    panel: ClassVar[str] = DUMP
    name: str = opt(
        STREAM, "--name", "GLOB",
        "The tensors, such as resid_post, blocks.*.attn.pattern or 0-3.mlp_out,logits. [default: "
        "the residual stream after every layer]",
    )  # fmt: skip
    to: str | None = opt(
        None, "-o", "--output", "FILE",
        f"Write them as they are, by the file's ending: {', '.join(FILES)}. [default: "
        "statistics only]",
    )  # fmt: skip
    force: bool = opt(False, "--force", "Write a file however large it gets.")
    no_check: bool = opt(
        False, "--no-check",
        "Do not compute the tensors a second time by their formulas.",
    )  # fmt: skip
    every: bool = opt(
        False, "--all",
        "Show every tensor in detail, not some layers of many.",
    )  # fmt: skip


def command(
    prompt: PromptOptions,
    template: TemplateOptions,
    new: NewTokensOptions,
    dump: DumpOptions,
    model: ModelOptions,
    output: ViewOutputOptions,
) -> None:
    """Any activation by name: shape, mean, deviation, range and norm, and all of it in a file.

    Without `--name`: the residual stream after every layer. The numbers are the fast kernel's own;
    what it never writes (attention scores and pattern, a head's result) is computed from what it
    wrote. Every tensor has to be what its formula makes of its inputs, in float64, and scores and
    pattern with the values have to give the kernel's own z, or the command exits 1. NaN and
    infinity (except the −∞ of masked scores) exit 7, after the output is written.
    """
    from llmcli.anatomy.names import known
    from llmcli.commands.dump.view import render_dump
    from llmcli.ui.facts import model_line

    out = Output("dump", output)
    kind = None if dump.to is None else kind_of_file(dump.to, FILES)
    notes: list[str] = []
    given = prompt_or_default(prompt, notes.append)
    names: tuple[str, ...] = ()
    runs = True  # parameters need no run of the model

    def check(config: ModelConfig) -> None:
        nonlocal names, runs
        names = chosen(dump.name, config)
        there = known(config)
        runs = any(there[name].kind != "parameter" for name in names)

    text = given.ids is None and given.text != LOOKED_AT
    loaded = load_model(model, out, text=text, check=check).model
    encoded = Encoded("", (), False)
    if runs:
        for note in notes:
            out.note(note)
        encoded = encode_prompt(given, template, model, loaded, new=new.generate)
    report, size = _dumped(loaded, names, encoded, kind, new.generate, dump, out)
    if dump.to is not None:
        out.note(written(dump.to, counted(len(report.tensors), "tensor")))
    about = loaded.describe()
    try:
        out.present(
            lambda: render_dump(report, model_line(about), every=dump.every),
            members(report) | {
                "prompt": {"text": encoded.text, "ids": encoded.ids},
                "file": None if dump.to is None else {"path": dump.to, "bytes": size},
                "checks": checks_document(report.checks),
            },
            model=about,
            environment=environment(kernels=kernels_of(about)),
            checks=report.checks,
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


def chosen(pattern: str, config: ModelConfig) -> tuple[str, ...]:
    """The names that match: of activations and states, else of parameters.

    Raises UsageError for a name that matches nothing.
    """
    from llmcli.anatomy.names import Names
    from llmcli.families.sources import sources

    names = Names(config, sources(config))
    found: set[str] = set()
    items = pattern.split(",")
    for item in items if all(map(str.strip, items)) else [pattern]:
        try:
            found |= set(names.select(item))
        except UsageError as error:
            try:
                found |= set(names.select(item, ("parameter",)))
            except UsageError:
                raise error from None
    return tuple(name for name in names.known if name in found)


def _dumped(
    model: Model,
    names: Sequence[str],
    encoded: Encoded,
    kind: str | None,
    generate: int,
    dump: DumpOptions,
    out: Output,
) -> tuple[DumpReport, int]:
    """The report, and the bytes of the file, which is whole then."""
    from llmcli.commands.dump.measure import measure_dump, plan_dump
    from llmcli.model import dtype_name
    from llmcli.ui.arrays import ArrayPlan, array_file_size, array_writer

    def metadata(tokens: Sequence[Token], prompt_tokens: int) -> dict[str, str]:
        """What the file says of itself."""
        return {
            "schema": "llmcli.dump/1",
            "model": model.name,
            "names": dump.name,
            "prompt": encoded.text or "",
            **tokens_metadata(tokens, prompt_tokens),
        }

    ids = encoded.ids
    plan = plan_dump(
        model.config, names, tokens=len(ids), generate=generate, dtype=dtype_name(model.dtype),
        cache=dtype_name(model.decoder.cache_dtype),
    )  # fmt: skip
    arrays = [ArrayPlan(one.name, one.dtype, one.shape) for one in plan]
    about = metadata(model.tokens(ids), 0)
    about["tokens"] += " " * 40 * generate  # room for those that will be generated
    if dump.to is not None and kind is not None:
        estimate = array_file_size(kind, arrays, about)
        check_size(dump.to, estimate, force=dump.force, smaller=SMALLER)
    opened = nullcontext() if dump.to is None else whole_file(dump.to)
    with opened as file, Progress(out) as progress:
        writer = None
        if kind is not None and file is not None:
            writer = array_writer(kind, file, arrays, about)
        report = measure_dump(
            model,
            ids,
            plan,
            generate=generate,
            check=not dump.no_check,
            write=None if writer is None else writer.write_parts,
            progress=progress,
        )
        size = 0
        if writer is not None and file is not None:
            writer.finish(metadata(report.tokens, len(ids)))
            size = file.seek(0, os.SEEK_END)  # a pipe does not say it afterwards
    return report, size

"""`llmcli patch`: which activations of one prompt restore its answer in another one."""

from __future__ import annotations

from dataclasses import dataclass
from shutil import get_terminal_size
from typing import TYPE_CHECKING, ClassVar, Literal

from llmcli.errors import UsageError
from llmcli.records.numbers import counted
from llmcli.shell.answer import AnswerOptions
from llmcli.shell.encoding import TemplateOptions, check_fits, encode
from llmcli.shell.inspection import (
    FORCE,
    OPEN,
    Export,
    FileOptions,
    Inspection,
    check_span,
    parse_span,
)
from llmcli.shell.options import PROMPT, ModelOptions, ViewOutputOptions
from llmcli.shell.params import arg, opt
from llmcli.shell.progress import Progress
from llmcli.shell.prompts import Prompt, parse_ids, text_argument

if TYPE_CHECKING:
    from llmcli.commands.patch.report import PatchReport
    from llmcli.config.model import ModelConfig
    from llmcli.graph.names import Names

FILES = ("html", "png", "json")

EPILOG = """
The number is the logit of --answer minus that of --versus after the
last token; by default the top tokens of both prompts. 0 is the corrupted
run's, 1 the clean one's. Prompts of as many tokens are aligned one by
one; of others what they have in common at both ends, and only that is
patched.

Examples:

  llmcli patch "The Eiffel Tower is in" "The Colosseum is in"
  llmcli patch "Anna met Tom" "Anna met Ben" --what mlp_out --noising
  llmcli patch "Anna met Tom" "Anna met Ben" --what z --position -1
  llmcli patch "Anna met Tom" "Anna met Ben" --what v --by position
  llmcli patch "Anna met Tom" "Anna met Ben" --to "8.attn.q[H=3]"
  llmcli patch --ids 5,17,3,8 --ids 5,17,9,8 -o patch.html
"""


@dataclass(frozen=True, kw_only=True)
class PromptsOptions:
    """Two prompts."""

    panel: ClassVar[str] = PROMPT
    clean: str | None = arg(None, "[CLEAN]", "The prompt that has the answer.")
    corrupted: str | None = arg(None, "[CORRUPTED]", "The prompt that has another one.")
    ids: list[str] | None = opt(
        None, "--ids 1,2,3", "Token ids instead of the texts, given twice.", excludes=("CLEAN",)
    )

    def parse(self) -> list[Prompt]:
        """Both. Raises UsageError unless there are two."""
        texts = [text for text in (self.clean, self.corrupted) if text]
        found = [Prompt(text_argument(text, "PROMPT")) for text in texts]
        found = found or [Prompt(None, parse_ids(ids)) for ids in self.ids or ()]
        if len(found) != 2:
            raise UsageError(
                f"two prompts are compared, and {len(found) or 'none'} "
                f"{'was' if len(found) < 2 else 'were'} given",
                hint="for example `llmcli patch \"Paris is in\" \"Rome is in\"`",
            )
        return found


@dataclass(frozen=True, kw_only=True)
class PatchOptions(FileOptions):
    """What is patched, and where."""

    panel: ClassVar[str] = "Patch"
    what: str = opt(
        "resid_pre",
        "--what NAME",
        "What is patched in each layer: resid_pre, attn_out, mlp_out, z, k, v or any other "
        "activation, also of some layers (blocks.0-5.mlp_out).",
    )
    by: Literal["position", "head"] | None = opt(
        None,
        "--by position|head",
        "A run for each position, or for each head. [default: head where there are heads]",
    )
    position: str | None = opt(
        None, "--position SPAN", "Patch only these positions of CLEAN, such as 3, -1 or 2:5."
    )
    noising: bool = opt(
        False, "--noising", "Put corrupted activations into the clean run, not the other way."
    )
    to: str | None = opt(
        None,
        "--to NAME[INDEX]",
        "Path patching: pass on only what reaches this activation (the receiver) directly from the "
        "places of --what and --position (the senders), all else as it was.",
    )
    save: str | None = opt(
        None,
        "-o --output FILE",
        f"Also write everything to a file, its format by extension: {', '.join(FILES)}.",
    )
    open: bool = opt(False, *OPEN)
    every: bool = opt(False, "--all", "Show every position, or every head, at any height.")
    force: bool = opt(False, *FORCE)

    def check(self, config: ModelConfig) -> None:
        """Refuses what is wrong for any prompts, before the weights are read."""
        self.names(config)
        if self.position is not None:
            check_span(self.position, "--position")

    def names(self, config: ModelConfig) -> tuple[str, ...]:
        """The activations, one of a layer. Raises UsageError."""
        found = all_names(config).select(self.what, ("activation",))
        layers: dict[str, str] = {}
        for name in found:
            layer = name.split(".")[1] if name.startswith("blocks.") else ""
            if not layer or layers.setdefault(layer, name) != name:
                two = f"both `{layers[layer]}` and `{name}`" if layer else f"`{name}`, of no layer"
                raise UsageError(
                    f"`--what {self.what}` is {two}: one activation of each layer is patched",
                    hint="for example `--what resid_pre` or `--what attn.z`",
                )
        return found


def all_names(config: ModelConfig) -> Names:
    """Its names, with those of other programs."""
    from llmcli.families.sources import sources
    from llmcli.graph.names import Names

    return Names(config, sources(config))


def command(
    prompts: PromptsOptions,
    template: TemplateOptions,
    answer: AnswerOptions,
    patch: PatchOptions,
    model: ModelOptions,
    output: ViewOutputOptions,
) -> None:
    """Patch activations of a clean run into a corrupted one: what restores the answer, and where.

    One run for each place, all layers by all positions, or by all heads; `--noising` patches the
    clean run instead. What the two prompts have in common before their first difference is computed
    once. The strongest places are run again alone, and everything patched at the end has to be the
    other run, or the command exits 1.
    """
    from llmcli.commands.patch.view import render_patch

    look = Inspection("patch", patch, FILES, output)
    given = prompts.parse()
    look.load(model, patch.check, text=not given[0].ids)
    chat = template.options()
    encoded = [encode(one, chat, look.model) for one in given]
    check_fits(encoded, look.model.config, model.context_length)
    clean, corrupted = (one.ids for one in encoded)
    look.plan(exports(look, len(clean)), "use shorter prompts")
    report = measured(look, (clean, corrupted), answer, patch)
    height = None if patch.every or not look.out.out.terminal else get_terminal_size().lines
    look.present(
        lambda: render_patch(report, look.title, height=height, whole="--all"),
        report,
        counted(len(report.cells), "place"),
    )


def measured(
    look: Inspection,
    ids: tuple[tuple[int, ...], tuple[int, ...]],
    asked: AnswerOptions,
    patch: PatchOptions,
) -> PatchReport:
    """Patches, and notes what is to be known of the answer."""
    from llmcli.commands.patch.measure import PatchRequest, measure_patch
    from llmcli.graph.edited import parse_edit

    config, answer, to = look.model.config, asked.parse(look.model), None
    if patch.to is not None:
        if "=" in patch.to.rpartition("]")[2]:
            raise UsageError(
                f"`--to {patch.to}` says what the receiver becomes, which the senders do",
                hint="name it alone, such as `8.attn.q[H=3]`",
            )
        to = parse_edit(patch.to, all_names(config), option="--to", what="zero")
        if len(to.places) > 1:
            raise UsageError(
                f"`--to {patch.to}` is {counted(len(to.places), 'activation')}, not one",
                hint="name one with its layer, such as `8.attn.q[H=3]`",
            )
    span = None
    if patch.position is not None:
        span = range(*parse_span(patch.position, len(ids[0]), "--position"))
    request = PatchRequest(
        what=patch.what,
        names=patch.names(config),
        answer=answer,
        by=patch.by,
        noising=patch.noising,
        positions=span,
        to=to,
    )
    for note in asked.notes(answer, look.model):
        look.out.note(note)
    with Progress(look.out) as progress:
        return measure_patch(look.model, *ids, request, progress=progress)


def exports(look: Inspection, tokens: int) -> dict[str, Export]:
    """The files, by their kinds. Sizes are as measured: of every place about so many bytes."""
    from llmcli.commands.patch.view import patch_page, patch_png

    places = len(look.model.config.layers) * tokens
    return {
        "html": Export(size=30_000 + 40 * places, make=patch_page),
        "png": Export(make=patch_png),
        "json": Export(size=3000 + 130 * places),
    }

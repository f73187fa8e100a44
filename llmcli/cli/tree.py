"""The table of commands, and the root command with its options."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from typing import Any

from typer.core import TyperGroup

from llmcli import __version__
from llmcli.cli.group import (
    Entry,
    OurHelp,
    asks_for_help,
    imported,
    paragraphs,
    read_ahead,
    show_help,
    width,
)
from llmcli.errors import UsageError
from llmcli.records.numbers import did_you_mean
from llmcli.shell.params import WORDS, Declared, Option
from llmcli.shell.streams import write

# by heading; `llmcli.commands.NAME.command` is the module of each
COMMANDS = {
    "Run": {
        "generate": "Generate text with a model, token by token.",
        "chat": "Chat with a model, turn by turn.",
        "models": "List models here and in the catalog; pull, rm, path, prune.",
    },
    "Look": {
        "info": "Architecture, parameters and memory of a model; does it fit.",
        "shapes": "Every tensor: symbolic and numeric shape, formula, source.",
        "attention": "Attention patterns of every head: maps, metrics, pairs.",
        "experts": "Expert routing: which experts each token takes.",
        "lens": "Logit lens: the top tokens after every layer.",
        "dump": "Any activation by name: statistics, export to a file.",
        "explain": "Derive one number step by step; compare with the kernel's.",
        "weights": "Weights without a prompt: norms, damage, spectra, circuits.",
        "score": "Log-probability of every token, perplexity, bits per byte.",
        "tokens": "Tokenize a text: token ids, pieces, byte offsets.",
    },
    "What if": {
        "attribute": "What adds up to a logit: heads, MLPs, experts, biases.",
        "ablate": "What changes without a head, an MLP, an expert, a layer.",
        "patch": "Patch one prompt's activations into another: a map.",
        "diff": "Two models, or one in two ways: where they part.",
    },
    "Measure": {
        "timing": "Profile a run: where the time goes, by phase, layer, part.",
        "bench": "Benchmark with llama-bench's tests and options; compare.",
    },
    "Also": {  # names alone on the root's screen
        "ladder": "The same model from nested loops to fused kernels, timed.",
        "selftest": "Check this machine's arithmetic and speed; a receipt.",
        "load": "Load the weights: what becomes of every tensor; `--check`.",
        "env": "The machine, and where each setting comes from.",
    },
}
HELP_SUMMARY = "Explain a topic, such as formats or sampling, or a command."
# commands of two words are in the module of the first, but for those in `OWN_MODULES`
SUBCOMMANDS = {
    "bench compare": "Compare two results of bench or llama-bench, test by test.",
    "models list": "The same as `models`.",
    "models pull": "Download models into the cache.",
    "models rm": "Remove models from the caches.",
    "models path": "Print the path of a model, for scripts.",
    "models prune": "Remove stale partial downloads and superseded versions.",
}
OWN_MODULES = {"bench compare": "llmcli.commands.bench.compare"}


def _entry(name: str, summary: str, heading: str) -> Entry:
    module = f"llmcli.commands.{name.split()[0]}.command"
    return Entry(OWN_MODULES.get(name, module), summary, heading)


ENTRIES = {
    name: _entry(name, summary, heading)
    for heading, commands in COMMANDS.items()
    for name, summary in commands.items()
}
# commands that compute, and import PyTorch for it
COMPUTING = ENTRIES.keys() - {"info", "shapes", "tokens", "models", "env"}
NESTED = {
    name: _entry(name, summary, ENTRIES[name.split()[0]].heading)
    for name, summary in SUBCOMMANDS.items()
}

ALIASES = {
    "models ls": "models list",
    "models remove": "models rm",
    "models delete": "models rm",
}

HELP = "Run language models in the terminal and see exactly what they compute."


class Root(OurHelp, TyperGroup):
    """`llmcli` itself: commands are imported when they are named.

    `nested` are commands of two words, `bench compare`; the first of them is a command, too.
    `configured`: commands that a configuration file may have a table for.
    """

    entries: Mapping[str, Entry] = {  # `help` alone has no JSON
        **ENTRIES,
        "help": Entry("llmcli.cli.help", HELP_SUMMARY, "Also"),
    }
    nested = NESTED
    configured = (*ENTRIES, *NESTED)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Imports the module of that command; None for a name that does not exist."""
        entry = self.entries.get(cmd_name) or self.nested.get(cmd_name)
        return None if entry is None else imported(entry.module, cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Like typer's; raises UsageError with the closest names."""
        name = args[0]
        if name not in self.entries:
            hint = _suggestion(name)
            raise UsageError(f"unknown command `{name}`", hint=hint)
        name, rest = self.named(args)
        if name not in self.nested and rest:
            both = " ".join(args[:2])
            if near := _nested(both):
                raise UsageError(f"unknown command `{both}`", hint=near)
        if name in COMPUTING and not asks_for_help(args):
            read_ahead()
        return name, self.get_command(ctx, name), rest

    def named(self, words: Sequence[str]) -> tuple[str, Sequence[str]]:
        """The command that a line begins with, of two words or of one, and what follows."""
        both = " ".join(words[:2])
        both = ALIASES.get(both, both)
        return (both, words[2:]) if both in self.nested else (words[0], words[1:])

    def get_help(self, ctx: Any) -> str:
        """Commands by heading, from the table alone: no command is imported; then the options.

        It fits 80 × 24.
        """
        words = filter(None, paragraphs(self.help or ""))  # without the empty line below it
        lines = ["usage: llmcli COMMAND [OPTIONS] [ARGUMENTS]", *words]
        heading = ""
        column = 9 + max(map(len, self.entries))
        others = [name for name, entry in self.entries.items() if entry.heading == "Also"]
        for name, entry in self.entries.items():
            if entry.heading == "Also":
                continue
            left = f"{'' if entry.heading == heading else entry.heading:<7} {name}"
            heading = entry.heading
            first, *rest = textwrap.wrap(entry.summary, width() - column - 1)
            lines += [f"{left:<{column}} {first}", *(" " * (column + 1) + line for line in rest)]
        also = f"Also    {', '.join(others)}: see `llmcli COMMAND --help`"
        lines += textwrap.wrap(also, width(), subsequent_indent=" " * 8, break_on_hyphens=False)
        options = ", ".join(["[COMMAND] --help", *(one.opts[0] for one in self.params)])
        lines += textwrap.wrap(
            f"Options {options}", width(), subsequent_indent=" " * 8, break_on_hyphens=False
        )
        return "\n".join(lines)


def _nested(both: str) -> str | None:
    """A hint where `both` nearly is a command of two words, or can be nothing else."""
    first, second = both.split(" ", 1)
    own = [] if second.startswith("-") else [n for n in NESTED if n.split()[0] == first]
    if near := get_close_matches(both, own, 1, 0.8):
        return did_you_mean([f"llmcli {near[0]}"])
    if own and first == "models":  # no other word follows it
        return f"the commands are {', '.join(own)}; see `llmcli {first} --help`"
    return None


def _suggestion(name: str) -> str:
    close = [both for both in NESTED if both.split()[1] == name]
    close = close or [full for full in Root.entries if full.startswith(name)]
    close = close or get_close_matches(name, Root.entries, 1)
    otherwise = f"the commands are {', '.join(Root.entries)}; see `llmcli --help`"
    return did_you_mean([f"llmcli {one}" for one in close[:1]], otherwise)


def _version(ctx: Any, option: Any, value: bool) -> None:
    if value:
        write(f"llmcli {__version__}\n")
        ctx.exit()


def _completion(ctx: Any, option: Any, value: bool) -> None:
    """Installs or prints completion for the shell that is named behind the option, or this one.

    Where `--help` is named, too, it is shown instead.
    """
    if not value:
        return
    from llmcli.cli.completion import current_shell, install, script

    show_help(ctx, None, asks_for_help(ctx.meta[WORDS]))
    named = [word for word in ctx.meta[WORDS] if word != option.display]
    if len(named) > 1:
        raise UsageError(
            f"`{option.display}` takes one shell, not `{' '.join(named)}`",
            hint=f"for example `llmcli {option.display} zsh`",
        )
    shell = named[0] if named else current_shell()
    write(f"{install(shell)}\n" if option.name == "install_completion" else script(shell))
    ctx.exit()


# the root's options by name: what each does, and its help
_OPTIONS = {
    "version": (_version, "Print the version."),
    "install_completion": (
        _completion, "Install completion for your shell or a named one (bash, zsh, fish)."
    ),
    "show_completion": (_completion, "Print the completion script of your shell or a named one."),
}


@cache
def root() -> Any:
    """The `llmcli` command, its subcommands not imported yet."""
    options = []
    for name, (callback, words) in _OPTIONS.items():
        spelled = f"--{name.replace('_', '-')}"
        declared = Declared(names=(spelled,), help=words, default=False)
        options.append(Option(name, declared, callback=callback, is_eager=True))
    return Root(name="llmcli", params=options, help=HELP)

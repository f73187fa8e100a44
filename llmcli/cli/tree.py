"""The root command with its options, and the table of commands."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any

import typer
from typer.main import get_command

from llmcli import __version__
from llmcli.cli.group import HELP_NAMES, Entry, Root, asks_for_help, show_help
from llmcli.errors import UsageError
from llmcli.shell.params import WORDS, adopt
from llmcli.shell.streams import write

# by heading; `llmcli.commands.NAME.command` is its module, of two words the second names the file
COMMANDS = {
    "Run": {
        "generate": "Generate text with a model, token by token.",
        "chat": "Chat with a model, turn by turn.",
    },
    "Look": {
        "info": "Architecture, parameters and memory of a model; does it fit.",
        "shapes": "Every tensor: symbolic and numeric shape, formula, source.",
        "attention": "Attention patterns of every head: maps, metrics, pairs.",
        "experts": "Expert routing: which experts each token takes.",
        "lens": "Logit lens: the top tokens after every layer.",
        "dump": "Any activation by name: statistics, export to a file.",
        "explain": "Derive one number step by step; compare with the kernel's.",
        "score": "Log-probability of every token, perplexity, bits per byte.",
        "tokens": "Tokenize a text: token ids, pieces, byte offsets.",
    },
    "Measure": {
        "timing": "Profile a run: where the time goes, by phase, layer, part.",
        "bench": "Benchmark with llama-bench's tests and options; compare.",
        "ladder": "The same model from nested loops to fused kernels, timed.",
        "selftest": "Check this machine's arithmetic and speed; a receipt.",
    },
    "Manage": {
        "load": "Load the weights: what becomes of every tensor; `--check`.",
        "models": "List models here and in the catalog; pull, rm, path, prune.",
        "env": "The machine, and where each setting comes from.",
    },
}
# those that compute, and import PyTorch for it
COMPUTING = frozenset({
    "generate", "chat", "attention", "experts", "lens", "dump", "explain", "score", "timing",
    "bench", "ladder", "selftest", "load",
})  # fmt: skip
HELP_SUMMARY = "Explain a topic, or list the options of a command."
SUBCOMMANDS = {
    "bench compare": "Compare two results of bench or llama-bench, test by test.",
    "models list": "The same as `models`.",
    "models pull": "Download models into the cache.",
    "models rm": "Remove models from the caches.",
    "models path": "Print the path of a model, for scripts.",
    "models prune": "Remove stale partial downloads and superseded versions.",
}


def _entry(name: str, summary: str, heading: str) -> Entry:
    first, _, second = name.partition(" ")
    file = second or ("list" if name == "models" else "command")
    return Entry(f"llmcli.commands.{first}.{file}", summary, heading)


ENTRIES = {
    name: _entry(name, summary, heading)
    for heading, commands in COMMANDS.items() for name, summary in commands.items()
}  # fmt: skip
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
EPILOG = "`COMMAND --help` lists options; `help TOPIC` explains models, formats, sampling."


class LlmcliRoot(Root):
    """The root of the tree, with our commands."""

    entries: Mapping[str, Entry] = {  # `help` alone has no JSON
        **ENTRIES, "help": Entry("llmcli.cli.help.command", HELP_SUMMARY, "Manage"),
    }  # fmt: skip
    nested = NESTED
    configured = (*ENTRIES, *NESTED)
    computing = COMPUTING
    bare = frozenset({"models"})
    aliases = ALIASES


def _version(value: bool) -> None:
    if value:
        write(f"llmcli {__version__}\n")
        raise typer.Exit()


def _completion(ctx: typer.Context, param: typer.CallbackParam, value: bool) -> None:
    """Installs or prints completion for the shell that is named behind the option, or this one.

    Where `--help` is named, too, it is shown instead.
    """
    if not value:
        return
    from llmcli.cli.completion import current_shell, install, script

    show_help(ctx, None, asks_for_help(ctx.meta[WORDS]))
    (option,) = param.opts
    named = [word for word in ctx.meta[WORDS] if word != option]
    if len(named) > 1:
        raise UsageError(
            f"`{option}` takes one shell, not `{' '.join(named)}`",
            hint=f"for example `llmcli {option} zsh`",
        )
    shell = named[0] if named else current_shell()
    write(f"{install(shell)}\n" if option == "--install-completion" else script(shell))
    raise typer.Exit()


def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
    install_completion: Annotated[
        bool,
        typer.Option(
            "--install-completion",
            callback=_completion,
            is_eager=True,
            help="Install completion for your shell or a named one (bash, zsh, fish).",
        ),
    ] = False,
    show_completion: Annotated[
        bool,
        typer.Option(
            "--show-completion",
            callback=_completion,
            is_eager=True,
            help="Print the completion script of your shell or a named one.",
        ),
    ] = False,
) -> None:
    """The root does nothing by itself."""


@cache
def root() -> Any:
    """The `llmcli` command, its subcommands not imported yet."""
    app = typer.Typer(
        name="llmcli",
        cls=LlmcliRoot,
        callback=_root,
        add_completion=False,
        rich_markup_mode=None,
        help=HELP,
        epilog=EPILOG,
        context_settings=dict(HELP_NAMES),
    )
    command = get_command(app)
    for parameter in command.params:
        adopt(parameter, {str(parameter.name): bool})
    return command

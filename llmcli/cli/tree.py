"""The root command with its options, and the table of commands."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.main import get_command

from llmcli import __version__
from llmcli.cli.group import HELP_NAMES, Entry, Root
from llmcli.cli.params import adopt

ENTRIES = {
    "generate": Entry(
        "llmcli.commands.generate.command", "Write text with a model, token by token.", "Run"
    ),
    "chat": Entry(
        "llmcli.commands.chat.command", "A conversation with a model, turn by turn.", "Run"
    ),
    "timing": Entry(
        "llmcli.commands.timing.command", "Where the time goes: phases, layers, parts.", "Measure"
    ),
    "bench": Entry(
        "llmcli.commands.bench.command",
        "How fast a model runs, in llama-bench's tests, options and formats.",
        "Measure",
    ),
    "ladder": Entry(
        "llmcli.cli.ladder",
        "The same model from nested loops to fused kernels, each step timed.",
        "Measure",
    ),
    "explain": Entry(
        "llmcli.commands.explain.command",
        "One number derived step by step, equal to the kernel's.",
        "Measure",
    ),
    "load": Entry(
        "llmcli.commands.load.command",
        "What becomes of every tensor, and whether files are whole.",
        "Look",
    ),
    "info": Entry(
        "llmcli.commands.info.command", "What a model is, and whether it fits this machine.", "Look"
    ),
    "shapes": Entry(
        "llmcli.commands.shapes.command",
        "Every tensor: letters, numbers, memory, formula, source.",
        "Look",
    ),
    "attention": Entry(
        "llmcli.commands.attention.command",
        "What each head attends to: heatmaps, metrics, pairs.",
        "Look",
    ),
    "experts": Entry(
        "llmcli.commands.experts.command",
        "Mixtures: which experts every token takes, in every layer.",
        "Look",
    ),
    "lens": Entry(
        "llmcli.commands.lens.command", "Logit lens: the likeliest token after every layer.", "Look"
    ),
    "dump": Entry(
        "llmcli.commands.dump.command",
        "Any activation by name: statistics, and all of it in a file.",
        "Look",
    ),
    "score": Entry(
        "llmcli.commands.score.command",
        "Log-probability of every token, perplexity, bits per byte.",
        "Look",
    ),
    "tokens": Entry(
        "llmcli.commands.tokens.command", "The tokens of a text: ids, pieces, byte offsets.", "Look"
    ),
    "models": Entry(
        "llmcli.commands.models.list", "The models on this machine and in the catalog.", "Manage"
    ),
    "env": Entry(
        "llmcli.commands.env.command", "This machine, and where each setting comes from.", "Manage"
    ),
}

NESTED = {
    "bench compare": Entry(
        "llmcli.commands.bench.compare",
        "Two results of bench or llama-bench side by side.",
        "Measure",
    ),
    "models list": Entry("llmcli.commands.models.list", "What `models` shows.", "Manage"),
    "models pull": Entry("llmcli.commands.models.pull", "Fetch models into the cache.", "Manage"),
    "models rm": Entry("llmcli.commands.models.rm", "Remove models from the caches.", "Manage"),
    "models path": Entry(
        "llmcli.commands.models.path", "Where a model lies, for scripts.", "Manage"
    ),
    "models prune": Entry(
        "llmcli.commands.models.prune", "Remove stale downloads and old versions.", "Manage"
    ),
}

ALIASES = {
    "models ls": "models list",
    "models remove": "models rm",
    "models delete": "models rm",
}

HELP = "Run language models in the terminal and see exactly what they compute."
EPILOG = """
Examples:

  llmcli generate "What is the capital of France?"
  cat page.txt | llmcli generate "What is this text about?" -n 64
  llmcli score -f page.txt --json

Options follow the command; `llmcli COMMAND --help` explains them. Your own settings are in
~/.config/llmcli/config.toml; `llmcli env` shows them.
"""


class LlmcliRoot(Root):
    """The root of the tree, with our commands."""

    entries = ENTRIES
    nested = NESTED
    bare = frozenset({"models"})
    aliases = ALIASES


def _version(value: bool) -> None:
    if value:
        typer.echo(f"llmcli {__version__}")
        raise typer.Exit()


def _install(value: bool) -> None:
    if value:
        from llmcli.cli.completion import install

        typer.echo(install())
        raise typer.Exit()


def _show(value: bool) -> None:
    if value:
        from llmcli.cli.completion import current_shell, script

        typer.echo(script(current_shell()), nl=False)
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
            callback=_install,
            is_eager=True,
            help="Install completion for your shell (bash, zsh or fish).",
        ),
    ] = False,
    show_completion: Annotated[
        bool,
        typer.Option(
            "--show-completion",
            callback=_show,
            is_eager=True,
            help="Print the completion script of your shell.",
        ),
    ] = False,
) -> None:
    """The root does nothing by itself."""


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

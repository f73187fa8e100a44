"""The root command with its options, and the table of commands."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer
from typer.main import get_command

from llmcli import __version__
from llmcli.cli.group import HELP_NAMES, Entry, Root
from llmcli.cli.params import adopt

ENTRIES = {
    "generate": Entry("llmcli.cli.generate", "Generate text with a model, token by token.", "Run"),
    "chat": Entry("llmcli.cli.chat.command", "Chat with a model, turn by turn.", "Run"),
    "timing": Entry(
        "llmcli.cli.timing.command",
        "Profile a run: where the time goes, by phase, layer and part.",
        "Measure",
    ),
    "bench": Entry(
        "llmcli.cli.bench.command",
        "Benchmark with llama-bench's tests, options and formats.",
        "Measure",
    ),
    "ladder": Entry(
        "llmcli.cli.ladder",
        "The same model from nested loops to fused kernels, each step timed.",
        "Measure",
    ),
    "explain": Entry(
        "llmcli.cli.explain",
        "Derive one number step by step and compare it with the kernel's.",
        "Measure",
    ),
    "load": Entry(
        "llmcli.cli.load.command",
        "Load the weights: what becomes of every tensor; `--check` verifies files.",
        "Look",
    ),
    "info": Entry(
        "llmcli.cli.info.command",
        "Architecture, parameters and memory of a model; whether it fits.",
        "Look",
    ),
    "shapes": Entry(
        "llmcli.cli.shapes.command",
        "Every tensor: symbolic and numeric shape, memory, formula, source.",
        "Look",
    ),
    "attention": Entry(
        "llmcli.cli.attention.command",
        "Attention patterns of every head: heatmaps, metrics, top pairs.",
        "Look",
    ),
    "experts": Entry(
        "llmcli.commands.experts.command",
        "Expert routing: which experts each token takes, in every layer.",
        "Look",
    ),
    "lens": Entry(
        "llmcli.cli.lens.command", "Logit lens: the top tokens after every layer.", "Look"
    ),
    "dump": Entry(
        "llmcli.cli.dump", "Any activation by name: statistics, and export to a file.", "Look"
    ),
    "score": Entry(
        "llmcli.cli.score", "Log-probability of every token, perplexity, bits per byte.", "Look"
    ),
    "tokens": Entry(
        "llmcli.cli.tokens", "Tokenize a text: token ids, pieces, byte offsets.", "Look"
    ),
    "models": Entry(
        "llmcli.cli.models.list", "List the models on this machine and in the catalog.", "Manage"
    ),
    "env": Entry("llmcli.cli.env", "The machine, and where each setting comes from.", "Manage"),
}

HELP_ENTRY = Entry(
    "llmcli.commands.help.command", "Explain a topic, or list the options of a command.", "Manage"
)

NESTED = {
    "bench compare": Entry(
        "llmcli.cli.bench.compare",
        "Compare two results of bench or llama-bench, test by test.",
        "Measure",
    ),
    "models list": Entry("llmcli.cli.models.list", "The same as `models`.", "Manage"),
    "models pull": Entry("llmcli.cli.models.pull", "Download models into the cache.", "Manage"),
    "models rm": Entry("llmcli.cli.models.rm", "Remove models from the caches.", "Manage"),
    "models path": Entry(
        "llmcli.cli.models.path", "Print the path of a model, for scripts.", "Manage"
    ),
    "models prune": Entry(
        "llmcli.cli.models.prune",
        "Remove stale partial downloads and superseded versions.",
        "Manage",
    ),
}

HELP = "Run language models in the terminal and see exactly what they compute."
EPILOG = """
Examples:

  llmcli generate "What is the capital of France?"
  cat page.txt | llmcli generate "What is this text about?" -n 64
  llmcli score -f page.txt --json

Options follow the command; `llmcli COMMAND --help` lists them. `llmcli help TOPIC` explains models,
sampling, shapes, attention, benchmarking, formats, numbers, safety and settings.
"""


class LlmcliRoot(Root):
    """The root of the tree, with our commands."""

    entries: Mapping[str, Entry] = {**ENTRIES, "help": HELP_ENTRY}  # the only one without JSON
    nested = NESTED
    bare = frozenset({"models"})


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

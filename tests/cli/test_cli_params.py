"""Options that no command has yet: several needs, short names in rules, names with `_`.

What the options of all commands take and refuse is in the transcripts and in test_cli_config.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from llmcli.cli.group import build
from llmcli.errors import UsageError
from llmcli.shell.params import Range, arg, flatten, opt


@dataclass(frozen=True, kw_only=True)
class Named:
    most_words: int = opt(
        5, "-w --most-words N", "Words.", within=Range(1, or_else=-1), aliases=("--words",)
    )


@dataclass(frozen=True, kw_only=True)
class Ruled:
    width: str | None = arg(None, "WIDTH", "Width.")
    high: bool = opt(False, "-H --high", "High.", needs=("--low", "-w"), excludes=("--flat",))
    low: bool = opt(False, "--low", "Low.")
    flat: bool = opt(False, "--flat", "Flat.", excludes=("WIDTH", "--words=7", "--deep!=0"))
    deep: int = opt(1, "--deep N", "Deep.")
    words: int = opt(5, "-w --words N", "Words.")


@pytest.mark.parametrize(("argv", "message"), [
    (["--high"], "`--high` needs `--low` or `-w`"),
    (["--high", "-w", "5"], "`--high` needs `--low` or `-w`"),  # the default
    (["--high", "-w", "6"], ""),
    (["-H", "--low", "--flat"], "`--high` and `--flat` exclude each other"),
    (["wide", "--flat"], "`--flat` and `WIDTH` exclude each other"),
    (["wide", "--high", "--low"], ""),
    (["--flat", "-w", "7"], "`--flat` and `--words 7` exclude each other"),
    (["--flat", "--deep", "2"], "`--flat` and `--deep 2` exclude each other"),
    (["--flat", "-w", "6", "--deep", "0"], ""),
])  # fmt: skip
def test_what_an_option_needs_and_excludes(argv, message):
    def function(ruled: Ruled) -> None:
        """A command."""

    command = build("try", function)
    with command.make_context("try", argv) as context:
        if not message:
            return command.invoke(context)
        with pytest.raises(UsageError) as refused:
            command.invoke(context)
    assert refused.value.message == message


@pytest.mark.parametrize("name", ["-w", "--most-words", "--most_words", "--words"])
def test_an_option_has_names_that_no_help_lists(name):
    seen = {}

    def function(named: Named) -> None:
        """A command."""
        seen.update(named=named)

    command = build("try", function)
    with command.make_context("try", [name, "-1"]) as context:
        text = command.get_help(context)
        assert "-w, --most-words N  Words." in text
        assert "--words" not in text.replace("--most-words", "")
        assert "_" not in text
        command.invoke(context)
    assert seen["named"] == Named(most_words=-1)


def test_one_name_twice_is_a_mistake_in_the_program():
    def function(one: Named, most_words: int = 1) -> None:
        """Never called."""

    with pytest.raises(ValueError, match="two options are called 'most_words'"):
        flatten(function)

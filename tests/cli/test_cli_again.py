"""The command line of a run once more."""

from __future__ import annotations

import shlex

import pytest

from llmcli.cli.looking import NewTokensOptions
from llmcli.cli.options import ModelOptions, PromptOptions
from llmcli.commands.attention.options import HeadOptions, ViewOptions
from llmcli.commands.attention.prompt import again


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ((ModelOptions(), PromptOptions(), HeadOptions()), "llmcli x"),
        ((PromptOptions(prompt="a b"), ModelOptions(model="tiny")), "llmcli x 'a b' -m tiny"),
        ((HeadOptions(synthetic=32, weighted=True),), "llmcli x --weighted --synthetic 32"),
        ((NewTokensOptions(generate=4), ViewOptions(key="-2:")), "llmcli x --generate 4 --key -2:"),
        ((PromptOptions(prompt="a " * 30),), "llmcli x PROMPT"),
        ((PromptOptions(prompt="a\nb"),), "llmcli x PROMPT"),
        ((PromptOptions(ids=",".join("1" * 30)),), "llmcli x --ids 1,2,3"),
        ((PromptOptions(file="/a" * 30),), f"llmcli x -f {'/a' * 30}"),
        ((PromptOptions(prompt="it's $HOME"),), "llmcli x 'it'\"'\"'s $HOME'"),
    ],
)  # fmt: skip
def test_only_what_is_not_as_by_default_is_repeated(given, line):
    assert again("x", *given) == line


def test_a_shell_reads_it_as_it_was():
    text = "a 'quoted' \"text\" $(ls) `id` \\"
    assert shlex.split(again("x", PromptOptions(prompt=text))) == ["llmcli", "x", text]

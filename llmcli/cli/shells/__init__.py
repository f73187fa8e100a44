"""The completion scripts of bash, zsh and fish, from a description of the commands."""

from llmcli.cli.shells.bash import bash
from llmcli.cli.shells.fish import fish
from llmcli.cli.shells.spec import CommandSpec, Spec
from llmcli.cli.shells.zsh import zsh

__all__ = ["CommandSpec", "Spec", "bash", "fish", "zsh"]

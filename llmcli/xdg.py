"""Folders of the XDG base directory specification."""

from __future__ import annotations

import os
from pathlib import Path


def folder(variable: str, default: str) -> Path:
    """The folder that $VARIABLE names; `default` (`~/.config`) where it is unset or relative.

    The specification says that relative paths are to be ignored. Raises RuntimeError where
    there is no home directory.
    """
    named = os.environ.get(variable, "")
    return Path(named if os.path.isabs(named) else default).expanduser()

"""Folders of the XDG base directory specification."""

from __future__ import annotations

import os
from pathlib import Path


def folder(variable: str, default: str) -> Path:
    """The directory in $VARIABLE; `default` (`~/.config`) if it is unset or relative.

    Relative paths are ignored, as required by the specification. Raises RuntimeError without a home
    directory.
    """
    named = os.environ.get(variable, "")
    return Path(named if os.path.isabs(named) else default).expanduser()

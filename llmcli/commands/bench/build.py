"""Which program measured: the commit of a checkout, else the version."""

from __future__ import annotations

import subprocess
from pathlib import Path

import llmcli
from llmcli.commands.bench.report.fields import Bencher
from llmcli.observe.environment import environment

_SECONDS = 5


def bencher() -> Bencher:
    """The program and the machine; a number of 0 stands for an installed version.

    llama-bench's number counts the commits, and so does ours where there are any to count.
    """
    machine = environment()
    root = Path(llmcli.__file__).resolve().parents[1]
    commit, number = llmcli.__version__, 0
    if (root / ".git").exists():  # not that of a project which has us in its own environment
        said = _git(root, "rev-parse", "--short=8", "HEAD")
        count = _git(root, "rev-list", "--count", "HEAD")
        if said and count.isdecimal():
            commit, number = said, int(count)
    return Bencher(
        build_commit=commit,
        build_number=number,
        cpu_info=machine.processor,
        gpu_info=", ".join(machine.gpus),
    )


def _git(root: Path, *words: str) -> str:
    """What git says, nothing where it is not installed or refuses."""
    try:
        said = subprocess.run(
            ["git", "-C", str(root), *words],
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return said.stdout.strip()

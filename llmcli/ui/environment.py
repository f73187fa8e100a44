"""The machine and the software in one line."""

from __future__ import annotations

from llmcli.records.environment import Environment
from llmcli.records.numbers import counted
from llmcli.ui.theme import one_line


def environment_words(environment: Environment) -> list[str]:
    """What a measured result depends on: processor, threads and versions, for a line."""
    where = [environment.processor, counted(environment.cores, "core"), *environment.gpus]
    kernels = environment.kernel_level.partition(" (")[0]
    software = [
        f"torch {environment.torch}",
        f"kernels {kernels}",
        f"llmcli {environment.llmcli}",
    ]
    if environment.threads is not None:
        software.insert(1, counted(environment.threads, "thread"))
    return [one_line(words) for words in (*where, *software)]

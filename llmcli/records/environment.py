"""The machine and the software that a result was measured with."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Environment:
    """The machine and the software that a result was measured with.

    Sizes in bytes. `cores`: logical processors available to this process. Fields that need PyTorch
    are None if it was not imported (`threads`, `cuda`). `kernels`: what computed the result;
    `kernel_level`: the level of the C kernels on this processor, `off`, or why there are none.
    """

    llmcli: str
    python: str
    platform: str
    processor: str
    cores: int
    features: tuple[str, ...]
    memory_bytes: int | None
    gpus: tuple[str, ...]
    driver: str | None
    torch: str | None
    cuda: str | None = None
    threads: int | None = None
    kernels: tuple[str, ...] = ()
    kernel_level: str

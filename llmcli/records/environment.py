"""The machine and the software that a result was measured with."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Environment:
    """The machine and the software that a result was measured with.

    Sizes in bytes. `cores` are the logical processors that this process may use. Fields that
    only PyTorch can answer are None where it was not imported (`threads`, `cuda`). `kernels`
    names what computed the result; `kernel_level` is the level of the C kernels on this
    processor, `off`, or why there are none.
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

"""Machines that are not here, for tests that see one: `LLMCLI_TESTS_ON=avx2 pytest tests/explain`.

`.ci/run` passes such tests on each of them: two processors that lack what this one may have, with
names of 60 and of 8 characters, and a CUDA build of PyTorch on a machine without a driver.
"""

import ctypes
import os
from dataclasses import dataclass, field
from pathlib import Path

VARIABLE = "LLMCLI_TESTS_ON"


@dataclass(frozen=True)
class Machine:
    """What is set before PyTorch is imported, and the processor's name and features."""

    environ: dict[str, str] = field(default_factory=dict)
    processor: str = ""
    features: str = ""
    cuda: bool = False


MACHINES = {
    "avx2": Machine(
        environ={"LLMCLI_KERNELS": "avx2", "ATEN_CPU_CAPABILITY": "avx2",
                 "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
        processor="Intel(R) Xeon(R) Platinum 8275CL CPU @ 3.00GHz, Cascade Lake",
        features="avx avx2 fma f16c",
    ),
    "plain": Machine(
        environ={"LLMCLI_KERNELS": "portable", "ATEN_CPU_CAPABILITY": "default",
                 "ONEDNN_MAX_CPU_ISA": "SSE41", "OMP_NUM_THREADS": "1"},
        processor="QEMU 9.2", features="sse4_1",
    ),
    "cuda": Machine(cuda=True),
}  # fmt: skip


def before() -> None:
    """What a machine that is asked for has in its environment; called before PyTorch is there."""
    if (name := os.environ.get(VARIABLE)) is not None:
        os.environ.update(MACHINES[name].environ)


def after() -> None:
    """What it says of itself, once our modules are there."""
    if (name := os.environ.get(VARIABLE)) is None:
        return
    machine = MACHINES[name]
    if machine.processor:
        _processor(machine)
    if machine.cuda:
        _cuda_without_a_driver()


def _processor(machine: Machine) -> None:
    from llmcli import processor

    processor.name = lambda: machine.processor  # type: ignore[assignment]
    processor.flags = lambda: frozenset(machine.features.split())  # type: ignore[assignment]


def _cuda_without_a_driver() -> None:
    """As PyTorch from the package index on Linux: a guard is there for CUDA, and no card for it.

    It is one that computes on another device: what asks it gets an error.
    """
    import torch

    cpu, cuda = 0, 1  # `enum DeviceType` of c10
    library = ctypes.CDLL(str(next((Path(torch.__file__).parent / "lib").glob("libc10.*"))))
    guards = (ctypes.c_void_p * 24).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    assert guards[cpu] is not None
    guards[cuda] = guards[cpu]
    torch.version.cuda = "13.0"

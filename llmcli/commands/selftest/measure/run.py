"""All of `selftest`, in order: arithmetic first, then what takes memory and time."""

from __future__ import annotations

from time import perf_counter

import torch

from llmcli import devices
from llmcli.commands.selftest.measure.arithmetic import measure_groups
from llmcli.commands.selftest.measure.children import measure_exhaustion, measure_levels
from llmcli.commands.selftest.measure.machine import (
    fitting_layers,
    measure_shape,
    numbers_on,
    shape,
)
from llmcli.commands.selftest.report import MemoryResult, RateResult, SelftestReport
from llmcli.measure.ceilings import measure_ceilings
from llmcli.records.progress import Progress

# layers of each shape that are run, at most: five minutes are enough for all of it
_LAYERS = {"cpu": {"1B": 16, "8B": 3}, "cuda": {"1B": 16, "8B": 32}}


def measure_selftest(
    device: torch.device, *, speed: bool = True, progress: Progress | None = None
) -> SelftestReport:
    """Checks on small models, and, with `speed`, rates and memory of a 1B and an 8B shape."""
    begin, refused = perf_counter(), []
    groups = list(measure_groups(device, progress))
    if device.type == "cpu":
        levels = measure_levels()
        groups += [] if levels is None else [levels]
        refused += ["levels: no kernels were built"] if levels is None else []
    groups.append(measure_exhaustion(device))
    rates: list[RateResult] = []
    memory: list[MemoryResult] = []
    ceilings = None
    if speed:
        config = shape("1B").config
        ceilings = measure_ceilings(
            device, numbers_on(device, config), threads=torch.get_num_threads(), progress=progress
        )
        for name, most in _LAYERS["cuda" if device.type == "cuda" else "cpu"].items():
            layers = fitting_layers(name, device, most)
            if not layers:
                refused.append(f"{name}: no memory for one layer of it")
                continue
            one = shape(name, layers)
            found, taken = measure_shape(one, device, against=name == "1B", progress=progress)
            rates += found
            memory.append(taken)
            if layers < most:
                refused.append(f"{one.words}: no memory for more")
            if device.type == "cuda":
                devices.release_freed_memory()
    return SelftestReport(
        device=str(device), groups=tuple(groups), rates=tuple(rates), memory=tuple(memory),
        ceilings=ceilings, refused=tuple(refused), seconds=perf_counter() - begin,
    )  # fmt: skip

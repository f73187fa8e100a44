"""`info` of devices that are not here, which no transcript has: as text at fixed widths."""

from __future__ import annotations

from dataclasses import replace

import pytest
from drawn import changes, lines_of, shown
from rich.cells import cell_len

from llmcli.checkpoints import open_model
from llmcli.commands.info.measure import measure_info
from llmcli.commands.info.view import render_info
from llmcli.kernels import native
from llmcli.records.info import Device

CPU = Device(
    device="cpu", name="Some CPU", total_bytes=16 << 30, free_bytes=4 << 30, bfloat16=True
)
GPUS = [replace(CPU, device=f"cuda:{i}", name="NVIDIA H200") for i in range(8)]


@pytest.fixture(autouse=True)
def one_processor(monkeypatch):
    """Estimates of memory depend on the kernels that there are."""
    monkeypatch.setattr(native, "level", lambda: "avx2")


def report(*devices, **how):
    found = measure_info(open_model("tiny"), devices, dtype="float32", **how)
    return replace(found, file=replace(found.file, path="tiny"))


@pytest.mark.parametrize("width", [40, 60, 80, 200])
@pytest.mark.parametrize("gpus", [0, 1, 8])
def test_every_line_fits_and_every_device_is_there(width, gpus):
    found = report(*GPUS[:gpus], replace(CPU, free_bytes=1 << 20), batch=2)
    found = replace(found, file=replace(found.file, path="/somewhere" * 30))
    for full in (False, True):
        lines = lines_of(render_info(found, full=full, metadata=True), width=width)
        assert max(map(cell_len, lines)) <= width
        assert sum(line.count("/somewhere") + line.endswith("/") for line in lines) == 30
        assert all(any(line.startswith(f"cuda:{i} ") for line in lines) for i in range(gpus))
        assert sum(" fits: " in line and " of 4" in line for line in lines) == gpus
        assert sum("does not fit" in line for line in lines) == 1


def test_screens(golden):
    mapped = replace(CPU, free_bytes=1 << 20)
    packed = report(mapped)
    formats = packed.memory[0].need.formats | {"product_format": "int16"}
    need = replace(packed.memory[0].need, formats=formats)
    plain = shown(render_info(report(CPU)))

    def new(*devices):
        return changes(plain, shown(render_info(report(*devices))))

    golden("info", {
        "without a size of the memory": new(replace(CPU, free_bytes=None)),
        "without a CUDA in PyTorch": new(replace(GPUS[0], usable=False)),
        "two devices, in full": shown(render_info(report(GPUS[0], CPU, batch=2), full=True)),
        "blocks that do not fit stay in the file": changes(
            shown(render_info(packed)),
            shown(render_info(replace(packed, memory=(replace(packed.memory[0], need=need),)))),
        ),
    })  # fmt: skip

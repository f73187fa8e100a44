"""What `--list-devices` prints."""

from __future__ import annotations

from collections.abc import Iterator

from llmcli.commands.bench.report.fields import device_words
from llmcli.observe.memory import machine_devices


def device_lines() -> Iterator[str]:
    """`CUDA0: name (MiB, MiB free)`, as llama-bench lists them; the CPU, too."""
    yield "Available devices:\n"
    for device in machine_devices():
        name = "CPU" if device.device == "cpu" else device_words(device.device)
        sizes = [
            f"{'unknown' if nbytes is None else nbytes // 2**20} MiB{word}"
            for nbytes, word in ((device.total_bytes, ""), (device.free_bytes, " free"))
        ]
        yield f"  {name}: {device.name} ({', '.join(sizes)})\n"

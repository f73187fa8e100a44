"""Small models to time, and ceilings that nobody measured."""

import torch
from decoder_faults import red
from small_models import ids, random_model
from zoo import MODELS

from llmcli.commands.timing.measure.run import measure_timing
from llmcli.records.machine import Cache, Ceilings, MatrixRate, ReadRate

PROMPT = tuple(ids(1, 9)[0].tolist())
CEILINGS = Ceilings(
    device="cpu", dtype="float32", threads=1, seconds=0.0, start_s=2e-6,
    caches=(Cache(level="L2", bytes=1 << 20), Cache(level="L3", bytes=16 << 20)),
    reads=(
        ReadRate(nbytes=1 << 20, bytes_per_s=100e9, level="L2"),
        ReadRate(nbytes=16 << 20, bytes_per_s=50e9, level="L3"),
        ReadRate(nbytes=1 << 28, bytes_per_s=10e9, level="memory"),
    ),
    matrices=(MatrixRate(dtype="float32", flops_per_s=1e11, way="direct"),),
)  # fmt: skip


def small(name, dtype=torch.float32):
    """A small model of the zoo as loading gives it."""
    return random_model(MODELS[name], dtype)


def timed(model, prompt=PROMPT, new_tokens=3, pairs=1, **rest):
    return measure_timing(model, prompt, new_tokens, pairs=pairs, ceilings=CEILINGS, **rest)


def undisturbed(model, *args, good=lambda report: not red(report.checks), **options):
    """The first of several reports that is good: other programs take the processor at times."""
    reports = []
    while not reports or not good(reports[-1]):
        assert len(reports) < 5, [red(report.checks) for report in reports]
        reports.append(timed(model, *args, **options))
    return reports[-1]


class FakeDevice:
    """A GPU that works in its own time: each thing that is started takes it 20 s.

    No host is so busy that starting it takes as long.
    """

    def __init__(self):
        self.now, self.events, self.waits, self.done = 0.0, 0, 0, False

    def event(self):
        self.events += 1
        return FakeEvent(self)

    def wait(self):
        self.waits += 1
        self.done = True


class FakeEvent:
    def __init__(self, device):
        self.device = device
        self.at = None

    def record(self):
        self.device.now += 20_000.0  # ms
        self.device.done = False
        self.at = self.device.now

    def elapsed_time(self, later):
        assert self.device.done, "read before the device was waited for"
        return later.at - self.at

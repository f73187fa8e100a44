"""`llmcli selftest`: is this machine's arithmetic right, and how fast is it; a receipt of it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from llmcli.commands.selftest.report import Receipt
from llmcli.errors import UsageError
from llmcli.measure.machine import environment
from llmcli.records.document import members
from llmcli.shell.documents import read_bytes
from llmcli.shell.files import kind_of_file
from llmcli.shell.options import ViewOutputOptions
from llmcli.shell.output import ExportFile, Output, write_document
from llmcli.shell.params import opt
from llmcli.shell.progress import Progress

EPILOG = """
Small models of every kind are computed in float64, float32 and bfloat16 and compared with the
graph's own evaluation, step by step, with taps and edits, replayed, and at every level of the
kernels. Then a 1B and an 8B shape with random weights are timed, alternating with measurements of
this machine's memory and matrix rates, and with transformers where it is installed.

Examples:

  llmcli selftest
  llmcli selftest --device cuda -o receipt.json
  llmcli selftest --verify receipt.json
  llmcli selftest --no-speed
"""
_LARGEST = 1 << 20  # bytes of a receipt


@dataclass(frozen=True, kw_only=True)
class SelftestOptions:
    """The device, whether rates are measured, and receipts to write or compare with."""

    panel: ClassVar[str] = "Selftest"
    device: str = opt("auto", "--device DEVICE", "auto, cpu, cuda, cuda:1 … or mps.")
    no_speed: bool = opt(False, "--no-speed", "Only the checks: a minute, and little memory.")
    save: str | None = opt(
        None, "-o --output FILE.json", "Write the result to a file, as a receipt."
    )
    verify: str | None = opt(
        None,
        "--verify FILE.json",
        "Compare with a receipt: checks that passed, and the rates of the same machine.",
    )


def command(selftest: SelftestOptions, output: ViewOutputOptions) -> None:
    """Check this machine's arithmetic on small models and its speed on large ones; a receipt.

    A check that fails ends with exit 1. It takes up to five minutes; nothing is fetched.
    """
    from llmcli.commands.selftest.measure.run import measure_selftest
    from llmcli.commands.selftest.view import render_selftest
    from llmcli.devices import resolve_device

    out = Output("selftest", output)
    if selftest.save is not None:
        kind_of_file(selftest.save, ("json",))
    receipt = None if selftest.verify is None else read_receipt(selftest.verify)
    device = resolve_device(selftest.device)
    with Progress(out) as progress:
        report = measure_selftest(device, speed=not selftest.no_speed, progress=progress)
    body, machine, file = members(report), environment(), None
    if report.ceilings is not None:  # in a receipt a cache is a pair
        pairs = [(cache.level, cache.bytes) for cache in report.ceilings.caches]
        body["ceilings"] = members(report.ceilings) | {"caches": pairs}
    if selftest.save is not None:
        write = partial(write_document, selftest.save)
        holds = "a receipt for `llmcli selftest --verify`"
        file = ExportFile(path=selftest.save, holds=holds, write=write)
    out.present(
        lambda: render_selftest(report, receipt, machine),
        body,
        environment=machine,
        checks=report.checks,
        file=file,
        hint="run it again with `LLMCLI_KERNELS=off` to see whether our kernels are at fault",
    )


def read_receipt(path: str) -> Receipt:
    """Raises UsageError for a file that is no receipt, or not there."""
    hint = "`llmcli selftest -o receipt.json` writes one"
    data = read_bytes(path, hint, _LARGEST)
    try:
        return Receipt.of(json.loads(data))
    except (ValueError, RecursionError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"`{path}` is no receipt: {reason}", hint=hint) from error

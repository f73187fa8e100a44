"""All of `selftest`, in order: arithmetic first, then what takes processes, memory and time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import torch

from llmcli.commands.selftest.measure.arithmetic import measure_groups
from llmcli.commands.selftest.measure.machine import (
    Shape,
    fitting_layers,
    measure_shape,
    numbers_on,
)
from llmcli.commands.selftest.report import GroupResult, MemoryResult, RateResult, SelftestReport
from llmcli.errors import WriteFailed
from llmcli.kernels.native import levels as levels_here
from llmcli.measure.ceilings import measure_ceilings
from llmcli.records.document import ViewCheck, difference
from llmcli.records.work import Progress, no_progress

# layers of each shape that are run, at most: five minutes are enough for all of it
_LAYERS = {"cpu": {"1B": 16, "8B": 3}, "cuda": {"1B": 16, "8B": 32}}
_DIGEST = "from llmcli.commands.selftest.measure.arithmetic import digest; print(digest())"
_HUGE = 1 << 40  # tokens of context: more memory than any machine has
_CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 32,
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": _HUGE, "rms_norm_eps": 1e-5,
}  # fmt: skip
_WAIT_S = 120


def measure_selftest(
    device: torch.device, *, speed: bool = True, progress: Progress = no_progress
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
        numbers = numbers_on(device, Shape("1B", 1).whole)
        ceilings = measure_ceilings(
            device, numbers, threads=torch.get_num_threads(), progress=progress
        )
        for name, most in _LAYERS["cuda" if device.type == "cuda" else "cpu"].items():
            layers = fitting_layers(name, device, most)
            if not layers:
                refused.append(f"{name}: no memory for one layer of it")
                continue
            one = Shape(name, layers)
            found, taken = measure_shape(one, device, against=name == "1B", progress=progress)
            rates += found
            memory.append(taken)
            if layers < most:
                refused.append(f"{one.words}: no memory for more")
    return SelftestReport(
        device=str(device), groups=tuple(groups), rates=tuple(rates), memory=tuple(memory),
        ceilings=ceilings, refused=tuple(refused), seconds=perf_counter() - begin,
    )  # fmt: skip


def measure_levels() -> GroupResult | None:
    """Packed models at every level of this processor's kernels; None where there are no kernels."""
    begin, found = perf_counter(), {}
    for level in levels_here():
        done = _run(["-c", _DIGEST], {"LLMCLI_KERNELS": level})
        found[level] = done.stdout.strip() if done.returncode == 0 else f"exit {done.returncode}"
    if not found:
        return None
    best = next(reversed(found.values()))
    wrong = [level for level, bits in found.items() if bits != best or bits.startswith("exit")]
    check = ViewCheck(
        name="levels", words="all kernel levels compute the same bits",
        value=len(wrong), tolerance=0, where=", ".join(wrong or found),
    )  # fmt: skip
    return GroupResult(check=check, cases=len(found), seconds=perf_counter() - begin)


def measure_exhaustion(device: torch.device) -> GroupResult:
    """A context that no memory holds has to end with exit 5, a line and a hint."""
    begin = perf_counter()
    try:
        with TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(_CONFIG))
            done = _run(
                ["-m", "llmcli", "generate", "--ids", "1,2", "-n", str(_HUGE - 2), "-m", folder,
                 "--offline", "--random-weights", "--device", str(device),
                 "--context-length", str(_HUGE)], {},
            )  # fmt: skip
    except OSError as error:
        raise WriteFailed(f"could not write a temporary file: {error.strerror}") from error
    lines = [line for line in done.stderr.splitlines() if line.startswith(("error: ", "hint: "))]
    ok = done.returncode == 5 and len(lines) == 2
    wrong = [] if ok else [f"exit {done.returncode}"]
    words = "a context that does not fit: exit 5, a hint"
    check = difference("memory exhausted", words, wrong)
    return GroupResult(check=check, cases=1, seconds=perf_counter() - begin)


def _run(words: list[str], environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run Python; exit code 124, as `timeout` gives, if it does not end in `_WAIT_S`."""
    try:
        return subprocess.run(
            [sys.executable, *words], env={**os.environ, **environ}, capture_output=True,
            text=True, check=False, timeout=_WAIT_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(words, 124, "", "")

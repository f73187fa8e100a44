"""What only another process can show: other levels of the kernels, and memory that runs out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import torch

from llmcli.commands.selftest.report import GroupResult
from llmcli.errors import WriteFailed
from llmcli.kernels.native import levels as levels_here
from llmcli.records.checks import ViewCheck, difference

_DIGEST = "from llmcli.commands.selftest.measure.arithmetic import digest; print(digest())"
_HUGE = 1 << 40  # tokens of context: more memory than any machine has
_CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 32,
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": _HUGE, "rms_norm_eps": 1e-5,
}  # fmt: skip
_WAIT_S = 120


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
    """Its exit code and output; 124, as of `timeout`, where it does not end."""
    try:
        return subprocess.run(
            [sys.executable, *words], env={**os.environ, **environ}, capture_output=True,
            text=True, check=False, timeout=_WAIT_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(words, 124, "", "")

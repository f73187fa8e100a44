"""Run language models in the terminal and see exactly what they compute."""

import os
import time

from llmcli.limits import processor_numbers, processors

__version__ = "0.1.0"

# How long a thread of OpenMP looks for more work before it sleeps: rounds in GNU's library, which
# waits for 300,000 by default (milliseconds), and milliseconds in Intel's and LLVM's (200). On a
# processor that others use, too, a thread that waits so long takes the time of the one that it
# waits for, at each of a thousand operations of a token; without any waiting a token takes a third
# longer, since the threads have to be woken. So it is bounded, and short where other programs want
# the processors when we start; else longer than the pauses between two operations of a token.
# OpenMP reads it when PyTorch is imported.
OPENMP_SPIN = {"GOMP_SPINCOUNT": "100000", "KMP_BLOCKTIME": "1"}
OPENMP_SPIN_BUSY = {"GOMP_SPINCOUNT": "4000", "KMP_BLOCKTIME": "0"}
OPENMP_VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "KMP_BLOCKTIME")


def _is_busy() -> bool:
    """Whether others run on this machine (Linux says), so that our threads get not all of it.

    Seen three times, a millisecond apart: a program that only looks in does not count.
    """
    for reading in range(3):
        if reading:
            time.sleep(0.001)
        try:
            with open("/proc/loadavg", "rb") as file:
                running = int(file.read().split()[3].partition(b"/")[0])  # this one among them
        except (OSError, ValueError, IndexError):
            return False
        if running < 2:
            return False
    return True


if not any(os.environ.get(name) for name in OPENMP_VARIABLES):  # else the user has chosen
    os.environ.update(OPENMP_SPIN_BUSY if _is_busy() else OPENMP_SPIN)

# PyTorch knows nothing of the quota of a container: what it is told here, all threads follow.
OPENMP_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
WITHIN_QUOTA = not any(os.environ.get(name) for name in OPENMP_THREADS) and (
    processors() < len(processor_numbers())
)
if WITHIN_QUOTA:
    os.environ[OPENMP_THREADS[0]] = str(processors())

"""Run language models in the terminal and see exactly what they compute."""

import os
import time

from llmcli.limits import processor_numbers, processors

__version__ = "0.1.0"

# The time that an OpenMP thread spins for more work before it sleeps: rounds in GNU's library
# (default 300,000, milliseconds), and milliseconds in Intel's and LLVM's (default 200). On a
# processor shared with other programs, a spinning thread takes time from the thread that it waits
# for, at each of a thousand operations of a token; without spinning a token takes a third longer,
# since threads have to be woken. So the spin is short if other programs use the processors at the
# start, else longer than the pauses between two operations. Read when PyTorch is imported.
OPENMP_SPIN = {"GOMP_SPINCOUNT": "100000", "KMP_BLOCKTIME": "1"}
OPENMP_SPIN_BUSY = {"GOMP_SPINCOUNT": "4000", "KMP_BLOCKTIME": "0"}
OPENMP_VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "KMP_BLOCKTIME")


def _is_busy() -> bool:
    """Whether other programs run on this machine (Linux only).

    True if seen three times, a millisecond apart: short runs do not count.
    """
    for reading in range(3):
        if reading:
            time.sleep(0.001)
        try:
            with open("/proc/loadavg", "rb") as file:
                running = int(file.read().split()[3].partition(b"/")[0])  # includes this process
        except (OSError, ValueError, IndexError):
            return False
        if running < 2:
            return False
    return True


if not any(os.environ.get(name) for name in OPENMP_VARIABLES):  # else the user's choice
    os.environ.update(OPENMP_SPIN_BUSY if _is_busy() else OPENMP_SPIN)

# PyTorch ignores the quota of a container; this variable limits all thread pools.
OPENMP_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
WITHIN_QUOTA = not any(os.environ.get(name) for name in OPENMP_THREADS) and (
    processors() < len(processor_numbers())
)
if WITHIN_QUOTA:
    os.environ[OPENMP_THREADS[0]] = str(processors())

"""Run language models in the terminal and see exactly what they compute."""

import os

__version__ = "0.1.0"

# How long a thread of OpenMP looks for more work before it sleeps: rounds in GNU's library, which
# waits for 300,000 by default (milliseconds), and milliseconds in Intel's and LLVM's (200). On a
# processor that others use, too, a thread that waits so long takes the time of the one that it
# waits for, at each of a thousand operations of a token. Without any waiting a token takes a third
# longer, since the threads have to be woken. OpenMP reads it when PyTorch is imported.
OPENMP_SPIN = {"GOMP_SPINCOUNT": "10000", "KMP_BLOCKTIME": "1"}
OPENMP_VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "KMP_BLOCKTIME")

if not any(os.environ.get(name) for name in OPENMP_VARIABLES):  # else the user has chosen
    os.environ.update(OPENMP_SPIN)

"""PyTorch's libraries, mapped and relocated while Python imports what comes before them.

That is 150 ms of `import torch` on one processor (and a second where CUDA's are among them), which
needs no Python. ctypes keeps the interpreter's lock while it opens a library, so the system's own
`dlopen` is called.
"""

from __future__ import annotations

import os
import sys
from threading import Thread


def read_ahead() -> None:
    """Starts to open what `import torch` will, on a thread; nothing where that cannot be done."""
    if sys.platform != "linux":
        return
    try:
        os.getcwd()
    except OSError:  # MKL ends the process: `running.need_directory` has the words for it
        return
    # libraries of Python's own that our imports open, which would wait for PyTorch's
    import array  # noqa: F401
    import binascii  # noqa: F401
    import csv  # noqa: F401
    import ctypes
    import hashlib  # noqa: F401
    import json  # noqa: F401
    import mmap  # noqa: F401
    import random  # noqa: F401
    import socket  # noqa: F401
    import unicodedata  # noqa: F401
    from importlib.util import find_spec

    spec = find_spec("torch")
    if spec is None or spec.origin is None or "torch" in sys.modules:
        return
    folder = os.path.join(os.path.dirname(spec.origin), "lib")
    open_library = ctypes.CDLL(None).dlopen
    open_library.argtypes, open_library.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p

    def work() -> None:
        # as torch does: the first gives its symbols to all that follow
        for name, mode in (("libtorch_global_deps.so", os.RTLD_GLOBAL), ("libtorch.so", 0)):
            open_library(os.fsencode(os.path.join(folder, name)), os.RTLD_NOW | mode)

    try:
        # no daemon: Python's own end, unlike ours, must not come while the libraries are opened
        Thread(target=work).start()
    except RuntimeError:  # no more threads may be started
        return

"""What `llmcli` and `python -m llmcli` run.

Until the program has its own handlers Ctrl-C ends it as it ends any other program, silently, where
Python would print where it was among its imports. So that comes before anything else is read from
the disk: `signal` imports `enum`, and even `from __future__` reads a file.
"""

import _signal  # type: ignore[import-not-found]
import os


def script() -> None:
    """The `llmcli` of the command line: `main`, and then an end on the spot.

    Everything is written and closed by then; Python's own end takes torch down module by
    module, which is half a second before the prompt comes back. What is imported stays: looking
    for garbage among it every 700 objects would take a tenth of the start.
    """
    try:
        # one that the parent ignores (`nohup`) stays ignored
        if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
            _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
    except ValueError:  # not the main thread: an embedder's own affair
        pass

    import gc

    from llmcli.cli.app import main

    gc.set_threshold(100_000)

    os._exit(main())


if __name__ == "__main__":
    script()

"""Wrong command lines: one line, a hint, an exit code, and the same as JSON."""

import contextlib
import json
import os
import signal
from pathlib import Path

import pytest

from llmcli.commands.bench.measure.sweep import failure
from llmcli.errors import (
    CheckpointError,
    NetworkError,
    UnsupportedModel,
    UsageError,
    WeightMismatch,
)
from llmcli.shell import exits


def raising(exception):
    def action(argv):
        raise exception

    return action


def receives(number):
    """This process does, here."""
    os.kill(os.getpid(), number)
    for _ in range(1000):
        pass


EXCEPTIONS = (
    CheckpointError("broken"), UnsupportedModel("new"), WeightMismatch(missing=["head.W"]),
    UsageError("wrong"), NetworkError("no net"), MemoryError(), MemoryError("so much"),
    ImportError("libtorch.so: failed to map segment from shared object"),
    ImportError("x.so: cannot apply additional memory protection after relocation: "
                "Cannot allocate memory"),
    ImportError("x.so: cannot allocate memory in static TLS block"),
    ImportError("cannot import name `x`"),
    RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate"),
    # PyTorch's, recognized without importing it
    type("OutOfMemoryError", (RuntimeError,), {})("CUDA out of memory. Tried …"),
    OSError(28, "No space left on device", "/full/a"), OSError(24, "Too many open files"),
    OSError(23, "Too many open files in system"), RuntimeError("Failed to initialize cpuinfo!"),
    OSError(2, "No such file or directory", "/gone/a"),
    ZeroDivisionError("division by zero"), KeyError("lost"),
    CheckpointError("tensor `\x1b]0;evil\x07\nhint: no`"),  # cannot send terminal codes
    KeyboardInterrupt(), exits.Terminated(),
)  # fmt: skip


def test_what_is_told(capsys, as_written):
    """Of each exception the exit code, the kind in JSON, and stderr; and what a row of `bench` has.

    Every one that is the user's has a hint.
    """
    found = {}
    for exception in EXCEPTIONS:
        code = exits.run(raising(exception), ["x"])
        out, err = capsys.readouterr()
        assert exits.run(raising(exception), ["x", "--json"]) == code
        error = json.loads(capsys.readouterr().out)["error"]
        assert (out, error["code"]) == ("", code)
        assert error["hint"] or error["kind"] == "interrupted"
        lines = found[repr(exception)] = [f"{code} {error['kind']}", *err.splitlines()]
        if isinstance(exception, Exception):
            lines.append("bench: {0.message!r} · {0.hint!r}".format(failure(exception)))
    as_written(Path(__file__).with_name("told-errors.txt"), found)


def test_debug_prints_the_traceback(capsys):
    assert exits.run(raising(KeyError("lost")), ["x", "--debug"]) == 1
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_an_exception_made_of_an_interruption_is_one(capsys):
    """An import that Ctrl-C cuts short raises whatever the library makes of it."""

    def action(argv):
        try:
            receives(signal.SIGINT)
        except KeyboardInterrupt:
            raise SystemError("initialization failed") from None

    assert exits.run(action, ["x"]) == 130
    assert capsys.readouterr().err == ""


def test_an_interruption_that_got_lost_is_raised_again(capsys):
    """Raised in a callback of the import system, the exception is printed and ignored."""
    seen = []

    def action(argv):
        try:
            receives(signal.SIGINT)
        except KeyboardInterrupt:
            seen.append("lost")
        exits.SIGNALS.check()
        seen.append("went on")

    assert exits.run(action, ["x"]) == 130
    assert seen == ["lost"]


def test_a_second_signal_right_after_the_first_is_the_same_one(capsys):
    def action(argv):
        try:
            receives(signal.SIGTERM)
        except KeyboardInterrupt as first:
            os.kill(os.getpid(), signal.SIGTERM)
            raise exits.Stopped(first, reported=True) from first

    assert exits.run(action, ["x", "--json"]) == 143
    assert capsys.readouterr().out == "", "its document is there already"


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_what_ends_a_run_is_not_lost_behind_ctrl_c(second):
    """A conversation forgets Ctrl-C; SIGTERM right after it ends the run all the same."""

    def action(argv):
        try:
            receives(signal.SIGINT)
        except KeyboardInterrupt:
            with contextlib.suppress(KeyboardInterrupt):
                receives(second)
        exits.SIGNALS.forget()

    assert exits.run(action, ["x"]) == (0 if second == signal.SIGINT else 143)


def test_what_is_written_whole_is_not_cut_by_ctrl_c():
    done = []

    def action(argv):
        with exits.SIGNALS.held():
            receives(signal.SIGINT)
            done.append("whole")
        done.append("went on")

    assert exits.run(action, ["x"]) == 130
    assert done == ["whole"]

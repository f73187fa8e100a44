"""Wrong command lines: one line, a hint, an exit code, and the same as JSON."""

import contextlib
import json
import os
import signal

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


@pytest.mark.parametrize(
    ("exception", "code", "kind"),
    [
        (CheckpointError("broken"), 4, "checkpoint"),
        (UnsupportedModel("new"), 4, "unsupported"),
        (WeightMismatch(missing=["head.W"]), 4, "weight_mismatch"),
        (UsageError("wrong"), 2, "usage"),
        (NetworkError("no net"), 6, "network"),
        (MemoryError(), 5, "out_of_memory"),
        (ImportError("libtorch.so: failed to map segment from shared object"), 5, "out_of_memory"),
        (ImportError("x.so: cannot apply additional memory protection after relocation: "
                     "Cannot allocate memory"), 5, "out_of_memory"),
        (ImportError("x.so: cannot allocate memory in static TLS block"), 1, "error"),
        (ImportError("cannot import name `x`"), 1, "error"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate"), 5, "out_of_memory"),
        (OSError(28, "No space left on device"), 1, "write_failed"),
        (ZeroDivisionError("division by zero"), 1, "error"),
        (type("OutOfMemoryError", (RuntimeError,), {})("CUDA out of memory. Tried …"), 5,
         "out_of_memory"),  # PyTorch's, recognized without importing it
        (KeyboardInterrupt(), 130, "interrupted"),
        (exits.Terminated(), 143, "interrupted"),
    ],
)  # fmt: skip
def test_every_exception_has_an_exit_code_and_the_users_ones_a_hint(capsys, exception, code, kind):
    assert exits.run(raising(exception), ["x", "--json"]) == code
    error = json.loads(capsys.readouterr().out)["error"]
    assert (error["code"], error["kind"]) == (code, kind)
    assert error["hint"] or kind == "interrupted"


@pytest.mark.parametrize(("exception", "cause", "hint"), [
    (OSError(24, "Too many open files"), "too many open files", "ulimit -n"),
    (OSError(23, "Too many open files in system"), "too many open files", "ulimit -n"),
    (RuntimeError("Failed to initialize cpuinfo!"), "`/proc/cpuinfo`", "mount /proc"),
])
def test_what_the_system_lacks_is_no_internal_error(capsys, exception, cause, hint):
    assert exits.run(raising(exception), ["x"]) == 1
    error, told = capsys.readouterr().err.splitlines()
    assert cause in error
    assert "internal error" not in error
    assert hint in told
    assert cause in failure(exception).message
    assert hint in failure(exception).hint


@pytest.mark.parametrize(("exception", "lines"), [
    (MemoryError(), ["error: out of memory"]),
    (MemoryError("so much"), ["error: out of memory: so much"]),
    (KeyError("lost"), ["error: internal error: KeyError: 'lost'",
                        "hint: run it again with --debug for the traceback"]),
    # messages cannot send terminal codes
    (CheckpointError("tensor `\x1b]0;evil\x07\nhint: no`"),
     ["error: tensor `\\x1b]0;evil\\x07\\nhint: no`"]),
    (KeyboardInterrupt(), []),
])  # fmt: skip
def test_what_is_told(capsys, exception, lines):
    exits.run(raising(exception), ["x"])
    captured = capsys.readouterr()
    told = captured.err.splitlines()
    assert (captured.out, told[: len(lines)]) == ("", lines)
    assert len(told) == (2 if lines else 0)


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

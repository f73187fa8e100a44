"""How a run ends: every exception becomes one line with a hint and an exit code.

Imported before anything heavy, so that Ctrl-C during an import already ends properly.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from llmcli.errors import (
    LlmcliError,
    UsageError,
    WriteFailed,
    as_lacking,
    as_out_of_memory,
    first_line,
)
from llmcli.shell.streams import (
    KEYS,
    STDOUT,
    begin_line,
    columns,
    detach,
    erase_line,
    escape_unencodable,
    wrapped,
)

# what a write fails with that does not go through `streams.write`
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG, errno.EBADF, errno.EPIPE)
ENDING = (signal.SIGTERM, signal.SIGHUP)  # a terminal that closes ends what ran on it
_FILE_HINT = "check that it is still there, and its permissions"
TRACEBACK_HINT = "run it again with --debug for the traceback"


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP, raised where the program was; handled wherever Ctrl-C is."""


class Stopped(LlmcliError):
    """Interrupted (exit 130) or terminated (143). `reported`: stdout already has the document.

    `where`: what was cut short, which is said on stderr even where that is no terminal.
    """

    kind = "interrupted"

    def __init__(self, cause: BaseException, *, reported: bool = False, where: str = "") -> None:
        terminated = isinstance(cause, Terminated)
        super().__init__(("terminated" if terminated else "interrupted") + where)
        self.where = where
        self.code = 143 if terminated else 130
        self.reported = reported


class Signals:
    """SIGINT, SIGTERM and SIGHUP raise where the program is; `received` remembers the first.

    The exception can get lost on its way: raised in a callback of the import system it is
    printed and ignored, and libraries turn it into another one. So imports are `abrupt`: the
    process ends on the spot. Elsewhere `check` raises again, and `cause` finds the reason of
    whatever arrived. A second signal within a second is the same one (`timeout` signals the
    process and its group), but for SIGTERM or SIGHUP after SIGINT; a later one ends the process at
    once.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self.telling = False  # how the run ended; there is nothing left to interrupt
        self.over = False
        self._argv: Sequence[str] = ()
        self._abrupt = self._held = False
        self._when = 0.0

    def install(self, argv: Sequence[str]) -> None:
        """Takes the signals over, except where the parent had them ignored (`nohup`)."""
        self.received, self.telling, self.over = None, False, False
        self._argv, self._abrupt, self._held = argv, False, False
        for number in (signal.SIGINT, *ENDING):
            try:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    signal.signal(number, self._handle)
            except ValueError:  # not the main thread: an embedder's own affair
                return

    @contextmanager
    def abrupt(self) -> Iterator[None]:
        """For imports: nothing has been written yet that would have to be kept or tidied up."""
        self._abrupt = True
        try:
            yield
        finally:
            self._abrupt = False

    @contextmanager
    def held(self) -> Iterator[None]:
        """Ctrl-C waits for the end of what must be written whole; a second one does not."""
        self._held = True
        try:
            yield
        finally:
            self._held = False
        self.check()

    def check(self) -> None:
        """Raises KeyboardInterrupt or Terminated where a signal came and its exception got lost."""
        if self.received is not None:
            raise self._exception()

    def forget(self) -> None:
        """After a Ctrl-C that ended one thing and not the run. No other signal is forgotten."""
        self.check_terminated()
        self.received = None

    def check_terminated(self) -> None:
        """Raises Terminated where that is what came."""
        if self.received in ENDING:
            raise Terminated

    def stopped(self, *, reported: bool, where: str) -> Stopped:
        """The end of what was cut short and gave back what it had: by Ctrl-C, or by the signal."""
        cause = KeyboardInterrupt() if self.received is None else self._exception()
        return Stopped(cause, reported=reported, where=where)

    def cause(self, exception: BaseException) -> BaseException:
        """The interruption behind `exception`, where there was one, else `exception`."""
        if self.received is None or isinstance(exception, LlmcliError | KeyboardInterrupt):
            return exception
        return self._exception()

    def _exception(self) -> KeyboardInterrupt:
        return KeyboardInterrupt() if self.received == signal.SIGINT else Terminated()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.over or (self.received is not None and now - self._when > 1.0):
            _end(128 + number)
        more = self.received == signal.SIGINT and number in ENDING and not self.telling
        if self.received is not None and not more:
            return
        if self.telling:
            _end(128 + number)
        self.received, self._when = number, now
        if self._held and number == signal.SIGINT:
            return
        if self._abrupt:
            _end(_report(self._exception(), self._argv))
        raise self._exception()


SIGNALS = Signals()


def _end(code: int) -> NoReturn:
    """Ends the process where it stands."""
    KEYS.restore()
    os._exit(code)


def run(action: Callable[[list[str]], None], argv: Sequence[str]) -> int:
    """Runs `action(argv)` and returns the process's exit code; nothing escapes."""
    try:
        SIGNALS.install(argv)
        STDOUT.document = STDOUT.line_open = False
        escape_unencodable(sys.stdout)
        escape_unencodable(sys.stderr)
        action(list(argv))
        if sys.stdout is not None:
            sys.stdout.flush()
        return 0
    except BaseException as exception:
        SIGNALS.telling = True
        return _report(SIGNALS.cause(exception), argv)
    finally:
        SIGNALS.over = True  # nothing is left to tell: Ctrl-C while Python takes itself down
        KEYS.restore()
        detach(sys.stdout)
        detach(sys.stderr)


def _report(exception: BaseException, argv: Sequence[str]) -> int:
    """Tells the user what happened, on stderr and with `--json` on stdout; the exit code."""
    if type(exception).__name__ == "Exit" and hasattr(exception, "exit_code"):
        return int(exception.exit_code)
    if isinstance(exception, BrokenPipeError):
        return 0
    if isinstance(exception, SystemExit):
        return exception.code if isinstance(exception.code, int) else 1
    error = as_error(exception)
    if isinstance(error, UsageError) and error.hint is None:
        words = argv[:2] if list(argv[:2]) == ["bench", "compare"] else argv[:1]
        error.hint = f"see `{' '.join(['llmcli', *words])} --help`"
    flags = argv[: argv.index("--")] if "--" in argv else argv
    json = "--json" in flags or "--stream-json" in flags
    if isinstance(error, Stopped):
        terminal = sys.stderr is not None and not sys.stderr.closed and sys.stderr.isatty()
        if terminal:  # the `^C` and an unfinished line of ours go
            erase_line()
        if error.where or (terminal and not json):
            tell(error.message)
    else:
        if "--debug" in flags:
            for line in "".join(traceback.format_exception(exception)).splitlines():
                tell(line)
        tell_error(error)
    if json and not STDOUT.document and not getattr(error, "reported", False):
        _write_error(error)
    return error.code


def tell_error(error: LlmcliError) -> None:
    """Prints an error and its hint on stderr, a line each."""
    tell(f"error: {error.message}")
    if error.hint:
        tell(f"hint: {error.hint}")


def as_error(exception: BaseException) -> LlmcliError:
    """The error that the user is shown for any exception."""
    if isinstance(exception, LlmcliError):
        return exception
    if isinstance(exception, KeyboardInterrupt):
        return Stopped(exception)
    hint = "use a smaller model or --context-length; `llmcli info` says what fits here"
    if (found := as_out_of_memory(exception, hint=hint)) is not None:
        return found
    if (refused := as_system_error(exception)) is not None:
        return refused
    name = type(exception).__name__
    return LlmcliError(f"internal error: {name}: {first_line(exception)}", hint=TRACEBACK_HINT)


def as_system_error(exception: BaseException) -> LlmcliError | None:
    """The error for what the system lacks, or refuses to do with a file; None for any other."""
    if (lacking := as_lacking(exception)) is not None:
        return lacking
    if isinstance(exception, OSError) and exception.errno is not None:
        reason = os.strerror(exception.errno).lower()
        place = f"`{exception.filename}`" if exception.filename else ""
        if exception.errno in _UNWRITABLE:
            return WriteFailed(f"could not write {place or 'the output'}: {reason}")
        if place:
            return LlmcliError(f"{place}: {reason}", hint=_FILE_HINT)
    return None


def tell(line: str) -> None:
    """One message on stderr, control characters spelled out; silent where stderr is gone.

    On a terminal its lines break between words, elsewhere it is one line.
    """
    from llmcli.ui.theme import one_line

    try:
        if sys.stderr is not None:
            line = one_line(line)
            if sys.stderr.isatty() and not line.startswith(" "):  # a traceback's lines stay
                line = wrapped(line, columns(sys.stderr, os.environ))
            begin_line()
            print(line, file=sys.stderr, flush=True)
    except (OSError, ValueError):
        pass


def _write_error(error: LlmcliError) -> None:
    import json

    from llmcli.ui.theme import encodable

    message, hint = encodable(error.message), error.hint and encodable(error.hint)
    body = {"code": error.code, "kind": error.kind, "message": message, "hint": hint}
    document = {"schema": "llmcli.error/1", "error": body}
    try:
        if sys.stdout is not None:
            print(json.dumps(document), flush=True)
    except OSError:  # the pipe is closed or the disk full: the exit code still tells
        pass

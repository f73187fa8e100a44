"""What a command writes and where: results on stdout, everything else on stderr.

One door for stdout: whatever goes wrong there (closed pipe, full disk) is the same everywhere.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path, PurePath
from shutil import get_terminal_size, which
from typing import TYPE_CHECKING, Any, Literal, TextIO

from llmcli.errors import CheckFailed
from llmcli.kernels import native
from llmcli.records.document import ViewCheck, checks_document, members
from llmcli.shell import streams
from llmcli.shell.exits import tell
from llmcli.shell.files import open_file, whole_file, written
from llmcli.shell.options import OutputOptions, PagedOutputOptions, ViewOutputOptions
from llmcli.shell.streams import (
    STDOUT,
    begin_line,
    change_modes,
    columns,
    modes_of,
    to_devnull,
)
from llmcli.ui.theme import encodable

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from llmcli.records.machine import Environment

UNLIMITED = 10_000
EXPLAIN = "`llmcli explain` finds the formula that does not hold"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportFile:
    """A file that a view also writes: `write` is given the JSON document.

    `holds`: what it contains, in words. `open`: whether it is shown at once.
    """

    path: str
    holds: str
    write: Callable[[Mapping[str, Any]], None]
    open: bool = False


@dataclasses.dataclass(frozen=True)
class Screen:
    """What a stream can do: `animate` only on a real terminal, `colour` also when forced."""

    terminal: bool
    animate: bool
    colour: bool
    width: int = UNLIMITED  # columns; in a pipe as many as needed where nothing bounds them

    @classmethod
    def of(cls, stream: TextIO | None, environ: Mapping[str, str]) -> Screen:
        """NO_COLOR wins over FORCE_COLOR (not empty, not `0`); TERM=dumb is plain."""
        terminal = stream is not None and stream.isatty()
        smart = environ.get("TERM", "") != "dumb"
        forced = environ.get("FORCE_COLOR", "0") not in ("", "0")
        colour = (terminal or forced) and smart and not environ.get("NO_COLOR")
        return cls(terminal, terminal and smart, colour, columns(stream, environ) or UNLIMITED)


class Output:
    """The streams of one command, whose name is in the schema of its JSON documents."""

    def __init__(self, command: str, options: OutputOptions) -> None:
        self.command = command
        self.json = options.json
        self.quiet = options.quiet
        self.checks = isinstance(options, ViewOutputOptions) and options.checks
        self.pager = isinstance(options, PagedOutputOptions) and not options.no_pager
        self._begun = False  # a stream of documents, the first of which is written
        self.fit()
        self.erase: Callable[[], None] | None = None  # takes back a bar that stands on stderr
        native.TRITON_STATE.warn = self.note

    def fit(self) -> None:
        """Takes the terminal as it is now: it may have another width than before."""
        self.out = Screen.of(sys.stdout, os.environ)
        self.err = Screen.of(sys.stderr, os.environ)

    def write(self, text: str, *, flush: bool = True) -> None:
        """Writes to stdout. Raises BrokenPipeError if the reader is gone, else WriteFailed."""
        streams.write(text, flush=flush)

    def note(self, message: str) -> None:
        """A line on stderr, `note: …`; not with `--quiet`."""
        if not self.quiet:
            if self.erase is not None:
                self.erase()
            tell(f"note: {message}")

    def show(self, *renderables: RenderableType, paged: bool = False) -> None:
        """Renders to stdout: as wide as the terminal, as wide as it needs in a pipe or file.

        `paged`: through the pager where it is taller than the terminal.
        """
        self.print(self._rendered(self.out, renderables), paged=paged)

    def print(self, text: str, *, paged: bool = False) -> None:
        """Writes a whole result; `paged` as in `show`."""
        # the shell's prompt comes below it
        tall = paged and self.out.animate and text.count("\n") >= get_terminal_size().lines
        if tall and page(text):
            return
        with drop_on_interrupt():
            self.write(text)

    def present(
        self,
        view: Callable[[], RenderableType],
        body: Mapping[str, Any],
        *,
        model: Mapping[str, Any] | None = None,
        environment: Environment | None = None,
        checks: Sequence[ViewCheck] = (),
        file: ExportFile | None = None,
        hint: str = EXPLAIN,
    ) -> None:
        """The end of a command: its file, its view or JSON document, and what the checks say.

        `body` is the document's, to which `checks` and `ok` (unless it has a false one) are added
        where there are any; `environment`: as it is now, unless given. The file is written first,
        whole or not at all. A view that is taller than the terminal goes through the pager. Where
        nothing can open the file, a note says so.
        Raises WriteFailed, and CheckFailed with `hint` where a check fails.
        """
        if checks:
            ok = all(check.ok for check in checks) and body.get("ok", True)
            body = {**body, "checks": checks_document(checks), "ok": ok}
        unopened = ""  # what is wrong with opening it is said below the result
        if file is not None:
            file.write(self.envelope(body, model=model, environment=environment))
            unopened = open_file(file.path) if file.open else ""
        if self.json:
            self.document(body, model=model, environment=environment)
        else:
            from rich.text import Text

            from llmcli.ui.layout import render_checks

            ending = [Text(), render_checks(checks, full=self.checks)] if checks else []
            self.show(view(), *ending, paged=self.pager)
        if file is not None:
            self.note(written(file.path, file.holds))
        if unopened:
            self.note(unopened)
        require(checks, hint)

    def aside(self, *renderables: RenderableType) -> None:
        """Renders to stderr."""
        if sys.stderr is not None:
            try:
                begin_line()
                sys.stderr.write(self._rendered(self.err, renderables))
                sys.stderr.flush()
            except OSError:
                pass

    def document(
        self,
        body: Mapping[str, Any],
        *,
        model: Mapping[str, Any] | None = None,
        environment: Environment | None = None,
        lines: bool = False,
    ) -> None:
        """Writes one JSON document; `lines`: on one line, as one of a stream.

        Of a stream the first one alone has `model` and `environment`.
        """
        indent = 2 if self.out.terminal and not lines else None
        whole = self.envelope(body, model=model, environment=environment)
        if self._begun:
            del whole["model"], whole["environment"]
        self._begun = lines
        # in pieces: a whole document's text may need more memory than its values
        pieces = json_pieces(whole) if indent is None else [dumps(whole, indent=indent)]
        STDOUT.document = True
        with drop_on_interrupt():
            for piece in pieces:
                self.write(piece, flush=False)
            self.write("\n")
        STDOUT.document = not lines

    def envelope(
        self,
        body: Mapping[str, Any],
        *,
        model: Mapping[str, Any] | None,
        environment: Environment | None,
    ) -> dict[str, Any]:
        """The document that `document` writes."""
        from llmcli.measure import machine

        return {
            "schema": f"llmcli.{self.command}/1",
            "model": model,
            "environment": environment or machine.environment(),
            **body,
        }

    def _rendered(self, screen: Screen, renderables: tuple[RenderableType, ...]) -> str:
        console = make_console(screen)
        with console.capture() as capture:
            for renderable in renderables:
                console.print(renderable, crop=False)
        text = capture.get()
        return "\n".join(line.rstrip() for line in text.split("\n")) if not screen.colour else text


def require(checks: Iterable[ViewCheck], hint: str) -> None:
    """Raises CheckFailed for the first check that fails; the view has said so."""
    wrong = next((check for check in checks if not check.ok), None)
    if wrong is None:
        return
    number = f": {wrong.value:.2g}, allowed {wrong.tolerance:.2g}" if wrong.tolerance else ""
    where = f", worst at `{wrong.where}`" if wrong.where else ""
    raise CheckFailed(f"check failed: {wrong.words}{number}{where}", hint=hint)


@contextmanager
def drop_on_interrupt() -> Iterator[None]:
    """For the last output of a run: Ctrl-C drops the rest instead of waiting for a reader."""
    try:
        yield
    except KeyboardInterrupt:
        to_devnull(sys.stdout)
        raise


def write_file(path: str, data: bytes) -> None:
    """Writes a file that the user asked for; raises WriteFailed and leaves no half of one."""
    with whole_file(path) as file:
        file.write(data)


def write_document(path: str, document: Mapping[str, Any]) -> None:
    """Writes JSON to a file, arrays row by row: the text of a whole matrix is never in memory.

    Numbers of float32 arrays have nine digits, which is all they have. Raises WriteFailed.
    """
    with whole_file(path) as file:
        for piece in json_pieces(document):
            file.write(piece.encode())
        file.write(b"\n")


def make_console(screen: Screen, *, live: bool = False) -> Console:
    """A rich console that never guesses: colour and width are decided here.

    `live`: for what is drawn again and again, which NO_COLOR does not forbid.
    """
    from rich.console import Console

    names: tuple[Literal["truecolor", "256", "standard"], ...] = ("standard", "256", "truecolor")
    return Console(
        width=screen.width,
        force_terminal=screen.animate if live else screen.colour,
        no_color=not screen.colour,
        color_system=names[colour_system() - 1] if screen.colour else None,
        highlight=False,
        markup=False,
        emoji=False,
        legacy_windows=False,
    )


def colour_system() -> Any:
    """rich's `ColorSystem` of this terminal."""
    from rich.color import ColorSystem

    if os.environ.get("COLORTERM") in ("truecolor", "24bit"):
        return ColorSystem.TRUECOLOR
    return ColorSystem.EIGHT_BIT if "256" in os.environ.get("TERM", "") else ColorSystem.STANDARD


def dumps(value: Any, *, indent: int | None = None) -> str:
    """ASCII JSON of dataclasses, mappings, sequences and arrays; NaN and infinity become null."""
    return json.dumps(jsonable(value), indent=indent, allow_nan=False)


def json_pieces(value: Any) -> Iterator[str]:
    """The text of `dumps`, in pieces: a row of an array at a time."""
    if isinstance(value, Mapping) and any(
        one is not None and not isinstance(one, str | float | int) for one in value.values()
    ):
        comma = "{"
        for key, item in value.items():
            yield f"{comma}{json.dumps(encodable(str(key)))}: "
            yield from json_pieces(item)
            comma = ", "
        yield "}"
    elif isinstance(value, list | tuple | Iterator) or getattr(value, "ndim", 0) > 1:
        comma = "["
        for item in value:
            yield comma
            yield from json_pieces(item)
            comma = ", "
        yield "]" if comma == ", " else "[]"
    elif getattr(value, "ndim", 0) == 1 and str(value.dtype) == "float32":
        row = value.tolist()
        numbers = (f"{number:.9g}" if math.isfinite(number) else "null" for number in row)
        yield f"[{', '.join(numbers)}]"
    else:
        yield json.dumps(jsonable(value), allow_nan=False)


def jsonable(value: Any) -> Any:
    """`value` in JSON's own types, with texts that UTF-8 can have."""
    if isinstance(value, str):
        return encodable(value)
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {encodable(str(key)): jsonable(item) for key, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {name: jsonable(item) for name, item in members(value).items()}
    if isinstance(value, PurePath):
        return encodable(str(value))
    listed: Callable[[], Any] | None = getattr(value, "tolist", None)
    if listed is not None:
        return jsonable(listed())
    return [jsonable(item) for item in value]


def page(text: str) -> bool:
    """Shows `text` in the user's pager and waits for its end; False where it could not be started.

    It is `$LLMCLI_PAGER`, else `$PAGER`, else less; none where that is empty, `cat` or not there.
    Unless `$LESS` is set, less quits if all fits (F), passes colours on (R) and leaves the text on
    the screen (X). Ctrl-C is the pager's while it runs; what else ends this process ends it, too.
    """
    chosen = os.environ.get("LLMCLI_PAGER", os.environ.get("PAGER", "less"))
    try:
        command = shlex.split(chosen)
    except ValueError:  # a quote without its other half
        return False
    if command in ([], ["cat"]) or which(command[0]) is None:
        return False
    environ = {"LESS": "FRX", **os.environ}
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    sys.stdout.flush()
    modes = modes_of(sys.stdout)
    child = None
    before = signal.signal(signal.SIGINT, lambda *_: None)  # a pager would inherit SIG_IGN
    try:
        child = subprocess.Popen(command, stdin=subprocess.PIPE, env=environ)
        child.communicate(text.encode(encoding, "backslashreplace"))  # an early quit is no error
    except OSError:
        return False
    except BaseException:  # a signal
        if child is not None:
            _end(child)
            if modes is not None:
                change_modes(sys.stdout, modes)
        raise
    finally:
        signal.signal(signal.SIGINT, before)
    return True


def _end(child: subprocess.Popen[bytes]) -> None:
    """Ends a pager, and the one that it has started itself (`bat` and `delta` start less)."""
    family = [child.pid]
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):  # nothing on other systems
        with suppress(OSError):
            # `PID (NAME) STATE PARENT …`, and a name can have anything in it
            stat = path.read_bytes().rpartition(b")")[2]
            parents[int(path.parent.name)] = int(stat.split()[1])
    for one in family:
        family += [pid for pid, parent in parents.items() if parent == one]
    for number in (signal.SIGTERM, signal.SIGKILL):
        end = time.monotonic() + 0.5
        for pid in family:
            _signal(pid, number)
        while time.monotonic() < end:
            child.poll()
            if not any(_signal(pid, 0) for pid in family):
                return
            time.sleep(0.01)


def _signal(pid: int, number: int) -> bool:
    """Sends a signal (0: none); returns whether the process exists."""
    try:
        os.kill(pid, number)
        return True
    except OSError:
        return False

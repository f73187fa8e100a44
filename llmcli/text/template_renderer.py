"""Renders chat templates in a separate process, which can be killed at any moment.

A new interpreter instead of a fork: it starts in about the time of importing Jinja, works on macOS
and in programs with threads or PyTorch, and its memory can be limited. The other end is
`llmcli.text.template_server`.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from llmcli.checkpoints.files import why
from llmcli.errors import LlmcliError, as_lacking

MAX_OUTPUT = 1 << 24  # characters, plus 8 per character of the messages
MAX_SECONDS = 2.0  # plus 1 per million characters; real templates: milliseconds
MAX_MEMORY = 512 << 20  # bytes, plus 64 per character; Python and Jinja take 20 MiB
MAX_WAIT = 15  # wall seconds per CPU second: the machine may be busy

SERVER = Path(__file__).with_name("template_server.py")


class RenderError(Exception):
    """The reason why a template gave no text."""


@dataclass(frozen=True)
class TemplateLimits:
    """Limits of one rendering: CPU seconds, bytes of memory, output characters."""

    seconds: float
    memory: int
    characters: int

    @classmethod
    def of(cls, content: int) -> TemplateLimits:
        """The limits for messages with `content` characters in total."""
        return cls(
            seconds=MAX_SECONDS + content / 1e6,
            memory=MAX_MEMORY + 64 * content,
            characters=MAX_OUTPUT + 8 * content,
        )


class TemplateRenderer:
    """A process that renders templates one at a time, for all threads.

    `with renderer:` starts and ends it; enter early so that it starts while other things load. A
    render outside of this uses a new process. A failed process is not reused.
    """

    def __init__(self, server: Path = SERVER) -> None:
        """`server`: the script of the process."""
        self._server = server
        self._lock = threading.RLock()
        self._users = 0
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> TemplateRenderer:
        with self._lock:
            self._started()
            self._users += 1
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                self._kill()

    def render(
        self, source: str, variables: Mapping[str, Any] | None, limits: TemplateLimits
    ) -> str:
        """Render the template `source` with `variables` (JSON values).

        With None: the names that the template looks up, one per line. Raises RenderError if the
        template fails or exceeds a limit, LlmcliError if no process can be started.
        """
        request = {"source": source, "variables": variables, **asdict(limits)}
        with self, self._lock:
            try:
                return self._checked(self._answer(_line(request), limits), limits)
            except BaseException:  # also Ctrl-C: stop the rendering
                self._kill()
                raise

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is not None:
            self._kill()  # it was ended while idle
        if self._process is None:
            try:
                self._process = subprocess.Popen(
                    # without `site`: faster, and the path is set by us
                    [sys.executable, "-S", "-s", "-P", str(self._server)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    bufsize=0,
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
                    process_group=0,  # a terminal's Ctrl-C goes to this process only
                )
            except OSError as error:
                raise as_lacking(error) or LlmcliError(
                    f"the process that renders chat templates cannot be started: {why(error)}",
                    hint="go without the template: `generate` has `--raw` for that",
                ) from error
            for pipe in (self._process.stdin, self._process.stdout):
                assert pipe is not None
                os.set_blocking(pipe.fileno(), False)
        return self._process

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with process:  # closes the pipes and waits
                process.kill()

    def _answer(self, request: bytes, limits: TemplateLimits) -> bytes:
        """Send the request; returns the line received, not yet validated."""
        process = self._started()
        stdin, stdout = process.stdin, process.stdout
        assert stdin is not None
        assert stdout is not None
        end = time.monotonic() + MAX_WAIT * limits.seconds
        most = 6 * limits.characters + 4096  # bytes; JSON takes up to 6 per character
        unsent, answer = memoryview(request), bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(stdin, selectors.EVENT_WRITE)
            selector.register(stdout, selectors.EVENT_READ)
            while not answer.endswith(b"\n"):
                ready = selector.select(max(0.0, end - time.monotonic()))
                if not ready and time.monotonic() >= end:
                    raise RenderError(f"it takes more than {MAX_WAIT * limits.seconds:.3g} seconds")
                for key, _ in ready:
                    if key.fileobj is stdin:
                        try:
                            unsent = unsent[os.write(stdin.fileno(), unsent) :]
                        except BrokenPipeError:
                            raise self._ended(process, limits) from None
                        if not unsent:
                            selector.unregister(stdin)
                        continue
                    chunk = os.read(stdout.fileno(), 1 << 16)
                    if not chunk:
                        raise self._ended(process, limits)
                    answer += chunk
                    if len(answer) > most:
                        raise RenderError("its process answers with too much")
        return bytes(answer)

    @staticmethod
    def _ended(process: subprocess.Popen[bytes], limits: TemplateLimits) -> Exception:
        """The error for a process that has closed its pipes."""
        try:
            code = process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            return RenderError("its process gives no answer")
        if code == -signal.SIGPROF:
            return RenderError(f"it takes more than {limits.seconds:.3g} seconds of processor time")
        if code < 0:
            return RenderError(f"its process ended with signal {-code} ({signal.strsignal(-code)})")
        return LlmcliError(
            f"the process that renders chat templates ended with exit code {code}",
            hint="reinstall llmcli: a package that it needs may be broken",
        )

    @staticmethod
    def _checked(line: bytes, limits: TemplateLimits) -> str:
        """The validated text of an answer, which is untrusted if a template escapes the sandbox."""
        try:
            answer = json.loads(line.decode("utf-8", "surrogatepass"))
        except (ValueError, RecursionError):
            answer = None
        if isinstance(answer, dict):
            text, error = answer.get("text"), answer.get("error")
            if isinstance(text, str) and len(text) <= limits.characters:
                return text
            if isinstance(error, str):
                raise RenderError(error)
        raise RenderError("its process gives an answer that is not valid")


def _line(request: Mapping[str, Any]) -> bytes:
    return json.dumps(request, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"


RENDERER = TemplateRenderer()

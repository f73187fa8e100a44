"""Calls to the hub: whether it answers, bytes of its files, and its errors in our words.

All go through huggingface_hub's session, which knows $HF_ENDPOINT, $HF_TOKEN and proxies. What
the library does not bound is bounded here: a server is a stranger, as a file is.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from llmcli.checkpoints.files import shown
from llmcli.checkpoints.hub.errors import as_ours, no_client
from llmcli.checkpoints.hub.library import check_settings
from llmcli.checkpoints.names import HubId
from llmcli.errors import CheckpointError, LlmcliError, NetworkError

_REACH_S = 3.0
ANSWER_S = 10.0  # for everything after the first request: a long listing takes its time
_MAX_ERROR_BYTES = 100_000
_WHOLE_S = 30.0  # for an answer from its first byte to its last, and
_SLOWEST = 20_000  # for a part of a file a second more for each so many bytes


def reachable() -> bool:
    """Whether the hub ($HF_ENDPOINT) answers one request within three seconds. Never raises.

    Asked in a thread: no timeout of a connection bounds how long its name is looked up.
    False also where nothing can be asked: `explained` says why.
    """
    try:
        prepare()
    except LlmcliError:
        return False
    from huggingface_hub import constants, get_session

    over, answers = threading.Event(), []

    def ask() -> None:
        with contextlib.suppress(Exception):
            get_session().head(constants.ENDPOINT, timeout=_REACH_S, follow_redirects=False)
            answers.append(True)
        over.set()

    threading.Thread(target=ask, daemon=True).start()
    over.wait(_REACH_S)
    return bool(answers)


@contextlib.contextmanager
def explained(model: HubId) -> Iterator[None]:
    """Inside, errors of the hub, the network and the hub's cache become ours.

    ModelNotFound, NetworkError, CheckpointError or WriteFailed, with a hint for each.
    """
    prepare()
    try:
        yield
    except LlmcliError:
        raise
    except (OSError, ValueError, RuntimeError, EOFError) as error:
        raise as_ours(model, error) from None
    except Exception as error:  # of the library's client, whose errors have a root of their own
        from huggingface_hub import errors

        if not isinstance(error, errors.HTTPError | errors.XetDownloadError):  # type: ignore[attr-defined]
            raise
        raise as_ours(model, error) from None


def deadline(size: int) -> Callable[[], None]:
    """A function to call for each piece of an answer of `size` bytes, from now on.

    It raises NetworkError once the whole takes too long: a timeout of a connection bounds the
    wait for the next byte only.
    """
    end = time.monotonic() + _WHOLE_S + size / _SLOWEST

    def late() -> None:
        if time.monotonic() > end:
            raise NetworkError("the hub's answer does not come to an end", hint="try again later")

    return late


def bytes_of(model: HubId, name: str, commit: str, start: int, stop: int) -> bytes:
    """Bytes [start, stop) of a file, fewer where it ends before; for use inside `explained`.

    A server that knows no ranges sends everything: what is not asked for is dropped.
    """
    from huggingface_hub import get_session, hf_hub_url, hf_raise_for_status
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    headers = build_hf_headers() | {
        "Range": f"bytes={start}-{stop - 1}",
        "Accept-Encoding": "identity",
    }
    url, data = hf_hub_url(model.repository, name, revision=commit), bytearray()
    late = deadline(stop - start)
    with get_session().stream(
        "GET", url, headers=headers, timeout=ANSWER_S, follow_redirects=True
    ) as answer:
        hf_raise_for_status(answer)
        skip = start if answer.status_code == 200 else 0
        for chunk in answer.iter_bytes():
            late()
            data += chunk[skip:]
            skip = max(0, skip - len(chunk))
            if len(data) >= stop - start:
                break
    return bytes(data[: stop - start])


@functools.cache
def prepare() -> None:
    """Sets the library up, once: quiet, and with `_guard` on every answer.

    Raises UsageError for a setting of the library's that cannot be, NetworkError for one of
    proxies or certificates.
    """
    check_settings()
    from huggingface_hub import constants, get_session, set_client_factory
    from huggingface_hub.utils import logging

    # that a line was cut is nobody's affair once it goes on
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    # what it writes at once, and what a cut line can lose: 10 MB as it comes
    constants.DOWNLOAD_CHUNK_SIZE = 1 << 20
    try:
        made = get_session()
    except Exception as error:  # whatever the client thinks of the environment
        raise no_client(error) from None
    others = [hook for hook in made.event_hooks["response"] if hook is not _guard]
    hooks = {**made.event_hooks, "response": [*others, _guard]}
    set_client_factory(lambda: type(made)(event_hooks=hooks, follow_redirects=True, timeout=None))


def _guard(answer: Any) -> None:
    """Looks at the head of every answer before the library does.

    Raises NetworkError for what the library would ask again in half a minute or, if the server
    says so, tomorrow; CheckpointError for an ETag that leads out of the cache, where it becomes
    the name of a file.
    """
    status = answer.status_code
    if status == 429 or status >= 500:
        wait = answer.headers.get("retry-after", "")
        later = f", and asks to wait {wait} s" if wait.isascii() and wait.isdigit() else ""
        raise NetworkError(
            f"the hub answers with an error ({status} {shown(answer.reason_phrase)}){shown(later)}",
            hint="try again later; with a login (`hf auth login`) the hub allows more requests",
        )
    for header in ("etag", "x-linked-etag"):
        tag = answer.headers.get(header, "").lstrip("W/").strip('"')
        if answer.request.method == "HEAD" and (set(tag) & set("/\\\0") or tag in (".", "..")):
            raise CheckpointError(
                f"the hub names a file `{shown(tag)}`, which is no name",
                hint="check HF_ENDPOINT: what answers is no hub",
            )
    answer.stream = _bounded()(answer.stream, _MAX_ERROR_BYTES if status >= 400 else None)


@functools.cache
def _bounded() -> type[Any]:
    """The class of bodies that end: of the client library, whichever this huggingface_hub uses."""
    from huggingface_hub import get_session

    client = importlib.import_module(type(get_session()).__module__.partition(".")[0])

    class Bounded(client.SyncByteStream):  # type: ignore[name-defined, misc]
        """A body of at most `limit` bytes. A connection that was reset counts as one that was
        closed: after that the library continues where it was.
        """

        def __init__(self, stream: Any, limit: int | None) -> None:
            self._stream, self._limit = stream, limit

        def __iter__(self) -> Iterator[bytes]:
            done = 0
            try:
                for chunk in self._stream:
                    done += len(chunk)
                    yield chunk
                    if self._limit is not None and done > self._limit:
                        return
            except client.ReadError as error:
                raise client.RemoteProtocolError(str(error)) from error

        def close(self) -> None:
            self._stream.close()

    return Bounded

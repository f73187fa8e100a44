"""Calls to the hub: reachability, bytes of files, limits, and errors with their cause and a hint.

All go through huggingface_hub's session, which knows $HF_ENDPOINT, $HF_TOKEN and proxies. Servers
are untrusted: sizes and times that the library does not limit are limited here.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import re
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from typing import Any

from llmcli.checkpoints.files import MAX_JSON_BYTES, is_full, shown, why
from llmcli.checkpoints.hub.library import check_settings
from llmcli.checkpoints.names import HubId
from llmcli.errors import (
    CheckpointError,
    LlmcliError,
    ModelNotFound,
    NetworkError,
    WriteFailed,
    first_line,
)

_REACH_S = 3.0
ANSWER_S = 10.0  # for requests after the first; a long listing takes time
_LONGEST_TAG = 128  # SHA-256: 64; the library appends to it; file systems allow 255
_COMMITS = re.compile(r"(?<=/)[0-9a-f]{40}(?=/)")  # in the path of a file
_LEAST = 1_000  # bytes/s of a body; behind by `_patience` seconds at most

_LOGIN = "log in with `hf auth login`"
# client errors (of either client library) for answers that no hub sends
_NO_HUB = ("UnsupportedProtocol", "TooManyRedirects", "InvalidURL", "DecodingError")


def reachable() -> bool:
    """Whether the hub ($HF_ENDPOINT) answers one request within three seconds. Never raises.

    Also False if no request can be made: `explained` reports why.
    """
    try:
        prepare()
        from huggingface_hub import constants, get_session

        within: Any = {"timeout": _REACH_S, "extensions": {"patience": _REACH_S}}
        get_session().head(constants.ENDPOINT, follow_redirects=False, **within)
    except Exception:  # of the client, whichever library it is from
        return False
    return True


@contextlib.contextmanager
def explained(model: HubId) -> Iterator[None]:
    """Translate errors of the hub, the network and the hub cache inside the context.

    Raises ModelNotFound, NetworkError, CheckpointError or WriteFailed, each with a hint.
    """
    prepare()
    try:
        yield
    except Exception as error:  # the library's client has its own exception classes
        from huggingface_hub import errors

        of_library = (errors.HTTPError, errors.XetDownloadError)  # type: ignore[attr-defined]
        known = (OSError, ValueError, RuntimeError, EOFError, *of_library)
        if isinstance(error, LlmcliError) or not isinstance(error, known):
            raise
        raise as_ours(model, error) from None


def _endless() -> NetworkError:
    return NetworkError("the hub's answer does not end", hint="try again later")


def _patience(request: Any) -> float:
    """Seconds for the head of an answer: `patience` of the request, or 3 × its read timeout."""
    read = request.extensions.get("timeout", {}).get("read") or ANSWER_S
    return float(request.extensions.get("patience", 3 * read))


def bytes_of(model: HubId, name: str, commit: str, start: int, stop: int) -> bytes:
    """Bytes [start, stop) of a file, fewer if it ends before; for use inside `explained`.

    Surplus bytes of a server without range requests are dropped.
    """
    from huggingface_hub import get_session, hf_hub_url, hf_raise_for_status
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    headers = build_hf_headers() | {
        "Range": f"bytes={start}-{stop - 1}",
        "Accept-Encoding": "identity",
    }
    url, data = hf_hub_url(model.repository, name, revision=commit), bytearray()
    with get_session().stream(
        "GET", url, headers=headers, timeout=ANSWER_S, follow_redirects=True
    ) as answer:
        hf_raise_for_status(answer)
        skip = start if answer.status_code == 200 else 0
        for chunk in answer.iter_bytes():
            data += chunk[skip:]
            skip = max(0, skip - len(chunk))
            if len(data) >= stop - start:
                break
    return bytes(data[: stop - start])


@functools.cache
def prepare() -> None:
    """Configure the library once: quiet, `_guard` on every answer, a limit for every wait.

    Raises UsageError for an invalid library setting, NetworkError for proxies or certificates.
    """
    check_settings()
    from huggingface_hub import constants, get_session, set_client_factory
    from huggingface_hub.utils import logging

    # resumed connections need no warning
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    # bytes per write, lost if the connection breaks; the default is 10 MB
    constants.DOWNLOAD_CHUNK_SIZE = 1 << 20
    try:
        made = get_session()
    except Exception as error:  # any client error about the environment
        raise no_client(error) from None
    others = [hook for hook in made.event_hooks["response"] if hook is not _guard]
    hooks = {**made.event_hooks, "response": [*others, _guard]}

    def client() -> Any:
        new: Any = type(made)(event_hooks=hooks, follow_redirects=True, timeout=None)
        new.send = _hasty(new.send)
        return new

    set_client_factory(client)


def _hasty(send: Callable[..., Any]) -> Callable[..., Any]:
    """A client's `send` that raises NetworkError unless it returns in time.

    That is with the head of an answer, or all of it if it is read into memory: `whole`, a note on
    the request, and so on those that redirections make of it.

    The client's timeout is per read and not for name resolution: headers could continue forever.
    """

    def hasty(request: Any, **more: Any) -> Any:
        answer: Future[Any] = Future()
        request.extensions["whole"] = not more.get("stream", False)

        def ask() -> None:
            try:
                answer.set_result(send(request, **more))
            except BaseException as error:
                answer.set_exception(error)

        threading.Thread(target=ask, daemon=True).start()
        parts = 10 * [_patience(request) / 10]  # a process that is stopped loses only one of them
        if not any(wait([answer], part).done for part in parts):
            raise _endless()
        return answer.result()

    return hasty


def _guard(answer: Any) -> None:
    """Check the head of every answer before the library does.

    Raises NetworkError for statuses that the library would retry after 30 s, or as late as the
    server says. Raises CheckpointError for an ETag that is not a valid file name, since it becomes
    one in the cache (an empty one would replace the folder of blobs), and for a commit other than
    the requested one, which the library would record permanently.
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
        if answer.request.method != "HEAD" or header not in answer.headers:
            continue
        tag = answer.headers[header].lstrip("W/").strip('"')
        if set(tag) & set("/\\\0") or tag in ("", ".", "..") or len(tag) > _LONGEST_TAG:
            raise CheckpointError(
                f"the hub names a file with the invalid ETag `{shown(tag)}`",
                hint="check HF_ENDPOINT: the server is not a hub",
            )
    path, commit = answer.request.url.path, answer.headers.get("x-repo-commit")
    if answer.request.method == "HEAD" and commit and commit not in _COMMITS.findall(path):
        raise CheckpointError(
            f"the hub sent `{shown(path.rpartition('/')[2])}` of a different commit",
            hint="run the command again: it may have changed just now",
        )
    # an encoded body may be endless and decode to nothing
    encoded, whole = "content-encoding" in answer.headers, answer.request.extensions.get("whole")
    limit = MAX_JSON_BYTES if whole or encoded or status >= 300 else None
    answer.stream = _bounded()(answer, limit)


@functools.cache
def _bounded() -> type[Any]:
    """A class of bounded bodies for the client library that this huggingface_hub uses."""
    from huggingface_hub import get_session

    client = importlib.import_module(type(get_session()).__module__.partition(".")[0])

    class Bounded(client.SyncByteStream):  # type: ignore[name-defined, misc]
        """A body of at most `limit` bytes, that comes with `_LEAST` bytes/s or more.

        `_patience`: seconds that it may fall behind. Raises NetworkError if that is exceeded: the
        client's timeouts limit the wait for the next byte only. A reset connection counts as
        closed, so that the library resumes the download.
        """

        def __init__(self, answer: Any, limit: int | None) -> None:
            self._answer, self._stream, self._limit = answer, answer.stream, limit
            self._done, self._late, self._over = 0, False, threading.Event()

        def __iter__(self) -> Iterator[bytes]:
            threading.Thread(target=self._watch, daemon=True).start()
            try:
                for chunk in self._stream:
                    self._done += len(chunk)
                    yield chunk
                    if self._limit is not None and self._done > self._limit:
                        return
            except (client.ReadError, client.RemoteProtocolError) as error:
                if not self._late:
                    raise client.RemoteProtocolError(str(error)) from error
            finally:
                self._over.set()
            if self._late:
                raise _endless()

        def _watch(self) -> None:
            """Close the connection once no patience is left; a stopped process loses little."""
            patience = left = _patience(self._answer.request)
            while left > 0:
                before = self._done
                if self._over.wait(patience / 10):
                    return
                left = min(left + (self._done - before) / _LEAST, patience) - patience / 10
            connection = self._answer.extensions.get("network_stream")
            if connection is not None:
                self._late = True
                with contextlib.suppress(OSError):
                    connection.get_extra_info("socket").shutdown(socket.SHUT_RDWR)

        def close(self) -> None:
            self._over.set()
            self._stream.close()

    return Bounded


def as_ours(model: HubId, error: Exception) -> LlmcliError:
    """The error to raise for `error` of huggingface_hub, its client, or the file system.

    ModelNotFound for missing models, WriteFailed for the cache, otherwise NetworkError.
    """
    from huggingface_hub import errors, get_token

    cause = error.__cause__
    if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(cause, Exception):
        return as_ours(model, cause)
    name = shown(model.repository)
    if isinstance(error, errors.HfHubHTTPError):
        return _refused(model, error)
    if isinstance(error, errors.HFValidationError):
        return ModelNotFound(
            f"`{name}` cannot be a hub id", hint="a hub id is `org/name`, as on the model's page"
        )
    if isinstance(error, errors.OfflineModeIsEnabled):
        return NetworkError(
            f"`{name}` is not in the hub cache, and offline mode allows no download",
            hint="unset HF_HUB_OFFLINE where there is a network",
        )
    if isinstance(error, UnicodeEncodeError) and not (get_token() or "").isascii():
        return NetworkError("the hub token has invalid characters", hint="check HF_TOKEN")
    full = "No space left" in str(error)  # Xet writes files itself and reports errors as text
    if full or (isinstance(error, OSError) and _of_the_disk(error)):
        return unwritable(error if isinstance(error, OSError) else None)
    hint = "run the command again: files that are complete are kept"
    strange = type(error).__name__ in _NO_HUB or "location header" in str(error)
    if strange or isinstance(error, errors.FileMetadataError | ValueError):
        hint = "check HF_ENDPOINT and the proxy, if any: the server is not a hub"
    return NetworkError(
        f"the download of `{name}` failed: {shown(str(error) or type(error).__name__, 120)}",
        hint=hint,
    )


def unwritable(error: OSError | None, *, room: int | None = None) -> WriteFailed:
    """The error for an unwritable hub cache; None: out of space. `room`: bytes still needed."""
    from huggingface_hub import constants

    full = error is None or is_full(error)
    cause = "no space left on device" if error is None else why(error)
    free = f"free {room / 1e6:,.0f} MB there, or " if room and full else ""
    free = free or ("free some space there, or " if full else "")
    return WriteFailed(
        f"the hub cache `{shown(constants.HF_HUB_CACHE, 200)}` cannot be written: {cause}",
        hint=f"{free}set HF_HOME to a directory {'with room' if full else 'that can be written'}",
    )


def no_client(error: Exception) -> NetworkError:
    """The error for invalid proxy or certificate settings, before any connection."""
    if isinstance(error, OSError) and not isinstance(error, UnicodeError):
        cause, hint = f"the certificates cannot be read: {why(error)}", "check SSL_CERT_FILE"
    else:
        cause = f"the proxy cannot be used: {shown(first_line(error), 120)}"
        hint = "check HTTP_PROXY, HTTPS_PROXY and ALL_PROXY; socks needs `pip install socksio`"
    return NetworkError(f"no connection to the hub: {cause}", hint=hint)


def _of_the_disk(error: OSError) -> bool:
    """Whether the file system raised it: the library raises bare OSErrors for bodies too."""
    return error.errno is not None and not isinstance(error, ConnectionError | TimeoutError)


# HTTP answers, the first that applies: class or status (`-`: without a token), error, message, hint
_REFUSALS: tuple[tuple[str, type[LlmcliError], str, str], ...] = (
    ("GatedRepoError", NetworkError, "`{name}` is gated: the hub requires accepting its terms",
     "accept them on its page, then {login}"),
    ("RevisionNotFoundError", ModelNotFound, "`{name}` has no revision `{revision}` on the hub",
     "leave the revision out for the newest version"),
    ("EntryNotFoundError", ModelNotFound,
     "`{name}` does not have the file that the hub lists in it",
     "run the command again: it may have changed just now"),
    ("DisabledRepoError", NetworkError, "`{name}` is disabled on the hub", "look for a copy of it"),
    ("RepositoryNotFoundError", ModelNotFound,
     "there is no model `{name}` on the hub, or it is private",
     "check its name; for a private one {login}"),
    ("404", ModelNotFound, "no model `{name}` at the configured hub",
     "check its name, HF_ENDPOINT and the proxy, if any"),
    ("401- 403-", NetworkError, "the hub wants a login for `{name}` ({status})",
     "{login}, or set HF_TOKEN; where HF_ENDPOINT is set, check that it is a hub"),
    ("401", NetworkError, "the hub rejected the token", "correct HF_TOKEN or unset it; or {login}"),
    ("403", NetworkError, "the hub token has no read access to `{name}`",
     "grant read access to the token on the hub's settings page"),
    ("Exception", NetworkError, "the hub answers for `{name}` with an error ({status})",
     "check HF_ENDPOINT, or try again later"),
)  # fmt: skip


def _refused(model: HubId, error: Exception) -> LlmcliError:
    """The error for an HTTP answer. The hub hides private repositories: they are not found."""
    from huggingface_hub import get_token

    response = getattr(error, "response", None)
    status = response.status_code if response is not None else 0
    known = {*(one.__name__ for one in type(error).__mro__), str(status)}
    known |= set() if get_token() else {f"{status}-"}
    values = {"name": shown(model.repository), "revision": shown(model.revision), "status": status}
    kind, message, hint = next(row[1:] for row in _REFUSALS if not known.isdisjoint(row[0].split()))
    return kind(message.format(**values), hint=hint.format(login=_LOGIN))

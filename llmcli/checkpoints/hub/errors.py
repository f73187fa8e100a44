"""Translates the hub's errors: the cause and a hint."""

from __future__ import annotations

from llmcli.checkpoints.files import is_full, shown, why
from llmcli.checkpoints.names import HubId
from llmcli.errors import LlmcliError, ModelNotFound, NetworkError, WriteFailed, first_line

_LOGIN = "log in with `hf auth login`"
# client errors (of either client library) for answers that no hub sends
_NO_HUB = ("UnsupportedProtocol", "TooManyRedirects", "InvalidURL", "DecodingError")


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
        return _refused(model, name, error)
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


def _refused(model: HubId, name: str, error: Exception) -> LlmcliError:
    """The error for an HTTP answer, from the most specific class to the status."""
    from huggingface_hub import errors, get_token

    response = getattr(error, "response", None)
    status = response.status_code if response is not None else 0
    if isinstance(error, errors.GatedRepoError):
        return NetworkError(
            f"`{name}` is gated: the hub requires accepting its terms",
            hint=f"accept them on its page, then {_LOGIN}",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return ModelNotFound(
            f"`{name}` has no revision `{shown(model.revision)}` on the hub",
            hint="leave the revision out for the newest version",
        )
    if isinstance(error, errors.EntryNotFoundError):
        return ModelNotFound(
            f"`{name}` does not have the file that the hub lists in it",
            hint="run the command again: it may have changed just now",
        )
    if isinstance(error, errors.DisabledRepoError):
        return NetworkError(f"`{name}` is disabled on the hub", hint="look for a copy of it")
    if status == 404 and not isinstance(error, errors.RepositoryNotFoundError):
        return ModelNotFound(
            f"no model `{name}` at the configured hub",
            hint="check its name, HF_ENDPOINT and the proxy, if any",
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        # the hub hides private repositories from users without access
        return ModelNotFound(
            f"there is no model `{name}` on the hub, or it is private",
            hint=f"check its name; for a private one {_LOGIN}",
        )
    if status in (401, 403) and not get_token():
        return NetworkError(
            f"the hub wants a login for `{name}` ({status})",
            hint=f"{_LOGIN}, or set HF_TOKEN; where HF_ENDPOINT is set, check that it is a hub",
        )
    if status == 401:
        return NetworkError(
            "the hub rejected the token",
            hint=f"correct HF_TOKEN or unset it; or {_LOGIN}",
        )
    if status == 403:
        return NetworkError(
            f"the hub token has no read access to `{name}`",
            hint="grant read access to the token on the hub's settings page",
        )
    return NetworkError(
        f"the hub answers for `{name}` with an error ({status})",
        hint="check HF_ENDPOINT, or try again later",
    )

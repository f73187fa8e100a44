"""Errors shown to users: one line with the cause, a hint, and an exit code.

No torch. All errors caused by user input are of these types; any other exception is a bug and exits
1.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence


class LlmcliError(Exception):
    """Base of all errors shown to the user as one line.

    `message`: one lower-case sentence, with backticks around user input; `hint`: what to do next,
    by default the class's; `code`: the process's exit status; `kind`: its stable name in JSON.
    """

    code = 1
    kind = "error"
    usual_hint: str | None = None

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint or self.usual_hint


class CheckFailed(LlmcliError):
    """A check that a view prints came out red (exit 1).

    `reported`: the view is on stdout, as a JSON document too, and says so.
    """

    kind = "check_failed"
    reported = True


class WriteFailed(LlmcliError):
    """Output could not be written: full disk, no permission (exit 1)."""

    kind = "write_failed"
    usual_hint = "write to another file or directory"


class UsageError(LlmcliError):
    """An invalid option or argument (exit 2)."""

    code = 2
    kind = "usage"


class PromptTooLong(UsageError):
    """The prompt does not fit the context (exit 2)."""

    kind = "prompt_too_long"


class ModelNotFound(LlmcliError):
    """No model, file or catalog entry with this name (exit 3)."""

    code = 3
    kind = "model_not_found"


class CheckpointError(LlmcliError):
    """A checkpoint that is truncated, inconsistent, hostile, pickled or not configured (exit 4)."""

    code = 4
    kind = "checkpoint"
    usual_hint = "correct the file, or fetch or convert it again"


class UnsupportedModel(CheckpointError):
    """An unsupported architecture, tokenizer or tensor format (exit 4)."""

    kind = "unsupported"
    usual_hint = "`llmcli info --families` lists what can be run"


class WeightMismatch(CheckpointError):
    """Checkpoint tensors and model parameters do not match one to one (exit 4).

    `missing`: parameters without a tensor; `source`: the expected tensor of the first one;
    `unexpected`: checkpoint tensors that no rule matches; `misshapen`: (parameter, checkpoint
    tensor, shape expected, shape found).
    """

    kind = "weight_mismatch"

    def __init__(
        self,
        *,
        missing: Sequence[str] = (),
        source: str | None = None,
        unexpected: Sequence[str] = (),
        misshapen: Sequence[tuple[str, str, tuple[int, ...], tuple[int, ...]]] = (),
        hint: str | None = None,
    ) -> None:
        self.missing = tuple(missing)
        self.unexpected = tuple(unexpected)
        self.misshapen = tuple(misshapen)
        parts = []
        if self.missing:
            called = f" (the first would be `{source}`)" if source else ""
            parts.append(f"no tensor for {_some(self.missing)}{called}")
        if self.unexpected:
            parts.append(f"no parameter for {_some(self.unexpected)}")
        for name, source, expected, found in self.misshapen[:1]:
            rest = f" (and {len(self.misshapen) - 1} more)" if len(self.misshapen) > 1 else ""
            parts.append(
                f"`{name}` from `{source}` should be {list(expected)} but is {list(found)}{rest}"
            )
        if hint is None:
            hint = "a file of the weights may not be here: fetch all of them again"
            if self.misshapen or self.unexpected:
                hint = "its configuration and its weights are of different models: fetch both again"
        super().__init__(
            "the checkpoint does not fit its own configuration: " + "; ".join(parts), hint=hint
        )


class OutOfMemory(LlmcliError):
    """Weights, cache or activations do not fit in memory (exit 5)."""

    code = 5
    kind = "out_of_memory"


# offline options: `tiny` is part of the package; the list has fetched models
WITHOUT_NETWORK = "`llmcli models` lists what is on this machine, such as `-m tiny`"


class NetworkError(LlmcliError):
    """No network, offline mode, or a repository that needs a token (exit 6)."""

    code = 6
    kind = "network"
    usual_hint = f"try again when there is a network; {WITHOUT_NETWORK}"


class NotFinite(LlmcliError):
    """NaN or infinity in weights, activations or logits (exit 7).

    `dtype`: the arithmetic, for the hint: float16 overflows in some models; with other dtypes the
    weights are the likely cause.
    """

    code = 7
    kind = "not_finite"

    def __init__(self, message: str, *, hint: str | None = None, dtype: str = "") -> None:
        found = "`llmcli dump --name '*'` names the first number that is not"
        if dtype == "float16":
            found = f"try `--dtype float32`, for float16 may overflow; {found}"
        super().__init__(message, hint=hint or found)


def as_out_of_memory(exception: BaseException, *, hint: str | None = None) -> OutOfMemory | None:
    """Convert out-of-memory errors of Python, CUDA, the CPU allocator or the loader.

    None for other errors. Does not import torch.
    """
    text = str(exception)
    if isinstance(exception, ImportError):  # from the system's loader
        none = "failed to map segment" in text or "Cannot allocate memory" in text
        found = none and "static TLS" not in text  # a table of the loader
    else:
        found = isinstance(exception, MemoryError) or (
            isinstance(exception, RuntimeError)
            and (
                type(exception).__name__ == "OutOfMemoryError"
                or "DefaultCPUAllocator" in text
                or "out of memory" in text
            )
        )
    if not found:
        return None
    said = f": {first_line(exception)}" if text.strip() else ""
    return OutOfMemory(f"out of memory{said}", hint=hint)


def as_lacking(exception: BaseException) -> LlmcliError | None:
    """Convert errors of exhausted file descriptors or a missing `/proc`; None for others."""
    if isinstance(exception, OSError) and exception.errno in (errno.EMFILE, errno.ENFILE):
        return LlmcliError(
            "too many open files: this process, or the system, may have no more",
            hint="`ulimit -n` is the limit of a process: raise it, for example to 1024",
        )
    if isinstance(exception, RuntimeError) and "cpuinfo" in str(exception):
        return LlmcliError(
            "PyTorch needs `/proc/cpuinfo`, which cannot be read here",
            hint="mount /proc, or start the container with it",
        )
    return None


def first_line(exception: BaseException) -> str:
    """The first line of the message; `no message` if empty."""
    return next(iter(str(exception).strip().splitlines()), "no message")


def _some(names: Sequence[str], show: int = 2) -> str:
    listed = ", ".join(f"`{name}`" for name in names[:show])
    return listed if len(names) <= show else f"{listed} and {len(names) - show} more"

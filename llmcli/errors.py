"""Errors that a user sees: one line with the cause, a hint with the next thing to do, an exit code.

No torch here. Everything that can go wrong through the user's input raises one of these;
anything else that escapes is a bug of ours and exits 1.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence


class LlmcliError(Exception):
    """Base of all errors shown to the user as one line.

    `message` is lower case, one sentence, with backticks around what the user typed;
    `hint` is the next thing to do; where it is not given, the class's own, if it has one.
    `code` is the process's exit status and `kind` the stable word for it in JSON.
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

    `told`: the view is on stdout, as a JSON document too, and says so.
    """

    kind = "check_failed"
    told = True


class WriteFailed(LlmcliError):
    """Output could not be written: full disk, no permission (exit 1)."""

    kind = "write_failed"
    usual_hint = "write to another file or directory"


class UsageError(LlmcliError):
    """An option or argument that cannot be right (exit 2)."""

    code = 2
    kind = "usage"


class PromptTooLong(UsageError):
    """The prompt does not fit the context (exit 2)."""

    kind = "prompt_too_long"


class ModelNotFound(LlmcliError):
    """No model, file or catalog entry of that name (exit 3)."""

    code = 3
    kind = "model_not_found"


class CheckpointError(LlmcliError):
    """A checkpoint that is truncated, lying, hostile, pickled or not configured (exit 4)."""

    code = 4
    kind = "checkpoint"
    usual_hint = "correct the file, or fetch it again from where it came"


class UnsupportedModel(CheckpointError):
    """An architecture, tokenizer or tensor format that llmcli does not know (exit 4)."""

    kind = "unsupported"
    usual_hint = "`llmcli info --families` lists what can be run"


class WeightMismatch(CheckpointError):
    """Checkpoint tensors and model parameters do not match one to one (exit 4).

    `missing`: parameters that nothing fills, the first of them in vain from the tensor `source`;
    `unexpected`: checkpoint tensors that no rule names; `misshapen`: (parameter, checkpoint
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


# what can be done offline: `tiny` is part of the package, the list says what was fetched before
WITHOUT_NETWORK = "`llmcli models` lists what is on this machine, such as `-m tiny`"


class NetworkError(LlmcliError):
    """No network, offline mode, or a repository that needs a token (exit 6)."""

    code = 6
    kind = "network"
    usual_hint = f"try again when there is a network; {WITHOUT_NETWORK}"


class NotFinite(LlmcliError):
    """NaN or infinity in weights, activations or logits (exit 7).

    `dtype`: the arithmetic that it came out of, for a hint that can help: float16
    overflows in some models, where it is nothing else the weights are at fault.
    """

    code = 7
    kind = "not_finite"

    def __init__(self, message: str, *, hint: str | None = None, dtype: str = "") -> None:
        found = "`llmcli dump --name '*'` names the first number that is not"
        if dtype == "float16":
            found = f"try `--dtype float32`, for float16 may overflow; {found}"
        super().__init__(message, hint=hint or found)


def as_out_of_memory(exception: BaseException, *, hint: str | None = None) -> OutOfMemory | None:
    """The same in our words where Python, CUDA, the CPU's allocator or its loader have no memory.

    None for anything else. Imports no torch to know its errors.
    """
    text = str(exception)
    if isinstance(exception, ImportError):  # of a library, by the system's loader
        none = "failed to map segment" in text or "Cannot allocate memory" in text
        found = none and "static TLS" not in text  # which is a table of the loader's
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
    """The same in our words where the system has no more open files for us, or no `/proc`.

    None for anything else.
    """
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
    """Of its message, `no message` where it has none."""
    return next(iter(str(exception).strip().splitlines()), "no message")


def _some(names: Sequence[str], show: int = 2) -> str:
    listed = ", ".join(f"`{name}`" for name in names[:show])
    return listed if len(names) <= show else f"{listed} and {len(names) - show} more"

"""Why a row could not be measured, in the words of an exit."""

from __future__ import annotations

from llmcli.errors import LlmcliError, OutOfMemory

Failure = tuple[int, str, str]  # exit code, kind, one line


def failure(error: Exception) -> Failure:
    """Of any exception: ours as they are, memory that is not there as OutOfMemory.

    Anything else is a bug here or in a peer: exit 1, the exception named.
    """
    if isinstance(error, LlmcliError):
        return error.code, error.kind, error.message
    first = next(iter(str(error).strip().splitlines()), "no message")
    if _out_of_memory(error):
        said = f": {first}" if str(error).strip() else ""
        return OutOfMemory.code, OutOfMemory.kind, f"out of memory{said}"
    return LlmcliError.code, LlmcliError.kind, f"internal error: {type(error).__name__}: {first}"


def _out_of_memory(error: Exception) -> bool:
    """Python's, CUDA's and the CPU allocator's ways to say it."""
    text = str(error)
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError)
        and (
            type(error).__name__ == "OutOfMemoryError"
            or "DefaultCPUAllocator" in text
            or "out of memory" in text
        )
    )

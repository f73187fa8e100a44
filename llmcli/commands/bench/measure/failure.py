"""Why a row could not be measured, in the words of an exit."""

from __future__ import annotations

from llmcli.errors import LlmcliError, as_out_of_memory, first_line

Failure = tuple[int, str, str]  # exit code, kind, one line


def failure(error: Exception) -> Failure:
    """Of any exception: ours as they are, memory that is not there as OutOfMemory.

    Anything else is a bug here or in a peer: exit 1, the exception named.
    """
    known = error if isinstance(error, LlmcliError) else as_out_of_memory(error)
    if known is None:
        words = f"internal error: {type(error).__name__}: {first_line(error)}"
        return LlmcliError.code, LlmcliError.kind, words
    return known.code, known.kind, known.message


def hint_for(error: Exception) -> str | None:
    """What can be done about it, where that is known."""
    if isinstance(error, LlmcliError):
        return error.hint
    hint = "use a smaller model or shorter tests (`-p`, `-d`, `-ub`); `llmcli info` says what fits"
    known = as_out_of_memory(error, hint=hint)
    return None if known is None else known.hint

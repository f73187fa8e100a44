"""Stop strings that span tokens: text is held back while it may be the beginning of one."""

from __future__ import annotations

from collections.abc import Sequence

from llmcli.errors import UsageError
from llmcli.text.segments import begun


class StopMatcher:
    """Passes a growing text through until one of `stops` has come.

    The text is read as if character by character: the stop string that is complete first wins
    (of two that end together, the one that began first), so that the result does not depend on
    how the text was cut into tokens. Neither the stop string nor anything behind it is passed.
    Raises UsageError for an empty stop string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if "" in stops:
            raise UsageError(
                "a stop string must not be empty", hint="leave `--stop` away to use none"
            )
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """Return what of the text so far is now sure to be in front of any stop string.

        Sets `stopped` once a stop string is complete; everything after that is dropped.
        """
        if self.stopped:
            return ""
        text = self._held + text
        matches = []
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0:
                matches.append((start + len(stop), start))
        if matches:
            self.stopped, self._held = True, ""
            return text[: min(matches)[1]]
        sure = begun(text, self._stops)
        self._held = text[sure:]
        return text[:sure]

    def finish(self) -> str:
        """Return what was still held back: the text ended without completing a stop string."""
        held, self._held = self._held, ""
        return held

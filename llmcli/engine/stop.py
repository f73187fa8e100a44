"""Matches stop strings across tokens; holds back text that may begin one."""

from __future__ import annotations

from collections.abc import Sequence

from llmcli.errors import UsageError
from llmcli.text.segments import begun


class StopMatcher:
    """Passes a growing text through until one of `stops` occurs.

    The text is processed character by character: the stop string that completes first counts (of
    two with the same end, the one that began first), so the result does not depend on token
    boundaries. The stop string and anything after it are not passed. Hidden text (of special
    tokens) is not passed either, but stop strings match both with and without it.
    Raises UsageError for an empty stop string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if "" in stops:
            raise UsageError("a stop string must not be empty", hint="omit `--stop` to use none")
        self._stops = tuple(stops)
        self._held: list[tuple[str, bool]] = []  # characters, and whether they are hidden
        self.stopped = False

    def push(self, text: str, *, hidden: bool = False) -> str:
        """Add text; return the text that is now certainly before any stop string.

        Sets `stopped` once a stop string is complete; all later text is dropped.
        """
        if self.stopped:
            return ""
        if not self._stops:
            return "" if hidden else text
        self._held += [(character, hidden) for character in text]
        places = range(len(self._held))
        shown = [at for at in places if not self._held[at][1]]
        sure, matches = len(self._held), []
        for view in (places, shown)[: 1 + (len(shown) < len(places))]:
            seen = "".join(self._held[at][0] for at in view)
            for stop in self._stops:
                start = seen.find(stop)
                if start >= 0:
                    matches.append((view[start + len(stop) - 1], view[start]))
            unsure = begun(seen, self._stops)
            sure = min(sure, view[unsure]) if unsure < len(view) else sure
        if matches:
            self.stopped, sure = True, min(matches)[1]
        passed, self._held = self._shown(sure), [] if matches else self._held[sure:]
        return passed

    def finish(self) -> str:
        """End the text without a stop string; return the text held back."""
        held, self._held = self._shown(len(self._held)), []
        return held

    def _shown(self, end: int) -> str:
        return "".join(character for character, hidden in self._held[:end] if not hidden)

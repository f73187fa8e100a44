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
    Text that is hidden (of special tokens) is never passed either, but a stop string may be part
    of it; one is found in the text with it and in the text without it.
    Raises UsageError for an empty stop string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if "" in stops:
            raise UsageError(
                "a stop string must not be empty", hint="leave `--stop` away to use none"
            )
        self._stops = tuple(stops)
        self._held: list[tuple[str, bool]] = []  # characters, and whether they are hidden
        self.stopped = False

    def push(self, text: str, *, hidden: bool = False) -> str:
        """Return what of the text so far is now sure to be in front of any stop string.

        Sets `stopped` once a stop string is complete; everything after that is dropped.
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
        """Return what was still held back: the text ended without completing a stop string."""
        held, self._held = self._shown(len(self._held)), []
        return held

    def _shown(self, end: int) -> str:
        return "".join(character for character, hidden in self._held[:end] if not hidden)

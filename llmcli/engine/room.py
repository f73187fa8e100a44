"""Room for sequences that grow, of which it is not known how long they get."""

from __future__ import annotations

from llmcli.devices import release_freed_memory, require_memory
from llmcli.engine.session import Session


def make_room(session: Session, tokens: int, most: int, hint: str) -> None:
    """Slots for so many tokens per sequence, twice as many as before but at most `most`.

    Raises OutOfMemory with that hint where there is no memory for them, ValueError where they are
    more than `most`.
    """
    if tokens > most:
        raise ValueError(f"{tokens} tokens are more than {most}")
    state = session.state
    if tokens <= state.capacity:
        return
    wanted = max(tokens, min(2 * state.capacity, most))
    require_memory(
        session.decoder.state_bytes(state.batch, wanted), session.decoder.device,
        f"the cache of {wanted} tokens", hint,
    )  # fmt: skip
    session.grow(wanted)
    release_freed_memory()  # the smaller caches

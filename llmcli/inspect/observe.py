"""Runs a prompt once, and the tokens generated after it, while somebody looks.

A watcher is shown every activation as it appears; what it does not keep is freed. The prompt is
one call, so that one layer at a time is there.

Axes: T tokens of one call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from llmcli import devices
from llmcli.anatomy.counts import PROMPT_CHUNK
from llmcli.engine.sampler import Sampler
from llmcli.engine.sampling import Sampling
from llmcli.engine.session import Session
from llmcli.model import Model
from llmcli.nn.state import State
from llmcli.nn.step import Tap
from llmcli.records.progress import Progress

# watch(first, name, tensor): an activation of the call whose tokens begin at position `first`
Watch = Callable[[int, str, Tensor], None]


@dataclass(frozen=True, kw_only=True)
class Observed:
    """What was run: all token ids, the prompt's and the new ones, and what was kept.

    `state` holds keys and values of all of them, None where the prompt was a call without a cache.
    """

    ids: tuple[int, ...]
    prompt_tokens: int
    state: State | None


def observe(
    model: Model,
    ids: Sequence[int],
    watch: Watch,
    *,
    generate: int = 0,
    sampling: Sampling | None = None,
    until: int | None = None,
    logits: Literal["all", "last"] = "last",
    progress: Progress | None = None,
) -> Observed:
    """One forward call over `ids`, then one for each of up to `generate` new tokens.

    The new tokens are drawn as `sampling` says, and each is fed to the model too, the last one
    as well, so that every token is a query. An end-of-text token is the last. `until`: nothing
    after that layer is computed (without `generate` only). `logits`: of all tokens of the prompt,
    which takes as much memory as they have, or of the last one. Raises OutOfMemory where the cache
    does not fit, NotFinite for logits that are NaN.
    """
    one = torch.tensor([list(ids)], device=model.device)
    if generate < 1:
        _tell(progress, "reading the prompt", 0, len(ids))
        model.decoder(one, tap=partial(watch, 0), logits=logits, until=until)
        return Observed(ids=tuple(ids), prompt_tokens=len(ids), state=None)
    if until is not None or sampling is None:
        raise ValueError("what is generated needs every layer, and a sampling")
    session = session_of(model, len(ids) + generate)
    _tell(progress, "reading the prompt", 0, len(ids))
    session.extend(one, logits=logits, tap=shown_to(watch, session))
    return continued(session, model, watch, generate, sampling, progress)


def shown_to(watch: Watch, session: Session) -> Tap:
    """A tap that tells `watch` where the tokens of each call of `session` begin."""
    return lambda name, tensor: watch(session.lengths[0], name, tensor)


def continued(
    session: Session,
    model: Model,
    watch: Watch,
    generate: int,
    sampling: Sampling | None,
    progress: Progress | None,
) -> Observed:
    """The tokens after the prompt that `session` has read, as `observe` has them."""
    (prompt,) = session.ids
    every = list(prompt)
    if generate and sampling is not None:
        sampler = Sampler(
            sampling, [prompt], samples=1, vocab=model.config.vocab, device=model.device,
            logprobs=None, limit=generate,
        )  # fmt: skip
        tap = shown_to(watch, session)
        for choices in session.decode(sampler.pick, limit=generate, tap=tap):
            _tell(progress, "generating", len(every) - len(prompt), generate)
            every.append(choices[0].id)
            if every[-1] in model.eos_ids:
                session.advance(tap=tap)
                break
    return Observed(ids=tuple(every), prompt_tokens=len(prompt), state=session.state)


def read_in_chunks(
    session: Session, ids: Sequence[int], watch: Watch, progress: Progress | None
) -> None:
    """Reads a prompt in chunks, as `generate` does, in the empty `session`, shown to `watch`."""

    def tell(done: int, total: int) -> None:
        _tell(progress, "reading the prompt", done, total)

    tell(0, len(ids))
    session.prefill([ids], chunk=PROMPT_CHUNK, tap=shown_to(watch, session), on_prefill=tell)


def session_of(model: Model, capacity: int) -> Session:
    """A session for one sequence of so many tokens. Raises OutOfMemory."""
    devices.require_memory(
        model.decoder.state_bytes(1, capacity),
        model.device,
        f"the cache of {capacity} tokens",
        "use a shorter prompt or a smaller --generate",
    )
    return Session(model.decoder, 1, capacity)


def _tell(progress: Progress | None, words: str, done: int, total: int | None) -> None:
    if progress is not None:
        progress(words, done, total)

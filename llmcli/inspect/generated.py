"""New tokens, generated before all tokens are read again, with the proof of their steps.

And a prompt, read in chunks as `generate` does: a `Watch` is called with every activation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from llmcli import devices
from llmcli.anatomy.counts import PROMPT_CHUNK
from llmcli.anatomy.graph import graph
from llmcli.engine.sampler import Sampler
from llmcli.engine.sampling import Sampling
from llmcli.engine.session import Session
from llmcli.graph.node import State as NodeState
from llmcli.inspect.cache import cache_check, filled, remembered
from llmcli.inspect.formulas import formula_checks, worst
from llmcli.inspect.kernel import layer_of
from llmcli.inspect.layer_map import LayerMap
from llmcli.inspect.recurrence import End, walk
from llmcli.model import Model
from llmcli.nn.state import State
from llmcli.nn.step import Tap
from llmcli.records.checks import ViewCheck
from llmcli.records.progress import Progress

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of a number

# watch(first, name, tensor): an activation of the call whose tokens begin at position `first`
Watch = Callable[[int, str, Tensor], None]

WORDS = "every new token, read as `generate` reads it, follows from the formulas and the cache"


class Generated(NamedTuple):
    """All token ids, the prompt's and the new ones, and the check of their steps, if any."""

    ids: tuple[int, ...]
    checks: tuple[ViewCheck, ...] = ()


def generated(
    model: Model,
    ids: Sequence[int],
    limit: int,
    progress: Progress | None = None,
    *,
    prove: bool = True,
) -> Generated:
    """`ids` and up to `limit` likeliest tokens after them; an end-of-text token is the last.

    Each new token is read, the last one too. `prove`: with the check that every step follows from
    the formulas and the cache. Raises OutOfMemory where the cache does not fit, and NotFinite for
    logits that are NaN.
    """
    if limit < 1:
        return Generated(tuple(ids))
    capacity = len(ids) + limit
    devices.require_memory(
        model.decoder.state_bytes(1, capacity), model.device, f"the cache of {capacity} tokens",
        "use a shorter prompt or a smaller --generate",
    )  # fmt: skip
    session = Session(model.decoder, 1, capacity, on_reread=lambda tokens: proof.reread())
    proof = _Steps(model, len(ids), session.state)
    tap = _tap(proof.watch, session) if prove else None
    sampler = Sampler(
        Sampling(temperature=0.0), [ids], samples=1, vocab=model.config.vocab,
        device=model.device, logprobs=None, limit=limit,
    )  # fmt: skip
    every = list(ids)
    with torch.inference_mode():
        _read(session, ids, tap, progress)
        for choices in session.decode(sampler.pick, limit=limit, tap=tap):
            if progress is not None:
                progress("generating", len(every) - len(ids), limit)
            every.append(choices[0].id)
            if every[-1] in model.eos_ids:
                session.advance(tap=tap)
                break
    return Generated(tuple(every), proof.checks())


def read_in_chunks(
    session: Session, ids: Sequence[int], watch: Watch, progress: Progress | None
) -> None:
    """Reads a prompt in chunks, as `generate` does, in the empty `session`, shown to `watch`."""
    _read(session, ids, _tap(watch, session), progress)


def _read(
    session: Session, ids: Sequence[int], tap: Tap | None, progress: Progress | None
) -> None:
    def tell(done: int, total: int) -> None:
        if progress is not None:
            progress("reading the prompt", done, total)

    tell(0, len(ids))
    session.prefill([ids], chunk=PROMPT_CHUNK, tap=tap, on_prefill=tell)


def _tap(watch: Watch, session: Session) -> Tap:
    """A tap that tells `watch` where the tokens of each call of `session` begin."""
    return lambda name, tensor: watch(session.lengths[0], name, tensor)


class _Steps:
    """Watches a prompt of so many tokens and the steps after it, all read into `state`.

    What a step makes of its token has to follow from the formulas, with the keys and values that
    the cache holds by then; what the cache holds has to be what was computed, bit by bit, and to
    stay so in later calls; and a recurrence has to go on from the state that the call before left.
    """

    def __init__(self, model: Model, prompt: int, state: State) -> None:
        self._model, self._prompt, self._state = model, prompt, state
        self._graph = graph(model.config)
        self._maps = {layer: LayerMap(model, layer) for layer in self._graph.mixers}
        self._now: dict[str, Tensor] = {}
        self._every: dict[str, Tensor] = {}  # rows of all calls, where a cache does not have them
        self._sums: dict[str, int] = {}  # of the bits of what is cached, after the last call
        self._ends: dict[int, End] = {}  # of recurrences, after the last call
        self._found: list[ViewCheck] = []

    def watch(self, first: int, name: str, tensor: Tensor) -> None:
        """An activation of the call whose tokens begin at `first`. Raises NotFinite for a NaN."""
        layer = layer_of(name)
        if layer not in self._maps:
            return
        of = self._maps[layer]
        if name in of.inputs or name in of.checked:
            self._now[name] = tensor
        if name == of.adds:
            self._read(of, first, first + tensor.shape[-2])
            self._now = {}

    def _read(self, of: LayerMap, first: int, end: int) -> None:
        """All that one call emitted of a layer."""
        states, caches = (*of.states, *of.kept_fixed), self._state.tensors()
        kept = {one.holds for one in of.kept_fixed} | (set(of.whole) if of.score is None else set())
        for name in kept & self._now.keys():
            parts = [self._every[name]] if name in self._every else []
            at = 1 + self._graph[name].axes.index("T")
            self._every[name] = torch.cat((*parts, self._now[name]), at)
        for one in (one for one in states if one.holds in self._now):
            cached = filled(one, caches[one.name][0], end)
            rows = self._every[one.holds] if one.holds in kept else self._now[one.holds]
            if one.holds not in kept:
                at = one.axes.index("S")
                cached = cached.narrow(at, first, end - first)
            made = remembered(self._graph, one, rows[0]) if one.holds in kept else rows[0]
            self._found.append(cache_check(made, cached, one.name))
            if "S" in one.axes:
                self._found.append(self._unchanged(one, caches[one.name][0], first, end))
        if of.signed:
            self._walk(of, caches)
        if first >= self._prompt:
            self._prove(of, end, caches)

    def _unchanged(self, one: NodeState, cached: Tensor, first: int, end: int) -> ViewCheck:
        """Whether what was cached before this call still has the same sum of its bits."""
        bits = filled(one, cached, end).view(_BITS[cached.dtype.itemsize])
        before = int(filled(one, bits, first).sum(dtype=torch.int64))
        changed = before != self._sums.get(one.name, before)
        self._sums[one.name] = int(bits.sum(dtype=torch.int64))
        where = f"{one.name}, before position {first}" if changed else ""
        return ViewCheck(
            name="cache", words=WORDS, value=float(changed), tolerance=0.0, where=where
        )

    def reread(self) -> None:
        """All tokens are read again, with other rotations: the cache is another one."""
        self._sums.clear()

    def _walk(self, of: LayerMap, caches: dict[str, Tensor]) -> None:
        seen = {name: tensor[0] for name, tensor in self._now.items()}
        walked = walk(of.recurrence(seen), before=self._ends.get(of.number))
        self._ends[of.number] = walked.end
        self._found.append(walked.check(caches[of.matrix.name][0], of.matrix.name))

    def _prove(self, of: LayerMap, end: int, caches: dict[str, Tensor]) -> None:
        """A step: what comes from its own row, and what reads the rows of all tokens."""
        whole = {name: self._every[name] for name in of.whole if name in self._every}
        names = [name for name in of.checked if name in self._now]
        inputs = {name: self._graph[name].op.inputs for name in names}
        own = [n for n in names if n != of.mixed and set(of.whole).isdisjoint(inputs[n])]
        readers = [name for name in names if name not in own]
        with_cache = self._now | whole | of.held(caches, end)
        for emitted, some in ((self._now, own), (with_cache, readers)):
            if some:
                self._found.append(
                    formula_checks(
                        self._model, range(end), emitted, some, prompt_tokens=self._prompt
                    )
                )

    def checks(self) -> tuple[ViewCheck, ...]:
        """One, of all steps."""
        return (replace(worst(self._found), name="steps", words=WORDS),) if self._found else ()

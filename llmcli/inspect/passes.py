"""The passes of a look over its tokens, and the proof that they are those of `generate`.

Axes of what a cache holds: K key/value heads, S positions, d size of a head.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from llmcli import devices
from llmcli.engine.sampler import Sampler
from llmcli.engine.sampling import Sampling
from llmcli.engine.session import Session
from llmcli.graph.graph import Graph, graph
from llmcli.graph.node import State as NodeState
from llmcli.inspect.edits import apply_edits
from llmcli.inspect.formulas import formula_checks, worst
from llmcli.inspect.kernel import layer_of
from llmcli.inspect.layer_map import LayerMap
from llmcli.inspect.recurrence import End, Walk, walk
from llmcli.model import Model
from llmcli.nn.state import State
from llmcli.nn.step import Tap
from llmcli.records.document import ViewCheck
from llmcli.records.work import Progress, no_progress
from llmcli.shell.inspection import Subject
from llmcli.shell.progress import Progress as Bar

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of a number
ROWS = 64  # queries of a layer that are compared, spread over all chunks of a prompt
CHUNK_ROWS = 4  # … and of each chunk at least, its first and last among them

# watch(first, name, tensor): an activation of the call whose tokens begin at position `first`
Watch = Callable[[int, str, Tensor], None]


class Passes:
    """Runs a model for a look: first it writes new tokens, then one pass reads all tokens.

    Commands that look inside run the model here alone, with its edits (`apply_edits`). `ids` are
    the prompt's tokens, and after `write` the up to `generate` new ones.
    """

    def __init__(
        self,
        model: Model,
        ids: Sequence[int],
        generate: int = 0,
        progress: Progress = no_progress,
    ) -> None:
        self.model, self.ids = model, tuple(ids)
        self.prompt_tokens, self.generate = len(ids), generate
        self.progress = progress
        self._steps: tuple[ViewCheck, ...] = ()
        self._chunks: tuple[ViewCheck, ...] = ()
        apply_edits(model, [self.ids])

    @property
    def most(self) -> int:
        """The most tokens that there can be with the new ones."""
        return self.prompt_tokens + self.generate

    @property
    def checks(self) -> tuple[ViewCheck, ...]:
        """That chunks of a prompt, and steps of new tokens, follow from the formulas."""
        return (*self._chunks, *self._steps)

    def write(self, *, prove: bool = True) -> None:
        """Adds up to `generate` likeliest tokens to `ids`; an end-of-text token is the last.

        Each new token is read, the last one too. `prove`: with the check that every step follows
        from the formulas and the cache. Raises OutOfMemory where the cache does not fit, and
        NotFinite for logits that are NaN.
        """
        if self.generate < 1:
            return
        model, prompt, ids = self.model, self.ids, list(self.ids)
        self.require_cache(self.most)
        session = Session(model.decoder, 1, self.most, on_reprefill=lambda tokens: proof.reset())
        proof = _Steps(model, session.state, range(self.most), len(prompt))
        tap = _tap(proof.watch, session) if prove else None
        sampler = Sampler(
            Sampling(temperature=0.0),
            [prompt],
            samples=1,
            vocab=model.config.vocab,
            device=model.device,
            logprobs=None,
            limit=self.generate,
        )
        with torch.inference_mode():
            self._prefill(session, tap)
            for choices in session.decode(sampler.pick, limit=self.generate, tap=tap):
                self.progress("generating", len(ids) - len(prompt), self.generate)
                ids.append(choices[0].id)
                if ids[-1] in model.eos_ids:
                    session.advance(tap=tap)
                    break
        self.ids, self._steps = tuple(ids), proof.checks()

    def in_chunks(self, watch: Watch) -> None:
        """Reads `ids` in chunks, as `generate` reads a prompt, and proves them where several are.

        Raises NotFinite for a NaN.
        """
        session = self.session()
        several = len(self.ids) > session.chunk
        proof = _Chunks(self.model, session, self.ids) if several else None

        def seen(first: int, name: str, tensor: Tensor) -> None:
            watch(first, name, tensor)
            if proof is not None:
                proof.watch(first, name, tensor)

        with torch.inference_mode():
            self._prefill(session, _tap(seen, session))
        if proof is not None:
            self._chunks = proof.checks()

    def require_cache(self, tokens: int) -> None:
        """Raises OutOfMemory where the cache of `tokens` tokens does not fit."""
        devices.require_memory(
            self.model.decoder.state_bytes(1, tokens),
            self.model.device,
            f"the cache of {tokens} tokens",
            "use a shorter prompt or a smaller --generate",
        )

    def session(self) -> Session:
        """An empty one, for all of `ids`."""
        return Session(self.model.decoder, 1, len(self.ids))

    def at_once(
        self,
        tap: Tap,
        *,
        logits: Literal["all", "last", "none"],
        until: int | None,
        session: Session | None = None,
    ) -> None:
        """Reads `ids` in one call, up to block `until` (None: all), into the cache of `session`."""
        run: Callable[..., Tensor] = self.model.decoder if session is None else session.extend
        self.progress("reading the prompt", 0, len(self.ids))
        tokens = torch.tensor([self.ids], device=self.model.device)
        with torch.inference_mode():
            run(tokens, tap=tap, logits=logits, until=until)

    def _prefill(self, session: Session, tap: Tap | None) -> None:
        def tell(done: int, total: int) -> None:
            self.progress("reading the prompt", done, total)

        tell(0, len(self.ids))
        session.prefill([self.ids], tap=tap, on_prefill=tell)


@contextmanager
def passes_over(subject: Subject) -> Iterator[Passes]:
    """The passes of a look, whose progress is shown on stderr."""
    with Bar(subject.out) as progress:
        yield Passes(subject.model, subject.ids, subject.generate, progress)


def _tap(watch: Watch, session: Session) -> Tap:
    """A tap that tells `watch` where the tokens of each call of `session` begin."""
    return lambda name, tensor: watch(session.lengths[0], name, tensor)


class _Proof(ABC):
    """Watches calls that read `ids` into `state`, layer by layer; `_now`: of the current one.

    The first `prompt` tokens are the prompt; `rows` as in `formula_checks`. `name` and `words` are
    those of its check.
    """

    name: ClassVar[str]
    words: ClassVar[str]

    def __init__(
        self, model: Model, state: State, ids: Sequence[int], prompt: int, rows: int | None = None
    ) -> None:
        self._model, self._state, self._graph = model, state, graph(model.config)
        self._ids, self._prompt, self._rows = ids, prompt, rows
        maps = [LayerMap(model, layer) for layer in self._graph.mixers]
        self._maps = {of.number: of for of in maps if not (of.signed and of.edited)}
        self._now: dict[str, Tensor] = {}
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
        if name == of.residual_update:
            self._read(of, first, first + tensor.shape[-2])
            self._now = {}

    @abstractmethod
    def _read(self, of: LayerMap, first: int, end: int) -> None:
        """All that one call emitted of a layer."""

    def _walk(self, of: LayerMap, *, results: bool = False) -> Walk:
        """A recurrence goes on from the state before the call, and leaves its own in the cache."""
        seen = {name: tensor[0] for name, tensor in self._now.items()}
        walked = walk(of.recurrence(seen), before=self._ends.get(of.number), results=results)
        self._ends[of.number] = walked.end
        cached = self._state.tensors()[of.matrix.name][0]
        self._found.append(walked.check(cached, of.matrix.name))
        return walked

    def _prove(self, end: int, emitted: Mapping[str, Tensor], names: Sequence[str]) -> None:
        """That `names` follow from what calls up to the token before `end` `emitted`."""
        if names:
            ids, prompt = self._ids[:end], self._prompt
            self._found.append(
                formula_checks(
                    self._model, ids, emitted, names, rows=self._rows, prompt_tokens=prompt
                )
            )

    def checks(self) -> tuple[ViewCheck, ...]:
        """One, of all calls; none without them."""
        if not self._found:
            return ()
        return (replace(worst(self._found), name=self.name, words=self.words),)


class _Chunks(_Proof):
    """Proves a prompt of more than one chunk.

    Every chunk's embeddings have to be those of its tokens and positions, its queries and keys to
    be rotated by their own positions, and its attention to be what the formula makes of its queries
    and of all keys and values that the cache holds by then; a recurrence has to go on from the
    state that the chunk before left, and to leave its own in the cache. A prompt of one chunk is
    not proven here: it is what the views themselves prove.
    """

    name = "chunks"
    words = "every chunk of the prompt, read as `generate` reads it, follows from the formulas"

    def __init__(self, model: Model, session: Session, ids: Sequence[int]) -> None:
        chunks = -(-len(ids) // session.chunk)
        super().__init__(model, session.state, ids, len(ids), max(CHUNK_ROWS, ROWS // chunks))
        # maps of something else are not proven here: no cache has their rows
        maps = self._maps.items()
        self._maps = {layer: of for layer, of in maps if of.score is not None or of.signed}

    def watch(self, first: int, name: str, tensor: Tensor) -> None:
        """An activation of the call whose tokens begin at `first`. Raises NotFinite for a NaN."""
        if name in ("embed", "pos_embed"):
            self._prove(first + tensor.shape[-2], {name: tensor}, [name])
        super().watch(first, name, tensor)

    def _read(self, of: LayerMap, first: int, end: int) -> None:
        """A chunk."""
        if of.signed:
            walked, eps = self._walk(of, results=True), torch.finfo(self._model.stream_dtype).eps
            self._found.append(walked.check_results(self._now[of.mixed][0], eps, of.mixed))
        else:
            held = of.held(self._state.tensors(), end)
            self._prove(end, self._now, [one for one in of.sources if one.endswith("_rot")])
            self._prove(end, self._now | held, [of.mixed])


class _Steps(_Proof):
    """Proves the steps after a prompt, which is read into the same `state`.

    What a step makes of its token has to follow from the formulas (which read no ids), with the
    keys and values that the cache holds by then; what the cache holds has to be what was computed,
    bit by bit, and to stay so in later calls; and a recurrence has to go on from the state that the
    call before left.
    """

    name = "steps"
    words = (
        "every new token, read as `generate` reads it, follows from the formulas and the cache"
    )

    def __init__(self, model: Model, state: State, ids: Sequence[int], prompt: int) -> None:
        super().__init__(model, state, ids, prompt)
        self._every: dict[str, Tensor] = {}  # rows of all calls, where a cache does not have them
        self._sums: dict[str, int] = {}  # of the bits of what is cached, after the last call

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
            if one.holds in kept:
                made = remembered(self._graph, one, self._every[one.holds][0])
            else:
                made = self._now[one.holds][0]
                cached = cached.narrow(one.axes.index("S"), first, end - first)
            self._found.append(cache_check(made, cached, one.name))
            if "S" in one.axes:
                self._found.append(self._unchanged(one, caches[one.name][0], first, end))
        if of.signed:
            self._walk(of)
        if first >= self._prompt:  # what comes from its own row, and what reads those of all tokens
            whole = {name: self._every[name] for name in of.whole if name in self._every}
            names = [name for name in of.checked if name in self._now]
            inputs = {name: self._graph[name].op.inputs for name in names}
            own = [n for n in names if n != of.mixed and set(of.whole).isdisjoint(inputs[n])]
            self._prove(end, self._now, own)
            held = self._now | whole | of.held(caches, end)
            self._prove(end, held, [name for name in names if name not in own])

    def _unchanged(self, one: NodeState, cached: Tensor, first: int, end: int) -> ViewCheck:
        """Whether what was cached before this call still has the same sum of its bits."""
        bits = filled(one, cached, end).view(_BITS[cached.dtype.itemsize])
        before = int(filled(one, bits, first).sum(dtype=torch.int64))
        changed = before != self._sums.get(one.name, before)
        self._sums[one.name] = int(bits.sum(dtype=torch.int64))
        where = f"{one.name}, before position {first}" if changed else ""
        return ViewCheck(name="cache", words="", value=float(changed), tolerance=0.0, where=where)

    def reset(self) -> None:
        """All tokens are read again, with other rotations: the cache is another one."""
        self._sums.clear()


def filled(state: NodeState, cached: Tensor, tokens: int) -> Tensor:
    """The slots of a state's tensor, without a batch axis, that `tokens` tokens fill, or all."""
    return cached.narrow(state.axes.index("S"), 0, tokens) if "S" in state.axes else cached


def remembered(model: Graph, state: NodeState, rows: Tensor) -> Tensor:
    """What a state holds of all `rows` of its activation, `[…, T, …]` without a batch axis.

    Axes that are not the activation's are tokens: `S` all of them, another letter that many of the
    last ones, with zeros before the first; without any it is the last one alone. In a ring each is
    in the slot of its position.
    """
    at = model[state.holds].axes.index("T")
    tokens = [axis for axis in state.axes if axis not in model[state.holds].axes]
    if tokens == ["S"]:
        return rows
    wanted = model.sizes(state.layer)[tokens[0]] if tokens else 1
    there = min(wanted, rows.shape[at])
    last = rows.narrow(at, rows.shape[at] - there, there)
    behind = 2 * (rows.ndim - 1 - at)
    last = F.pad(last, (*[0] * behind, wanted - there, 0))
    if state.ring:
        last = last.roll(rows.shape[at] % wanted, at)
    return last if tokens else last.squeeze(at)


def cache_check(emitted_KSd: Tensor, cached_KSd: Tensor, name: str) -> ViewCheck:
    """Counts the numbers of the cache called `name` that are not those that were computed.

    Bit for bit, except that any NaN equals any other.
    """
    cached_KSd = cached_KSd.to(emitted_KSd.device)
    equal_KSd = (emitted_KSd == cached_KSd) | (emitted_KSd.isnan() & cached_KSd.isnan())
    wrong = (~equal_KSd).nonzero().tolist()
    where = f"{name}[{','.join(map(str, wrong[0]))}]" if wrong else ""
    words = "the cache holds the keys and values that were computed"
    return ViewCheck(name="cache", words=words, value=float(len(wrong)), tolerance=0.0, where=where)

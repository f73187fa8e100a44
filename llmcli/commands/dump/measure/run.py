"""Activations by name, as the kernel computed them, handed on one by one.

The prompt runs once. A tensor goes out as soon as it is there and is then forgotten; what the
fused kernel never writes is computed from what it wrote, a head and some rows at a time.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from llmcli import devices
from llmcli.commands.dump.measure.plan import MATRICES, OUTPUTS, last_layer, plan_dump, sources
from llmcli.commands.dump.measure.written import Written, first_bad, summary
from llmcli.commands.dump.report import DumpedTensor, DumpPlan, DumpReport
from llmcli.engine.sampling import Sampling
from llmcli.engine.session import Session
from llmcli.errors import NotFinite
from llmcli.inspect.attention.block import Tokens
from llmcli.inspect.attention.checks import AttentionChecks
from llmcli.inspect.attention.rows import checked_rows
from llmcli.inspect.formulas import formula_checks, formula_words, worst
from llmcli.inspect.kernel import layer_of
from llmcli.inspect.layer_map import LayerMap
from llmcli.inspect.observe import observe
from llmcli.inspect.parts import arrays_of
from llmcli.inspect.statistics import Statistics
from llmcli.model import Model, dtype_name
from llmcli.records.checks import ViewCheck
from llmcli.records.progress import Progress

# an array with its name, shape, dtype, and its numbers in C order, a part at a time
Write = Callable[[str, tuple[int, ...], str, Iterable[np.ndarray]], None]

FORMULA_ROWS = 32  # so many tokens of a longer prompt are held against the formulas


def measure_dump(
    model: Model,
    ids: Sequence[int],
    plan: Sequence[DumpPlan],
    *,
    texts: Callable[[Sequence[int]], tuple[tuple[int, str], ...]],
    generate: int = 0,
    check: bool = True,
    write: Write | None = None,
    progress: Progress | None = None,
) -> DumpReport:
    """The tensors of `plan` (`plan_dump`), for `ids` and up to `generate` likeliest tokens more.

    Each is given to `write` once. `texts`: the tokens for people. `check`: whether each activation
    follows from its formula, and attention matrices with the values give what the kernel made of
    them. Numbers that are not finite are reported, not raised, and what there
    is is written. Raises OutOfMemory before the model is run.
    """
    dump = _Dump(model, ids, plan, check=check, write=write, progress=progress)
    with torch.inference_mode():
        dump.run(generate)
    return DumpReport(
        dtype=dtype_name(model.dtype),
        tokens=texts(dump.ids),
        prompt_tokens=len(ids),
        tensors=tuple(dump.done),
        checks=dump.checks(),
        not_finite=next(filter(None, map(first_bad, dump.done)), dump.error),
    )


class _Dump:
    """The watcher of one run: `kept` is what is still needed of what the kernel wrote."""

    def __init__(
        self,
        model: Model,
        ids: Sequence[int],
        plan: Sequence[DumpPlan],
        *,
        check: bool,
        write: Write | None,
        progress: Progress | None,
    ) -> None:
        self.model, self.ids, self.plan = model, list(ids), plan
        self.prompt_tokens = len(ids)
        self._write, self._progress, self._check = write, progress, check
        self._sources = {one.name: sources(model.config, one, check=check) for one in plan}
        self._uses = Counter(chain.from_iterable(self._sources.values()))
        self._written = Written(model)
        self.done: list[DumpedTensor] = []
        self._formulas: list[ViewCheck] = []
        self._caches: dict[str, list[ViewCheck]] = {}  # of what is written, and of states
        self._proof: AttentionChecks | None = None  # of attention matrices, where there are any
        self._proven: set[int] = set()  # layers
        self._sound = True  # no number so far was NaN or infinite
        self.error = ""  # where something that is not dumped is not finite

    def run(self, generate: int) -> None:
        """The parameters, and the forward pass where something of it is wanted."""
        for one in self.plan:
            if not self._sources[one.name]:
                self._settle(one)
        if self._uses:
            self._require_memory(generate)
        if self._uses and generate:
            self._generated(generate)
        elif self._uses:
            self._streamed()

    def _require_memory(self, generate: int) -> None:
        """Raises OutOfMemory where what is kept until it is settled does not fit."""
        model = self.model
        kept = plan_dump(
            model.config, self._uses, tokens=len(self.ids), generate=generate,
            dtype=dtype_name(model.dtype), cache=dtype_name(model.decoder.cache_dtype),
        )  # fmt: skip
        by_layer: dict[int | None, int] = {}
        for one in kept:
            layer = layer_of(one.name)
            by_layer[layer] = by_layer.get(layer, 0) + one.nbytes
        # pieces and what they are put together to; else one layer after the other
        needed = 2 * sum(by_layer.values()) if generate else max(by_layer.values())
        if generate or any(one.kind == "state" for one in self.plan):
            needed += model.decoder.state_bytes(1, len(self.ids) + generate)
        if self._logits == "all":  # in the model's dtype and in at least float32
            logits = plan_dump(
                model.config, ("logits_raw", "logits"), tokens=len(self.ids), generate=0,
                dtype=dtype_name(model.dtype),
            )  # fmt: skip
            needed += sum(one.nbytes for one in logits)
        hint = "use a shorter prompt, or name fewer tensors"
        devices.require_memory(needed, model.device, "the activations that are dumped", hint)

    @property
    def _logits(self) -> Literal["all", "last"]:
        """Of which tokens of the prompt the output is computed."""
        return "all" if self._uses.keys() & set(OUTPUTS) else "last"

    def _streamed(self) -> None:
        """Every tensor goes out in the layer where it is made."""
        decoder, device = self.model.decoder, self.model.device
        pending = deque(one for one in self.plan if self._sources[one.name])
        run: Callable[..., Tensor] = decoder
        if any(one.kind == "state" for one in pending):
            session = Session(decoder, 1, len(self.ids))
            run, self._written.state = session.extend, session.state

        def watch(name: str, tensor: Tensor) -> None:
            if name in self._uses:
                self._written.kept[name] = tensor
            while pending and self._sources[pending[0].name] <= self._written.kept.keys():
                self._settle(pending.popleft())

        run(
            torch.tensor([self.ids], device=device), tap=watch, logits=self._logits,
            until=last_layer(self._uses),
        )  # fmt: skip

    def _generated(self, generate: int) -> None:
        """What the calls wrote is put together at the end."""
        pieces: dict[str, list[Tensor]] = {}
        prompt: dict[str, Tensor] = {}

        def watch(first: int, name: str, tensor: Tensor) -> None:
            if name in self._uses:
                kept = _alone(tensor)
                pieces.setdefault(name, []).append(kept)
                prompt.setdefault(name, kept)

        greedy = Sampling(temperature=0.0)
        try:
            seen = observe(
                self.model, self.ids, watch, generate=generate, sampling=greedy,
                logits=self._logits, progress=self._progress,
            )  # fmt: skip
        except NotFinite as error:  # no token could be drawn: the prompt is what there is
            self.error = f"new tokens are left out: {error.message}"
            self._written.kept = prompt
        else:
            self.ids, self._written.state = list(seen.ids), seen.state
            self._written.kept = {name: torch.cat(parts, -2) for name, parts in pieces.items()}
        for one in self.plan:
            if self._sources[one.name]:
                self._settle(one)

    def _settle(self, one: DumpPlan) -> None:
        """One tensor whole: its statistics, the file, its checks."""
        if self._progress is not None:
            self._progress("looking", len(self.done), len(self.plan))
        shape, numbers = self._written.numbers(one, len(self.ids))
        statistics = Statistics(masks=one.name.endswith(".scores"))
        arrays = arrays_of(numbers, statistics)
        if self._write is not None:
            self._write(one.name, shape, one.dtype, arrays)
        else:
            deque(arrays, maxlen=0)
        self.done.append(summary(one, shape, statistics))
        if one.kind == "state" and self._written.state is not None:
            found = self._written.compare_cache(one, len(self.ids))
            self._caches.setdefault(found.name, []).append(found)
        elif self._check and one.kind == "activation":
            self._check_formula(one.name)
            self._check_matrix(one.name)
        for source in self._sources[one.name]:
            self._uses[source] -= 1
            if not self._uses[source]:
                self._written.kept.pop(source, None)

    def _check_formula(self, name: str) -> None:
        self._sound = self._sound and self.done[-1].first_bad is None
        if not self._sound:
            return  # of numbers that are none nothing follows
        try:
            check = formula_checks(
                self.model, self.ids, self._written.kept, [name], rows=FORMULA_ROWS,
                prompt_tokens=self.prompt_tokens,
            )  # fmt: skip
        except NotFinite as error:
            self._sound, self.error = False, self.error or error.message
        else:
            self._formulas.append(check)

    def _check_matrix(self, name: str) -> None:
        """Of scores and pattern: that the kernel's own z is what they make of the values."""
        layer = layer_of(name)
        if not name.endswith(MATRICES) or layer is None or layer in self._proven or not self._sound:
            return
        self._proven.add(layer)
        of, device = LayerMap(self.model, layer), self.model.device
        seen = {one: self._written.kept[one][0] for one in of.reads}
        if self._proof is None:
            self._proof = AttentionChecks(self.model.dtype, device)
        heads, tokens = list(range(of.heads)), Tokens(self.ids, device)
        try:
            deque(checked_rows(self._proof, of, heads, 0, tokens, seen), maxlen=0)
        except NotFinite as error:
            self._sound, self.error = False, self.error or error.message

    def checks(self) -> tuple[ViewCheck, ...]:
        """One of all formulas, those of attention matrices, one of all caches, as there are any."""
        found = []
        if self._formulas:
            words = formula_words(len(self._formulas), FORMULA_ROWS, len(self.ids))
            found.append(replace(worst(self._formulas), words=words))
        if self._proof is not None and self._sound:
            found += self._proof.checks()
        found += map(worst, self._caches.values())
        return tuple(found)


def _alone(tensor: Tensor) -> Tensor:
    """The tensor; where it is a part of a larger one, a copy, so that the rest can be freed."""
    whole = tensor.untyped_storage().nbytes()
    return tensor.clone() if whole > tensor.numel() * tensor.element_size() else tensor

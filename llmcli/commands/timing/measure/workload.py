"""The workload that is timed, and its calls, work and marks as the anatomy counts them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from llmcli import devices
from llmcli.anatomy import plan
from llmcli.anatomy.graph import Place, graph
from llmcli.anatomy.work import decode_calls, part_work, prompt_calls, step_bytes
from llmcli.commands.timing.measure.clock import END, RunClock
from llmcli.commands.timing.measure.parts import SAMPLE, STEP
from llmcli.engine.sampler import Sampler
from llmcli.engine.sampling import Sampling
from llmcli.engine.session import Session
from llmcli.graph.routing import Choose
from llmcli.graph.spec import Call, Logits, Phase
from llmcli.model import Model
from llmcli.nn.step import Tap
from llmcli.records.work import PartWork


@dataclass(frozen=True, kw_only=True)
class RunOutput:
    """The result of a run: the ids that it chose, and its last logits `[1, V]`."""

    ids: tuple[int, ...]
    logits_BV: Tensor

    def unlike(self, other: RunOutput) -> int:
        """Count the logits and ids that differ in any bit."""
        ids = sum(one != its for one, its in zip(self.ids, other.ids, strict=True))
        return ids + int((self.logits_BV != other.logits_BV).sum())


class Workload:
    """A prompt, and `new_tokens` greedy ones after it, end-of-text or not.

    Raises OutOfMemory where the cache does not fit.
    """

    def __init__(self, model: Model, ids: Sequence[int], new_tokens: int) -> None:
        self.model = model
        self.ids = list(ids)
        self.new_tokens = new_tokens
        self.numbers = model.arithmetic
        capacity = len(ids) + new_tokens
        devices.require_memory(
            model.decoder.state_bytes(1, capacity),
            model.device,
            f"the cache of 1 × {capacity} tokens",
            "use a shorter prompt or a smaller --max-tokens",
        )
        self.session = Session(model.decoder, 1, capacity)

    def ready(self, phase: Phase) -> None:
        """The state in which the phase begins: nothing read yet, or the prompt."""
        past = 0 if phase == "prefill" else len(self.ids)
        if self.session.lengths[0] < past:
            self.session.rewind(0)
            self.session.prefill([self.ids])
        if past and self.session.lengths[0] == past:  # the prompt was read just now
            self.session.keep()
        self.session.rewind(past)
        self._sampler = Sampler(
            Sampling(temperature=0.0), [self.ids], samples=1, vocab=self.model.config.vocab,
            device=self.model.device, logprobs=None, limit=max(1, self.new_tokens),
        )  # fmt: skip

    def run(self, phase: Phase, clock: RunClock | None, tap: Tap | None = None) -> RunOutput:
        """The phase once, from its beginning: `ready` comes before it, and is no part of it.

        Decoding chooses and computes, `new_tokens` times, as `generate` does.
        """
        if clock is not None:
            clock.start()
        chosen: list[int] = []
        if phase == "prefill":
            logits_BV = self.session.prefill([self.ids], clock=clock, tap=tap)
        else:
            for (choice,) in self.session.decode(
                self._sampler.pick, limit=self.new_tokens, tap=tap, clock=clock
            ):
                if clock is not None:
                    clock(SAMPLE)
                chosen.append(choice.id)
            assert self.session.logits_BV is not None
            logits_BV = self.session.logits_BV
        if clock is not None:
            clock.stop()
        return RunOutput(ids=tuple(chosen), logits_BV=logits_BV)

    def check_finite(self, out: RunOutput) -> None:
        """Raises NotFinite where logits have a NaN or an infinity, as generating does."""
        self._sampler.pick(out.logits_BV)

    def experts(self, phase: Phase) -> dict[int, int]:
        """Run the phase once to count the experts that each layer ran, over all its calls."""
        nodes = graph(self.model.config).nodes.values()
        chosen = {node.name: node.layer for node in nodes if isinstance(node.op, Choose)}
        ran: Counter[int] = Counter()

        def tap(name: str, tensor: Tensor) -> None:
            if (layer := chosen.get(name)) is not None:
                ran[layer] += len(set(tensor.flatten().tolist()))

        if chosen:
            self.ready(phase)
            self.run(phase, None, tap)
        return ran

    def calls(self, phase: Phase) -> Iterator[tuple[Call, Logits]]:
        """The forward calls of a phase."""
        if phase == "decode":
            return decode_calls(batch=1, tokens=self.new_tokens, past=len(self.ids))
        return prompt_calls(batch=1, tokens=len(self.ids))

    def marks(self, phase: Phase) -> tuple[str, ...]:
        """The marks that a run of it makes: of each call first its own, then its activations."""
        config, model = self.model.config, graph(self.model.config)
        call = Call(batch=1, tokens=1, past=0, phase=phase)
        first = (SAMPLE, STEP) if phase == "decode" else (STEP,)
        names = {
            logits: [
                spec.name
                for spec in plan(config, call, logits=logits).written
                if not model[spec.name].shown  # it is computed for a tap only
            ]
            for logits in {logits for _, logits in self.calls(phase)}
        }
        calls = self.calls(phase)
        return (*(mark for _, logits in calls for mark in (*first, *names[logits])), END)

    def products(self, phase: Phase) -> tuple[Mapping[Place, PartWork], ...]:
        """For each of its calls what the parts with a weight matrix take."""
        found: dict[tuple[int, Logits], Mapping[Place, PartWork]] = {}
        for call, logits in self.calls(phase):
            if (call.tokens, logits) not in found:  # what the cache holds changes none of them
                works = part_work(self.model.config, call, numbers=self.numbers, logits=logits)
                found[call.tokens, logits] = {
                    (part, layer): work for part, layer, work in works if work.gemv or work.gemm
                }
        return tuple(found[call.tokens, logits] for call, logits in self.calls(phase))

    @property
    def working_set(self) -> int:
        """Bytes that the last step streams, the weights as they are stored in memory."""
        return step_bytes(
            self.model.config, len(self.ids) + self.new_tokens, numbers=self.numbers
        )

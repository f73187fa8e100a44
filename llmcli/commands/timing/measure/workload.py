"""What is run to be timed, and what the anatomy says of it: calls, work, marks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from llmcli.anatomy import plan
from llmcli.anatomy.arithmetic import Arithmetic
from llmcli.anatomy.graph import Place, graph
from llmcli.anatomy.work import (
    Ran,
    Works,
    calls_work,
    decode_calls,
    part_work,
    prompt_calls,
    step_bytes,
    total_work,
)
from llmcli.commands.timing.measure.parts import expected_marks
from llmcli.commands.timing.report import PhaseName
from llmcli.graph.spec import Call, Logits
from llmcli.model import Model
from llmcli.records.work import PartWork


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is run: the model, `batch` prompts of `tokens` tokens each, and the new ones."""

    model: Model
    batch: int
    tokens: int
    new_tokens: int

    def calls(self, phase: PhaseName) -> Iterator[tuple[Call, Logits]]:
        """The forward calls of a phase."""
        if phase == "decode":
            return decode_calls(batch=self.batch, tokens=self.new_tokens, past=self.tokens)
        return prompt_calls(batch=self.batch, tokens=self.tokens)

    def works(self, phase: PhaseName, ran: Ran | None = None) -> Works:
        """What each part in each layer takes in all of them, with the bytes that they have.

        `ran`: how many experts ran.
        """
        return calls_work(self.model.config, self.calls(phase), numbers=self.numbers, ran=ran)

    def flops(self, phase: PhaseName) -> int:
        """Of all its calls, added up from each as a whole."""
        return sum(
            total_work(self.model.config, call, numbers=self.numbers, logits=logits).flops
            for call, logits in self.calls(phase)
        )

    def marks(self, phase: PhaseName) -> tuple[str, ...]:
        """The marks that a run of it makes."""
        config, model = self.model.config, graph(self.model.config)
        call = Call(batch=1, tokens=1, past=0, phase=phase)
        names = {
            logits: [
                spec.name
                for spec in plan(config, call, logits=logits).written
                if not model[spec.name].shown  # it is computed for a tap only
            ]
            for logits in {logits for _, logits in self.calls(phase)}
        }
        return expected_marks(
            (names[logits] for _, logits in self.calls(phase)), chooses=phase == "decode"
        )

    def products(self, phase: PhaseName) -> tuple[Mapping[Place, PartWork], ...]:
        """For each of its calls what the parts with a weight matrix take."""
        found: dict[tuple[int, Logits], Mapping[Place, PartWork]] = {}
        for call, logits in self.calls(phase):
            if (call.tokens, logits) not in found:  # what the cache holds changes none of them
                works = part_work(self.model.config, call, numbers=self.numbers, logits=logits)
                found[call.tokens, logits] = {
                    (part, layer): work for part, layer, work in works if work.gemv or work.gemm
                }
        return tuple(found[call.tokens, logits] for call, logits in self.calls(phase))

    @cached_property
    def numbers(self) -> Arithmetic:
        """The arithmetic, and what weights and cache are kept in."""
        return self.model.arithmetic


def working_set(model: Model, *, tokens: int, batch: int = 1) -> int:
    """Bytes that one step after `tokens` tokens streams, the weights as they lie in memory."""
    return step_bytes(model.config, tokens, batch=batch, numbers=model.arithmetic)

"""What a test computes, a lower bound of its time on a machine, and the memory it needs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from llmcli.anatomy.arithmetic import Arithmetic
from llmcli.anatomy.counts import memory_need
from llmcli.anatomy.work import Works, added, calls_work, decode_work, prompt_calls, step_bytes
from llmcli.commands.bench.report.plan import Test
from llmcli.commands.bench.report.settings import Settings
from llmcli.config import ModelConfig
from llmcli.devices import resolve_device
from llmcli.graph.spec import Call, Logits
from llmcli.measure.roofline import lower_bound_seconds
from llmcli.ops.processor import has_bfloat16
from llmcli.records.ceilings import Ceilings
from llmcli.records.work import PartWork

# The logits of a prompt's last token, or of each call's last; in the latter case layers that keep
# nothing (`Graph.readers`) compute that token alone, as in the former, or the whole call.
Reads = Literal["prompt", "calls", "whole"]


@dataclass(frozen=True, kw_only=True)
class Counted:
    """The work of an engine whose weights are those of a configuration.

    `numbers`: its arithmetic. `reads`: the logits that it computes while it reads a prompt, and the
    tokens that its last layers compute.
    """

    config: ModelConfig
    numbers: Arithmetic
    reads: Reads = "prompt"

    def calls(
        self, tokens: int, settings: Settings, depth: int = 0
    ) -> Iterator[tuple[Call, Logits]]:
        """The forward calls that read a prompt after `depth` tokens.

        Each of its batches ends with logits.
        """
        for start in range(0, tokens, settings.n_batch):
            size = min(settings.n_batch, tokens - start)
            calls = prompt_calls(batch=1, tokens=size, past=depth + start, chunk=settings.chunk)
            for call, logits in calls:
                yield call, logits if self.reads == "prompt" else "last"

    def work(self, test: Test, settings: Settings) -> PartWork:
        """Of one run, without reading its depth."""
        return sum((added(works) for _, works in _phases(self, test, settings)), PartWork())

    def working_set(self, test: Test) -> int:
        """Bytes that the last step of a run reads again: the weights, and the keys and values."""
        return step_bytes(self.config, test.capacity, numbers=self.numbers)

    def roofline_ns(self, test: Test, settings: Settings, ceilings: Ceilings) -> float | None:
        """The lower bound of one run's time, each part waiting for its bytes or for its products.

        See `measure.roofline`. None where the rate of such products was not measured.
        """
        nbytes, whole = self.working_set(test), 0.0
        for calls, works in _phases(self, test, settings):
            seconds = lower_bound_seconds(
                works, calls, ceilings, numbers=self.numbers, working_set=nbytes
            )
            if seconds is None:
                return None
            whole += seconds
        return 1e9 * whole

    def memory_bytes(self, test: Test, settings: Settings) -> int:
        """Weights, cache and activations that such a run takes, as `info` counts them.

        On the device that `auto` is: needed for shapes alone.
        """
        need = memory_need(
            self.config,
            self.numbers,
            batch=1,
            context=test.capacity,
            chunk=settings.chunk,
            cuda=resolve_device("auto").type == "cuda",
            native=has_bfloat16(),
        )
        return need.total


@lru_cache(maxsize=8)  # needed twice for a row, and takes half a millisecond a token
def _phases(counted: Counted, test: Test, settings: Settings) -> tuple[tuple[int, Works], ...]:
    """Each call that reads the prompt, then all that write tokens: (how many calls, work)."""
    config, numbers, whole = counted.config, counted.numbers, counted.reads == "whole"
    found = [
        (1, calls_work(config, (call,), numbers=numbers, whole=whole))
        for call in counted.calls(test.n_prompt, settings, test.n_depth)
    ]
    if test.n_gen:
        past = test.n_depth + test.n_prompt
        works = decode_work(config, batch=1, tokens=test.n_gen, past=past, numbers=numbers)
        found.append((test.n_gen, works))
    return tuple(found)

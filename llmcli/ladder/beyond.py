"""What the machine offers beyond the decoder: fewer bytes a weight, a compiler, a CUDA graph.

Each computes one step, the token after the prompt, for one sequence: the step that a person
waits for. None is a rung, since fewer bits are not the same numbers; how far its numbers are
from the decoder's is reported instead, as logits and as a distribution.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from llmcli.engine.session import Session
from llmcli.formats.dense import writable
from llmcli.ladder.clock import spread, timed
from llmcli.ladder.course import Course
from llmcli.ladder.int8 import quantize
from llmcli.ladder.weights import Weights
from llmcli.nn.decoder import Decoder
from llmcli.reports.ladder import Variant
from llmcli.reports.progress import Progress

Step = Callable[[], Tensor]  # the logits [V] of the token after the prompt


@dataclass(frozen=True)
class _Made:
    """A variant: its name, what it is, and the step that it built or the reason why not."""

    name: str
    what: str
    step: Step | None
    missing: str | None = None


@torch.inference_mode()
def beyond(
    weights: Weights, run: Course, *, progress: Progress | None = None
) -> tuple[Variant, ...]:
    """Builds every variant and times their steps in turns; the first is the decoder's own."""
    made = []
    for number, (name, what, make) in enumerate(_MAKERS):
        if progress is not None:
            progress(name, number, len(_MAKERS))
        made.append(_make(name, what, lambda make=make: make(weights.decoder, run)))  # type: ignore[misc]
    seconds: dict[str, list[float]] = {one.name: [] for one in made}
    for _ in range(max(1, 2 * run.rounds)):
        for one in made:
            if one.step is not None:
                seconds[one.name].append(timed(one.step)[1])
    exact = made[0].step
    assert exact is not None
    return tuple(_variant(one, exact(), seconds) for one in made)


def _make(name: str, what: str, make: Callable[[], Step]) -> _Made:
    """The step, run once; a machine that lacks what it needs is no error but the reason."""
    try:
        step = make()
        step()
    except Exception as error:  # whatever a compiler or a driver raises
        lines = str(error).strip().splitlines()
        return _Made(name, what, None, lines[0] if lines else type(error).__name__)
    return _Made(name, what, step)


def _variant(one: _Made, exact_V: Tensor, seconds: dict[str, list[float]]) -> Variant:
    if one.step is None:
        return Variant(name=one.name, what=one.what, missing=one.missing)
    logits_V = one.step().double()
    ours, theirs = (x.log_softmax(-1) for x in (exact_V.double(), logits_V))
    times = seconds[one.name]
    first = next(iter(seconds.values()))
    ratios = [a / b for a, b in zip(first, times, strict=True)]
    return Variant(
        name=one.name,
        what=one.what,
        token_s=spread(times),
        speedup=spread(ratios).median,
        difference=(logits_V - exact_V).abs().max().item(),
        divergence=(ours.exp() * (ours - theirs)).sum().item(),
        same_token=bool(logits_V.argmax() == exact_V.argmax()),
    )


def _step_of(decoder: Decoder, run: Course) -> Step:
    """The decoder's step after the prompt; the state is put back before each, so that any number
    of them compute the same.
    """
    prompt = run.prompts[:1]
    session = Session(decoder, 1, prompt.shape[1] + 1)
    session.extend(prompt)
    session.keep()
    id = run.more[:1].reshape(1, 1)

    def step() -> Tensor:
        session.rewind(prompt.shape[1])
        return session.extend(id)[0]

    return step


def _in_bfloat16(decoder: Decoder, run: Course) -> Step:
    return _step_of(_copied(decoder), run)


def _in_int8(decoder: Decoder, run: Course) -> Step:
    return _step_of(quantize(_copied(decoder)), run)


def _copied(decoder: Decoder) -> Decoder:
    copy = Decoder(decoder.config, device=decoder.device, dtype=torch.bfloat16)
    for name in copy.weight_names:
        writable(copy.weight(name)).copy_(decoder.weight(name).dense())
    return copy


def _compiled(decoder: Decoder, run: Course) -> Step:
    step: Step = torch.compile(_step_of(decoder, run), fullgraph=True, dynamic=False)
    return step


def _captured(decoder: Decoder, run: Course) -> Step:
    """Everything that the step launches, recorded once and launched as one."""
    if decoder.device.type != "cuda":
        raise RuntimeError("needs a CUDA device")
    step = _step_of(decoder, run)
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # a capture wants every library warmed up on another stream
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()

    def replay() -> Tensor:
        graph.replay()
        return out

    return replay


_MAKERS: tuple[tuple[str, str, Callable[[Decoder, Course], Step]], ...] = (
    ("decoder", "rung 8 for one sequence, a token after the prompt", _step_of),
    ("bfloat16", "half the bytes a weight", _in_bfloat16),
    ("int8", "the blocks' weights in 8 bits with a scale a row, the rest bfloat16", _in_int8),
    ("compiled", "torch.compile over the whole step", _compiled),
    ("CUDA graph", "all launches of the step recorded and replayed as one", _captured),
)

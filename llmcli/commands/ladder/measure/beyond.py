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

from llmcli.commands.ladder.measure.clock import spread, timed
from llmcli.commands.ladder.measure.weights import Weights
from llmcli.commands.ladder.measure.workload import Workload
from llmcli.commands.ladder.report import Variant
from llmcli.engine.session import Session
from llmcli.formats.dense import writable
from llmcli.nn.decoder import Decoder
from llmcli.nn.linear import Linear
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
    weights: Weights, workload: Workload, *, progress: Progress | None = None
) -> tuple[Variant, ...]:
    """Builds every variant and times their steps in turns; the first is the decoder's own."""
    made = []
    for number, (name, what, make) in enumerate(_MAKERS):
        if progress is not None:
            progress(name, number, len(_MAKERS))
        made.append(_make(name, what, lambda make=make: make(weights.decoder, workload)))  # type: ignore[misc]
    seconds: dict[str, list[float]] = {one.name: [] for one in made}
    for _ in range(max(1, 2 * workload.rounds)):
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


def _step_of(decoder: Decoder, workload: Workload) -> Step:
    """The decoder's step after the prompt; the state is put back before each, so that any number
    of them compute the same.
    """
    prompt = workload.prompts[:1]
    session = Session(decoder, 1, prompt.shape[1] + 1)
    session.extend(prompt)
    session.keep()
    id = workload.more[:1].reshape(1, 1)

    def step() -> Tensor:
        session.rewind(prompt.shape[1])
        return session.extend(id)[0]

    return step


def _in_bfloat16(decoder: Decoder, workload: Workload) -> Step:
    return _step_of(_copied(decoder), workload)


def _in_int8(decoder: Decoder, workload: Workload) -> Step:
    return _step_of(quantize(_copied(decoder)), workload)


def _copied(decoder: Decoder) -> Decoder:
    copy = Decoder(decoder.config, device=decoder.device, dtype=torch.bfloat16)
    for name in copy.weight_names:
        writable(copy.weight(name)).copy_(decoder.weight(name).dense())
    return copy


def _compiled(decoder: Decoder, workload: Workload) -> Step:
    step: Step = torch.compile(_step_of(decoder, workload), fullgraph=True, dynamic=False)
    return step


def _captured(decoder: Decoder, workload: Workload) -> Step:
    """Everything that the step launches, recorded once and launched as one."""
    if decoder.device.type != "cuda":
        raise RuntimeError("needs a CUDA device")
    step = _step_of(decoder, workload)
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


class Int8Linear(Linear):
    """A projection whose weights are integers -127 … 127 with one scale a row.

    Axes: B batch, T tokens, D width, R rows (outputs).

    `Y = (X Wᵢₙₜ₈ᵀ) · scale`: symmetric, rounded to nearest, the scale the row's largest number
    over 127 (absmax quantization; Dettmers et al. 2022, arXiv 2208.07339, section 2.1). The
    activations stay bfloat16, for which PyTorch has a kernel that widens the weights as it reads.
    """

    def __init__(self, linear: Linear) -> None:
        wide_RD = linear.weight.dense(torch.float32)
        scale_R = wide_RD.abs().amax(1).clamp_min(torch.finfo(torch.float32).tiny) / 127
        self.packed = (wide_RD / scale_R[:, None]).round_().to(torch.int8).contiguous()
        self.scale = scale_R.bfloat16()
        self.bias = linear.bias
        self.rows = linear.rows

    def __call__(self, x_BTD: Tensor) -> Tensor:
        """`[B, T, D]` → `[B, T, R]`."""
        y = torch._weight_int8pack_mm(x_BTD.reshape(-1, x_BTD.shape[-1]), self.packed, self.scale)
        y = y.reshape(*x_BTD.shape[:-1], -1)
        return y if self.bias is None else y + self.bias

    def wide(self, x_BTD: Tensor) -> Tensor:
        """The same for a float32 stream: PyTorch's kernel rounds its sums to bfloat16."""
        return self(x_BTD).float()


def quantize(decoder: Decoder) -> Decoder:
    """Replaces the projections of every block, in place; the head and the embeddings stay."""
    for block in decoder.blocks:
        for part in block.parts.values():
            for name, linear in list(vars(part).items()):
                if isinstance(linear, Linear):
                    setattr(part, name, Int8Linear(linear))
    return decoder


_MAKERS: tuple[tuple[str, str, Callable[[Decoder, Workload], Step]], ...] = (
    ("decoder", "rung 8 for one sequence, a token after the prompt", _step_of),
    ("bfloat16", "half the bytes a weight", _in_bfloat16),
    ("int8", "the blocks' weights in 8 bits with a scale a row, the rest bfloat16", _in_int8),
    ("compiled", "torch.compile over the whole step", _compiled),
    ("CUDA graph", "all launches of the step recorded and replayed as one", _captured),
)

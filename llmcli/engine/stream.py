"""Prompts → a stream of tokens: one prefill, then decode steps for all sequences.

Does not print or measure time; callers wrap the iterator. Exceptions of the caller (Ctrl-C, a
closed generator) take effect between two steps.

Axes: P prompts, B sequences still running, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from llmcli.engine.output import Output, Token
from llmcli.engine.sampler import Sampler
from llmcli.engine.sampling import Sampling
from llmcli.engine.session import Session, make_room, require_cache
from llmcli.engine.speculation import Speculation, decode
from llmcli.engine.ties import NearTies
from llmcli.errors import PromptTooLong, UsageError

if TYPE_CHECKING:
    from llmcli.model import Model

_BUCKET = 64  # capacities are multiples of this, so that few sizes of cache exist
_FIRST = 256  # initial room for new tokens without a limit; it doubles
_FULL = "lower --max-tokens, --context-length or --num-samples"


@dataclass(frozen=True, kw_only=True)
class TextRequest:
    """Prompts (lists of ids), the number of continuations per prompt, and settings.

    Every prompt is continued `samples` times, all as one batch. A text ends with one of
    `model.eos_ids` (unless `ignore_eos`), a `stop` string, after `limit` tokens (None: no limit),
    or when full: the model reads at most `capacity` tokens (default: its context), so a prompt of n
    leaves room for `capacity - n + 1`.

    `logprobs` K requests log-probabilities of the token and of the K best, `margins` the margins of
    greedy choices and whether they are near ties.
    """

    prompts: Sequence[Sequence[int]]
    sampling: Sampling
    limit: int | None
    stop: Sequence[str] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    margins: bool = False
    samples: int = 1
    capacity: int | None = None


def stream(
    model: Model,
    request: TextRequest,
    *,
    on_prefill: Callable[[int, int], None] | None = None,
    on_reprefill: Callable[[int], None] | None = None,
    speculation: Speculation | None = None,
) -> Iterator[Token]:
    """Return an iterator over the generated tokens.

    Each step yields one token of every running sequence, in order. Sequences end independently.

    Sample i of every prompt only depends on `sample_seed(sampling.seed, i)`: the text equals that
    of a single run with this seed, up to rounding of the logits. `on_prefill(done, total)` is
    called with the prompt tokens read, after each chunk of the longest prompt,
    `on_reprefill(tokens)` when all are read again (`Session`). `speculation` is used for a single
    sequence.

    Raises immediately UsageError (no prompt, an id outside the vocabulary, a number below 1, an
    empty stop string) and PromptTooLong; while running NotFinite and OutOfMemory.
    """
    prompts, limit, logprobs = request.prompts, request.limit, request.logprobs
    room = model.config.room(request.capacity)
    _check_numbers(limit=1 if limit is None else limit, samples=request.samples, capacity=room)
    if logprobs is not None and logprobs < 0:
        raise UsageError(f"`--logprobs {logprobs}` is out of range", hint="it must be 0 or more")
    _check_prompts(prompts, model.config.vocab, room)
    outputs = _outputs(model, request, room)
    sampler = Sampler(
        request.sampling,
        prompts,
        vocab=model.config.vocab,
        device=model.device,
        samples=request.samples,
        logprobs=logprobs,
        limit=limit,
        ties=NearTies(model) if request.margins and request.sampling.greedy else None,
    )
    new = (_FIRST if limit is None else limit) - 1  # the last one is never read
    capacity = min(room, -(-(max(map(len, prompts)) + new) // _BUCKET) * _BUCKET)

    def tokens() -> Iterator[Token]:
        # forking samples and dropping finished rows copies the remaining caches
        batch = len(outputs)
        what = f"the caches of {batch} × {capacity} tokens"
        most = batch if batch == 1 else 2 * batch
        require_cache(model.decoder, most, capacity, what, _FULL)
        session = Session(model.decoder, len(prompts), capacity, on_reprefill=on_reprefill)
        session.prefill(prompts, on_prefill=on_prefill)
        if request.samples > 1:
            session.select([number // request.samples for number in range(len(outputs))])
        running = outputs
        for choices in decode(session, sampler, limit, speculation):
            for output, choice in zip(running, choices, strict=True):
                yield output.add(choice)
            rows = [row for row, output in enumerate(running) if output.finish is None]
            if not rows:
                return
            if len(rows) < len(running):
                running = [running[row] for row in rows]
                sampler.keep(rows)
                session.select(rows)
            if limit is None:
                make_room(session, min(max(session.lengths) + 1, room), room, _FULL)

    return tokens()


def _outputs(model: Model, request: TextRequest, room: int) -> list[Output]:
    """Outputs by prompt · samples + sample."""
    eos_ids = frozenset[int]() if request.ignore_eos else model.eos_ids
    begin = partial(Output, tokenizer=model.tokenizer, stop=request.stop, eos_ids=eos_ids)
    prompts = [prompt for prompt in request.prompts for _ in range(request.samples)]
    rooms = [room - len(prompt) + 1 for prompt in prompts]
    if request.limit is not None:
        rooms = [min(request.limit, most) for most in rooms]
    return [begin(at, prompts[at], room=most) for at, most in enumerate(rooms)]


def _check_numbers(**numbers: int) -> None:
    for name, number in numbers.items():
        if number < 1:
            raise UsageError(f"the {name} is {number}", hint="it must be 1 or more")


def _check_prompts(prompts: Sequence[Sequence[int]], vocab: int, capacity: int) -> None:
    if not prompts:
        raise UsageError("there is no prompt to continue", hint="give a PROMPT")
    for number, ids in enumerate(prompts):
        which = "the prompt" if len(prompts) == 1 else f"prompt {number}"
        if not ids:
            raise UsageError(f"{which} has no tokens", hint="give at least one character or id")
        if len(ids) > capacity:
            excess = len(ids) - capacity
            raise PromptTooLong(
                f"{which} has {len(ids)} tokens, {excess} more than the context of {capacity}",
                hint=f"shorten it by {excess} tokens, or give more room with `--context-length`",
            )
        for id in ids:
            if not 0 <= id < vocab:
                raise UsageError(
                    f"{which} has the token id `{id}`, outside the vocabulary of {vocab}",
                    hint=f"ids go from 0 to {vocab - 1}",
                )

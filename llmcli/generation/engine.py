"""Prompts to a stream of tokens: one prefill, then one decode step for all sequences at a time.

Nothing here prints or reads a clock; whoever wants to time or show wraps the iterator. An
exception at the caller's end (Ctrl-C, a closed generator) passes through between two steps.

Axes: P prompts, B sequences still running, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from llmcli.devices import require_memory
from llmcli.engine.session import Session
from llmcli.errors import PromptTooLong, UsageError
from llmcli.generation.output import Output, Token
from llmcli.generation.picker import Picker
from llmcli.generation.sampling import Sampling
from llmcli.generation.speculation import Speculation
from llmcli.generation.stop import StopMatcher
from llmcli.generation.ties import NearTies

if TYPE_CHECKING:
    from llmcli.model import Model

_BUCKET = 64  # capacities are multiples of this, so that few sizes of cache exist


def stream(
    model: Model,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    limit: int,
    stop: Sequence[str] = (),
    ignore_eos: bool = False,
    logprobs: int | None = None,
    margins: bool = False,
    samples: int = 1,
    capacity: int | None = None,
    on_prefill: Callable[[int, int], None] | None = None,
    on_reread: Callable[[int], None] | None = None,
    speculation: Speculation | None = None,
) -> Iterator[Token]:
    """Return an iterator over the tokens that `model` writes after `prompts` (lists of ids).

    Every prompt is continued `samples` times, all as one batch: each step yields one token of
    every sequence that still runs, in order. A sequence ends at one of `model.eos_ids` (unless
    `ignore_eos`), at one of the strings `stop`, after `limit` tokens, or when it is full: at
    most `capacity` tokens (default: the model's context) enter the model, so that a prompt of n
    leaves room for `capacity - n + 1`. It ends alone; the others go on without it.

    Sample i of every prompt draws with `sample_seed(sampling.seed, i)` and nothing else: the
    text is that of the prompt alone with that seed, within the rounding of the logits.
    `logprobs` K asks for log-probabilities of the token and of the K best, `margins` for the
    margin of greedy choices and whether they are near ties. `on_prefill(done, total)` is called
    with the prompt tokens read, every 512 tokens of the longest prompt, `on_reread(tokens)` where
    all of them are read once more (`Session`). `speculation` decodes where there is one sequence.

    Raises at once UsageError (nothing to continue, an id outside the vocabulary, a number below
    1, an empty stop string) and PromptTooLong; while it runs NotFinite.
    """
    room = _capacity(model, capacity)
    _check_numbers(limit=limit, samples=samples, capacity=room)
    if logprobs is not None and logprobs < 0:
        raise UsageError(f"`--logprobs {logprobs}` is out of range", hint="it must be 0 or more")
    StopMatcher(stop)
    _check_prompts(prompts, model.config.vocab, room)
    outputs = [
        Output(
            number,
            prompts[number // samples],
            room=min(limit, room - len(prompts[number // samples]) + 1),
            tokenizer=model.tokenizer,
            stop=stop,
            eos_ids=frozenset() if ignore_eos else model.eos_ids,
        )
        for number in range(len(prompts) * samples)
    ]
    picker = Picker(
        sampling,
        prompts,
        samples=samples,
        vocab=model.config.vocab,
        device=model.device,
        logprobs=logprobs,
        limit=limit,
        ties=NearTies(model) if margins and sampling.greedy else None,
    )
    longest = max(map(len, prompts))
    wanted = -(-(longest + limit - 1) // _BUCKET) * _BUCKET
    return _run(
        model, prompts, outputs, picker, min(room, wanted), on_prefill, on_reread, speculation
    )


def _run(
    model: Model,
    prompts: Sequence[Sequence[int]],
    outputs: list[Output],
    picker: Picker,
    capacity: int,
    on_prefill: Callable[[int, int], None] | None,
    on_reread: Callable[[int], None] | None,
    speculation: Speculation | None,
) -> Iterator[Token]:
    # forking samples and dropping finished rows copies the caches of those that go on
    copies = 1 if len(outputs) == 1 else 2
    require_memory(
        model.decoder.state_bytes(copies * len(outputs), capacity),
        model.device,
        f"the caches of {len(outputs)} × {capacity} tokens",
        "lower --max-tokens, --context-length or --num-samples",
    )
    session = Session(model.decoder, len(prompts), capacity, on_reread=on_reread)
    session.prefill(prompts, on_prefill=on_prefill)
    samples = len(outputs) // len(prompts)
    if samples > 1:
        session.select([number // samples for number in range(len(outputs))])
    steps = session.decode(picker.pick)
    if speculation is not None and len(outputs) == 1:
        steps = speculation.decode(session, picker)
    for choices in steps:
        for output, choice in zip(outputs, choices, strict=True):
            yield output.add(choice)
        rows = [row for row, output in enumerate(outputs) if output.finish is None]
        if not rows:
            return
        if len(rows) < len(outputs):
            outputs = [outputs[row] for row in rows]
            picker.keep(rows)
            session.select(rows)


def _capacity(model: Model, capacity: int | None) -> int:
    """How many tokens may enter the model, the table of learned positions being a hard limit."""
    wanted = model.config.context if capacity is None else capacity
    positions = model.config.embedding.positions
    return wanted if positions is None else min(wanted, positions)


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

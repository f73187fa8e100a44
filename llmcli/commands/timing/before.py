"""What `llmcli timing` measures before the model is there: the machine, and what memory is held.

The ceilings come first, so that what measuring them leaves in the process is no memory of the
model, and so that nothing of the model is pushed out of a cache between loading and running.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmcli.anatomy.counts import memory_need
from llmcli.anatomy.work import step_bytes
from llmcli.shell.options import ModelOptions
from llmcli.shell.output import Output
from llmcli.shell.progress import Progress
from llmcli.shell.prompts import Prompt

if TYPE_CHECKING:
    from llmcli.checkpoints import Checkpoint
    from llmcli.records.ceilings import Ceilings

_TOKEN_BYTES = 3  # of a text in each token, at least, in most texts and vocabularies


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """`base`: bytes held without a model (0 on a GPU), None where that is not known.

    The system may not say, and a process that has computed before keeps some of what that took.
    """

    ceilings: Ceilings
    base: int | None


def measuring(
    given: Prompt, new_tokens: int, options: ModelOptions, out: Output, found: list[Baseline]
) -> Callable[[Checkpoint], None]:
    """What is done with the checkpoint's headers once torch is there: puts a `Baseline` in `found`.

    Raises UnsupportedModel, and UsageError for a device or a dtype that is not there.
    """
    fresh = "torch" not in sys.modules

    def measure(checkpoint: Checkpoint) -> None:
        import torch

        from llmcli import devices
        from llmcli.families import plan, translate
        from llmcli.loading.load import arithmetic_on
        from llmcli.measure.ceilings import measure_ceilings
        from llmcli.measure.peaks import resident_bytes

        config, rules = translate(checkpoint)
        device = devices.resolve_device(options.device)
        drawn = options.weights_seed is not None
        numbers = arithmetic_on(
            device, checkpoint, config,
            None if drawn else plan(checkpoint.tensors, rules, config),
            dtype=options.dtype, quantize=options.quantize,
        ).given(options.activations, options.cache_type)  # fmt: skip
        room = options.context_length or config.context
        tokens = min(room, prompt_tokens(given) + new_tokens)
        held = resident_bytes()
        with Progress(out) as progress:
            ceilings = measure_ceilings(
                device,
                numbers,
                threads=torch.get_num_threads(),
                working_set=step_bytes(config, tokens, numbers=numbers),
                progress=progress,
            )
        base: int | None = 0
        if device.type != "cuda" and not fresh:
            base = None
        elif device.type != "cuda":
            # `runtime` without a tokenizer: the libraries' code
            code = memory_need(config, numbers, batch=1, context=1).runtime
            base = base_bytes(held, resident_bytes(), code)
        found.append(Baseline(ceilings=ceilings, base=base))

    return measure


def base_bytes(before: int | None, after: int | None, code: int) -> int | None:
    """What is there without a model, from what was held before and after the ceilings.

    Of what measuring them has left so many bytes are the libraries' `code`, which every run loads
    and which the estimate of a run has in it.
    """
    if before is None or after is None:
        return None
    return max(before, after - code)


def prompt_tokens(given: Prompt) -> int:
    """How many tokens the prompt has, about: the tokenizer comes with the model."""
    if given.ids is not None:
        return len(given.ids)
    return 1 + len((given.text or "").encode()) // _TOKEN_BYTES

"""Picks the next token of every running sequence, and keeps the state for this.

Axes: B sequences still running, V vocabulary, S steps per table of random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from llmcli.devices import copy_to_host_async, float64_device
from llmcli.engine.output import Choice
from llmcli.engine.sampling import Sampling, check_kernel, choose, penalized, top
from llmcli.engine.seeds import uniforms
from llmcli.engine.ties import NearTies
from llmcli.errors import NotFinite

_STEPS = 256  # steps per upload of random numbers


class Sampler:
    """Sampling for a batch: `samples` sequences for each of `prompts`, prompt by prompt.

    Up to `limit` tokens each (a hint for the number of random numbers; None: unknown). Computed on
    the logits' device, or on the CPU if that may lack float64. Token counts `[B, V]` exist only if
    a penalty needs them, random numbers only for non-greedy choices, log-probabilities (of the
    token and of the `logprobs` best) only if `logprobs` is not None, margins only with `ties`,
    which bounds their rounding errors.
    """

    def __init__(
        self,
        sampling: Sampling,
        prompts: Sequence[Sequence[int]],
        *,
        vocab: int,
        device: torch.device,
        samples: int = 1,
        logprobs: int | None = None,
        limit: int | None = None,
        ties: NearTies | None = None,
    ) -> None:
        self._sampling = sampling
        self._device = device = float64_device(device)
        check_kernel(vocab, device)
        self._logprobs = None if logprobs is None else min(logprobs, vocab)
        self._ties = ties
        self._sequences = list(range(len(prompts) * samples))
        self._samples = samples
        self._step = 0
        self._steps = _STEPS if limit is None else min(_STEPS, limit)
        self._u_BS = torch.empty(0, device=device)
        prompt_BV = output_BV = None
        if sampling.repetition_penalty != 1:
            counts = [torch.bincount(torch.tensor(ids), minlength=vocab) for ids in prompts]
            prompt_BV = torch.stack(counts).repeat_interleave(samples, 0).to(device)
        output_penalties = sampling.presence_penalty or sampling.frequency_penalty
        if sampling.repetition_penalty != 1 or output_penalties:
            shape = (len(self._sequences), vocab)
            output_BV = torch.zeros(shape, dtype=torch.int64, device=device)
        # how often each token is in the prompts and in the outputs; None if no penalty needs it
        self._counts: list[Tensor | None] = [prompt_BV, output_BV]

    def pick(self, logits_BV: Tensor) -> tuple[Tensor, list[Choice]]:
        """`draw`, then wait for the choices."""
        ids_B, choices = self.draw(logits_BV)
        return ids_B, choices()

    @torch.inference_mode()
    def draw(self, logits_BV: Tensor) -> tuple[Tensor, Callable[[], list[Choice]]]:
        """The next ids `[B]` on the logits' device, and a function that waits for the choices.

        Does not synchronize, except for margins. The function raises NotFinite for a row of logits
        with NaN, +inf, or only -inf, whose token is invalid.
        """
        device, logits_BV = logits_BV.device, logits_BV.to(self._device)
        u_B = None if self._sampling.greedy else self._uniforms()
        free_BV = self._sampling.suppressed(logits_BV, self._step)
        ids_B, best_B = choose(free_BV, self._sampling, u_B, *self._counts)
        margins = None if self._ties is None else self._margins(self._ties, free_BV, ids_B)
        if (output_BV := self._counts[1]) is not None:
            output_BV.scatter_(1, ids_B[:, None], 1, reduce="add")
        # ids by their bits: a conversion is a launch, and so is each column of mixed dtypes
        columns = [ids_B.view(torch.float64)[:, None], best_B.double()[:, None]]
        if self._logprobs is not None:
            columns += _logprobs(logits_BV, ids_B, self._logprobs)
        rows = copy_to_host_async(torch.cat(columns, 1))
        sequences, step = self._sequences, self._step
        self._step += 1

        def choices() -> list[Choice]:
            values = rows()
            ids = values.view(torch.int64)[:, 0].tolist()
            each = zip(sequences, ids, values[:, 1:].tolist(), strict=True)
            found = [_choice(sequence, step, id, *row) for sequence, id, row in each]
            if margins is None:
                return found
            return [
                choice._replace(margin=margin, tied=margin <= bound)
                for choice, (margin, bound) in zip(found, margins, strict=True)
            ]

        return ids_B.to(device), choices

    @torch.inference_mode()
    def guess(self, logits_1V: Tensor, ahead: int) -> int:
        """The choice of `pick` after `ahead` further tokens for these logits, without side effects.

        For a single sequence. Logits of another model may lack ids at the end.
        """
        logits_1V = logits_1V.to(self._device)
        u_B = None
        if not self._sampling.greedy:
            numbers = uniforms(self._sampling.seed, 0, self._step + ahead, 1)
            u_B = torch.tensor(numbers, dtype=torch.float64).to(self._device, non_blocking=True)
        vocab = logits_1V.shape[1]
        counts = [None if one is None else one[:, :vocab] for one in self._counts]
        free_1V = self._sampling.suppressed(logits_1V, self._step + ahead)
        return int(choose(free_1V, self._sampling, u_B, *counts)[0])

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only these rows of the batch."""
        index = torch.tensor(rows, device=self._device)
        self._sequences = [self._sequences[row] for row in rows]
        if self._u_BS.numel():
            self._u_BS = self._u_BS[index]
        self._counts = [None if one is None else one[index] for one in self._counts]

    def _uniforms(self) -> Tensor:
        """The random number of every row for this step, `[B]`; a new table every S steps."""
        if self._step % self._steps == 0:
            keys = [sequence % self._samples for sequence in self._sequences]
            seed = self._sampling.seed
            table = {key: uniforms(seed, key, self._step, self._steps) for key in set(keys)}
            u_BS = torch.tensor([table[key] for key in keys], dtype=torch.float64)
            self._u_BS = u_BS.to(self._device, non_blocking=True)
        return self._u_BS[:, self._step % self._steps]

    def _margins(
        self, ties: NearTies, logits_BV: Tensor, ids_B: Tensor
    ) -> list[tuple[float, float]]:
        """Per row the margin to the best other token, and the bound of its rounding error."""
        scores_BV = penalized(logits_BV, self._sampling, *self._counts)
        others_B = scores_BV.scatter(1, ids_B[:, None], float("-inf")).argmax(-1)
        ids_B2 = torch.stack((ids_B, others_B), 1)

        def pair(each_BV: Tensor) -> Tensor:
            return each_BV.gather(1, ids_B2).cpu().double()  # some devices lack float64

        scores_B2, logits_B2 = pair(scores_BV), pair(logits_BV)
        both = (None if one is None else pair(one) for one in self._counts)
        # a score is linear in its logit (repetition scales it, other penalties are constant)
        doubled_B2 = penalized(2 * logits_B2, self._sampling, *both)
        slopes_B2 = torch.where(logits_B2 == 0, 1.0, (doubled_B2 - scores_B2) / logits_B2)
        margins_B = scores_B2[:, 0] - scores_B2[:, 1]
        bounds_B = ties.bound(ids_B2, logits_B2, slopes_B2)
        return list(zip(margins_B.tolist(), bounds_B.tolist(), strict=True))


def _choice(sequence: int, step: int, id: int, best: float, *logprobs: float) -> Choice:
    if not float("-inf") < best < float("inf"):
        raise NotFinite(
            f"the logits of sequence {sequence} for its token {step} are not finite",
            hint="try `--cache-type float32`, and `--dtype float32` where it was float16, which "
            "overflows in some models; else the checkpoint may hold NaN: `llmcli load --check` "
            "finds it",
        )
    if not logprobs:
        return Choice(id, None, ())
    half = len(logprobs) // 2 + 1
    top_ids = (int(token) for token in logprobs[1:half])
    return Choice(id, logprobs[0], tuple(zip(top_ids, logprobs[half:], strict=True)))


def _logprobs(logits_BV: Tensor, ids_B: Tensor, best: int) -> list[Tensor]:
    """Columns in float64: log-probability of `ids_B`, ids of the `best`, their log-probabilities.

    Log-softmax of the model's own logits, for these tokens only.
    """
    total_B1 = logits_BV.double().logsumexp(-1, keepdim=True)
    chosen_B1 = logits_BV.gather(1, ids_B[:, None]).double() - total_B1
    if best == 0:
        return [chosen_B1]
    ids_BK = top(logits_BV, best)
    return [chosen_B1, ids_BK.double(), logits_BV.gather(1, ids_BK).double() - total_B1]

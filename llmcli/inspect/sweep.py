"""Many runs of one text with an edit each, in batches that share what is the same in all of them.

Axes: B runs of a batch, T tokens, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from llmcli.inspect.kernel import layer_of
from llmcli.model import Model
from llmcli.nn.step import Edit, Tap
from llmcli.records.work import Progress, no_progress

AT_ONCE = 4096  # tokens of one call of the decoder
LOGITS = 1 << 26  # numbers of the logits of one call


class Sweep:
    """Runs of `ids` with one edit each, none of which changes a token before position `since`.

    Computed once are the tokens before `since`, and all layers before the edited one; embeddings
    and final norm are of no layer, and their runs begin with the first. `plain`: the
    logits of the run without an edit, as those of `run`; its activations pass through `tap`.
    `logits`: of the `last` token, or of `all` from `since` on. `rows`: runs at a time (default: as
    many as memory allows).
    """

    def __init__(
        self,
        model: Model,
        ids: Sequence[int],
        *,
        since: int = 0,
        logits: Literal["all", "last"] = "last",
        rows: int | None = None,
        tap: Tap | None = None,
        progress: Progress = no_progress,
    ) -> None:
        self._decoder, self._ids, self._since = model.decoder, list(ids), since
        self._logits: Literal["all", "last"] = logits
        self._progress = progress
        tokens = len(ids) - since
        numbers = model.config.vocab * (tokens if logits == "all" else 1)
        self.rows = rows or max(1, min(AT_ONCE // tokens, LOGITS // numbers))
        self._state = self._decoder.new_state(1, len(ids)) if since else None
        self._stream: dict[int, Tensor] = {}  # before each layer, [1, T, D]

        def keep(name: str, tensor: Tensor) -> None:
            if name.endswith(".resid_pre"):
                self._stream[layer_of(name) or 0] = tensor
            if tap is not None:
                tap(name, tensor)

        with torch.inference_mode():
            if self._state is not None:
                before = torch.tensor([self._ids[:since]], device=model.device)
                self._decoder(before, self._state, totals=[len(ids)], logits="last")
            self.plain = self._call([None], None, keep)

    def run(self, edits: Sequence[Edit]) -> Iterator[tuple[list[int], Tensor]]:
        """Yields the numbers of some of the runs, and their logits `[B, T, V]`.

        The function of an edit gets the activation `[1, …, T, …]` of its own run.
        """
        layers: dict[int | None, list[int]] = {}
        for number, edit in enumerate(edits):
            layers.setdefault(layer_of(edit.name), []).append(number)
        done = 0
        for layer, numbers in layers.items():
            for first in range(0, len(numbers), self.rows):
                some = numbers[first : first + self.rows]
                self._progress("running", done, len(edits))
                with torch.inference_mode():
                    found = self._call([edits[number] for number in some], layer)
                yield some, found
                done += len(some)

    def _call(
        self, edits: Sequence[Edit | None], layer: int | None, tap: Tap | None = None
    ) -> Tensor:
        """The logits of runs whose edits are all of this layer, or None."""
        rows, new = len(edits), self._ids[self._since :]
        given: dict[str, dict[int, Edit]] = {}
        for row, edit in enumerate(edits):
            if edit is not None:
                given.setdefault(edit.name, {})[row] = edit
        begin = None
        if layer is not None and self._decoder.begins_anywhere:
            begin = layer, self._stream[layer].expand(rows, -1, -1)
        return self._decoder(
            torch.tensor([new] * rows, device=self._decoder.device),
            None if self._state is None else self._state.select([0] * rows),
            totals=[len(self._ids)] * rows,
            tap=tap,
            edits=[Edit(name=name, fn=_by_row(own)) for name, own in given.items()],
            logits=self._logits,
            begin=begin,
        )


def _by_row(edits: Mapping[int, Edit]) -> Callable[[Tensor, Tensor], Tensor]:
    """The function of an edit of a batch, each row of which has an edit of its own, or none."""

    def edited(x: Tensor, positions: Tensor) -> Tensor:
        for row, edit in edits.items():
            at = positions if positions.ndim == 1 else positions[row : row + 1]
            x[row : row + 1] = edit.fn(x[row : row + 1].clone(), at)
        return x

    return edited

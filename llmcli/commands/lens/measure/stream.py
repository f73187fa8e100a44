"""The residual stream of one run: the rows that are kept, and that it is a sum.

Axes: B batch (1 here), T tokens of one call, D width, R rows kept (places of the stream), P
positions kept.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from llmcli.anatomy.block import block_names
from llmcli.errors import NotFinite
from llmcli.model import Model, dtype_name
from llmcli.records.checks import ViewCheck


class Stream:
    """Watches a run: keeps `names` at `positions`, and adds up what is added to the stream.

    Every place of it has to be the place before plus what was added since; the first is the
    embedding.
    """

    def __init__(self, model: Model, names: tuple[str, ...], positions: range) -> None:
        self.names = names
        # what is added, and the places of the stream, each with what its sum is multiplied by
        self._added = {"embed", "pos_embed"}
        self._places: dict[str, float] = {}
        for number, layer in enumerate(model.config.layers):
            for sublayer in block_names(layer, f"blocks.{number}"):
                self._places |= {sublayer.stream: 1.0, sublayer.leaves: 1.0}
                self._added |= set(sublayer.adds)
            self._places[sublayer.leaves] = layer.scale
            if layer.scaled:
                factor = model.decoder.weight(f"blocks.{number}.out_scale.w").dense()
                self._places[sublayer.leaves] *= float(factor)
        self._dtype = model.stream_dtype  # what the stream has to have
        self._computed = model.dtype
        self._positions = positions
        self._kept: dict[str, list[Tensor]] = {name: [] for name in names}
        self._parts: list[Tensor] = []
        self._off, self._where = 0.0, ""

    def watch(self, first: int, name: str, x_BTD: Tensor) -> None:
        """An activation of the call whose tokens begin at `first`. Raises NotFinite."""
        if name == "embed":
            self._parts = []
        if name in self._places:
            self._add_up(first, name, x_BTD[0])
        if name in self._places or name in self._added:
            self._parts.append(x_BTD[0])
        if name in self._kept:
            wanted = self._positions
            start, stop = (max(0, at - first) for at in (wanted.start, wanted.stop))
            self._kept[name].append(x_BTD[0, start:stop].clone())

    @property
    def last_TD(self) -> Tensor:
        """The latest place of the stream, all tokens of that call."""
        return self._parts[-1]

    def rows(self, positions: range) -> Tensor:
        """`[R, P, D]` at some of the positions that were kept, in the stream's dtype."""
        start, stop = (at - self._positions.start for at in (positions.start, positions.stop))
        return torch.stack([self._joined(name)[start:stop] for name in self.names])

    def _joined(self, name: str) -> Tensor:
        """What was kept of one place: of the prompt, and of every new token."""
        pieces = self._kept[name]
        if len(pieces) > 1:
            pieces[:] = [torch.cat(pieces)]
        return pieces[0]

    def check(self) -> ViewCheck:
        """The worst difference, as a share of the numbers that were added.

        One sum is rounded once, by half of eps at most; GPUs may do it in another order. The stream
        has at least float32 whatever the model computes in: one that was rounded to less is wrong.
        """
        return ViewCheck(
            name="residual_stream",
            words="every row is the one before plus its layer, relative",
            value=self._off,
            tolerance=torch.finfo(self._dtype).eps,
            where=self._where,
        )

    def _add_up(self, first: int, name: str, x_TD: Tensor) -> None:
        parts = [part.to(self._dtype) for part in self._parts]
        size_TD = sum((part.abs() for part in parts), torch.zeros_like(parts[0]))
        total_TD = sum(parts[1:], parts[0])
        if (scale := self._places[name]) != 1:
            total_TD, size_TD = total_TD * scale, size_TD * abs(scale)
        apart_TD = (total_TD - x_TD.to(self._dtype)).abs()
        share_T = (apart_TD / size_TD.clamp_min(torch.finfo(self._dtype).tiny)).amax(-1)
        off, at = (float(found) for found in share_T.max(0))
        if not math.isfinite(off):
            worst = int((~torch.isfinite(share_T)).nonzero()[0])
            raise NotFinite(
                f"`{name}` is not finite at position {first + worst}",
                dtype=dtype_name(self._computed),
            )
        if off > self._off:
            self._off, self._where = off, f"{name}, position {first + int(at)}"
        self._parts = []

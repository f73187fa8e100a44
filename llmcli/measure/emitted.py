"""Whether the cache holds, bit for bit, the keys and values that the layers gave out.

Axes: H heads of keys and values, T tokens, d size of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from llmcli.explain.formulas import worst
from llmcli.measure.attention.checks import cache_check
from llmcli.measure.observe import Observed
from llmcli.reports.checks import ViewCheck

# in the order in which a layer makes them, as far as it does: the last are those it multiplies with
_KEYS = ("attn.k", "attn.k_norm", "attn.k_rot")


class Emitted:
    """Watches a run: keeps keys and values of all its tokens, as many bytes as its cache has."""

    def __init__(self) -> None:
        self._key: Tensor | None = None
        self._kept: dict[str, list[Tensor]] = {}

    def watch(self, first: int, name: str, x_1HTd: Tensor) -> None:
        """An activation of the call whose tokens begin at `first`."""
        prefix, _, part = name.partition(".attn.")
        part = f"attn.{part}"
        if part in _KEYS:
            self._key = x_1HTd
        elif part == "attn.v":
            self._keep(f"{prefix}.v", x_1HTd)
        elif part == "attn.z" and self._key is not None:
            self._keep(f"{prefix}.k", self._key)
            self._key = None

    def _keep(self, name: str, x_1HTd: Tensor) -> None:
        """A copy: a view would keep the whole product of the projection."""
        self._kept.setdefault(name, []).append(x_1HTd[0].clone())

    def check(self, run: Observed) -> ViewCheck:
        """The worst difference to the cache of the run; what was kept is given up."""
        if run.state is None:
            raise ValueError("without new tokens there is no cache")
        found = []
        for layer, cache in enumerate(run.state.layers):
            for part, cached_1HCd in (("k", cache.k), ("v", cache.v)):
                emitted_HTd = torch.cat(self._kept.pop(f"blocks.{layer}.{part}"), 1)
                cached_HTd = cached_1HCd[0, :, : len(run.ids)]
                found.append(cache_check(emitted_HTd, cached_HTd, f"cache.{layer}.{part}"))
        return worst(found)

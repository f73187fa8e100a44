"""Whether a cache holds what was put there.

Axes: K key/value heads, S positions, d size of a head.
"""

from __future__ import annotations

from torch import Tensor

from llmcli.reports.checks import ViewCheck


def cache_check(emitted_KSd: Tensor, cached_KSd: Tensor, name: str) -> ViewCheck:
    """Counts the numbers of the cache called `name` that are not those that were computed.

    Bit for bit, but that one NaN is as good as another.
    """
    equal_KSd = (emitted_KSd == cached_KSd) | (emitted_KSd.isnan() & cached_KSd.isnan())
    wrong = (~equal_KSd).nonzero().tolist()
    return ViewCheck(
        name="cache",
        words="the cache holds the keys and values that were computed",
        value=float(len(wrong)),
        tolerance=0.0,
        where=f"{name}[{','.join(map(str, wrong[0]))}]" if wrong else "",
    )

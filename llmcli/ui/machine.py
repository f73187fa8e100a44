"""What the machine can do at most, and what was faster than that."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from llmcli.records.ceilings import Ceilings
from llmcli.ui.rates import unit
from llmcli.ui.stats import size

SURELY = 1.1  # of a ceiling: more than that is not how one measurement differs from another


def ceiling_words(ceilings: Ceilings) -> Iterator[str]:
    """Read rates from memory to the fastest cache, then products by dtype."""
    sizes = dict(ceilings.caches)
    # the smallest set of a cache is surely in it, the largest of all is surely in none
    fastest = {read.level: read for read in reversed(ceilings.reads)}
    fastest[ceilings.reads[-1].level] = ceilings.reads[-1]
    for level, read in fastest.items():
        held = f" ({size(sizes[level])})" if level in sizes else ""
        yield f"{level}{held} {unit(read.bytes_per_s, 'B/s')}"
    for matrix in ceilings.matrices:
        way = f" ({matrix.way})" if matrix.way not in ("", "direct") else ""
        yield f"{matrix.dtype} matrix products {unit(matrix.flops_per_s, 'FLOP/s')}{way}"


def ceiling_summary(ceilings: Ceilings) -> Iterator[str]:
    """Of memory and of products with weights alone: what decides in most runs."""
    last = ceilings.reads[-1]
    yield f"{last.level} {unit(last.bytes_per_s, 'B/s')}"
    for matrix in ceilings.matrices[:1]:
        yield f"{matrix.dtype} products {unit(matrix.flops_per_s, 'FLOP/s')}"


def beyond(names: Iterable[str]) -> str:
    """A warning that names the parts or tests faster than a ceiling; empty without any."""
    parts = list(names)
    if not parts:
        return ""
    return (
        f"faster than their ceiling: {', '.join(parts)}; something else took the machine while "
        "the ceilings were measured: run it again"
    )



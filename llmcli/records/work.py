"""The work of a part: FLOPs, and bytes by kind."""

from __future__ import annotations

from dataclasses import dataclass

from llmcli.records.document import derived


@dataclass(frozen=True, kw_only=True)
class PartWork:
    """FLOPs and bytes of a part for some calls.

    `flops` counts matrix products, 2 per multiply-add, for unmasked query-key pairs; `flops_full`
    counts the full `T × S` rectangle, as other tools do. Neither depends on the kernel. `weights`:
    bytes of parameters read (for a lookup table, the rows); `cache`: keys and values read;
    `activations`: all other reads and writes, new cache entries included. `gemv` and `gemm` count
    products with a weight matrix, one per kernel call: a GEMV has a single row.
    """

    flops: int = 0
    flops_full: int = 0
    weights: int = 0
    cache: int = 0
    activations: int = 0
    gemv: int = 0
    gemm: int = 0

    @derived
    def bytes(self) -> int:
        """Bytes read and written in total."""
        return self.weights + self.cache + self.activations

    def __add__(self, other: PartWork) -> PartWork:
        theirs = vars(other)
        return PartWork(**{name: value + theirs[name] for name, value in vars(self).items()})

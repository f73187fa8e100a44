"""What computing a part takes: FLOPs, and bytes by what they are."""

from __future__ import annotations

from dataclasses import dataclass

from llmcli.records.document import derived


@dataclass(frozen=True, kw_only=True)
class PartWork:
    """FLOPs and bytes of a part, for the calls that are meant.

    `flops` counts matrix products, 2 a multiply-add, of the query-key pairs that the causal mask
    and the window leave; `flops_full` counts the full `T × S` rectangle, as other tools do.
    Neither depends on the kernel. `weights`: bytes of the parameters that are read (of a table
    that is looked up, the rows); `cache`: keys and values read; `activations`: what else is read
    and written, new cache entries included. `gemv` and `gemm` count products with a weight
    matrix, one for all that one kernel call computes: a GEMV has a single row.
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
        """All that is read and written."""
        return self.weights + self.cache + self.activations

    def __add__(self, other: PartWork) -> PartWork:
        return PartWork(
            flops=self.flops + other.flops,
            flops_full=self.flops_full + other.flops_full,
            weights=self.weights + other.weights,
            cache=self.cache + other.cache,
            activations=self.activations + other.activations,
            gemv=self.gemv + other.gemv,
            gemm=self.gemm + other.gemm,
        )

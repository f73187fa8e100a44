"""All rungs, from the lowest up."""

from __future__ import annotations

from llmcli.ladder.batch import Batch
from llmcli.ladder.cache import KeyValueCache
from llmcli.ladder.combined import CombinedQKV
from llmcli.ladder.fused import FusedKernels
from llmcli.ladder.heads import HeadsAsDimension
from llmcli.ladder.loops import Loops
from llmcli.ladder.matrices import Matrices
from llmcli.ladder.rows import Rows
from llmcli.ladder.rung import Rung

RUNGS: tuple[type[Rung], ...] = (
    *(Loops, Rows, Matrices, HeadsAsDimension),
    *(CombinedQKV, KeyValueCache, Batch, FusedKernels),
)

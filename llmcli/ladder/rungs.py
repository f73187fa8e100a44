"""All rungs, from the lowest up."""

from __future__ import annotations

from llmcli.ladder.loops import Loops
from llmcli.ladder.matrices import Matrices
from llmcli.ladder.rows import Rows
from llmcli.ladder.rung import Rung

RUNGS: tuple[type[Rung], ...] = (Loops, Rows, Matrices)

"""Statistics of a run of `generate`, shown beside its text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmcli.records.environment import Environment
from llmcli.records.text import NearTie, Timings


@dataclass(frozen=True, kw_only=True)
class Statistics:
    """Speed, memory and settings of a run.

    `model` and `speculation` are the objects of JSON documents. `sampling`: each value in force and
    where it comes from; `seed` is None in a greedy run, `ties` in a random one. `side_by_side`:
    number of texts that are generated at once. `ended`: what ended the text before the model did.
    """

    timings: Timings
    model: Mapping[str, Any]
    environment: Environment
    sampling: Mapping[str, tuple[float, str]]
    seed: int | None
    ties: tuple[NearTie, ...] | None = None
    side_by_side: int = 1
    speculation: Mapping[str, Any] | None = None
    ended: str = ""

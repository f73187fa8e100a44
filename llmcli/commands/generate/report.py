"""How texts were generated: settings, the path of computation, speed and memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from llmcli.records.document import OPTIONAL
from llmcli.records.ranges import Range
from llmcli.records.text import Timings
from llmcli.shell.options import TOKEN_LIMIT
from llmcli.shell.sampling import SamplingValues


@dataclass(frozen=True, kw_only=True)
class SamplingReport(SamplingValues):
    """The values in force. `origins`: where each comes from.

    `ignored`: what generation_config.json, or `general.sampling` of a GGUF file, sets and llmcli
    does not follow.
    """

    greedy: bool
    max_tokens: Annotated[int, TOKEN_LIMIT]
    stop: tuple[str, ...]
    origins: Mapping[str, str]
    ignored: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class ComputePath:
    """How the text was computed: formats, kernels, and the sequences in one product.

    The same seed gives the same text again on the same path, and on another one within its
    roundings.
    """

    weight_format: str
    activation_format: str
    cache_format: str
    product_format: str
    kernels: tuple[str, ...]
    sequences: Annotated[int, Range(1)]


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """How the texts of one prompt, or of a whole run, were generated."""

    sampling: SamplingReport
    path: ComputePath
    timings: Timings
    speculation: Mapping[str, Any] | None = field(default=None, metadata=OPTIONAL)

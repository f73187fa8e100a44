"""Who computes in a benchmark: this program's decoder, or a peer on the same weights."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Literal, Protocol, runtime_checkable

from llmcli.anatomy.arithmetic import Arithmetic
from llmcli.commands.bench.report.results import EngineInfo
from llmcli.config import ModelConfig

# The logits of a prompt's last token, or of each call's last; in the latter case layers that keep
# nothing (`Graph.readers`) compute that token alone, as in the former, or the whole call.
Reads = Literal["prompt", "calls", "whole"]


class Engine(Protocol):
    """One model, loaded. Every call returns when the device has done the work."""

    @property
    def info(self) -> EngineInfo:
        """Of the engine, its model, and how it computes."""

    @property
    def vocab(self) -> int:
        """Ids go from 0 to `vocab` - 1."""

    @property
    def bos(self) -> int | None:
        """The id that the model puts in front of a text, None where it does not."""

    def start(self, tokens: int, threads: int, chunk: int) -> None:
        """An empty memory with room for so many tokens; prompts are read `chunk` at a time.

        Raises OutOfMemory where it does not fit, UsageError where it is not supported.
        """

    def computing(self) -> AbstractContextManager[object]:
        """What the calls of a run are made in: entered once, since entering takes time too."""

    def read(self, ids: Sequence[int]) -> None:
        """Reads a prompt behind what is there; the logits of its last token are computed."""

    def step(self, id: int) -> None:
        """One more token; its logits are computed."""

    def rewind(self, tokens: int) -> None:
        """Forgets all but the first `tokens`: 0, or a length that it is kept at by the same call
        while it has that length.
        """

    def close(self) -> None:
        """Gives the memory back; the engine is not used after it."""


@runtime_checkable
class Counted(Engine, Protocol):
    """An engine whose work can be counted: the weights are those of this configuration.

    On the device `meta` there are only shapes.
    """

    @property
    def config(self) -> ModelConfig:
        """The model."""

    @property
    def numbers(self) -> Arithmetic:
        """What it is computed in."""

    @property
    def reads(self) -> Reads:
        """Which logits it computes while it reads a prompt, and of which tokens the last layers."""

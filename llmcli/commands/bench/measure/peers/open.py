"""From a peer's name to an engine that has loaded the weights of a model of ours."""

from __future__ import annotations

from typing import Protocol, get_args

from torch import Tensor

from llmcli.commands.bench.measure.engine import Engine
from llmcli.commands.bench.report.results import EngineName, Settings
from llmcli.errors import UsageError
from llmcli.model import Model

PEERS: tuple[EngineName, ...] = tuple(name for name in get_args(EngineName) if name != "llmcli")


class PeerEngine(Engine, Protocol):
    """An engine that also shows what it computed, so that its weights can be told from others'."""

    def logits(self) -> Tensor:
        """Of the last token, `[V]` float32 on the host."""


def open_peer(name: EngineName, ours: Model, settings: Settings) -> PeerEngine:
    """The peer with the weights of `ours`, on the same device.

    transformers computes in our dtype, llama.cpp in the formats of the file. Raises UsageError
    where it is not installed or cannot run this model, OutOfMemory where it does not fit.
    """
    if name not in PEERS:
        raise UsageError(
            f"`{name}` is no engine to compare with", hint=f"one of {', '.join(PEERS)}"
        )
    if ours.device.type == "meta":
        raise UsageError(
            "on the meta device nothing is computed that could be compared",
            hint="leave out `--against` or the device",
        )
    if name == "transformers":
        from llmcli.commands.bench.measure.peers.transformers import open_transformers

        return open_transformers(ours, settings)
    from llmcli.commands.bench.measure.peers.llama_cpp import open_llama_cpp

    return open_llama_cpp(ours, settings)

"""A loaded model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from llmcli.checkpoints import Checkpoint
from llmcli.decoder.decoder import Decoder
from llmcli.graph.edited import EditRequest
from llmcli.graph.precision import Precision
from llmcli.records.ledger import Ledger
from llmcli.text.load import TextInterface


@dataclass(kw_only=True)
class Model(TextInterface):
    """A model ready to run."""

    decoder: Decoder
    checkpoint: Checkpoint
    ledger: Ledger = field(default_factory=Ledger)
    random_seed: int | None = None
    # requested edits of activations, and whether each has changed a number (`inspect.edits`)
    edits: Sequence[EditRequest] = ()
    changed: dict[str, bool] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        """The device of ids and logits, and of parameters outside of the layers."""
        return self.decoder.device

    @property
    def devices(self) -> str:
        """The devices of all parameters, separated by commas: those of the layers come first."""
        return ",".join(map(str, self.decoder.devices))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of activations and dense weights."""
        return self.decoder.dtype

    @property
    def precision(self) -> Precision:
        """Dtypes, and the formats of packed weights."""
        return self.decoder.precision

    @property
    def stream_dtype(self) -> torch.dtype:
        """The dtype of the residual stream, norm inputs and logits: at least float32."""
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def parameter_count(self) -> int:
        """Number of parameters; a tied head is counted once."""
        return sum(self.decoder.weight(name).count for name in self.decoder.weight_names)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters in memory; a tied head is counted once."""
        return sum(self.decoder.weight(name).nbytes for name in self.decoder.weight_names)

    @property
    def mapped_bytes(self) -> int:
        """Bytes of parameters that stay in the mapped file, since they do not fit into memory."""
        weights = map(self.decoder.weight, self.decoder.weight_names)
        return sum(weight.nbytes for weight in weights if weight.in_file)

    def describe(self) -> dict[str, Any]:
        """The `model` object of every JSON document; `edits` where there are any."""
        edits = [{"edit": text, "changed": changed} for text, changed in self.changed.items()]
        stored = sorted({entry.stored for entry in self.ledger.entries})
        return {
            "name": self.name,
            "path": str(self.checkpoint.path),
            "family": self.config.family,
            "model_type": self.config.model_type,
            "parameters": self.parameter_count,
            "context": self.config.context,
            "stored_formats": stored,
            **self.precision.describe(self.config),
            "weight_bytes": self.weight_bytes,
            "device": self.devices,
            "random_weights_seed": self.random_seed,
            **({"edits": edits} if edits else {}),
        }


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")

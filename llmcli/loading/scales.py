"""Scales of a checkpoint's quantized tensors: validation and application."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from llmcli.checkpoints import Checkpoint, TensorInfo
from llmcli.checkpoints.files import shown
from llmcli.errors import CheckpointError, UnsupportedModel
from llmcli.families.rules import Load
from llmcli.families.scales import scale_problem
from llmcli.ops.quant import dequantize
from llmcli.ops.scaled import scale_rows


def check_scale(load_: Load, tensors: Mapping[str, TensorInfo], called: str | None) -> None:
    """Check that a tensor has the scale that its format needs, in a valid shape and format.

    `called`: suffix of scales in this checkpoint (`Plan.scales`). Raises CheckpointError, and
    UnsupportedModel for integers without known meaning.
    """
    problem = scale_problem(load_.source, load_.scale, tensors, called)
    if problem is None:
        return
    message = f"`{shown(load_.source)}` {problem}"
    if called is None:
        raise UnsupportedModel(
            message,
            hint="fetch the config.json of these weights: its `quantization_config` would say it",
        )
    raise CheckpointError(message)


class Scaler:
    """Multiplies rows of one stored tensor by their scales, which are read on demand.

    `like`: the parameter, whose device and dtype (at least float32) the products have. Raises
    CheckpointError for a storage layout other than row-major, and in `read` for scales that are not
    finite.
    """

    def __init__(self, checkpoint: Checkpoint, load_: Load, like: Tensor) -> None:
        scale, shape = load_.scale, checkpoint.tensors[load_.source].shape
        assert scale is not None
        self._checkpoint = checkpoint
        self._scale = scale
        # in a stack, the rows of each matrix share a scale
        self._rows = shape[1] if len(shape) == 3 else scale.grid.rows
        self._info = checkpoint.tensors[scale.source]
        self._device = like.device
        self.dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        if scale.layout is not None and checkpoint.read(scale.layout, 0, 1) != b"\0":
            raise CheckpointError(
                f"`{shown(scale.layout)}` has a layout that is not row-major",
                hint="save the model again with a newer bitsandbytes, or use the unquantized one",
            )

    def read(self, start: int, stop: int) -> Tensor:
        """The scales `[down, across]` of the stored rows `start:stop`."""
        rows = self._rows
        down = self._info.shape[0] if rows is not None else 1
        first, last = (0, 1) if rows is None else (start // rows, (stop - 1) // rows + 1)
        row_bytes = self._info.nbytes // down
        data = self._checkpoint.read(self._info.name, first * row_bytes, last * row_bytes)
        raw = torch.frombuffer(data, dtype=torch.uint8).view(last - first, row_bytes)
        scales = dequantize(raw, self._info.format, dtype=self.dtype)
        if not scales.isfinite().all():
            name = shown(self._info.name)
            raise CheckpointError(f"the scale `{name}` has a number that is not finite")
        return scales.to(self._device)

    def apply(self, values: Tensor, scales: Tensor, start: int) -> Tensor:
        """Multiply stored rows from `start` on by `scales`, in place."""
        grid = self._scale.grid
        return scale_rows(
            values, scales, first=start, rows=self._rows, columns=grid.columns,
            divisor=grid.divisor,
        )  # fmt: skip

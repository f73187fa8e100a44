"""How many operations PyTorch is asked for between one mark and the next."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any

from torch.overrides import TorchFunctionMode

from llmcli.commands.timing.measure.clock import END, Marks

# An attribute such as `shape`, and the like: nothing is started for them.
_LOOKED_UP = frozenset({"__get__", "__len__", "data_ptr", "dim", "numel", "size", "stride"})


class OperationCount(TorchFunctionMode):
    """A `RunClock` that counts, while it is entered: operations are in the place of seconds.

    Every call of PyTorch from Python counts as one, views too: a start costs the same whether
    there is something to do. What such a call starts inside itself is in the cost of one. (A
    mode of PyTorch's dispatcher would import 65 MiB of its compiler.)
    """

    def __init__(self) -> None:
        super().__init__()
        self._names: list[str] = []
        self._counts: list[float] = []
        self._count = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        self._count += getattr(func, "__name__", "") not in _LOOKED_UP
        return func(*args, **(kwargs or {}))

    def start(self) -> None:
        """See `RunClock`."""
        self._count = 0

    def __call__(self, name: str) -> None:
        """The operations since the mark before are those of that activation."""
        self._names.append(name)
        self._counts.append(self._count)
        self._count = 0

    def replayed(self, names: Sequence[str], times: Sequence[int]) -> None:
        """See `ReplayClock`: they are started all at once, by the call before the first."""
        for name in names:
            self(name)

    def stop(self) -> None:
        """See `RunClock`."""
        self(END)

    def marks(self) -> Marks:
        """See `RunClock`."""
        counts = array("d", self._counts)
        return Marks(names=tuple(self._names), seconds=counts, host_s=counts)

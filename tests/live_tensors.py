"""How much memory the tensors take that a piece of code makes."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Live(TorchDispatchMode):
    """The most bytes that the tensors made inside it hold at once: of what they are views, too."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[weakref.ref[torch.Tensor]] = []
        self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.made.append(weakref.ref(result))
        alive = [one for one in (made() for made in self.made) if one is not None]
        sizes = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in alive}
        self.most = max(self.most, sum(sizes.values()))
        return result

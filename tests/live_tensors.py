"""How much memory the tensors take that a piece of code makes."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def _tensors(values):
    return [one for one in tree_leaves(values) if isinstance(one, torch.Tensor)]


class Live(TorchDispatchMode):
    """The most bytes that the tensors made inside it hold at once: of what they are views, too.

    `largest`: of the largest storage that an operation allocated; `total`: of all that were.
    """

    def __init__(self) -> None:
        super().__init__()
        self.made: list[weakref.ref[torch.Tensor]] = []
        self.most = self.largest = self.total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {one.untyped_storage().data_ptr() for one in _tensors((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for one in _tensors(result):
            self.made.append(weakref.ref(one))
            if one.untyped_storage().data_ptr() not in given:
                self.largest = max(self.largest, one.untyped_storage().nbytes())
                self.total += one.untyped_storage().nbytes()
        self.made = [made for made in self.made if made() is not None]
        alive = [one for one in (made() for made in self.made) if one is not None]
        sizes = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in alive}
        self.most = max(self.most, sum(sizes.values()))
        return result

"""How much memory the tensors take that a piece of code makes."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Live(TorchDispatchMode):
    """`most` bytes that the tensors made inside it hold at once: of what they are views, too.

    `largest`: how many numbers one of them has.
    """

    def __init__(self) -> None:
        super().__init__()
        self.made: list[weakref.ref[torch.Tensor]] = []
        self.most = self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.largest = max([self.largest, *(one.numel() for one in made)])
        alive = [one for one in (ref() for ref in self.made) if one is not None] + made
        self.made = [weakref.ref(one) for one in alive]
        sizes = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in alive}
        self.most = max(self.most, sum(sizes.values()))
        return result

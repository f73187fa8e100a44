"""What a mixture takes beside its weights does not depend on how many experts it has."""

import pytest
import torch
from small_models import ids, random_decoder
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from zoo import layer, llama, mixture


class Made(TorchDispatchMode):
    """Bytes of the largest memory that an operation made, and of all of them together."""

    def __init__(self):
        super().__init__()
        self.largest = self.total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs))
                  if isinstance(x, torch.Tensor)}  # fmt: skip
        made = func(*args, **(kwargs or {}))
        for x in tree_leaves(made):
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in before:
                self.largest = max(self.largest, x.untyped_storage().nbytes())
                self.total += x.untyped_storage().nbytes()
        return made


def made(count, tokens, *, captured):
    """Of a step after a prompt, or of the prompt."""
    decoder = random_decoder(llama(layer(mixture(count, hidden=96))))
    decoder.fixed_shapes = captured
    state = decoder.new_state(1, 80)
    decoder.fixed_shapes = False
    if tokens == 1:
        decoder(ids(1, 9), state)
    with Made() as mode:
        decoder(ids(1, tokens), state, logits="last")
    return mode


@pytest.mark.parametrize(("tokens", "captured"), [(60, False), (1, False), (1, True)])
def test_the_working_memory_of_8_and_of_64_experts_is_the_same(tokens, captured):
    few, many = (made(count, tokens, captured=captured) for count in (8, 64))
    scores = tokens * (64 - 8) * 8  # bytes of a number for each expert
    assert many.largest <= few.largest + 2 * scores
    assert many.total <= few.total + 20 * scores
    one = 96 * 16 * 8  # a matrix of one expert, of which two are copied in a captured step
    assert few.largest < (3 * 2 * one if captured else 2 * tokens * 2 * 96 * 8 + one)

"""Small models with random weights for the ladder's tests."""

import torch
from tiny_checkpoints import write_gpt2, write_llama

from llmcli.ladder.weights import Weights
from llmcli.loading import load

_KEPT = {}


def random_weights(kind, dtype="float32"):
    """The weights of a two-layer `gpt2` or `llama` (grouped heads), made once."""
    import tempfile
    from pathlib import Path

    if (kind, dtype) not in _KEPT:
        with tempfile.TemporaryDirectory() as folder:
            write = {"gpt2": write_gpt2, "llama": write_llama}[kind]
            write(Path(folder) / kind)
            model = load(str(Path(folder) / kind), dtype=dtype)
        _KEPT[kind, dtype] = Weights.of(model.decoder)
    return _KEPT[kind, dtype]


def ids(*numbers):
    """A prompt."""
    return torch.tensor(numbers)

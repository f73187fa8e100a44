"""Small models with random weights for the ladder's tests."""

import tempfile
from dataclasses import replace
from pathlib import Path

from tiny_checkpoints import write_gpt2, write_llama
from zoo import MODELS, ZOO

from llmcli.commands.ladder.measure.supported import require_supported
from llmcli.commands.ladder.measure.weights import Weights
from llmcli.errors import UnsupportedModel
from llmcli.loading.load import load

_KEPT = {}


def refusal(config):
    """Why the ladder does not take a model, None where it does."""
    try:
        require_supported(config)
    except UnsupportedModel as error:
        return str(error)
    return None


# models of every kind that our configuration can express, as far as the ladder takes it
DENSE = {name: config for name, config in MODELS.items() if refusal(config) is None}
# … and that of gated attention without its layer that has the keys of another
_GATED = MODELS["gated attention"]
DENSE["gated attention"] = replace(_GATED, layers=_GATED.layers[:4])
# … and one of each `model_type` of transformers that is
TYPES = {
    one.model_type: one.config()
    for one in reversed(ZOO)  # the first variant of each
    if refusal(one.config()) is None
}


def random_weights(kind, dtype="float32"):
    """The weights of a two-layer `gpt2` or `llama` (grouped heads), or of `tiny`, made once."""
    if (kind, dtype) not in _KEPT:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / kind
            if kind != "tiny":
                {"gpt2": write_gpt2, "llama": write_llama}[kind](path)
            model = load("tiny" if kind == "tiny" else str(path), dtype=dtype)
        _KEPT[kind, dtype] = Weights.of(model.decoder)
    return _KEPT[kind, dtype]

"""The configurations that the ladder takes."""

from dataclasses import replace

from zoo import MODELS, ZOO

from llmcli.commands.ladder.measure.weights import require_supported
from llmcli.errors import UnsupportedModel


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

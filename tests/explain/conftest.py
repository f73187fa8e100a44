"""The models of these tests."""

import explain_models
import pytest
from explain_models import TEXTS

from llmcli.commands.explain.options import names


@pytest.fixture
def model():
    """`model(name, dtype)`: a fresh one, so that a test may break it."""
    return lambda name, dtype="float64": explain_models.make(name, dtype)


@pytest.fixture
def known(model):
    def known(name):
        config = model(name).config
        return config, names(config, len(TEXTS))

    return known

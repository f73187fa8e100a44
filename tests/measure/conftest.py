"""The trained model of what is `real` here."""

from functools import cache

import pytest

from llmcli.checkpoints import open_checkpoint
from llmcli.loading.load import load_checkpoint


@pytest.fixture(scope="module")
def models(smollm2_path):
    """SmolLM2 by dtype, each loaded once."""
    opened = open_checkpoint(smollm2_path)
    return cache(lambda dtype: load_checkpoint(opened, device="cpu", dtype=dtype))

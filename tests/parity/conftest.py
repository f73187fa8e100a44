"""Checkpoints, references and our models of the parity cases, each made once per session."""

from functools import lru_cache

import pytest
import torch
import transformers
from parity_models import ROWS, opened, prompt, write
from parity_reference import load_reference, reference_logprobs
from zoo import variant


@pytest.fixture(scope="package", autouse=True)
def _quiet_and_serial():
    """No progress bars, and one thread: a second only costs time on models this small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """Name of a case → folder of its checkpoint."""
    folder = tmp_path_factory.mktemp("parity")
    return lru_cache(None)(lambda name: write(variant(name), folder))


@pytest.fixture(scope="session")
def references(checkpoints):
    """Name of a case and dtype → transformers' model."""
    return lru_cache(None)(
        lambda name, dtype: load_reference(checkpoints(name), getattr(torch, dtype))
    )


@pytest.fixture(scope="session")
def expected(references):
    """Name of a case and dtype → transformers' log-probabilities of the whole `prompt()`."""
    return lru_cache(None)(
        lambda name, dtype: reference_logprobs(references(name, dtype), prompt())
    )


@pytest.fixture(scope="session")
def expected_rows(references):
    """Name of a case → the same in float64 of `ROWS`: of each beginning of a row, too."""
    return lru_cache(None)(lambda name: reference_logprobs(references(name, "float64"), ROWS))


@pytest.fixture(scope="session")
def models(checkpoints):
    """Name of a case and dtype → our model."""
    return lru_cache(None)(lambda name, dtype: opened(checkpoints(name), dtype))

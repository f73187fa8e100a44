"""Fixtures for all tests."""

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import children
import machines
import pytest
from hypothesis import settings

machines.before()  # PyTorch reads it when it is imported

from llmcli.checkpoints import locate  # noqa: E402
from llmcli.text.template_renderer import RENDERER  # noqa: E402

machines.after()

# else children, and the next run, would compile every module and every rewritten test again
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
os.environ["LLMCLI_CONFIG"] = ""  # no test, and no child of one, reads the developer's own

if "PYTEST_XDIST_WORKER" in os.environ:  # the workers share the processors, a thread each
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Shared machines are slow at times: a time limit for each example would only make tests flaky.
# The seeds are fixed, so that a run says something about the commit and not about luck.
settings.register_profile("llmcli", deadline=None, derandomize=True, database=None)
settings.load_profile("llmcli")


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--update-screens` writes the golden screens anew."""
    parser.addoption("--update-screens", action="store_true", help="write tests/screens/golden")


SLOW = ("kernels", "parity", "measure", "cli")  # folders with files of minutes


def pytest_configure(config: pytest.Config) -> None:
    """xdist hands files out as they are collected: it would begin with those of most tests."""
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow folders first, so that no worker is left with a file of minutes at the end."""
    root = Path(__file__).parent

    def turn(item: pytest.Item) -> int:
        if not item.path.is_relative_to(root):  # tests that a test has written
            return 0
        folder = item.path.relative_to(root).parts[0]
        return SLOW.index(folder) if folder in SLOW else len(SLOW)

    items.sort(key=turn)


def pytest_collection_finish() -> None:
    """What was imported by now stays: garbage is not looked for among it, 0.35 s each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_child_outlives_its_test() -> Iterator[None]:
    yield
    children.end_all()


@pytest.fixture(scope="session", autouse=True)
def renderer() -> Iterator[None]:
    """One process renders the chat templates of all tests, but for those that are about it."""
    with RENDERER:
        yield


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The real SmolLM2 file, fetched into the user's cache by the first test that needs it.

    For tests marked `real`. Where it cannot be fetched they end in an error: they never
    pass, or are skipped, without having run.
    """
    return locate("smollm2")

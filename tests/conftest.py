"""Fixtures for all tests."""

import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import children
import machines
import pytest
from budget import Budget
from fork_server import Forked
from hypothesis import settings

# what PyTorch reads when it is imported
if "PYTEST_XDIST_WORKER" in os.environ:  # the workers share the processors, a thread each
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # and where a test has two, none waits busily for the other, whose processor it may have
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
machines.before()

from llmcli.checkpoints.locate import find  # noqa: E402
from llmcli.text.template_renderer import RENDERER  # noqa: E402

machines.after()

# else children, and the next run, would compile every module and every rewritten test again
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
os.environ["LLMCLI_CONFIG"] = ""  # no test, and no child of one, reads the developer's own
os.environ |= {"LC_ALL": "C.UTF-8", "TERM": "xterm-256color", "TOKENIZERS_PARALLELISM": "false"}
# shells find the `llmcli` under test, whether its environment is active or not
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
# nor is anything of the terminal and the shell that the tests were started in
for name in (
    "COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "COLORTERM", "PAGER", "LLMCLI_PAGER",
    "LLMCLI_MODEL",
):  # fmt: skip
    os.environ.pop(name, None)

# Shared machines are slow at times: a time limit for each example would only make tests flaky.
# The seeds are fixed, so that a run says something about the commit and not about luck.
settings.register_profile("llmcli", deadline=None, derandomize=True, database=None)
settings.load_profile("llmcli")


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--update` writes the transcripts and the golden screens anew."""
    parser.addoption("--update", action="store_true", help="write tests/transcripts, render/golden")
    parser.addoption(
        "--budget", type=float, metavar="SECONDS", help="fail where more processor time is taken"
    )
    parser.addoption("--skips", metavar="FILE", help="add the reasons of skipped tests to a file")


SLOW = ("transcripts", "kernels", "parity", "measure", "cli")  # folders with files of minutes


def pytest_configure(config: pytest.Config) -> None:
    """xdist hands files out as they are collected: it would begin with those of most tests."""
    config.pluginmanager.register(Budget(config.option.budget, config.option.skips))
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow folders first, so that no worker is left with a file of minutes at the end.

    What needs SmolLM2 is `real`, whether it says so or not.
    """
    for item in items:
        if "smollm2_path" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.real)
    root = Path(__file__).parent

    @cache
    def turn(path: Path) -> int:
        if not path.is_relative_to(root):  # tests that a test has written
            return 0
        folder = path.relative_to(root).parts[0]
        return SLOW.index(folder) if folder in SLOW else len(SLOW)

    items.sort(key=lambda item: turn(item.path))


def what_is_there_stays() -> None:
    """No garbage is looked for among it: a second each time with transformers' models."""
    gc.collect()
    gc.freeze()


def pytest_collection_finish() -> None:
    """What was imported by now."""
    what_is_there_stays()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """What a file leaves."""
    yield
    if nextitem is not None and nextitem.path != item.path:
        what_is_there_stays()


def sections(found: Mapping[str, str | Sequence[str]]) -> str:
    """Each text, or its lines, below its title, by two columns to the right."""
    lines = []
    for title, text in found.items():
        text = text if isinstance(text, str) else "\n".join(text)
        lines += ["", f"# {title}", *(f"  {line}".rstrip() for line in text.split("\n"))]
    return "\n".join(lines[1:]).replace("\x1b", "␛") + "\n"


@pytest.fixture
def as_written(request: pytest.FixtureRequest) -> Callable[[Path, Any], None]:
    """`as_written(file, found)`: it is what the file has, to the letter; `--update` writes it.

    `found` is the whole text, or the texts below titles (`sections`): read the difference of what
    was written before it goes in.
    """

    def compare(file: Path, found: str | Mapping[str, str | Sequence[str]]) -> None:
        found = found if isinstance(found, str) else sections(found)
        if request.config.getoption("--update"):
            file.write_text(found, encoding="utf-8")
        assert found == file.read_text(encoding="utf-8")

    return compare


@pytest.fixture(autouse=True)
def nothing_outlives_a_test() -> Iterator[None]:
    """No child; nor a number of threads, which would compute, and wait, in all that follow."""
    torch = sys.modules.get("torch")
    threads = torch.get_num_threads() if torch else None
    yield
    children.end_all()
    if torch and torch.get_num_threads() != threads:
        torch.set_num_threads(threads)


@pytest.fixture(scope="session", autouse=True)
def renderer() -> Iterator[None]:
    """One process renders the chat templates of all tests, but for those that are about it.

    Whatever replaces it, and every other Python script that the product starts, is forked.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", Forked)
        with RENDERER:
            yield


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The real SmolLM2 file, fetched into the user's cache by the first test that needs it.

    For tests marked `real`. Where it cannot be fetched they end in an error: they never
    pass, or are skipped, without having run.
    """
    return find("smollm2")[1]

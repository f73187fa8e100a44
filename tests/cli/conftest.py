"""A model with random weights and a byte tokenizer, small enough for every test, and a runner."""

import json
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from cli_tiny import write_mixture, write_tiny

from llmcli.cli.app import main
from llmcli.measure import ceilings
from llmcli.measure.machine import CpuContention
from llmcli.records.machine import Ceilings, MachineLoad


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture(autouse=True)
def plain_process() -> Iterator[None]:
    """Signals as a terminal gives them, and then as they were."""
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    saved = {number: signal.getsignal(number) for number in signals}
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the parent may have ignored them
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    for number, handler in saved.items():
        signal.signal(number, handler)


@pytest.fixture
def others_take(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """`others_take(0.9)`: what other programs take, in processors, while something is measured."""

    def plant(others: float) -> None:
        load = partial(
            MachineLoad, seconds=1.0, processors=2, others=others, stolen=0.0, load_average=None
        )
        monkeypatch.setattr(CpuContention, "load", lambda self, threads: load(threads=threads))

    return plant


@pytest.fixture(autouse=True)
def idle_machine(others_take: Callable[[float], None]) -> None:
    """Whatever else runs here, notes about it come only where a test plants them."""
    others_take(0.0)


_CEILINGS: dict[Any, Ceilings] = {}


@pytest.fixture(autouse=True)
def brief_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rungs are timed once; ceilings in less time and once for all tests.

    No test of a command looks at how near to them a run comes, and a run of 1 ms may be interrupted
    at its ends, which are in no part.
    """
    monkeypatch.setattr("llmcli.commands.ladder.measure.runner.ROUNDS_S", 0.0)
    monkeypatch.setattr("llmcli.commands.timing.measure.run._APART_S", 1.0)
    plain = ceilings.measure_ceilings

    def brief(*of: Any, progress: Any = None, **options: Any) -> Ceilings:
        asked = (*of, torch.get_num_threads(), *options.items())
        if asked not in _CEILINGS:
            _CEILINGS[asked] = plain(*of, **options | {"seconds": 0.02})
        return _CEILINGS[asked]

    monkeypatch.setattr(ceilings, "measure_ceilings", brief)


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """Runs one command line in this process."""

    def run(*argv: str) -> Result:
        capsys.readouterr()
        code = main([str(part) for part in argv])
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return run


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The path of the small model, to be run with `--random-weights`."""
    return str(write_tiny(tmp_path_factory.mktemp("models") / "tiny-llama"))


@pytest.fixture(scope="session")
def weighted(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The path of the small model with weights, and with 256 positions."""
    folder = tmp_path_factory.mktemp("models") / "weighted"
    return str(write_tiny(folder, weights=True, max_position_embeddings=256))


@pytest.fixture(scope="session")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The path of a small mixture of experts, to be run with `--random-weights`."""
    return str(write_mixture(tmp_path_factory.mktemp("models") / "tiny-mixture"))


@pytest.fixture
def run_tiny(cli: Callable[..., Result], tiny: str) -> Callable[..., Result]:
    """A command on the small model: `run_tiny("generate", "text", "--json")`."""

    def run(command: str, *argv: str) -> Result:
        return cli(command, "-m", tiny, "--random-weights", "--seed", "1", *argv)

    return run

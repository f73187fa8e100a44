"""How long OpenMP's threads wait busily is set before PyTorch loads the library that reads it."""

import io
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import children
import pytest

import llmcli
from llmcli import OPENMP_SPIN, OPENMP_SPIN_BUSY, OPENMP_VARIABLES

PROGRAMS = {
    # without PyTorch around it, which would be all the time that the program takes
    "the library": "import ctypes, sys, llmcli; ctypes.CDLL(sys.argv[1])",
    "the command line": "from llmcli.cli.app import main; main(['lens', '-m', 'tiny', 'x'])",
}
LIBRARIES = sorted((Path(find_spec("torch").origin).parent / "lib").glob("libgomp*"))
needs_gomp = pytest.mark.skipif(not LIBRARIES, reason="this PyTorch does not use GNU's OpenMP")


def displayed(program, **environ):
    """What OpenMP itself says of its settings when it is loaded: `GOMP_SPINCOUNT = '10000'`."""
    plain = {name: value for name, value in os.environ.items() if name not in OPENMP_VARIABLES}
    run = children.run(
        [sys.executable, "-c", program, *LIBRARIES], capture_output=True, text=True,
        env=plain | {"OMP_DISPLAY_ENV": "VERBOSE"} | environ, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    return run.stderr


@needs_gomp
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_threads_wait_a_bounded_time(program):
    said = displayed(program)
    rounds = [spin["GOMP_SPINCOUNT"] for spin in (OPENMP_SPIN, OPENMP_SPIN_BUSY)]
    assert any(f"GOMP_SPINCOUNT = '{one}'" in said for one in rounds)


@pytest.mark.parametrize(
    ("running", "busy"), [([1], False), ([2, 2, 2], True), ([3, 9, 1], False), ([2, None], False)]
)
def test_a_machine_is_busy_where_others_go_on_running(running, busy, monkeypatch):
    """As `/proc/loadavg` says, up to three times; None: there is no such file."""
    readings = iter(running)

    def opened(path, mode):
        count = next(readings)
        if count is None:
            raise FileNotFoundError(path)
        return io.BytesIO(f"0.20 0.18 0.12 {count}/80 11206\n".encode())

    monkeypatch.setattr(llmcli, "open", opened, raising=False)
    assert llmcli._is_busy() == busy
    assert not list(readings)


@needs_gomp
def test_what_the_user_set_stays():
    program = PROGRAMS["the library"]
    assert "GOMP_SPINCOUNT = '77'" in displayed(program, GOMP_SPINCOUNT="77")
    assert "GOMP_SPINCOUNT = '0'" in displayed(program, OMP_WAIT_POLICY="passive")


def test_one_variable_of_the_users_keeps_ours_away():
    asked = f"import os, llmcli; print(*(os.environ.get(name) for name in {OPENMP_VARIABLES}))"
    environ = {name: value for name, value in os.environ.items() if name not in OPENMP_VARIABLES}
    both = tuple(f"{one['GOMP_SPINCOUNT']} None {one['KMP_BLOCKTIME']}"
                 for one in (OPENMP_SPIN, OPENMP_SPIN_BUSY))  # fmt: skip
    for mine, seen in (({}, both), ({"KMP_BLOCKTIME": "5"}, ("None None 5",))):
        run = children.run([sys.executable, "-c", asked], env=environ | mine, capture_output=True)
        assert run.stdout.decode().strip() in seen

"""How long OpenMP's threads wait busily is set before PyTorch loads the library that reads it."""

import os
import subprocess
import sys

import children
import pytest

from llmcli import OPENMP_VARIABLES

PROGRAMS = {
    "the library": "import llmcli.loading",
    "the command line": "from llmcli.cli.app import main; main(['lens', '-m', 'tiny', 'x'])",
}


def displayed(program, **environ):
    """What OpenMP itself says of its settings when it is loaded: `GOMP_SPINCOUNT = '10000'`."""
    plain = {name: value for name, value in os.environ.items() if name not in OPENMP_VARIABLES}
    run = children.run(
        [sys.executable, "-c", program], env=plain | {"OMP_DISPLAY_ENV": "VERBOSE"} | environ,
        capture_output=True, text=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    if "GOMP_SPINCOUNT" not in run.stderr:
        pytest.skip("this PyTorch does not use GNU's OpenMP")
    return run.stderr


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_threads_wait_ten_thousand_rounds(program):
    assert "GOMP_SPINCOUNT = '10000'" in displayed(program)


def test_what_the_user_set_stays():
    program = PROGRAMS["the library"]
    assert "GOMP_SPINCOUNT = '77'" in displayed(program, GOMP_SPINCOUNT="77")
    assert "GOMP_SPINCOUNT = '0'" in displayed(program, OMP_WAIT_POLICY="passive")


def test_one_variable_of_the_users_keeps_ours_away():
    asked = f"import os, llmcli; print(*(os.environ.get(name) for name in {OPENMP_VARIABLES}))"
    environ = {name: value for name, value in os.environ.items() if name not in OPENMP_VARIABLES}
    for mine, seen in (({}, "10000 None 1"), ({"KMP_BLOCKTIME": "5"}, "None None 5")):
        run = children.run([sys.executable, "-c", asked], env=environ | mine, capture_output=True)
        assert run.stdout.decode().strip() == seen

"""What the other tests start: Ctrl-C reaches it, and it ends with its test or with pytest."""

import ast
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import children
import pytest

TESTS = Path(__file__).parent
SIGNALS = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
LEAVES_ONE = """
import sys
import children

def test_fails():
    process = children.start(["sleep", "600"])
    print(process.pid, file=sys.stderr, flush=True)
    {then}
"""


def test_a_child_does_not_inherit_that_ctrl_c_is_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        run = children.run([sys.executable, "-c", SIGNALS], capture_output=True)
        assert run.stdout == b"True\n"
        process = children.start(["sleep", "600"])
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) == -signal.SIGINT
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a child with its parent")
@pytest.mark.parametrize("then", ["assert False", "import time; time.sleep(600)"])
def test_no_child_is_left_by_a_test_that_fails_or_a_pytest_that_is_killed(then, tmp_path):
    (tmp_path / "test_one.py").write_text(LEAVES_ONE.format(then=then))
    pytest_run = children.start(
        [sys.executable, "-m", "pytest", "-q", "-s", "-p", "conftest", "-p", "no:cacheprovider",
         "--rootdir", str(tmp_path), str(tmp_path / "test_one.py")],
        env=os.environ | {"PYTHONPATH": f"{TESTS}{os.pathsep}{TESTS.parent}"},
        stderr=subprocess.PIPE, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    child = int(pytest_run.stderr.readline())
    assert alive(child) or then == "assert False"
    if then != "assert False":
        pytest_run.kill()
    pytest_run.wait(timeout=60)
    limit = time.monotonic() + 20
    while alive(child):
        assert time.monotonic() < limit
        time.sleep(0.01)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_nothing_else_starts_a_process():
    for path in sorted(TESTS.rglob("*.py")):
        if path.name == "children.py" or "benchmarks" in path.parts:
            continue
        calls = [node.func for node in ast.walk(ast.parse(path.read_text()))
                 if isinstance(node, ast.Call)]  # fmt: skip
        own = [ast.unparse(call) for call in calls if ast.unparse(call).startswith("subprocess.")]
        assert not own, f"{path.relative_to(TESTS)}: use `children.start` or `children.run`"

"""What the other tests start: Ctrl-C reaches it, and it ends with its test or with pytest."""

import ast
import json
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path

import children
import pytest
from fork_server import server_for

TESTS = Path(__file__).parent
SIGNALS = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
LEAVES_ONE = """
import sys, time
import children

started = []

def test_that_fails():
    started.append(children.start(["sleep", "600"]))
    print(started[0].pid, file=sys.stderr, flush=True)
    {then}

def test_after_it():
    assert started[0].poll() is not None
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


def nested(then, folder):
    """A pytest of its own on `LEAVES_ONE`, and the process that its first test started."""
    (folder / "test_one.py").write_text(LEAVES_ONE.format(then=then))
    run = children.start(
        [sys.executable, "-m", "pytest", "-s", "-p", "conftest", "-p", "no:cacheprovider",
         "--rootdir", str(folder), str(folder / "test_one.py")],
        env=os.environ | {"PYTHONPATH": f"{TESTS}{os.pathsep}{TESTS.parent}"},
        stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    return run, int(run.stderr.readline())


def test_a_test_that_fails_leaves_no_child(tmp_path):
    run, _ = nested("assert False", tmp_path)
    out, _ = run.communicate(timeout=60)
    assert "1 failed, 1 passed" in out


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a child with its parent")
def test_a_pytest_that_is_killed_leaves_no_child(tmp_path):
    run, child = nested("time.sleep(600)", tmp_path)
    assert children.runs(child)
    run.kill()
    run.wait(timeout=60)
    children.until(lambda: not children.runs(child))


STATE = """
import json, locale, os, resource, signal, sys
json.dump({
    "argv": sys.argv, "cwd": os.getcwd(), "environ": dict(os.environ), "parent": os.getppid(),
    "session": os.getsid(0) == os.getpid(), "files": sorted(os.listdir("/proc/self/fd")),
    "signals": [str(signal.getsignal(number)) for number in (1, 2, 3, 13, 15)],
    "masked": [*signal.pthread_sigmask(signal.SIG_BLOCK, ())],
    "streams": [[s.encoding, s.errors, s.line_buffering, s.isatty(), s.newlines, s.name]
                for s in (sys.stdin, sys.stdout, sys.stderr)],
    "limits": [resource.getrlimit(which) for which in range(16)],
    "locale": locale.getpreferredencoding(), "name": __name__, "read": sys.stdin.read(),
    "path": sys.path,
}, sys.stdout)
print("said", file=sys.stderr, end="")
os._exit((sys.stdout.flush(), 7)[1])
"""


@pytest.mark.parametrize(("name", "terminal"), [
    ("scripted.py", False), ("scripted.py", True), ("pip.py", False),
])  # fmt: skip
def test_a_program_that_was_forked_is_as_one_that_begins(tmp_path, monkeypatch, name, terminal):
    file = tmp_path / name
    file.write_text(STATE)

    def told():
        controller, inner = pty.openpty()
        options = {"stderr": inner} if terminal else {"stderr": subprocess.PIPE}
        if terminal:
            os.write(controller, b"typed\n\4")
        run = children.start(
            [sys.executable, str(file), "a b", "ä"], terminal=terminal, cwd=tmp_path,
            stdin=inner if terminal else subprocess.PIPE, stdout=subprocess.PIPE,
            env=os.environ | {"MINE": "ß"}, **options,
        )  # fmt: skip
        out, err = run.communicate(None if terminal else b"typed\n")
        os.close(inner)
        os.close(controller)
        return run.returncode, json.loads(out), err

    forked = told()
    monkeypatch.setattr(children, "server_for", lambda *_: None)
    real = told()
    assert forked[1] == real[1]
    assert forked == real
    assert (forked[0], forked[1]["read"], forked[1]["parent"]) == (7, "typed\n", os.getpid())


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere every program begins")
def test_which_programs_are_forked():
    ours = [sys.executable, "-m", "llmcli", "env"]
    assert server_for(ours, None) == server_for(ours, {**os.environ}) == "llmcli"
    assert server_for(["llmcli", "env"], None) is None
    assert server_for([sys.executable, "-c", "pass"], None) is None
    assert server_for(ours, os.environ | {"LC_ALL": "C"}) is None
    assert server_for(ours, {"PATH": "/bin"}) is None
    for script in ([__file__], ["-S", "-s", "-P", "template_server.py"]):
        assert server_for([sys.executable, *script], None) == "small"


def test_nothing_else_starts_a_process():
    for path in sorted(TESTS.rglob("*.py")):
        if {"children.py", "fork_server.py", "benchmarks", "trust"} & {*path.parts}:
            continue
        if not re.search(r"subprocess\.\w+\(", text := path.read_text()):
            continue
        calls = [node.func for node in ast.walk(ast.parse(text))
                 if isinstance(node, ast.Call)]  # fmt: skip
        own = [ast.unparse(call) for call in calls if ast.unparse(call).startswith("subprocess.")]
        assert not own, f"{path.relative_to(TESTS)}: use `children.start` or `children.run`"

"""PyTorch's libraries are opened on a thread, and nothing waits for that."""

import sys
from pathlib import Path

import children
import pytest

from llmcli.cli import group, tree
from llmcli.cli.tree import COMPUTING, ENTRIES, root

linux = pytest.mark.skipif(sys.platform != "linux", reason="only there")

# what was loaded when `read_ahead` returned, and which libraries of Python's own came after that
WATCH = """
import os, sys
from llmcli.cli import tree
from llmcli.cli.app import main

def so():
    files = {name: str(getattr(m, "__file__", None)) for name, m in list(sys.modules.items())}
    return {n for n, file in files.items() if file.endswith(".so") and "-packages" not in file}

class Torch:
    def find_spec(self, name, path, target=None):
        if name == "torch" and started:
            print("LATE", sorted(so() - started.pop()), file=sys.stderr)

started = []
sys.meta_path.insert(0, Torch())
own = tree.read_ahead
def watched():
    own()
    started.append(so())
tree.read_ahead = watched
os._exit(main(sys.argv[1:]))
"""


@linux
def test_no_library_of_python_waits_for_those_of_torch():
    words = ["generate", "Hello", "-n", "1", "-m", "tiny"]
    ran = children.run([sys.executable, "-c", WATCH, *words], capture_output=True, text=True)
    assert "LATE []" in ran.stderr, ran.stderr


@linux
def test_the_libraries_are_those_that_torch_opens():
    code = """
import os, sys, time
from pathlib import Path
from llmcli.cli.group import read_ahead
read_ahead()
for _ in range(600):
    opened = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()
              if "libtorch_cpu" in line}
    if opened:
        break
    time.sleep(0.05)
assert opened and "torch" not in sys.modules
import torch
assert torch.ones(3).sum() == 3
maps = Path("/proc/self/maps").read_text()
assert {line.split()[-1] for line in maps.splitlines() if "libtorch_cpu" in line} == opened
sys.stdout.flush()
os._exit(0)
"""
    ran = children.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize(("words", "read"), [
    ("generate x", True), ("bench", True), ("generate --help", False), ("generate -h", False),
    ("info", False), ("bench compare a b", False),
])  # fmt: skip
def test_only_commands_that_compute_read_them(words, read, monkeypatch):
    calls: list[int] = []
    monkeypatch.setattr(tree, "read_ahead", lambda: calls.append(1))
    command = root()
    with command.make_context("llmcli", words.split()) as context:
        command.resolve_command(context, words.split())
    assert bool(calls) is read


def test_without_torch_nothing_is_opened(monkeypatch):
    monkeypatch.setattr(group, "find_spec", lambda name: None)
    monkeypatch.setattr(group, "Thread", None)  # would be called
    group.read_ahead()


def test_every_command_that_computes_is_named():
    """Those whose modules import torch somewhere below `commands/NAME`, or load a model."""
    folder = Path(__file__).parents[2] / "llmcli" / "commands"
    signs = ("load_model(", "Inspection(", "import torch")
    names = {
        name for name in ENTRIES
        if any(sign in file.read_text() for file in (folder / name).glob("*.py") for sign in signs)
    }  # fmt: skip
    # the selftest imports what imports torch
    assert names | {"selftest"} == COMPUTING

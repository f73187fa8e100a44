"""Models from the hub as a user meets them: a run, one without network, and what stops it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import children
import pytest
from cli_tiny import write_tiny
from covers import few
from hub_stand_in import SHA, HubStandIn

GENERATE = (
    *("generate", "-m", "org/m", "--ids", "1,2,3", "--raw", "-n", "5", "--greedy"),
    *("--ignore-eos", "--dtype", "float32"),
)
PULL = ("models", "pull", "org/m")  # where what is fetched matters, and not what runs then


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    size = {"hidden_size": 256, "intermediate_size": 1024, "vocab_size": 2000}
    return write_tiny(tmp_path_factory.mktemp("hub") / "m", weights=True, **size)


@pytest.fixture
def hub(folder):
    with HubStandIn({"org/m": folder}) as hub:
        yield hub


@pytest.fixture
def start(hub, tmp_path):
    """Starts `generate` of five tokens, or another `command`, where no other hub is known."""
    home = os.environ | hub.environment(tmp_path)
    del home["HF_HUB_CACHE"]  # HF_HOME alone says where the cache is

    def run(*argv, command=GENERATE, **environ):
        return children.start(
            [sys.executable, "-m", "llmcli", *command, *argv], text=True, env=home | environ,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    return run


def ended(process):
    out, err = process.communicate(timeout=60)
    assert "Traceback" not in err
    return process.returncode, out, err


def left(tmp_path):
    """Files in the cache: (finished weights, half files)."""
    files = [path for path in (tmp_path / "hf").rglob("*") if path.is_file()]
    half = [path.name for path in files if path.name.endswith(".incomplete")]
    return [path.name for path in files if path.name == "model.safetensors"], half


def bodies(hub):
    return [one for one in hub.requests if one.method == "GET" and "model.safe" in one.path]


def test_the_second_run_makes_no_network_call(hub, start):
    code, out, err = ended(start("--json"))
    assert (code, err) == (0, "")
    ids = json.loads(out)["outputs"][0]["ids"]
    assert len(ids) == 5
    assert len(bodies(hub)) == 1
    hub.requests.clear()
    code, out, err = ended(start("--json"))
    assert (code, err) == (0, "")
    assert json.loads(out)["outputs"][0]["ids"] == ids
    code, _, err = ended(start("--revision", SHA, command=PULL, HF_HUB_OFFLINE="1"))
    assert (code, err) == (0, "")
    assert not hub.requests


@pytest.mark.parametrize(
    ("number", "code"),
    few([pytest.param(signal.SIGINT, 130), pytest.param(signal.SIGKILL, -9),
         pytest.param(signal.SIGTERM, 143)], 2),
)  # fmt: skip
def test_what_stops_a_download_leaves_nothing_that_is_used(hub, start, tmp_path, number, code):
    hub.hold["model.safetensors"] = 1_500_000
    process = start()
    assert hub.holding.wait(30)
    time.sleep(0.2)
    begin = time.monotonic()
    process.send_signal(number)
    found, out, _ = ended(process)
    assert (found, out) == (code, "")
    assert time.monotonic() - begin < 5
    finished, half = left(tmp_path)
    assert not finished
    assert bool(half) == (number == signal.SIGKILL)
    assert ended(start("--offline"))[0] == 6, "nothing of it counts"
    if number != signal.SIGKILL:
        return
    hub.hold.clear()
    hub.release.set()
    hub.requests.clear()
    assert ended(start(command=PULL))[0] == 0
    assert [one.headers.get("range") for one in bodies(hub)] == [None], "that file from its start"
    assert not [one for one in hub.requests if "tokenizer.json" in one.path], "the others are kept"


def test_two_processes_fetch_it_once(hub, start):
    hub.hold["model.safetensors"] = 1_500_000
    first = start(command=PULL)
    assert hub.holding.wait(30)
    second = start(command=PULL)
    deadline = time.monotonic() + 30
    while sum(one.method == "HEAD" and "model.safe" in one.path for one in hub.requests) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    hub.release.set()
    results = [ended(first), ended(second)]
    assert results[0] == results[1]
    assert results[0][0] == 0
    assert len(bodies(hub)) == 1

"""`llmcli models` as somebody types it: what it prints, what it removes, and when it does not."""

import io
import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest
from cli_tiny import write_tiny
from hub_cache_files import tree_of, write_revision
from hub_stand_in import HubStandIn
from programs import ended, start

SAFE = {"config.json": b"{}", "model.safetensors": b"w" * 2048, "tokenizer.json": b"{}"}


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub cache with one model in it, and our own cache beside it."""
    root = tmp_path / "hf" / "hub"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(root))
    monkeypatch.setenv("LLMCLI_CACHE", str(tmp_path / "own"))
    write_revision(root, "org/name", SAFE)
    return root


def test_prune_by_age(cli, hub):
    then = time.time() - 40 * 86400
    os.utime(hub / f"models--org--name/snapshots/{'a' * 40}/model.safetensors", (then, then))
    assert cli("models", "prune", "--older-than", "6w", "-y").out == "nothing to remove\n"
    dry = cli("models", "prune", "--older-than", "5w", "--dry-run", "--json").json()
    assert (dry["older_than"], len(dry["removed"])) == ("5w", 1)
    assert "complete 40 days ago hub cache" in " ".join(cli("models").out.split())
    assert "last used 40 days ago" in cli("models", "prune", "--older-than", "5w", "-y").out
    assert tree_of(hub) == {}


@pytest.mark.parametrize(("typed", "gone"), [
    ("y\n", True), ("Yes\n", True), ("\n", False), ("n\n", False), ("", False), ("yep\n", False),
])
def test_it_asks_on_a_terminal(cli, hub, monkeypatch, typed, gone):
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    for stream in (sys.stdin, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
    asked = cli("models", "rm", "org/name")
    assert asked.code == 0
    assert re.search(r"(?s)org/name  2 KiB.*would free.*remove it\? \[y/N\] ", asked.err)
    assert ("freed 2 KiB" in asked.out) == gone
    assert ("nothing was removed" in asked.err) != gone
    assert (tree_of(hub) == {}) == gone


# pull: the hub's protocol has tests of its own; here is what the command makes of it


@pytest.fixture
def stand_in(monkeypatch, tmp_path, tiny):
    """A hub with the small model, and with a repository of two GGUF files."""
    whole = tmp_path / "source" / "name"
    write_tiny(whole, weights=True)
    quants = tmp_path / "source" / "quants"
    quants.mkdir()
    for name in ("a.gguf", "b.gguf"):
        (quants / name).write_bytes(name.encode() * 100)
    with HubStandIn({"org/name": whole, "org/quants": quants}) as hub:
        hub.cache = hub.here(monkeypatch, tmp_path)
        yield hub


def test_pull_fetches_once_and_says_where(cli, stand_in):
    first = cli("models", "pull", "org/name", "tiny", "hf:org/quants/b.gguf")
    assert (first.code, first.err) == (0, "")
    lines = [line.split("  ") for line in first.out.splitlines()]
    assert [line[0] for line in lines] == ["org/name", "tiny", "hf:org/quants/b.gguf"]
    assert [line[2] for line in lines] == ["fetched", "already here", "fetched"]
    assert lines[2][1] == "600 B"
    for name, *_, path in lines:
        assert cli("models", "path", name).out == f"{path}\n"
    assert Path(lines[1][-1], "config.json").is_file()
    listed = cli("models").out
    assert "org/name " in listed
    assert "hf:org/quants/b.gguf " in listed
    assert "a.gguf" not in listed
    assert cli("tokens", "-m", "org/name", "hi").code == 0
    asked = len(stand_in.requests)
    again = cli("models", "pull", "org/name", "hf:org/quants/b.gguf", "--json").json()
    fetched = {model["name"]: model["fetched"] for model in again["models"]}
    assert fetched == {"org/name": False, "hf:org/quants/b.gguf": False}
    assert len(stand_in.requests) == asked, "what is here makes no network call"


def test_pull_goes_on_after_what_is_not_there(cli, stand_in):
    names = ("org/nowhere", "org/name", "org/quants", "tiny")
    result = cli("models", "pull", *names)
    assert result.code == 3, "as the first that failed"
    assert [line.split("  ")[0] for line in result.out.splitlines()] == ["org/name", "tiny"]
    said = [line for line in result.err.splitlines() if line.startswith("error: ")]
    assert ["org/nowhere" in said[0], "org/quants" in said[1], len(said)] == [True, True, 2]
    assert result.err.count("hint: ") == 2
    told = cli("models", "pull", *names, "--json")
    document = told.json()
    assert (told.code, document["finish_reason"]) == (3, "complete")
    assert [model["name"] for model in document["models"]] == ["org/name", "tiny"]
    failed = [(one["name"], one["code"], one["kind"]) for one in document["failed"]]
    assert failed == [("org/nowhere", 3, "model_not_found"), ("org/quants", 4, "checkpoint")]
    assert document["failed"][0]["message"] in said[0]
    # one model that cannot be had is an error like any other
    assert cli("models", "pull", "org/quants").code == 4, "which of the two files?"
    refused = cli("models", "pull", "org/name@other", "--json")
    assert (refused.code, refused.json()["error"]["kind"]) == (3, "model_not_found")


def test_pull_that_is_interrupted_says_what_it_has(stand_in, tmp_path):
    stand_in.hold["b.gguf"] = 100
    argv = ("models", "pull", "tiny", "hf:org/quants/b.gguf", "org/name", "--json")
    process = start(*argv, env=os.environ | stand_in.environment(tmp_path))
    assert stand_in.holding.wait(20)
    process.send_signal(signal.SIGINT)
    out, err = ended(process, 130)
    stand_in.release.set()
    document = json.loads(out)
    assert [model["name"] for model in document["models"]] == ["tiny"]
    assert (document["failed"], document["finish_reason"]) == ([], "interrupted")
    assert err == "interrupted after 1 of 3 models\n"

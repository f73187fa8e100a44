"""Models from a hub of our own: headers alone for `info`, `shapes` and `tokens`, and whole ones.

Whole ones as a user meets them: a run, one without network, what stops it, and `llmcli models`.
"""

import hashlib
import io
import json
import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path

import children
import programs
import pytest
from cli_tiny import write_tiny
from covers import few
from gguf_bytes import ARRAY, STRING, gguf, pair
from gguf_model import write_model
from hub_cache_files import tree_of, write_revision
from hub_stand_in import SHA, Answer, HubStandIn
from programs import ended

from llmcli.checkpoints.catalog import CATALOG, CatalogEntry
from llmcli.checkpoints.names import HubId
from llmcli.shell.options import ModelOptions, OutputOptions
from llmcli.shell.output import Output
from llmcli.shell.running import opened_headers

GENERATE = (
    *("generate", "-m", "org/m", "--ids", "1,2,3", "--raw", "-n", "5", "--greedy"),
    *("--ignore-eos", "--dtype", "float32"),
)
PULL = ("models", "pull", "org/m")  # where what is fetched matters, and not what runs then
CONSTANTS = {"HF_ENDPOINT": "ENDPOINT", "HF_HUB_CACHE": "HF_HUB_CACHE"}


def in_shards(folder):
    """A copy of the model with its tensors in two files and an index."""
    from safetensors.numpy import load_file, save_file

    shards = shutil.copytree(folder, folder.parent / "shards")
    tensors = load_file(shards / "model.safetensors")
    (shards / "model.safetensors").unlink()
    names = [f"model-{i + 1:05}-of-00002.safetensors" for i in range(2)]
    index = {tensor: names[i % 2] for i, tensor in enumerate(tensors)}
    for name in names:
        save_file({t: tensors[t] for t in tensors if index[t] == name}, shards / name)
    (shards / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def write_large(path: Path, words: int, *, parts: int = 1) -> None:
    """A small Llama with so many words in its (first) header, and as many megabytes behind it."""
    listed = pair("tests.words", ARRAY, (STRING, [f"word{i:08}" for i in range(words)]))
    for file in write_model(path, parts=parts, more=[listed]):
        with file.open("ab") as data:
            data.truncate(file.stat().st_size + 250 * words)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """id -> directory; everything that a hub of these tests can have."""
    root = tmp_path_factory.mktemp("hub")
    m = write_tiny(
        root / "m", weights=True, hidden_size=256, intermediate_size=1024, vocab_size=2000
    )
    for name, words in (("short", 1000), ("long", 120_000), ("split", 9000)):
        (root / name).mkdir()
        write_large(root / name / "a.gguf", words, parts=2 if name == "split" else 1)
    for name, data in {
        "ggufs/x.gguf": b"GGUF", "long/README.md": b"x", "several/a.gguf": b"x",
        "several/b.gguf": b"x" * 600, "none/pytorch_model.bin": b"x",
        "bare/model.safetensors": (m / "model.safetensors").read_bytes(),
        "lying/a.gguf": gguf([pair("a", STRING, "x")], keys=60_000) + bytes(40_000_000),
    }.items():  # fmt: skip
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(data)
    in_shards(m)
    return {f"org/{folder.name}": folder for folder in root.iterdir()}


@pytest.fixture
def hub(served):
    with HubStandIn(served) as hub:
        yield hub


@pytest.fixture
def ask(hub, tmp_path, cli):
    """What a command says that knows no other hub: in this process, or `alone` in one of its own.

    (stdout, stderr); with `--json` stdout is read. `code`: that it ends with.
    """

    def run(*argv, command="info", code=0, alone=False, **environ):
        hub.sent.clear()
        hub.requests.clear()
        line = [command, *argv, *(["--device", "cpu"] if command == "info" else [])]
        if alone:
            own = hub.environment(tmp_path, TMPDIR=str(tmp_path))
            out, err = ended(programs.start(*line, env=os.environ | own | environ), code)
        else:
            with pytest.MonkeyPatch.context() as patch:
                hub.here(patch, tmp_path)
                patch.setattr("tempfile.tempdir", str(tmp_path))
                for name, value in environ.items():
                    patch.setenv(name, value)
                    if name in CONSTANTS:  # the library has read them already
                        patch.setattr(f"huggingface_hub.constants.{CONSTANTS[name]}", value)
                done = cli(*line)
            assert done.code == code, done.err
            out, err = done.out, done.err
        return json.loads(out) if "--json" in argv else out, err

    return run


@pytest.fixture
def same_as_here(ask):
    """`same_as_here(document, path)`: what it says is what is said of the files at `path`."""

    def compare(document, path):
        here, _ = ask("-m", str(path), "--json")
        for key in ("architecture", "tokenizer", "checks"):
            assert document[key] == here[key]
        assert document["model"]["parameters"] == here["model"]["parameters"]

    return compare


def weights_sent(hub: HubStandIn) -> int:
    """Bytes that went out for weight files."""
    kinds = (".safetensors", ".gguf")
    return sum(count for path, count in hub.sent.items() if path.endswith(kinds))


@pytest.mark.parametrize("ranges", [True, False])
def test_only_headers_are_fetched_and_nothing_is_left(
    hub, ask, tmp_path, served, same_as_here, ranges
):
    hub.ranges = ranges
    document, _ = ask("-m", "org/m", "--json", alone=ranges)
    size = (served["org/m"] / "model.safetensors").stat().st_size
    assert document["model"]["parameters"] > 2_000_000
    assert document["file"]["bytes"] == size
    assert not ranges or 0 < weights_sent(hub) <= 100_000 < size / 10
    assert document["file"]["path"] == f"org/m@{SHA} on the hub"
    assert not list(tmp_path.glob("llmcli-headers-*"))
    assert (tmp_path / "hf/hub/models--org--m/refs/main").read_text() == SHA, "its branch is known"
    same_as_here(document, served["org/m"])
    out, _ = ask("-m", "org/m@main", "--params", command="shapes")
    assert "blocks.{0-1}.attn.W_q" in out
    assert not ranges or 0 < weights_sent(hub) <= 100_000
    assert hub.bytes_of("tokenizer.json") == 0, "cached the first time"


def test_their_bar_is_gone_before_anything_is_shown(hub, tmp_path, monkeypatch):
    hub.here(monkeypatch, tmp_path)
    out = Output("shapes", OutputOptions())
    with opened_headers(ModelOptions(model="org/m"), out):
        assert out.erase is None


@pytest.mark.parametrize(("name", "ranges", "most"), [
    ("org/short", True, 1 << 20), ("hf:org/short/a.gguf", False, 1 << 20),
    ("org/long", True, 1 << 22), ("org/long", False, 6 << 20),
])
def test_the_header_of_a_gguf_file(hub, ask, served, tmp_path, same_as_here, name, ranges, most):
    hub.ranges = ranges
    document, _ = ask("-m", name, "--json")
    file = served["org/long" if "long" in name else "org/short"] / "a.gguf"
    assert weights_sent(hub) <= min(most, file.stat().st_size)
    assert document["file"]["bytes"] == file.stat().st_size
    assert not list(tmp_path.rglob("*.gguf"))
    same_as_here(document, file)


def test_one_of_the_hubs_classics_by_its_bare_name(hub, ask, served):
    hub.repositories["openai-community/gpt2"] = served["org/m"]
    document, _ = ask("-m", "gpt2", "--json")
    assert document["file"]["path"] == f"openai-community/gpt2@{SHA} on the hub"
    ask("pull", "gpt2", command="models")
    assert "openai-community/gpt2" in ask(command="models")[0]


def test_a_catalog_model_that_is_not_here_is_looked_at_by_its_header(hub, ask, served, monkeypatch):
    """Its license and its purpose are in the list before that; after `pull` it is in our cache."""
    file = served["org/long"] / "a.gguf"
    entry = CatalogEntry(
        name="small", summary="a small one", purpose="tests", license="Public Domain",
        size=file.stat().st_size, sha256=hashlib.sha256(file.read_bytes()).hexdigest(),
        hub=HubId(repository="org/long", revision=SHA, file="a.gguf"),
    )  # fmt: skip
    monkeypatch.setitem(CATALOG, "small", entry)
    document, _ = ask("-m", "small", "--json")
    assert document["file"]["path"] == f"org/long@{SHA} on the hub"
    assert weights_sent(hub) < entry.size
    listed, _ = ask(command="models")
    assert re.search(r"^small +[\d.]+ MiB +not fetched", listed, re.MULTILINE)
    assert "\nsmall: tests · Public Domain\n" in listed
    ask("pull", "small", command="models")
    assert weights_sent(hub) >= entry.size
    models = ask("--json", command="models")[0]["models"]
    (model,) = (one for one in models if one["name"] == "small")
    assert (model["place"], model["license"]) == ("llmcli cache", "Public Domain")
    ask("-m", "small", "--offline")
    assert weights_sent(hub) == 0


def test_the_headers_of_all_parts_of_a_split_model(hub, ask):
    document, _ = ask("-m", "hf:org/split/a-00002-of-00002.gguf", "--json")
    assert document["file"]["files"] == 2
    assert document["architecture"]["layers"][0]["count"] == 1
    assert weights_sent(hub) <= 2 << 20
    whole, _ = ask("-m", "org/split", "--json")
    assert (whole["architecture"], whole["file"]) == (document["architecture"], document["file"])


def test_tokens_need_no_weights_and_then_no_network(hub, ask):
    """Nor does a model in shards of which only headers were read, which are one model."""
    hello = ("hello", "--json")
    first, _ = ask("-m", "org/m", *hello, command="tokens")
    assert len(first["tokens"]) == 5
    assert weights_sent(hub) == 0
    assert ask("-m", "org/m", *hello, command="tokens")[0]["tokens"] == first["tokens"]
    assert not hub.requests
    ask("-m", "org/shards", *hello, command="tokens")
    assert weights_sent(hub) == hub.bytes_of("model.safetensors.index.json") == 0
    document, _ = ask("-m", "org/shards", "--json")
    assert document["file"]["files"] == 2
    assert all(check["ok"] for check in document["checks"].values())
    assert hub.bytes_of("model.safetensors.index.json") > 0, "now the cache has it, and no shard"
    for name in ("org/shards", f"org/shards@{SHA}"):
        assert ask("-m", name, *hello, command="tokens")[0]["tokens"]
        assert not hub.requests


def test_a_cache_that_cannot_be_written_is_not_needed(ask, tmp_path):
    (tmp_path / "file").write_text("")
    document, _ = ask("-m", "org/m", "--json", HF_HUB_CACHE=str(tmp_path / "file" / "hub"))
    assert document["tokenizer"]
    assert not list(tmp_path.glob("llmcli-headers-*"))


@pytest.mark.parametrize(("line", "answer", "environ", "code", "words"), [
    ("info org/gone", {}, {}, 3, "no model `org/gone` on the hub"),
    ("info org/ggufs", {}, {}, 4, "not a usable GGUF file"),
    ("info org/lying", {}, {}, 4, "not a usable GGUF file"),  # its header never ends
    ("info org/several", {}, {}, 4, "several models: `a.gguf`, `b.gguf`"),
    ("info org/none", {}, {}, 4, "pickled weights only"),
    ("info org/m", {"/api/": Answer(status=500)}, {}, 6, "error (500"),
    ("info org/m", {}, {"HF_ENDPOINT": "http://127.0.0.1:9"}, 6, "cannot be reached"),
    ("info org/m --offline", {}, {}, 6, "offline mode allows no download"),
    ("info org/m", {}, {"HF_HUB_OFFLINE": "1"}, 6, "offline mode allows no download"),
    ("info hf:org/short/x.gguf", {}, {}, 3, "no file `x.gguf`"),
    ("tokens org/bare hello", {}, {}, 4, "has no tokenizer"),
])
def test_what_cannot_be_had_is_said(hub, ask, served, line, answer, environ, code, words):
    hub.answers |= answer
    command, *argv = line.split()
    out, err = ask("-m", *argv, command=command, code=code, **environ)
    assert out == ""
    assert words in err.replace("\n", " ")
    assert "hint:" in err
    assert weights_sent(hub) <= (served["org/lying"] / "a.gguf").stat().st_size, "no byte twice"
    offline = "cannot be reached" in words or "offline" in words
    assert ("`llmcli models` lists what is on this machine" in err) == offline
    assert "Traceback" not in err


def test_a_gated_model(hub, ask):
    hub.gated.add("org/m")
    out, err = ask("-m", "org/m", code=6)
    assert out == ""
    assert "is gated" in err
    ask("-m", "org/m", HF_TOKEN="hf_good")
    stored = [one.headers for one in hub.requests if one.host == "storage"]
    assert not any("authorization" in headers for headers in stored)


# whole models


@pytest.fixture
def start(hub, tmp_path):
    """Starts `generate` of five tokens, or another `command`, where no other hub is known."""
    home = os.environ | hub.environment(tmp_path)
    del home["HF_HUB_CACHE"]  # HF_HOME alone says where the cache is

    def run(*argv, command=GENERATE, **environ):
        return programs.start(*command, *argv, text=True, env=home | environ)

    return run


def bodies(hub):
    return [one for one in hub.requests if one.method == "GET" and "model.safe" in one.path]


def test_the_second_run_makes_no_network_call(hub, start):
    out, err = ended(start("--json"))
    assert err == ""
    ids = json.loads(out)["outputs"][0]["ids"]
    assert len(ids) == 5
    assert len(bodies(hub)) == 1
    hub.requests.clear()
    out, err = ended(start("--json"))
    assert err == ""
    assert json.loads(out)["outputs"][0]["ids"] == ids
    assert ended(start("--revision", SHA, command=PULL, HF_HUB_OFFLINE="1"))[1] == ""
    assert not hub.requests


@pytest.mark.parametrize(("number", "code"), few([
    pytest.param(signal.SIGINT, 130), pytest.param(signal.SIGKILL, -9),
    pytest.param(signal.SIGTERM, 143),
], 2))  # fmt: skip
def test_what_stops_a_download_leaves_nothing_that_is_used(hub, start, tmp_path, number, code):
    hub.hold["model.safetensors"] = 1_500_000
    process = start()
    assert hub.holding.wait(30)
    parts = (tmp_path / "hf").rglob
    children.until(lambda: any(part.stat().st_size for part in parts("*.incomplete")))
    begin = time.monotonic()
    process.send_signal(number)
    assert ended(process, code)[0] == b""
    assert time.monotonic() - begin < 5
    kept = [path.name for path in (tmp_path / "hf").rglob("*") if path.is_file()]
    assert "model.safetensors" not in kept
    half = any(name.endswith(".incomplete") for name in kept)
    assert half == (number == signal.SIGKILL)
    ended(start("--offline"), 6)  # nothing of it counts
    if number != signal.SIGKILL:
        return
    hub.hold.clear()
    hub.release.set()
    hub.requests.clear()
    ended(start(command=PULL))
    assert [one.headers.get("range") for one in bodies(hub)] == [None], "that file from its start"
    assert not [one for one in hub.requests if "tokenizer.json" in one.path], "the others are kept"


def test_two_processes_fetch_it_once(hub, start):
    hub.hold["model.safetensors"] = 1_500_000
    first = start(command=PULL)
    assert hub.holding.wait(30)
    second = start(command=PULL)
    children.until(
        lambda: sum(one.method == "HEAD" and "model.safe" in one.path for one in hub.requests) == 2
    )
    hub.release.set()
    assert ended(first) == ended(second)
    assert len(bodies(hub)) == 1


# `llmcli models`: what it prints, what it removes, and when it does not


@pytest.fixture
def cached(monkeypatch, tmp_path):
    """A hub cache with one model in it, and our own cache beside it."""
    root = tmp_path / "hf" / "hub"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(root))
    monkeypatch.setenv("LLMCLI_CACHE", str(tmp_path / "own"))
    files = {"config.json": b"{}", "model.safetensors": b"w" * 2048, "tokenizer.json": b"{}"}
    write_revision(root, "org/name", files)
    return root


def test_prune_by_age(cli, cached):
    then = time.time() - 40 * 86400
    os.utime(cached / f"models--org--name/snapshots/{'a' * 40}/model.safetensors", (then, then))
    assert cli("models", "prune", "--older-than", "6w", "-y").out == "nothing to remove\n"
    dry = cli("models", "prune", "--older-than", "5w", "--dry-run", "--json").json()
    assert (dry["older_than"], len(dry["removed"])) == ("5w", 1)
    assert "complete 40 days ago hub cache" in " ".join(cli("models").out.split())
    assert "last used 40 days ago" in cli("models", "prune", "--older-than", "5w", "-y").out
    assert tree_of(cached) == {}


@pytest.mark.parametrize(("typed", "gone"), [
    ("y\n", True), ("Yes\n", True), ("\n", False), ("n\n", False), ("", False), ("yep\n", False),
])
def test_it_asks_on_a_terminal(cli, cached, monkeypatch, typed, gone):
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    for stream in (sys.stdin, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
    asked = cli("models", "rm", "org/name")
    assert asked.code == 0
    assert re.search(r"(?s)org/name  2 KiB.*would free.*remove it\? \[y/N\] ", asked.err)
    assert ("freed 2 KiB" in asked.out) == gone
    assert ("nothing was removed" in asked.err) != gone
    assert (tree_of(cached) == {}) == gone


@pytest.fixture
def here(hub, monkeypatch, tmp_path):
    """The hub is the one that this process knows."""
    hub.here(monkeypatch, tmp_path)
    return hub


def test_pull_fetches_once_and_says_where(cli, here):
    first = cli("models", "pull", "org/m", "tiny", "hf:org/several/b.gguf")
    assert (first.code, first.err) == (0, "")
    lines = [line.split("  ") for line in first.out.splitlines()]
    assert [line[0] for line in lines] == ["org/m", "tiny", "hf:org/several/b.gguf"]
    assert [line[2] for line in lines] == ["fetched", "already here", "fetched"]
    assert lines[2][1] == "600 B"
    for name, *_, path in lines:
        assert cli("models", "path", name).out == f"{path}\n"
    assert Path(lines[1][-1], "config.json").is_file()
    listed = cli("models").out
    assert "org/m " in listed
    assert "hf:org/several/b.gguf " in listed
    assert "a.gguf" not in listed
    assert cli("tokens", "-m", "org/m", "hi").code == 0
    asked = len(here.requests)
    again = cli("models", "pull", "org/m", "hf:org/several/b.gguf", "--json").json()
    fetched = {model["name"]: model["fetched"] for model in again["models"]}
    assert fetched == {"org/m": False, "hf:org/several/b.gguf": False}
    assert len(here.requests) == asked, "what is here makes no network call"


def test_pull_goes_on_after_what_is_not_there(cli, here):
    names = ("org/nowhere", "org/m", "org/several", "tiny")
    result = cli("models", "pull", *names)
    assert result.code == 3, "as the first that failed"
    assert [line.split("  ")[0] for line in result.out.splitlines()] == ["org/m", "tiny"]
    said = [line for line in result.err.splitlines() if line.startswith("error: ")]
    assert ["org/nowhere" in said[0], "org/several" in said[1], len(said)] == [True, True, 2]
    assert result.err.count("hint: ") == 2
    told = cli("models", "pull", *names, "--json")
    document = told.json()
    assert (told.code, document["finish_reason"]) == (3, "complete")
    assert [model["name"] for model in document["models"]] == ["org/m", "tiny"]
    failed = [(one["name"], one["code"], one["kind"]) for one in document["failed"]]
    assert failed == [("org/nowhere", 3, "model_not_found"), ("org/several", 4, "checkpoint")]
    assert document["failed"][0]["message"] in said[0]
    # one model that cannot be had is an error like any other
    assert cli("models", "pull", "org/several").code == 4, "which of the two files?"
    refused = cli("models", "pull", "org/m@other", "--json")
    assert (refused.code, refused.json()["error"]["kind"]) == (3, "model_not_found")


def test_pull_that_is_interrupted_says_what_it_has(here, tmp_path):
    here.hold["b.gguf"] = 100
    argv = ("models", "pull", "tiny", "hf:org/several/b.gguf", "org/m", "--json")
    process = programs.start(*argv, env=os.environ | here.environment(tmp_path))
    assert here.holding.wait(20)
    process.send_signal(signal.SIGINT)
    out, err = ended(process, 130)
    here.release.set()
    document = json.loads(out)
    assert [model["name"] for model in document["models"]] == ["tiny"]
    assert (document["failed"], document["finish_reason"]) == ([], "interrupted")
    assert err == "interrupted after 1 of 3 models\n"

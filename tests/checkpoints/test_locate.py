"""The look-up rules of `-m`, with a hub cache of our own and no network.

Names that are refused are in tests/transcripts/names.txt.
"""

import re
import shutil
import socket
from pathlib import Path
from unittest.mock import Mock

import pytest
from gguf_bytes import STRING, gguf, pair
from hub_cache_files import write_revision

from llmcli.checkpoints import CATALOG, cache_dir, fetch, open_model
from llmcli.checkpoints.catalog import offline_from_environment
from llmcli.checkpoints.locate import find
from llmcli.checkpoints.names import HubId, parse
from llmcli.errors import ModelNotFound, NetworkError, UsageError, WriteFailed
from llmcli.records.ranges import SAMPLING

GGUF = gguf([pair("general.architecture", STRING, "llama")])
WHOLE = {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": b"x"}
SHA = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    """Own cache, own hub cache, own working directory, and no way to the network."""

    def refuse(*arguments, **more):
        raise AssertionError("a network call")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr("subprocess.Popen", refuse)
    for name in ("LLMCLI_MODEL", "LLMCLI_OFFLINE", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LLMCLI_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")


def locate(spec, **options):
    return find(spec, **options)[1]


def cache_hub(tmp_path, repository, files, **more):
    return write_revision(tmp_path / "hub", repository, files, **{"commit": SHA} | more)


@pytest.mark.parametrize(("spec", "expected"), [
    ("org/name", HubId(repository="org/name")),
    ("org/name@v1.0", HubId(repository="org/name", revision="v1.0")),
    ("gpt2", HubId(repository="openai-community/gpt2")),
    ("gpt2-xl@v1", HubId(repository="openai-community/gpt2-xl", revision="v1")),
    ("hf:gpt2-medium", HubId(repository="openai-community/gpt2-medium")),
    ("distilgpt2", HubId(repository="distilbert/distilgpt2")), ("./gpt2", Path("gpt2")),
    ("org/name@refs/pr/3", HubId(repository="org/name", revision="refs/pr/3")),
    ("hf:org/name@abc", HubId(repository="org/name", revision="abc")),
    ("hf:org/name/file.gguf", HubId(repository="org/name", file="file.gguf")),
    ("hf:o/n/sub/f.gguf@r", HubId(repository="o/n", file="sub/f.gguf", revision="r")),
    ("hf:org/name.gguf", HubId(repository="org/name.gguf")), ("smollm2", "smollm2"),
    ("anything", "anything"),
    *((path, Path(path))
      for path in ("./a", "../a", "/a", "a.gguf", "o/n.safetensors", "A.GGUF", ".")),
])  # fmt: skip
def test_what_a_name_means(spec, expected):
    assert parse(spec) == expected


def test_the_home_directory_and_a_path_of_no_file_system(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "m.gguf").write_bytes(GGUF)
    assert locate("~/m.gguf") == tmp_path / "m.gguf"
    with pytest.raises(ModelNotFound):
        locate("./none/none/x\0y.gguf")


def test_a_revision_is_one_wherever_it_stands():
    for spec in ("o/n", "o/n@r"):
        assert parse(spec, revision="r") == HubId(repository="o/n", revision="r")


@pytest.mark.parametrize(("refused", "reason"), [
    (None, "offline mode"), (NetworkError("pip: the index cannot be reached"), "cannot be reached"),
    (WriteFailed("`/cache` cannot be written: read-only file system"), "read-only"),
])  # fmt: skip
def test_where_nothing_was_named_and_the_default_cannot_be_had_it_is_tiny(
    monkeypatch, refused, reason
):
    if refused is not None:
        monkeypatch.setattr(fetch, "fetch", Mock(side_effect=refused))
    notes = []
    found = open_model(None, offline=refused is None, note=notes.append)
    assert (found.name, found.path) == ("tiny", CATALOG["tiny"].file)
    (note,) = notes
    assert note.startswith("using `tiny`, the small model that ships with llmcli: no model was")
    assert reason in note


def test_a_model_that_was_named_is_never_replaced(monkeypatch):
    notes = []
    for spec in ("smollm2", "smollm2-bf16", "o/n"):
        with pytest.raises(NetworkError):
            locate(spec, offline=True, note=notes.append)
        monkeypatch.setenv("LLMCLI_MODEL", spec)
        with pytest.raises(NetworkError):
            locate(None, offline=True, note=notes.append)
    monkeypatch.delenv("LLMCLI_MODEL")
    with pytest.raises(UsageError, match="--revision"):
        locate(None, revision="r", offline=True, note=notes.append)
    with pytest.raises(NetworkError, match="`smollm2`"):  # nobody would hear of it
        locate(None, offline=True)
    assert not notes


def test_the_default_and_the_variable(tmp_path, monkeypatch):
    with pytest.raises(NetworkError, match="`smollm2`"):
        locate(None, offline=True)
    (tmp_path / "m.gguf").write_bytes(GGUF)
    monkeypatch.setenv("LLMCLI_MODEL", str(tmp_path / "m.gguf"))
    assert locate(None, note=pytest.fail) == tmp_path / "m.gguf"
    assert open_model(None).name == str(tmp_path / "m.gguf")
    monkeypatch.setenv("LLMCLI_MODEL", "")
    with pytest.raises(NetworkError, match="`smollm2`"):
        locate(None, offline=True)


def test_a_cached_catalog_file_needs_nothing(monkeypatch):
    entry = CATALOG["smollm2"]
    entry.file.parent.mkdir(parents=True)
    with entry.file.open("wb") as file:
        file.truncate(entry.size)  # sparse
    assert locate("smollm2", offline=True) == entry.file
    with entry.file.open("ab") as file:
        file.write(b"x")
    with pytest.raises(NetworkError):
        locate("smollm2", offline=True)


@pytest.mark.parametrize("variable", ["LLMCLI_OFFLINE", "HF_HUB_OFFLINE"])
def test_offline_from_the_environment(monkeypatch, variable):
    assert not offline_from_environment()
    monkeypatch.setenv(variable, "0")
    assert not offline_from_environment()
    monkeypatch.setenv(variable, "1")
    with pytest.raises(NetworkError, match="offline"):
        locate("smollm2")


@pytest.mark.parametrize("kept", ["openai-community/gpt2", "gpt2"])
def test_the_hubs_classics_by_their_bare_names(tmp_path, kept):
    """As other tools keep them under the old name, or under the one that the hub redirects to."""
    with pytest.raises(NetworkError, match="`openai-community/gpt2` is not in the hub cache"):
        locate("gpt2", offline=True)
    snapshot = cache_hub(tmp_path, kept, WHOLE)
    notes = []
    assert locate("gpt2", offline=True, note=notes.append) == snapshot
    assert locate("gpt2", revision="main") == snapshot
    assert not notes


def test_the_entries_of_the_catalog_are_pinned_and_say_what_they_are():
    for name, entry in CATALOG.items():
        assert entry.license
        assert entry.purpose
        assert len(f"{name}: {entry.purpose} · {entry.license}") <= 80
        for key, value in entry.sampling.items():
            assert value in SAMPLING[key]
        if hub := entry.hub:
            assert re.fullmatch(r"[0-9a-f]{40}", hub.revision)
        if hub and hub.file:
            assert re.fullmatch(r"[0-9a-f]{64}", entry.sha256)
            assert hub.file.endswith(".gguf")
            said = re.search(r", ([\d.]+) ([MG])B, ", entry.summary)
            scale = {"M": 1e6, "G": 1e9}[said[2]]
            exact = 0.5 if scale < 1e9 else 0.005
            assert entry.size / scale == pytest.approx(float(said[1]), abs=exact)


def test_a_hub_snapshot_in_the_shared_cache(tmp_path):
    snapshot = cache_hub(
        tmp_path, "o/n", {"config.json": b"{}", "model.gguf": GGUF}, refs=("main", "v1")
    )
    for spec in ("o/n", "hf:o/n", "o/n@v1", f"o/n@{SHA}", "hf:o/n/model.gguf"):
        assert locate(spec) == snapshot / "model.gguf"
    checkpoint = open_model("o/n")
    assert (checkpoint.kind, checkpoint.name) == ("gguf", "o/n")
    folder = cache_hub(tmp_path, "o/f", {"Q4/m.gguf": GGUF})
    assert locate("hf:o/f/Q4/m.gguf") == folder / "Q4" / "m.gguf"
    cache_hub(tmp_path, "o/bare", {"config.json": b"{}"})  # a snapshot without weights is no model
    for spec in ("o/n@v2", "o/m", "hf:o/n/other.gguf", "o/bare"):
        with pytest.raises(NetworkError):
            locate(spec)


def test_what_is_not_cached_says_what_is_in_the_way():
    with pytest.raises(NetworkError, match="cannot be reached") as caught:
        locate("hf:o/n/f.gguf@v1")
    assert "HF_ENDPOINT" in caught.value.hint
    with pytest.raises(NetworkError, match="offline") as caught:
        locate("hf:o/n/f.gguf@v1", offline=True)
    assert "`o/n/f.gguf`" in caught.value.message
    assert "without offline mode" in caught.value.hint


def test_a_link_in_the_cache_that_leads_nowhere_is_called_broken(tmp_path):
    snapshot = cache_hub(tmp_path, "org/m", WHOLE)
    weights = snapshot / "model.safetensors"
    weights.resolve().unlink()
    with pytest.raises(NetworkError) as caught:
        locate("org/m", offline=True)
    assert "`org/m` is incomplete in the hub cache: `model.safetensors` is a broken link" in (
        caught.value.message
    )
    with pytest.raises(ModelNotFound, match=r"model\.safetensors` is a broken link: the file"):
        open_model(str(weights))


def test_the_catalogs_hub_entry_is_pinned(tmp_path):
    entry = CATALOG["smollm2-bf16"]
    cache_hub(tmp_path, entry.hub.repository, WHOLE)  # of another commit
    with pytest.raises(NetworkError, match=f"`{entry.hub.repository}`"):
        locate("smollm2-bf16")
    shutil.rmtree(tmp_path / "hub")
    snapshot = cache_hub(tmp_path, entry.hub.repository, WHOLE, refs=(), commit=entry.hub.revision)
    assert locate("smollm2-bf16") == snapshot


def test_a_directory_of_that_name_is_pointed_at(tmp_path):
    for name in ("zzz", "o/n", "gpt2"):
        Path(name).mkdir(parents=True)
    with pytest.raises(ModelNotFound) as caught:
        locate("zzz", note=pytest.fail)
    assert "`./zzz`" in caught.value.hint
    snapshot, notes = cache_hub(tmp_path, "o/n", {"m.gguf": GGUF}), []
    assert locate("o/n", note=notes.append) == snapshot / "m.gguf"
    snapshot = cache_hub(tmp_path, "gpt2", WHOLE)
    assert locate("gpt2", note=notes.append) == snapshot
    assert ["`./o/n`" in notes[0], "`./gpt2`" in notes[1], len(notes)] == [True, True, 2]
    locate("hf:o/n", note=pytest.fail)


def test_where_the_cache_is(monkeypatch, tmp_path):
    assert cache_dir() == tmp_path / "cache"
    monkeypatch.delenv("LLMCLI_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "llmcli"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "llmcli"

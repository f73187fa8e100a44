"""Models from the hub into its cache: the right files, whole and once; and looked up offline."""

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
from hub_stand_in import SHA, HubStandIn
from huggingface_hub import hf_hub_download

from llmcli.checkpoints.hub.download import cached, download
from llmcli.checkpoints.names import parse
from llmcli.errors import CheckpointError, ModelNotFound

BIG = os.urandom(3_500_000)
PLAIN = {
    "config.json": b"{}", "generation_config.json": b"{}", "tokenizer.json": b"{1}",
    "tokenizer_config.json": b"{}", "vocab.json": b"{}", "merges.txt": b"m b",
    "tokenizer.model": b"m", "chat_template.jinja": b"t", "model.safetensors": BIG,
    "chat_template.json": b"{}", "additional_chat_templates/rag.jinja": b"r",
}  # fmt: skip
OTHER = {
    "pytorch_model.bin": b"x", "onnx/model.onnx": b"x", "original/consolidated.safetensors": b"x",
    "tf_model.h5": b"x", "README.md": b"x", "train.py": b"x", "model.fp16.safetensors": b"x",
    "model-Q4.gguf": b"x", "sub/config.json": b"x",
}  # fmt: skip
INDEX = "model.safetensors.index.json"
SHARDS = [f"model-{number:05}-of-00003.safetensors" for number in (1, 2, 3)]


def sharded(**more: bytes) -> dict[str, bytes]:
    index = {"weight_map": {f"t{i}": name for i, name in enumerate([*SHARDS, SHARDS[0]])}}
    files = {name: b"weights" * (1 + i) for i, name in enumerate(SHARDS)}
    small = {"config.json": b"{}", "tokenizer.json": b"{}", INDEX: json.dumps(index).encode()}
    return small | files | more


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


@pytest.fixture
def serve(tmp_path, monkeypatch):
    """Starts a hub with `org/name`, and makes this process know it; its cache is `hub.cache`."""
    with ExitStack() as running:

        def start(files, **faults):
            folder = write(tmp_path / "served", files)
            hub = running.enter_context(HubStandIn({"org/name": folder}, **faults))
            hub.cache = hub.here(monkeypatch, tmp_path) / "models--org--name"
            # the library waits a second before it goes on
            monkeypatch.setattr("huggingface_hub.file_download.time", SimpleNamespace(sleep=id))
            return hub

        yield start


def fetched(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def get(spec="org/name", **options) -> Path:
    return download(parse(spec), **options)


def test_only_what_is_needed_is_fetched_and_it_is_bit_right(serve):
    hub = serve(PLAIN | OTHER)
    assert cached(parse("org/name")) is None
    assert not hub.requests
    path = get()
    assert path == hub.cache / "snapshots" / SHA
    assert fetched(path) == PLAIN
    asked = [one.path for one in hub.requests if one.method == "GET" and "resolve" in one.path]
    assert len(asked) == len(set(PLAIN.values())), "each content once"
    assert (hub.cache / "refs" / "main").read_text() == SHA
    hub.requests.clear()
    assert cached(parse("org/name")) == cached(parse(f"org/name@{SHA}")) == path
    assert not hub.requests, "what is cached needs no network"


def test_the_shards_that_the_index_names(serve):
    hub = serve(sharded(**{"model-00001-of-00009.safetensors": b"another", "x.bin": b"x"}))
    path = get()
    assert fetched(path) == sharded()
    assert cached(parse("org/name")) == path
    (path / SHARDS[1]).unlink()
    assert cached(parse("org/name")) is None, "a model without a shard is not here"
    hub.requests.clear()
    assert get() == path
    bodies = [one.path for one in hub.requests if one.method == "GET" and one.host == "storage"]
    assert not bodies, "its blob is still there"
    assert cached(parse("org/name")) == path


@pytest.mark.parametrize(
    "name", ["../../evil.safetensors", "absent.safetensors", "config.json", [], 7, None]
)
def test_an_index_that_leads_elsewhere_is_refused(serve, name):
    serve(sharded(**{INDEX: json.dumps({"weight_map": {"t": name}}).encode()}))
    with pytest.raises(CheckpointError, match="beside it"):
        get()


@pytest.mark.parametrize("name", ["a.gguf", "q/a.gguf"])
def test_the_one_gguf_file_of_a_repository(serve, name):
    hub = serve({name: BIG, "mmproj-a.gguf": b"x", "imatrix.gguf": b"x", "config.json": b"{}"})
    path = get()
    assert fetched(hub.cache / "snapshots" / SHA) == {name: BIG}
    assert path == hub.cache / "snapshots" / SHA / name
    assert cached(parse("org/name")) == cached(parse(f"hf:org/name/{name}")) == path
    assert hub.bytes_of("mmproj-a.gguf") == 0


def test_all_parts_of_a_split_gguf_model(serve):
    parts = {f"Q4/m-{number:05}-of-00003.gguf": bytes([number]) * 99 for number in (1, 2, 3)}
    serve(parts | {"Q4/other.gguf": b"x"})
    path = get("hf:org/name/Q4/m-00002-of-00003.gguf")
    assert path.name == "m-00001-of-00003.gguf"
    assert fetched(path.parents[1]) == parts
    assert cached(parse("hf:org/name/Q4/m-00003-of-00003.gguf")) == path
    path.unlink()
    assert cached(parse("hf:org/name/Q4/m-00003-of-00003.gguf")) is None


@pytest.mark.parametrize(("kinds", "liked", "words"), [
    (("Q2_K", "Q3_K", "Q4_K_M", "Q5_K_M", "Q8_0"), "Q4_K_M", "(4 MB), `m-Q2_K.gguf` (4 MB), "),
    (("f16", "q8_0"), "q8_0", "`m-q8_0.gguf` (4 MB), `m-f16.gguf` (4 MB)"),
    (("Q2_K", "Q3_K"), "Q2_K", "`m-Q2_K.gguf` (4 MB), `m-Q3_K.gguf` (4 MB)"),
])  # fmt: skip
def test_which_of_several_is_for_the_user_to_say(serve, kinds, liked, words):
    serve({f"m-{kind}.gguf": BIG for kind in kinds})
    with pytest.raises(CheckpointError, match="several models: `m-") as caught:
        get()
    assert words in caught.value.message
    assert caught.value.message.endswith(" and 1 more") == (len(kinds) > 4)
    assert f"`hf:org/name/m-{liked}.gguf`" in caught.value.hint
    assert get(f"hf:org/name/m-{kinds[1]}.gguf").name == f"m-{kinds[1]}.gguf"
    with pytest.raises(ModelNotFound, match="no file `m-Q9") as caught:
        get("hf:org/name/m-Q9.gguf")
    assert "did you mean `hf:org/name/m-" in caught.value.hint


def test_pickles_are_refused_before_they_are_fetched(serve):
    hub = serve({"config.json": b"{}", "pytorch_model.bin": BIG})
    with pytest.raises(CheckpointError, match="pickled weights only") as caught:
        get()
    assert "refs/pr/" in caught.value.hint
    with pytest.raises(CheckpointError, match="neither a gguf nor"):
        get("hf:org/name/pytorch_model.bin")
    assert sum(hub.sent.values()) < 10_000


def test_nothing_to_run_is_said(serve):
    serve({"README.md": b"x"})
    with pytest.raises(CheckpointError, match="neither safetensors nor GGUF"):
        get()


def test_branches_and_tags_are_kept_apart(serve, tmp_path):
    hub = serve({"m.gguf": b"new"})
    old = write(tmp_path / "old", {"m.gguf": b"old"})
    hub.revisions["org/name"] = {"v1": old, "refs/pr/3": old}
    commit, _ = hub.known("org/name")["v1"]
    assert get("org/name@v1").read_bytes() == b"old"
    assert get("org/name@refs/pr/3").read_bytes() == b"old"
    assert get(f"org/name@{commit}").read_bytes() == b"old"
    assert get().read_bytes() == b"new"
    assert (hub.cache / "refs" / "v1").read_text() == commit
    assert cached(parse("org/name@v1")).read_bytes() == b"old"
    assert cached(parse("org/name@refs/pr/3")).read_bytes() == b"old"


def test_a_branch_stays_where_it_was_until_the_newer_commit_is_whole(serve, tmp_path):
    hub = serve({"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": b"old"})
    old = get()
    newer = write(tmp_path / "newer", fetched(old) | {"model.safetensors": BIG})
    hub.repositories["org/name"], hub.commits["org/name"] = newer, "f" * 40
    hub.corrupt.add("model.safetensors")
    with pytest.raises(CheckpointError):
        get()
    assert cached(parse("org/name")) == old
    hub.corrupt.clear()
    assert (get() / "model.safetensors").read_bytes() == BIG
    assert cached(parse("org/name")).name == "f" * 40


def test_the_tokenizer_alone(serve):
    hub = serve(PLAIN)
    path = get(weights=False)
    assert fetched(path) == {name: PLAIN[name] for name in PLAIN if name != "model.safetensors"}
    assert hub.bytes_of("model.safetensors") == 0
    assert cached(parse("org/name"), weights=False) == path
    assert cached(parse("org/name")) is None


def test_what_another_tool_fetched_in_part_is_completed(serve):
    hub = serve(PLAIN)
    path = get()
    for name in PLAIN:
        if name.startswith(("tokenizer", "vocab", "merges")):
            (path / name).unlink()
    assert cached(parse("org/name")) is None
    assert cached(parse("org/name"), whole=False) == path, "it runs, and there may be no network"
    hub.sent.clear()
    get()
    assert fetched(path) == PLAIN
    assert hub.bytes_of("model.safetensors") == 0


@pytest.mark.parametrize("absent", ["tokenizer.json", "config.json"])
def test_what_a_repository_does_not_have_is_not_asked_for_again(serve, absent):
    files = {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": b"x"}
    del files[absent]
    serve(files)
    assert cached(parse("org/name")) is None
    path = get()
    assert cached(parse("org/name")) == path


def test_bytes_are_counted_over_all_files(serve):
    serve(PLAIN)
    told = []
    get(progress=lambda *one: told.append(one))
    total = sum(map(len, PLAIN.values()))
    assert {(what, of) for what, _, of in told} == {("downloading org/name", total)}
    done = [one for _, one, _ in told]
    assert done == sorted(done)
    assert (done[0], done[-1]) == (0, total)
    assert len(set(done)) > len(PLAIN), "within a file too"


def test_two_threads_fetch_at_once(serve, tmp_path):
    """Each verifies its own files, and another program's download in this process is not ours."""
    hub = serve(PLAIN)
    hub.repositories["org/other"] = write(tmp_path / "other", {"other.gguf": BIG[::-1]})
    hub.hold["model.safetensors"] = 1_000_000
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(get)
        assert hub.holding.wait(30)
        assert get("org/other").read_bytes() == BIG[::-1]
        theirs = hf_hub_download("org/other", "other.gguf", revision=SHA, local_dir=tmp_path)
        assert Path(theirs).read_bytes() == BIG[::-1]
        hub.release.set()
        assert (first.result() / "model.safetensors").read_bytes() == BIG


@pytest.mark.parametrize("reset", [False, True])
def test_a_body_that_is_cut_twice_continues(serve, reset, capfd):
    hub = serve(PLAIN, cut={"model.safetensors": [2_500_000, 600_000]}, reset=reset)
    told = []
    path = get(progress=lambda *one: told.append(one[1]))
    assert (path / "model.safetensors").read_bytes() == BIG
    bodies = [one for one in hub.requests if one.host == "storage" and "model.s" in one.path]
    ranges = [int(one.headers.get("range", "bytes=0-")[6:-1]) for one in bodies]
    assert len(ranges) == 3, "once and after each cut"
    assert ranges[0] == 0 < ranges[1] <= ranges[2], "continued, not begun again"
    assert told == sorted(told)
    assert capfd.readouterr() == ("", "")


def test_a_server_without_ranges_sends_it_again(serve):
    serve(PLAIN, cut={"model.safetensors": [2_500_000]}, ranges=False)
    assert (get() / "model.safetensors").read_bytes() == BIG


def test_the_token_goes_to_the_hub_and_not_to_the_storage(serve, monkeypatch):
    hub = serve(PLAIN, private=["org/name"], gated=["org/name"])
    monkeypatch.setenv("HF_TOKEN", "hf_good")
    get()
    by_host = {"hub": set(), "storage": set()}
    for one in hub.requests:
        by_host[one.host].add(one.headers.get("authorization"))
    assert by_host["storage"] == {None}
    assert "Bearer hf_good" in by_host["hub"]


def test_copies_of_a_cache_without_links_are_read(serve):
    hub = serve(PLAIN)
    path = get()
    files = fetched(path)
    shutil.rmtree(path)
    write(path, files)
    shutil.rmtree(hub.cache / "blobs")
    assert cached(parse("org/name")) == path

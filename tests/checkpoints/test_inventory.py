"""What is in the two caches, and what removing from them leaves: nothing else is ever touched."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import children
import pytest
from hub_cache_files import MAIN, OLD, lock_of, tree_of, write_revision

from llmcli.checkpoints import catalog
from llmcli.checkpoints.cache import locks
from llmcli.checkpoints.cache.inventory import Inventory
from llmcli.checkpoints.cache.locks import home_of, mark_used
from llmcli.checkpoints.cache.prune import left_over
from llmcli.checkpoints.cache.removal import pieces_of, remove
from llmcli.checkpoints.catalog import CATALOG, CatalogEntry
from llmcli.checkpoints.hub.download import cached
from llmcli.checkpoints.hub.marks import marked
from llmcli.checkpoints.locate import find
from llmcli.checkpoints.names import parse
from llmcli.errors import ModelNotFound, UsageError, WriteFailed

SAFE = {"config.json": b"{}", "model.safetensors": b"w" * 1000, "tokenizer.json": b"t" * 50}
DAY = 86400.0


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """The root of a hub cache of our own, and the environment that leads to it and to ours."""
    root = tmp_path / "hub"
    root.mkdir()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(root))
    monkeypatch.setenv("LLMCLI_CACHE", str(tmp_path / "own"))
    yield root
    while locks._held:
        os.close(locks._held.popitem()[1])


@pytest.fixture
def snapshot(hub):
    """That of `org/name`, a whole model."""
    return write_revision(hub, "org/name", SAFE)


def rows():
    return {s.model.name: s.model for s in Inventory.read().stored() if s.entry is None}


def take(*names, passing_over=False):
    def planned():
        return pieces_of(names, Inventory.read())

    return remove(planned(), planned, passing_over=passing_over)


def emptied(hub, *names):
    """The bytes of each removal, after which nothing is left."""
    gone, _ = take(*names)
    assert tree_of(hub) == {}
    return [removal.bytes for removal in gone]


def clear(since=None):
    def planned():
        return left_over(Inventory.read(), since)

    return remove(planned(), planned, passing_over=True)


def aged(path: Path, days: float) -> None:
    then = time.time() - days * DAY
    os.utime(path, (then, then), follow_symlinks=False)


# what is there


def test_names_are_what_one_types_and_sizes_what_the_disk_holds(hub, snapshot):
    write_revision(hub, "org/name", {**SAFE, "config.json": b"{ }"}, commit=OLD, refs=["v1"])
    write_revision(hub, "org/pinned", SAFE, refs=[])
    ggufs = {"a.gguf": b"a" * 10, "sub/b-00001-of-00002.gguf": b"b" * 20,
             "sub/b-00002-of-00002.gguf": b"c" * 30, "README.md": b"card"}  # fmt: skip
    write_revision(hub, "org/quants", ggufs)
    found = rows()
    assert list(found) == [
        "org/name", "org/name@v1", f"org/pinned@{MAIN[:12]}", "hf:org/quants/a.gguf",
        "hf:org/quants/sub/b-00001-of-00002.gguf",
    ]  # fmt: skip
    assert all(model.complete for model in found.values())
    name, parts = found["org/name"], found["hf:org/quants/sub/b-00001-of-00002.gguf"]
    assert (name.bytes, name.files, name.revision, name.refs) == (1052, 3, MAIN, ("main",))
    assert (parts.bytes, parts.files) == (50, 2)
    assert parts.path
    assert parts.path.endswith("sub/b-00001-of-00002.gguf")
    hub_use = Inventory.read().caches()[1]
    assert hub_use.bytes == (1052 + 3) + 1052 + (60 + 4), "what two commits share counts once"


def test_models_alone_are_listed_and_their_bytes_are_the_library_s(hub):
    from huggingface_hub import scan_cache_dir

    rng = random.Random(5)
    for repository in ("a/one", "a/two", "b/three"):
        for commit in (MAIN, OLD):
            files = {f"f{i}.safetensors": rng.randbytes(rng.randint(0, 99)) for i in range(5)}
            files["sub/same.bin"] = repository.encode()
            refs = ["main", "refs/pr/1"] if commit == MAIN else []
            write_revision(hub, repository, files, commit=commit, refs=refs)
    (hub / "datasets--a--data" / "snapshots").mkdir(parents=True)
    inventory = Inventory.read()
    assert inventory.others == 1
    assert inventory.caches()[1].bytes == scan_cache_dir(hub).size_on_disk
    assert list(rows()) == [name + at for name in ("a/one", "a/two", "b/three")
                            for at in ("", f"@{OLD[:12]}")]  # fmt: skip
    assert rows()["a/one"].refs == ("main", "refs/pr/1")


INDEX = "model.safetensors.index.json"
MAP = b'{"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}'  # noqa: E501


@pytest.mark.parametrize(
    ("files", "state"),
    [
        ({**SAFE}, "complete"),
        ({"config.json": b"{}", "model.safetensors": b"x"}, "no tokenizer"),
        ({"config.json": b"{}"}, "no weights"),
        ({"model.safetensors": b"x"}, "no configuration"),
        ({"config.json": b"{}", "pytorch_model.bin": b"x"}, "pickled weights only"),
        ({"config.json": b"{}", INDEX: MAP}, "incomplete"),
        ({"config.json": b"{}", INDEX: MAP, "model-00001-of-00002.safetensors": b"x"},
         "incomplete"),
        ({"config.json": b"{}", INDEX: MAP, "model-00001-of-00002.safetensors": b"x",
          "model-00002-of-00002.safetensors": b"y", "vocab.json": b"{}"}, "complete"),
        ({"config.json": b"{}", "model-00001-of-00002.safetensors": b"x"}, "incomplete"),
        ({"config.json": b"{}", INDEX: b"[]", "model-00001-of-00001.safetensors": b"x"},
         "incomplete"),
        ({**SAFE, INDEX: b"[]"}, "complete"),
    ],
)  # fmt: skip
def test_what_is_missing(hub, files, state):
    write_revision(hub, "org/name", files)
    assert rows()["org/name"].state == state


def test_what_the_library_and_we_note_beside_a_snapshot(hub):
    files = {"config.json": b"{}", "model.safetensors": b"x"}
    snapshot = write_revision(hub, "org/name", files)
    noted = snapshot.parent.parent / ".no_exist" / MAIN / "tokenizer.json"
    noted.parent.mkdir(parents=True)
    noted.touch()
    assert rows()["org/name"].complete, "its repository has no tokenizer either"
    with contextlib.suppress(KeyboardInterrupt), marked(snapshot, "model.safetensors"):
        assert rows()["org/name"].state == "incomplete", "nobody has compared its digest"
        raise KeyboardInterrupt
    assert rows()["org/name"].state == "incomplete"


def test_a_part_or_a_blob_that_is_gone(hub):
    write_revision(hub, "org/q", {"m-00001-of-00002.gguf": b"x"})
    snapshot = write_revision(hub, "org/name", SAFE)
    (snapshot / "model.safetensors").resolve().unlink()
    assert {name: model.state for name, model in rows().items()} == {
        "org/name": "unreadable", "hf:org/q/m-00001-of-00002.gguf": "incomplete",
    }  # fmt: skip
    (warning,) = Inventory.read().warnings()
    assert warning.startswith("`org/name` in the hub cache: blob missing (broken symlink)")
    take("org/name")
    assert list(rows()) == ["hf:org/q/m-00001-of-00002.gguf"]


def test_a_part_whose_digest_nobody_has_compared(hub):
    parts = {f"m-0000{part}-of-00002.gguf": b"x" for part in (1, 2)}
    snapshot = write_revision(hub, "org/q", parts)
    model = parse("hf:org/q/m-00001-of-00002.gguf")
    assert cached(model) == snapshot / "m-00001-of-00002.gguf"
    with contextlib.suppress(KeyboardInterrupt), marked(snapshot, "m-00002-of-00002.gguf"):
        raise KeyboardInterrupt
    assert cached(model) is None


@pytest.mark.parametrize("other", [False, True], ids=["alone", "beside a broken one"])
def test_what_cannot_be_read_is_a_warning_and_can_be_removed(hub, other):
    """The library skips most of them, stops at the bytes, and would wait for the pipe."""
    write_revision(hub, "org/good", SAFE, refs=["main", "v1"])
    (hub / "models--org--empty").mkdir()
    (hub / "models--org--file").write_text("")
    stray = write_revision(hub, "org/stray", SAFE)
    (stray.parent / "stray").write_text("no directory")
    moved = write_revision(hub, "org/moved", SAFE)
    (moved.parent.parent / "refs" / "main").write_text("c" * 40)
    bad = {"org/file", "org/stray", "org/moved"}
    if other:
        for name in ("bytes", "pipe"):
            reference = write_revision(hub, f"org/{name}", SAFE).parent.parent / "refs" / "main"
            bad.add(f"org/{name}")
            if name == "bytes":
                reference.write_bytes(b"\xff\xfe\x00")
            else:
                reference.unlink()
                os.mkfifo(reference)
    warnings = Inventory.read().warnings()
    said = {line.split("`")[1]: line.split(": ", 1)[1] for line in warnings}
    assert said.keys() == bad
    assert said["org/file"].startswith(f"repo path is not a directory: {hub}/models--org--file")
    assert "refer to missing commit" in said["org/moved"]
    found = rows()
    assert {name for name, model in found.items() if model.state == "unreadable"} == bad
    assert found["org/empty"].state == "nothing in it"
    assert found["org/good"].complete
    assert found["org/good"].refs == ("main", "v1")
    before = Inventory.read().caches()[1].bytes
    take("org/empty", *sorted(bad))
    assert set(rows()) == {"org/good"}
    assert Inventory.read().caches()[1].bytes == before
    assert os.listdir(hub) == ["models--org--good"]
    emptied(hub, "org/good")


def test_a_disk_that_is_full_while_one_repository_is_scanned(hub, snapshot, monkeypatch):
    reference = write_revision(hub, "org/bad", SAFE).parent.parent / "refs" / "main"
    reference.write_bytes(b"\xff\xfe\x00")

    def full(*arguments, **more):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tempfile.TemporaryDirectory", full)
    assert [line.split(": ", 1)[1] for line in Inventory.read().warnings()] == [
        "no space left on device", "no space left on device",
    ]  # fmt: skip


def test_a_commit_that_two_repositories_have_goes_from_one(hub):
    """A copy that was pushed under another name has the same commits."""
    for name in ("org/one", "org/two"):
        write_revision(hub, name, SAFE)
        write_revision(hub, name, {"a.gguf": name.encode()}, commit=OLD, refs=["v1"])
    for name in ("org/two", "org/two@v1"):
        before = tree_of(hub)
        take(name)
        assert all("models--org--two" in path for path in before.keys() - tree_of(hub).keys())
        assert name not in rows()
    take("org/one@v1")
    assert set(rows()) == {"org/one"}


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_directory_without_permission(hub):
    snapshot = write_revision(hub, "org/closed", SAFE)
    write_revision(hub, "org/open", SAFE)
    snapshot.chmod(0)
    try:
        assert "permission denied" in Inventory.read().warnings()[0]
        assert rows()["org/open"].complete
    finally:
        snapshot.chmod(0o700)


def test_caches_that_are_not_there(hub):
    hub.rmdir()
    inventory = Inventory.read()
    assert [s.model.name for s in inventory.stored()] == list(CATALOG)
    assert [cache.bytes for cache in inventory.caches()] == [0, 0]
    assert left_over(inventory) == []


def test_the_catalog_has_one_line_a_model_wherever_it_lies(hub):
    entry = CATALOG["smollm2-bf16"]
    assert entry.repository
    assert entry.revision
    write_revision(hub, entry.repository, SAFE, commit=entry.revision, refs=[])
    stored = {s.model.name: s.model for s in Inventory.read().stored()}
    assert list(stored) == list(CATALOG)
    assert stored["smollm2-bf16"].place == "hub cache"
    assert stored["smollm2-bf16"].complete
    assert stored["tiny"].place == "package"
    assert stored["tiny"].bytes > 7_000_000
    assert stored["smollm2"].place == "nowhere"
    take("smollm2-bf16")
    assert tree_of(hub) == {}


# removing


def test_a_revision_goes_with_what_only_it_needs(hub):
    write_revision(hub, "org/name", SAFE, refs=["main", "stable"])
    write_revision(hub, "org/name", {**SAFE, "model.safetensors": b"old"}, commit=OLD, refs=["v1"])
    write_revision(hub, "org/other", SAFE)
    before = tree_of(hub)
    (piece,) = pieces_of(["org/name@v1"], Inventory.read())
    assert piece.removal.bytes == 3
    gone, kept = take("org/name@v1")
    assert kept == []
    assert [removal.bytes for removal in gone] == [3]
    lost = before.items() - tree_of(hub).items()
    assert sum(size for _, size in lost if isinstance(size, int)) == 3 + 40, "and the branch"
    assert all("models--org--name" in path for path, _ in lost)
    assert rows()["org/name"].complete
    assert rows()["org/other"].complete
    take("org/name@stable")
    assert not (hub / "models--org--name").exists(), "the last one takes the repository with it"
    assert rows()["org/other"].complete


def test_what_goes_with_a_name_and_how_many_bytes(hub, snapshot):
    write_revision(hub, "org/name", {**SAFE, "config.json": b"{ }"}, commit=OLD, refs=["v1"])
    freed = emptied(hub, "org/name", "org/name@v1", "org/name")
    assert freed == [2, 1053], "shared bytes go with the last"
    files = {"a.gguf": b"a" * 10, "b-00001-of-00002.gguf": b"b", "b-00002-of-00002.gguf": b"cc",
             "README.md": b"card"}  # fmt: skip
    snapshot = write_revision(hub, "org/quants", files)
    gone, _ = take("hf:org/quants/b-00002-of-00002.gguf")
    assert gone[0].bytes == 3, "any part names the model"
    assert sorted(os.listdir(snapshot)) == ["README.md", "a.gguf"]
    assert emptied(hub, "hf:org/quants/a.gguf") == [14], "beside the last one is no model"
    write_revision(hub, "org/quants", {"a.gguf": b"a", "b.gguf": b"bb"})
    assert emptied(hub, "org/quants") == [3], "a repository of GGUF files by its own name"
    snapshot = write_revision(hub, "org/name", {"config.json": b"{}"})
    (snapshot / "model.safetensors").write_bytes(b"copied")
    assert emptied(hub, "org/name") == [8], "a file may be copied into the snapshot"
    write_revision(hub, "gpt2", SAFE)
    assert emptied(hub, "gpt2") == [1052], "old repositories have no organization"


@pytest.mark.parametrize(("name", "kind", "hint"), [
    ("tiny", UsageError, "models list"), ("./org/name", UsageError, "remove the file itself"),
    ("/etc/passwd", UsageError, "remove the file itself"),
    ("smollm2", ModelNotFound, "models list"),
    ("org/nam", ModelNotFound, "did you mean `org/name`?"),
    ("org/name@v2", ModelNotFound, "did you mean `org/name"),
    ("hf:org/name/x.gguf", ModelNotFound, "did you mean"),
    ("org/..", ModelNotFound, "write `org/name[@rev]`"),
    ("hf:org/name/../../../x", ModelNotFound, "write `org/name[@rev]`"),
    ("", UsageError, "llmcli env"), ("a\0b", ModelNotFound, "models list"),
])  # fmt: skip
def test_names_that_remove_nothing(hub, snapshot, name, kind, hint):
    before = tree_of(hub)
    with pytest.raises(kind) as caught:
        take("org/name", name)
    assert hint in (caught.value.hint or "")
    assert tree_of(hub) == before, "one wrong name, and nothing goes"


# nothing outside


@pytest.fixture
def outside(tmp_path):
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "precious").write_text("mine")
    yield folder
    assert (folder / "precious").read_text() == "mine"
    assert os.listdir(folder) == ["precious"]


def test_links_inside_are_removed_and_not_followed(hub, snapshot, outside):
    (snapshot / "file").symlink_to(outside / "precious")
    (snapshot / "up").symlink_to("../../../../outside/precious")
    (snapshot / "folder").symlink_to(outside)
    write_revision(hub, "org/name", {**SAFE, "config.json": b"{  }"}, commit=OLD, refs=["v1"])
    assert take("org/name")[0][0].bytes == 2
    assert set(rows()) == {"org/name@v1"}
    refs = snapshot.parent.parent / "refs"
    (refs / "x").symlink_to(outside / "precious")  # not a commit, so that nothing is read
    assert rows()["org/name"].state == "unreadable"
    emptied(hub, "org/name")


@pytest.mark.parametrize("folder", ["", "blobs", "snapshots", "refs"])
def test_a_directory_that_is_a_link_is_refused(hub, snapshot, tmp_path, folder):
    place = hub / "models--org--name" / folder
    moved = tmp_path / "moved"
    place.rename(moved)
    place.symlink_to(moved)
    before = tree_of(moved)
    with pytest.raises(WriteFailed, match="leads out of the cache"):
        take("org/name")
    assert tree_of(moved) == before
    aged(moved, 90)
    _, kept = clear(time.time() + DAY)
    assert tree_of(moved) == before
    if folder != "snapshots":  # whose links are broken, so that nobody knows the last use
        assert "leads out of the cache" in kept[0]


def test_the_cache_itself_may_be_a_link(hub, snapshot, tmp_path, monkeypatch):
    (tmp_path / "linked").symlink_to(hub)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "linked"))
    emptied(hub, "org/name")
    assert (tmp_path / "linked").is_symlink()


def test_a_blob_that_is_shared_between_repositories(hub):
    """The library keeps a store of blobs and who links to them; it has to do the counting."""
    from huggingface_hub.utils import _shared_blobs as shared

    for repository in ("org/one", "org/two"):
        snapshot = write_revision(hub, repository, SAFE)
        blob = Path(os.path.normpath(snapshot / os.readlink(snapshot / "model.safetensors")))
        blob = snapshot.parent.parent / "blobs" / blob.name
        published = shared.publish_blob_to_shared_store(
            blob_path=str(blob), xet_hash="ab" * 32, cache_dir=hub, expected_size=1000
        )
        assert published
        assert blob.is_symlink()
    payload = shared.shared_blob_path(hub, "ab" * 32)
    assert Inventory.read().caches()[1].bytes == 1000 + 2 * 52
    assert take("org/one")[0][0].bytes == 52
    assert payload.exists()
    assert take("org/two")[0][0].bytes == 1052
    assert not payload.exists()


# use


def hold(path: Path) -> subprocess.Popen[bytes]:
    """Another process that holds the lock of `path` in the way of the library and of `fetch`."""
    path.touch()
    code = "import fcntl, sys; f = open(sys.argv[1]); fcntl.flock(f, fcntl.LOCK_EX); print()"
    return _started(f"{code}; sys.stdout.flush(); sys.stdin.read()", path)


def use(path: Path) -> subprocess.Popen[bytes]:
    code = "import sys, pathlib; from llmcli.checkpoints.cache.locks import mark_used"
    run = "mark_used(pathlib.Path(sys.argv[1])); print(); sys.stdout.flush(); sys.stdin.read()"
    return _started(f"{code}; {run}", path)


def _started(code: str, path: Path) -> subprocess.Popen[bytes]:
    process = children.start(
        [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout
    assert process.stdout.readline() == b"\n"
    return process


def test_what_another_process_runs_stays_until_it_ends(hub, snapshot):
    write_revision(hub, "org/free", {**SAFE, "config.json": b"{  }"})
    running = use(snapshot / "model.safetensors")
    before = tree_of(hub)
    with pytest.raises(WriteFailed, match="in use"):
        take("org/free", "org/name")
    assert tree_of(hub) == before, "all or nothing"
    gone, kept = clear(time.time() + DAY)
    assert [removal.name for removal in gone] == ["org/free"]
    assert "in use" in kept[0]
    assert rows()["org/name"].complete
    running.communicate(timeout=20)
    emptied(hub, "org/name")


def test_a_repository_that_cannot_be_read_may_be_in_use_too(hub, snapshot):
    write_revision(hub, "org/name", {**SAFE, "config.json": b"{ }"}, commit=OLD, refs=["v1"])
    (snapshot.parent / OLD / "config.json").resolve().unlink()
    assert rows()["org/name"].state == "unreadable"
    running = use(snapshot)
    before = tree_of(hub)
    with pytest.raises(WriteFailed, match=rf"in use: another process holds `.*{MAIN}`"):
        take("org/name")
    assert tree_of(hub) == before
    running.communicate(timeout=20)
    emptied(hub, "org/name")


def test_what_another_process_fetches_stays(hub, snapshot):
    half = hub / "models--org--name" / "blobs" / "e1.00ff00ff.incomplete"
    half.write_bytes(b"half")
    downloading = hold(lock_of(hub, "org/name", "e1"))
    with pytest.raises(WriteFailed, match="in use"):
        take("org/name")
    assert clear()[0] == []
    assert half.exists()
    downloading.communicate(timeout=20)
    assert clear()[0][0].why == "a stale partial download"
    assert not half.exists()
    assert rows()["org/name"].complete


def test_a_download_that_ends_before_the_lock_is_ours(hub, snapshot):
    """Its snapshot links to a blob that the plan was going to remove."""
    pieces = pieces_of(["org/name"], Inventory.read())
    write_revision(hub, "org/name", SAFE, commit=OLD, refs=["v2"])
    remove(pieces, lambda: pieces_of(["org/name"], Inventory.read()), passing_over=False)
    assert rows()["org/name@v2"].complete
    assert "org/name" not in rows()


def test_the_last_use_is_the_access_time_of_the_weights(hub, snapshot):
    for name in SAFE:
        aged((snapshot / name).resolve(), 40)
    assert rows()["org/name"].last_used == pytest.approx(time.time() - 40 * DAY, abs=60)
    mark_used(snapshot)
    assert rows()["org/name"].last_used == pytest.approx(time.time(), abs=60)
    assert (snapshot / "model.safetensors").stat().st_mtime < time.time() - 39 * DAY
    take("org/name")  # what this process itself uses is no obstacle


@pytest.mark.parametrize("path", ["nowhere/x", "models--a--b/snapshots/c/x", "a\0b", "/", "."])
def test_noting_the_use_never_raises(hub, path, monkeypatch):
    monkeypatch.chdir(hub)
    mark_used(Path(path))


def test_a_cache_that_cannot_be_written(hub, snapshot, monkeypatch):

    def refuse(*arguments, **more):
        raise PermissionError(13, "Permission denied", str(arguments[0]))

    with monkeypatch.context() as patch:
        patch.setattr("os.utime", refuse)
        mark_used(snapshot)
    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", refuse)
        with pytest.raises(WriteFailed, match=r"cannot be removed: permission denied \(`/.*\)"):
            take("org/name")


def test_homes(hub, snapshot, tmp_path):
    own = tmp_path / "own" / "models" / "smollm2-0123456789ab"
    assert home_of(snapshot) == home_of(snapshot / "sub" / "x.gguf") == snapshot
    assert home_of(own / "x.gguf") == own
    assert home_of(tmp_path / "x.gguf") is None
    assert home_of(own.parent) is None


def test_a_home_has_one_name_however_one_gets_there(hub, snapshot, small, tmp_path, monkeypatch):
    """Whoever removes it has to know that this process itself is who uses it."""
    file = small.file
    (tmp_path / "linked").symlink_to(tmp_path)
    monkeypatch.setenv("LLMCLI_CACHE", str(tmp_path / "linked" / "own"))
    for path, home in ((snapshot, snapshot), (file, file.parent)):
        linked = tmp_path / "linked" / path.relative_to(tmp_path)
        assert home_of(linked) == home_of(path) == home
        mark_used(linked)
    take("small", "org/name")
    assert tree_of(hub) == {}
    assert not file.exists()


# our own cache


@pytest.fixture
def small(hub, monkeypatch):
    """A catalog file of four bytes, in the cache."""
    entry = CatalogEntry(
        name="small", summary="", size=4, sha256="c" * 64,
        wheel=catalog.WheelFile(requirement="x==1", member="x/small.gguf", wheel_bytes=4),
    )  # fmt: skip
    monkeypatch.setitem(CATALOG, "small", entry)
    assert entry.file
    entry.file.parent.mkdir(parents=True)
    entry.file.write_bytes(b"four")
    return entry


def test_a_file_of_our_cache(small):
    (stored,) = [s.model for s in Inventory.read().stored() if s.model.name == "small"]
    assert (stored.place, stored.bytes, stored.complete) == ("llmcli cache", 4, True)
    running = use(small.file)
    with pytest.raises(WriteFailed, match="in use"):
        take("small")
    running.communicate(timeout=20)
    fetching = hold(small.file.parent / ".lock")
    with pytest.raises(WriteFailed, match="in use"):
        take("small")
    fetching.communicate(timeout=20)
    assert take("small")[0][0].bytes == 4
    assert not small.file.parent.exists()
    assert small.file.parent.parent.exists()


def test_a_model_that_was_moved_elsewhere_and_linked(small, tmp_path):
    moved = tmp_path / "moved"
    small.file.parent.rename(moved)
    small.file.parent.symlink_to(moved)
    before = tree_of(tmp_path)
    with pytest.raises(WriteFailed, match="leads out of the cache"):
        take("small")
    _, kept = clear(time.time() + DAY)
    assert "leads out of the cache" in kept[0]
    assert tree_of(tmp_path) == before


def test_whoever_finds_a_model_uses_it(small, hub):
    snapshot = write_revision(hub, "org/name", SAFE)
    for name, weights in (("small", small.file), (str(snapshot), snapshot / "model.safetensors")):
        aged(weights.resolve(), 40)
        _, path = find(name, offline=True)
        assert home_of(path) in locks._held
        assert weights.stat().st_atime == pytest.approx(time.time(), abs=60)
    find("tiny")
    assert len(locks._held) == 2, "what ships with llmcli is in no cache"


def test_left_overs_of_our_cache(small):
    models = small.file.parent.parent
    (small.file.parent / ".fetch-abc").mkdir()
    (small.file.parent / ".fetch-abc" / "part").write_bytes(b"half!")
    old = models / "small-0123456789ab"
    old.mkdir()
    (old / "small.gguf").write_bytes(b"older version")
    (models / "not-ours").mkdir()
    (models / "file").write_text("not ours either")
    (models / "linked-0123456789ab").symlink_to(old)
    fetching = hold(small.file.parent / ".lock")
    gone, kept = clear()
    assert [(r.name, r.bytes) for r in gone] == [("small", 13)]
    assert "in use" in kept[0]
    fetching.communicate(timeout=20)
    assert [(r.bytes, r.why) for r in clear()[0]] == [(5, "left by an interrupted fetch")]
    assert set(tree_of(models)) == {
        "file", "linked-0123456789ab", f"{small.file.parent.name}/.lock",
        f"{small.file.parent.name}/small.gguf",
    }  # fmt: skip
    assert (models / "not-ours").is_dir()
    assert left_over(Inventory.read()) == []


# what is pruned of the hub's


def test_left_overs_of_the_hub_cache(hub, snapshot):
    write_revision(hub, "org/name", {**SAFE, "model.safetensors": b"old"}, commit=OLD, refs=[])
    write_revision(hub, "org/by-commit", SAFE, refs=[])
    blobs = hub / "models--org--name" / "blobs"
    (blobs / "fresh.incomplete").write_bytes(b"no lock, and perhaps being written")
    (blobs / "stale.incomplete").write_bytes(b"12345")
    (blobs / "orphan").write_bytes(b"123")
    (blobs / "new").write_bytes(b"its link may come")
    (hub / "models--org--asked" / "refs").mkdir(parents=True)
    (hub / "datasets--org--data" / "blobs").mkdir(parents=True)
    (hub / "datasets--org--data" / "blobs" / "x.incomplete").write_bytes(b"not ours")
    for path in (blobs / "stale.incomplete", blobs / "orphan", hub / "models--org--asked",
                 hub / "datasets--org--data" / "blobs" / "x.incomplete"):  # fmt: skip
        aged(path, 1)
    gone, kept = clear()
    assert kept == []
    assert {(r.name, r.why, r.bytes) for r in gone} == {
        ("org/asked", "a repository with no model in it", 0),
        ("org/name", "a stale partial download", 5), ("org/name", "no snapshot links to it", 3),
        (f"org/name@{OLD[:12]}", "a branch has moved on from this commit", 3),
    }  # fmt: skip
    assert set(rows()) == {"org/name", f"org/by-commit@{MAIN[:12]}"}
    assert all(model.complete for model in rows().values())
    assert (blobs / "fresh.incomplete").exists()
    assert (blobs / "new").exists()
    assert (hub / "datasets--org--data" / "blobs" / "x.incomplete").exists()
    assert left_over(Inventory.read()) == []


def test_downloads_that_only_began_are_left_over(hub):
    began = write_revision(hub, "org/began", {"config.json": b"{}", "vocab.json": b"x"}, refs=[])
    named = write_revision(hub, "org/named", {"config.json": b"{}", "vocab.json": b"x"})
    other = write_revision(hub, "org/other", {"config.json": b"{}", "model.onnx": b"o"}, refs=[])
    write_revision(hub, "org/name", SAFE)
    empty = hub / "models--org--name" / "snapshots" / OLD
    empty.mkdir()
    (hub / "models--org--name" / "refs" / "v1").write_text(OLD)
    assert f"org/name@{OLD[:12]}" not in rows()
    assert "org/name@v1" not in rows(), "a model with no file is none"
    assert left_over(Inventory.read()) == [], "they may be on their way"
    for path in (began, named, other, empty):
        aged(path, 1)
    gone, kept = clear()
    assert kept == []
    assert {(r.name, r.why, r.bytes) for r in gone} == {
        (f"org/began@{MAIN[:12]}", "what is beside weights, without them", 3),
        ("org/name@v1", "a snapshot with nothing in it", 0),
    }
    assert not (hub / "models--org--began").exists()
    assert not empty.exists()
    assert not (hub / "models--org--name" / "refs" / "v1").exists()
    assert set(rows()) == {"org/name", "org/named", f"org/other@{MAIN[:12]}"}
    assert left_over(Inventory.read()) == []


def test_the_commit_that_the_catalog_names_is_not_left_over(hub):
    entry = CATALOG["smollm2-bf16"]
    write_revision(hub, entry.repository, SAFE, commit=entry.revision, refs=[])
    write_revision(hub, entry.repository, SAFE, commit=OLD, refs=["main"])
    assert left_over(Inventory.read()) == []


def test_what_was_not_used_for_long(hub, small):
    for name, days in (("old", 45), ("new", 2)):
        content = {**SAFE, "model.safetensors": name.encode()}
        snapshot = write_revision(hub, f"org/{name}", content)
        for file in content:
            aged((snapshot / file).resolve(), days)
    aged(small.file, 31)
    assert left_over(Inventory.read()) == []
    gone, _ = clear(time.time() - 30 * DAY)
    assert {(r.name, r.why) for r in gone} == {
        ("small", "last used 31 days ago"), ("org/old", "last used 45 days ago"),
    }  # fmt: skip
    assert set(rows()) == {"org/new"}
    assert not small.is_cached()


def test_random_caches_lose_nothing_that_another_model_needs(hub):
    """Whatever is removed in whatever order: the rest is whole, and in the end nothing is left."""
    rng = random.Random(11)
    pool = [bytes([n]) * (n + 1) for n in range(6)]
    for _ in range(6):
        for repository in ("a/x", "a/y", "b/z"):
            for commit, refs in ((MAIN, ["main"]), (OLD, ["v1", "v2"]), ("c" * 40, [])):
                files = {f"{i}.gguf": rng.choice(pool) for i in range(rng.randint(1, 4))}
                with contextlib.suppress(FileExistsError):
                    write_revision(hub, repository, files, commit=commit, refs=refs)
        while here := [name for name, model in rows().items()]:
            names = rng.sample(here, rng.randint(1, min(3, len(here))))
            bytes_before = Inventory.read().caches()[1].bytes
            gone, _ = take(*names)
            now = rows()
            assert set(now) == set(here) - set(names)
            assert all(model.complete for model in now.values())
            freed = bytes_before - Inventory.read().caches()[1].bytes
            assert sum(removal.bytes for removal in gone) == freed
        assert tree_of(hub) == {}

"""What is in the two caches, and what removing from them leaves: nothing else is ever touched."""

import os
import shutil
import sys
import time
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
from hub_cache_files import MAIN, OLD, tree_of, write_revision
from huggingface_hub.utils import _cache_manager
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from llmcli.checkpoints import catalog
from llmcli.checkpoints.cache import Inventory
from llmcli.checkpoints.catalog import CATALOG, CatalogEntry
from llmcli.checkpoints.hub.download import cached
from llmcli.checkpoints.locate import find
from llmcli.checkpoints.names import parse
from llmcli.checkpoints.removal import left_over, pieces_of, remove
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
    return root


@pytest.fixture
def snapshot(hub):
    """That of `org/name`, a whole model."""
    return write_revision(hub, "org/name", SAFE)


def rows():
    found = [stored.model for stored in Inventory.read().stored()]
    return {model.name: model for model in found if model.name not in CATALOG}


def hub_bytes():
    return Inventory.read().caches()[1].bytes


def planned(*names):
    return pieces_of(names, Inventory.read())


def take(*names):
    """What is removed under these names: all of it, or WriteFailed."""
    gone, kept = remove(planned(*names), partial(planned, *names), passing_over=False)
    assert not kept
    return [removal.bytes for removal in gone]


def kept_whole(root, names, kind=WriteFailed, match=None):
    """The refusal to remove them, after which every file below `root` is there."""
    before = tree_of(root)
    with pytest.raises(kind, match=match) as caught:
        take(*names)
    assert tree_of(root) == before
    return caught.value


def emptied(hub, *names):
    """The bytes of each removal, after which nothing is left."""
    gone = take(*names)
    assert tree_of(hub) == {}
    return gone


def clear(since=None):
    def found():
        return left_over(Inventory.read(), since)

    return remove(found(), found, passing_over=True)


def pruned(since=None):
    """What of it goes: all of it, so that no more is left over."""
    gone, kept = clear(since)
    assert kept == left_over(Inventory.read(), since) == []
    rows = {(removal.name, removal.why, removal.bytes) for removal in gone}
    assert len(rows) == len(gone)
    return rows


def aged(path: Path, days: float) -> None:
    then = time.time() - days * DAY
    os.utime(path, (then, then), follow_symlinks=False)


# what is there


INDEX = "model.safetensors.index.json"
PARTS = [f"model-0000{part}-of-00002.safetensors" for part in (1, 2)]
CONTENT = {
    "config.json": b"{}", INDEX: b'{"weight_map": {"a": "%s", "b": "%s"}}' % tuple(
        part.encode() for part in PARTS
    ),
}  # fmt: skip


@pytest.mark.parametrize(("names", "index", "state"), [
    (SAFE, None, "complete"), (["config.json", "model.safetensors"], None, "no tokenizer"),
    (["config.json"], None, "no weights"), (["model.safetensors"], None, "no configuration"),
    (["config.json", "pytorch_model.bin"], None, "pickled weights only"),
    (["config.json", INDEX], None, "incomplete"),
    (["config.json", INDEX, PARTS[0]], None, "incomplete"),
    (["config.json", INDEX, *PARTS, "vocab.json"], None, "complete"),
    (["config.json", PARTS[0]], None, "incomplete"),
    (["config.json", "model-00001-of-00001.safetensors"], b"[]", "incomplete"),
    (SAFE, b"[]", "complete"),
])  # fmt: skip
def test_what_is_missing(hub, names, index, state):
    files = {name: CONTENT.get(name, name.encode()) for name in names}
    write_revision(hub, "org/name", files | ({INDEX: index} if index else {}))
    assert rows()["org/name"].state == state


def test_what_the_library_notes_beside_a_snapshot_and_what_a_power_loss_emptied(hub):
    files = {"config.json": b"{}", "model.safetensors": b"x"}
    snapshot = write_revision(hub, "org/name", files)
    noted = snapshot.parent.parent / ".no_exist" / MAIN / "tokenizer.json"
    noted.parent.mkdir(parents=True)
    noted.touch()
    assert rows()["org/name"].complete, "its repository has no tokenizer either"
    os.truncate(snapshot / "model.safetensors", 0)
    assert rows()["org/name"].state == "incomplete", "as after a power loss"
    parts = {f"m-0000{part}-of-00002.gguf": b"x" * part for part in (1, 2)}
    snapshot, model = write_revision(hub, "org/q", parts), parse("hf:org/q/m-00001-of-00002.gguf")
    assert cached(model) == snapshot / "m-00001-of-00002.gguf"
    os.truncate(snapshot / "m-00002-of-00002.gguf", 0)
    assert cached(model) is None
    assert rows()["hf:org/q/m-00001-of-00002.gguf"].state == "incomplete"


def test_a_part_or_a_blob_that_is_gone(hub, snapshot):
    write_revision(hub, "org/q", {"m-00001-of-00002.gguf": b"x"})
    (snapshot / "model.safetensors").resolve().unlink()
    assert {name: model.state for name, model in rows().items()} == {
        "org/name": "unreadable", "hf:org/q/m-00001-of-00002.gguf": "incomplete",
    }  # fmt: skip
    (warning,) = Inventory.read().warnings()
    assert warning.startswith("`org/name` in the hub cache: blob missing (broken symlink)")
    take("org/name")
    assert list(rows()) == ["hf:org/q/m-00001-of-00002.gguf"]


@pytest.mark.parametrize(("other", "private"), [(False, True), (True, True), (False, False)])
def test_what_cannot_be_read_is_a_warning_and_can_be_removed(hub, other, private, monkeypatch):
    """The library skips most of them, stops at the bytes, and would wait for the pipe.

    Without its `private` function for one repository it scans all.
    """
    if not private:
        public = {name: one for name, one in vars(_cache_manager).items() if name[0] != "_"}
        vars(module := ModuleType("")).update(public)
        monkeypatch.setitem(sys.modules, _cache_manager.__name__, module)
    write_revision(hub, "org/good", SAFE, refs=["main", "v1"])
    (hub / "models--org--empty").mkdir()
    (hub / "models--org--file").write_text("")
    bad = {"org/file", "org/stray", "org/moved", *(["org/bytes", "org/pipe"] if other else ())}
    refs = {}
    for name in bad - {"org/file"}:
        refs[name] = write_revision(hub, name, SAFE).parent.parent / "refs" / "main"
    (refs["org/stray"].parents[1] / "snapshots" / "stray").write_text("no directory")
    refs["org/moved"].write_text("c" * 40)
    if other:
        refs["org/bytes"].write_bytes(b"\xff\xfe\x00")
        refs["org/pipe"].unlink()
        os.mkfifo(refs["org/pipe"])
    warnings = Inventory.read().warnings()
    said = {line.split("`")[1]: line.split(": ", 1)[1] for line in warnings}
    assert said.keys() == bad
    if private:
        assert said["org/file"].startswith(f"repo path is not a directory: {hub}/models--org--file")
        assert "refer to missing commit" in said["org/moved"]
    found = rows()
    assert {name for name, model in found.items() if model.state == "unreadable"} == bad
    assert found["org/empty"].state == "nothing in it"
    assert found["org/good"].complete
    assert found["org/good"].refs == ("main", "v1")
    before = hub_bytes()
    take("org/empty", *sorted(bad))
    assert set(rows()) == {"org/good"}
    assert hub_bytes() == before
    assert os.listdir(hub) == ["models--org--good"]
    emptied(hub, "org/good")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_directory_without_permission(hub, snapshot):
    write_revision(hub, "org/open", SAFE)
    snapshot.chmod(0)
    try:
        assert "permission denied" in Inventory.read().warnings()[0]
        assert rows()["org/open"].complete
    finally:
        snapshot.chmod(0o700)


def test_the_catalog_has_one_line_a_model_wherever_it_lies(hub):
    hub.rmdir()
    inventory = Inventory.read()
    assert [s.model.name for s in inventory.stored()] == list(CATALOG)
    assert [cache.bytes for cache in inventory.caches()] == [0, 0]
    assert left_over(inventory) == []
    entry = CATALOG["smollm2-bf16"]
    write_revision(hub, entry.hub.repository, SAFE, commit=entry.hub.revision, refs=[])
    stored = {s.model.name: s.model for s in Inventory.read().stored()}
    assert list(stored) == list(CATALOG)
    assert stored["smollm2-bf16"].place == "hub cache"
    assert stored["smollm2-bf16"].complete
    assert stored["tiny"].place == "package"
    assert stored["tiny"].bytes > 7_000_000
    assert stored["smollm2"].place == "nowhere"
    write_revision(hub, entry.hub.repository, SAFE, commit=OLD, refs=["main"])
    assert left_over(Inventory.read()) == [], "no branch has the commit that the catalog names"
    take("smollm2-bf16")
    emptied(hub, entry.hub.repository)


# removing


GGUFS = ["a.gguf"], ["sub/b-00001-of-00002.gguf", "sub/b-00002-of-00002.gguf"]
REFS = {MAIN: ["main", "refs/pr/1"], OLD: ["v1"], "c" * 40: []}
AT = {MAIN: "", OLD: "@v1", "c" * 40: "@" + "c" * 12}
CACHES = st.dictionaries(
    st.tuples(st.sampled_from(["a/x", "z"]), st.sampled_from([*REFS])),
    st.dictionaries(
        st.sampled_from(["config.json", "model.safetensors", *GGUFS[0], *GGUFS[1]]),
        st.integers(1, 5).map(lambda size: bytes([size]) * size),
        min_size=3,
    ),
    min_size=1,
)  # fmt: skip


def models_in(cache):
    """Name -> repository, commit and files, of `cache`: (repository, commit) -> file -> content."""
    found = {}
    for (repository, commit), files in cache.items():
        ggufs = [[one for one in group if one in files] for group in GGUFS]
        plain = [name for name in files if not name.endswith(".gguf")]
        if plain and ("model.safetensors" in plain or not any(ggufs)):
            found[repository + AT[commit]] = (repository, commit, plain)
        for group in filter(None, ggufs):
            found[f"hf:{repository}/{group[0]}{AT[commit]}"] = (repository, commit, group)
    return found


def on_disk(cache):
    """Of bytes: what two commits of a repository share counts once."""
    blobs = {(place[0], data) for place, files in cache.items() for data in files.values()}
    return sum(len(data) for _, data in blobs)


def rewritten(hub, cache):
    shutil.rmtree(hub)
    hub.mkdir()
    for (repository, commit), files in cache.items():
        write_revision(hub, repository, files, commit=commit, refs=REFS[commit])
    return tree_of(hub)


@settings(
    max_examples=10, phases=[Phase.generate],  # to shrink it takes minutes
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)  # fmt: skip
@given(cache=CACHES, data=st.data())
def test_what_is_removed_takes_with_it_what_only_it_needs(hub, cache, data):
    """Whatever is removed in whatever order: the rest is as if nothing else had been written."""
    from huggingface_hub import scan_cache_dir

    rewritten(hub, cache)
    while cache:
        models, found, before = models_in(cache), rows(), on_disk(cache)
        assert found.keys() == models.keys()
        for name, (*place, files) in models.items():
            size = on_disk({("", ""): {file: cache[*place][file] for file in files}})
            model = found[name]
            assert (model.files, model.bytes, model.revision) == (len(files), size, place[1])
            assert model.refs == tuple(REFS[place[1]])
        assert hub_bytes() == before == scan_cache_dir(hub).size_on_disk
        names = data.draw(st.lists(st.sampled_from(sorted(models)), min_size=1, unique=True))
        freed = take(*names)
        for *place, gone in map(models.get, names):
            files = cache.pop(tuple(place))
            kept = {file: content for file, content in files.items() if file not in gone}
            if any(file.endswith((".gguf", ".safetensors")) for file in kept):
                cache[*place] = kept
        assert sum(freed) == before - on_disk(cache)
        left = tree_of(hub)
        assert left == rewritten(hub, cache)


def test_what_goes_with_a_name_and_how_many_bytes(hub, snapshot):
    write_revision(hub, "org/name", {**SAFE, "config.json": b"{ }"}, commit=OLD, refs=["v1", "v2"])
    write_revision(hub, "org/other", SAFE)
    (hub / "datasets--org--data" / "snapshots").mkdir(parents=True)
    assert Inventory.read().others == 1, "models alone are listed"
    assert take("org/name", "org/name@v2", "org/name") == [2, 1053], "shared bytes go with the last"
    assert not (hub / "models--org--name").exists(), "the last one takes the repository with it"
    emptied(hub, "org/other")
    files = {"a.gguf": b"a" * 10, "b-00001-of-00002.gguf": b"b", "b-00002-of-00002.gguf": b"cc",
             "README.md": b"card"}  # fmt: skip
    snapshot = write_revision(hub, "org/quants", files)
    assert rows()["hf:org/quants/b-00001-of-00002.gguf"].path.endswith("/b-00001-of-00002.gguf")
    assert take("hf:org/quants/b-00002-of-00002.gguf") == [3], "any part names the model"
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
    """One wrong name, and nothing goes."""
    assert hint in kept_whole(hub, ["org/name", name], kind).hint


# nothing outside


def test_links_inside_are_removed_and_not_followed(hub, snapshot, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("mine")
    (snapshot / "file").symlink_to(outside / "precious")
    (snapshot / "up").symlink_to("../../../../outside/precious")
    (snapshot / "folder").symlink_to(outside)
    write_revision(hub, "org/name", {**SAFE, "config.json": b"{  }"}, commit=OLD, refs=["v1"])
    assert take("org/name") == [2]
    assert set(rows()) == {"org/name@v1"}
    refs = snapshot.parent.parent / "refs"
    (refs / "x").symlink_to(outside / "precious")  # not a commit, so that nothing is read
    assert rows()["org/name"].state == "unreadable"
    emptied(hub, "org/name")
    assert (outside / "precious").read_text() == "mine"
    assert os.listdir(outside) == ["precious"]


@pytest.mark.parametrize("folder", ["", "blobs", "snapshots", "refs"])
def test_a_directory_that_is_a_link_is_refused(hub, snapshot, tmp_path, folder):
    place = hub / "models--org--name" / folder
    moved = tmp_path / "moved"
    place.rename(moved)
    place.symlink_to(moved)
    kept_whole(tmp_path, ["org/name"], match="is outside of the cache")
    before = tree_of(tmp_path)
    aged(moved, 90)
    _, kept = clear(time.time() + DAY)
    assert tree_of(tmp_path) == before
    if folder != "snapshots":  # whose links are broken, so that nobody knows the last use
        assert "is outside of the cache" in kept[0]


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
        target = os.readlink(snapshot / "model.safetensors")
        blob = Path(os.path.normpath(snapshot / target))
        assert shared.publish_blob_to_shared_store(
            blob_path=str(blob), xet_hash="ab" * 32, cache_dir=hub, expected_size=1000
        )
        assert blob.is_symlink()
    payload = shared.shared_blob_path(hub, "ab" * 32)
    assert hub_bytes() == 1000 + 2 * 52
    assert take("org/one") == [52]
    assert payload.exists()
    assert take("org/two") == [1052]
    assert not payload.exists()


# use


@pytest.mark.parametrize(("alone", "moved"), [(True, True), (False, True), (True, False)])
def test_what_has_changed_since_it_was_listed_stays(hub, snapshot, alone, moved):
    """The name then denotes a commit, or the plan removes a blob, that was not listed."""
    if not alone:
        write_revision(hub, "org/name", SAFE, commit="9" * 40, refs=["v1"])
    pieces = planned("org/name")
    new = {**SAFE, "model.safetensors": b"new"} if moved else SAFE
    write_revision(hub, "org/name", new, commit=OLD, refs=["main" if moved else "v2"])
    before = tree_of(hub)
    with pytest.raises(WriteFailed, match="`org/name` has changed since it was listed"):
        remove(pieces, lambda: planned("org/name"), passing_over=False)
    assert remove(pieces, lambda: planned("org/name"), passing_over=True)[0] == []
    assert tree_of(hub) == before


def test_a_cache_that_cannot_be_written(hub, snapshot, monkeypatch):
    def refuse(*arguments, **more):
        raise PermissionError(13, "Permission denied", str(arguments[0]))

    monkeypatch.setattr("os.utime", refuse)
    assert find("org/name", offline=True)[1] == snapshot
    monkeypatch.setattr("shutil.rmtree", refuse)
    with pytest.raises(WriteFailed, match=r"cannot be removed: permission denied \(`/.*\)"):
        take("org/name")


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


def test_a_file_of_our_cache(small, tmp_path):
    (stored,) = [s.model for s in Inventory.read().stored() if s.model.name == "small"]
    assert (stored.place, stored.bytes, stored.complete) == ("llmcli cache", 4, True)
    folder = small.file.parent
    moved = tmp_path / "moved"
    folder.rename(moved)
    folder.symlink_to(moved)
    kept_whole(tmp_path, ["small"], match="is outside of the cache")
    _, kept = clear(time.time() + DAY)
    assert "is outside of the cache" in kept[0]
    folder.unlink()
    moved.rename(folder)
    assert take("small") == [4]
    assert not folder.exists()
    assert folder.parent.exists()


def test_the_last_use_is_the_access_time_of_the_weights(small, hub, snapshot):
    for file in (*(snapshot / name for name in SAFE), small.file):
        aged(file.resolve(), 40)
    assert rows()["org/name"].last_used == pytest.approx(time.time() - 40 * DAY, abs=60)
    for name, weights in (("small", small.file), ("org/name", snapshot / "model.safetensors")):
        find(name, offline=True)
        assert weights.stat().st_atime == pytest.approx(time.time(), abs=60)
        assert weights.stat().st_mtime < time.time() - 39 * DAY
    assert rows()["org/name"].last_used == pytest.approx(time.time(), abs=60)


def test_left_overs_of_our_cache(small):
    models, scratch = small.file.parent.parent, small.file.parent / ".fetch-abc"
    old = models / "small-0123456789ab"
    for folder in (scratch, old, models / "not-ours"):
        folder.mkdir()
    (scratch / "part").write_bytes(b"half!")
    (old / "small.gguf").write_bytes(b"older version")
    (models / "file").write_text("not ours either")
    (models / "linked-0123456789ab").symlink_to(old)
    older = {(name, size) for name, _, size in pruned()}
    assert older == {("small", 13)}, "the scratch is perhaps written"
    for path in (scratch / "part", scratch):
        aged(path, 1)
    assert pruned() == {("small", "left by an interrupted fetch", 5)}
    assert set(tree_of(models)) == {
        "file", "linked-0123456789ab", f"{small.file.parent.name}/small.gguf",
    }  # fmt: skip
    assert (models / "not-ours").is_dir()


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
    assert pruned() == {
        ("org/asked", "a repository with no model in it", 0),
        ("org/name", "a stale partial download", 5), ("org/name", "no snapshot links to it", 3),
        (f"org/name@{OLD[:12]}", "a branch has moved on from this commit", 3),
    }  # fmt: skip
    assert set(rows()) == {"org/name", f"org/by-commit@{MAIN[:12]}"}
    assert all(model.complete for model in rows().values())
    assert (blobs / "fresh.incomplete").exists()
    assert (blobs / "new").exists()
    assert (hub / "datasets--org--data" / "blobs" / "x.incomplete").exists()


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
    assert pruned() == {
        (f"org/began@{MAIN[:12]}", "small files without weights", 3),
        ("org/name@v1", "an empty snapshot", 0),
    }
    assert not (hub / "models--org--began").exists()
    assert not empty.exists()
    assert not (hub / "models--org--name" / "refs" / "v1").exists()
    assert set(rows()) == {"org/name", "org/named", f"org/other@{MAIN[:12]}"}


def test_what_was_not_used_for_long(hub, small):
    for name, days in (("old", 45), ("new", 2)):
        content = {**SAFE, "model.safetensors": name.encode()}
        snapshot = write_revision(hub, f"org/{name}", content)
        for file in content:
            aged((snapshot / file).resolve(), days)
    aged(small.file, 31)
    assert left_over(Inventory.read()) == []
    assert {gone[:2] for gone in pruned(time.time() - 30 * DAY)} == {
        ("small", "last used 31 days ago"), ("org/old", "last used 45 days ago"),
    }  # fmt: skip
    assert set(rows()) == {"org/new"}
    assert not small.is_cached()

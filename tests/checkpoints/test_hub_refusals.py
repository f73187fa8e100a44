"""What the hub refuses, what goes wrong on the way, and a hub that means harm: one error each."""

import errno
import hashlib
import json
import os
import signal
import warnings
from concurrent.futures import wait
from dataclasses import replace
from itertools import chain, count, repeat
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from unittest.mock import DEFAULT, Mock

import pytest
from covers import few
from hub_stand_in import SHA, Answer, HubStandIn

from llmcli.checkpoints import open_checkpoint
from llmcli.checkpoints.hub import download as hub_download
from llmcli.checkpoints.hub.client import prepare, reachable
from llmcli.checkpoints.hub.download import cached, download
from llmcli.checkpoints.hub.headers import fetched_headers
from llmcli.checkpoints.hub.library import check_settings, hub_cache
from llmcli.checkpoints.names import HubId, parse
from llmcli.errors import (
    CheckpointError,
    LlmcliError,
    ModelNotFound,
    NetworkError,
    UsageError,
    WriteFailed,
)

FILES = {"config.json": b"{}", "tokenizer.json": b"{1}", "model.safetensors": b"w" * 3_000_000}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub with `org/name`, which this process knows."""
    folder = tmp_path / "served"
    folder.mkdir()
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    with HubStandIn({"org/name": folder}) as hub:
        hub.cache = hub.here(monkeypatch, tmp_path)
        yield hub


def headers_of(model):
    return fetched_headers(model).__enter__()


def refused(kind, *words, hint="", spec="org/name", ask=download) -> LlmcliError:
    """The one clear error of a download: its kind, words of its message and of its hint."""
    with pytest.raises(kind) as caught:
        ask(parse(spec) if isinstance(spec, str) else spec)
    error, text = caught.value, f"{caught.value.message} {caught.value.hint}"
    assert error.hint
    assert len(text) < 500
    assert text.isprintable()
    assert "Traceback" not in text
    assert all(word in error.message for word in words), error.message
    assert hint in error.hint
    return error


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file() or path.is_symlink())


def listing(**more) -> bytes:
    files = [{"rfilename": name, "size": len(content)} for name, content in FILES.items()]
    return json.dumps({"id": "org/name", "sha": SHA, "siblings": files} | more).encode()


def listing_but(**last) -> bytes:
    """A listing that says something else of its last file, the weights."""
    *others, weights = json.loads(listing())["siblings"]
    return listing(siblings=[*others, weights | last])


NAME, MISSING, NETWORK, LOGIN = "org/name", 3, 6, "`hf auth login`"
INVALID = Answer(headers={"X-Error-Message": "Invalid credentials in Authorization header"})


@pytest.mark.parametrize(("spec", "faults", "token", "code", "words", "hint"), [
    ("org/gone", {}, "", MISSING, "no model `org/gone` on the hub, or it is private", LOGIN),
    ("org/name@v9", {}, "", MISSING, "no revision `v9`", "leave the revision out"),
    ("hf:org/name/model.safetensor", {}, "", MISSING, "has no file", "did you mean"),
    ("org/a--b", {}, "", MISSING, "cannot be a hub id", "org/name"),
    ("org/name@../../x", {}, "", MISSING, "cannot be a revision", "branch"),
    (NAME, {"gated": {NAME}}, "", NETWORK, "is gated", "accept them on its page, then"),
    (NAME, {"private": {NAME}}, "", MISSING, "or it is private", LOGIN),
    (NAME, {"private": {NAME}}, "hf_bad", NETWORK, "the hub rejected the token", LOGIN),
    (NAME, {"private": {NAME}}, "hf_\u00e9", NETWORK, "invalid characters", "HF_TOKEN"),
    *((NAME, {"answers": {place: replace(INVALID, status=status)}}, token, NETWORK, words, hint)
      for place in ("/api/models/", "/model.safetensors")
      for status, token, words, hint in (
          (401, "", "wants a login", LOGIN), (403, "", "wants a login", LOGIN),
          (401, "hf_good", "rejected the token", LOGIN),
          (403, "hf_good", "token has no read access", "settings page"))),
])  # fmt: skip
def test_what_is_not_to_be_had(hub, monkeypatch, spec, faults, token, code, words, hint):
    """A token is blamed only where there is one, and never shown."""
    for name, value in faults.items():
        setattr(hub, name, value)
    monkeypatch.setenv("HF_TOKEN", token)
    error = refused(LlmcliError, words, hint=hint, spec=spec)
    assert error.code == code
    assert ("token" in error.message) == bool(token)
    assert token == "" or token not in error.message
    assert ".." in spec or cached(parse("org/name")) is None


SAID = {"ETag": '"x"', "X-Repo-Commit": SHA}


def wrong_answers():
    """What the hub says at which places; the error's kind, and words of its message and hint."""
    for place in ("/api/models/", "/resolve/"):
        for status, headers, words in (
            (429, {"Retry-After": "86400"}, "asks to wait 86400 s"), (429, {}, "error (429"),
            (500, {}, "error (500"), (503, {"Retry-After": "\x1b[2J"}, "error (503"),
            (403, {}, "wants a login"), (418, {}, "error (418"),
        ):  # fmt: skip
            yield {place: Answer(status=status, headers=headers, body=b"{}")}, NetworkError, words
    for body in (
        b"<html>please log in</html>", b"", b"[]", b"null", b"{}", b"\xff\xfe", b"[" * 100_000,
        listing(sha=None), listing(sha="../../x"), listing(sha="F" * 40), listing(siblings=None),
        listing(siblings=[None]), listing(siblings=[{"size": 3}]), listing(siblings=7),
        listing(siblings=[{"rfilename": "a.gguf", "lfs": 3}]),
    ):  # fmt: skip
        yield {"/api/models/": Answer(body=body)}, NetworkError, "invalid answer from the hub"
    unlisted = Answer(status=404, body=b"not found")
    yield {"/api/models/": unlisted}, ModelNotFound, "no model `org/name`", "HF_ENDPOINT"
    yield {"/config.json": Answer(body=b"{}")}, NetworkError, "", "HF_ENDPOINT"  # no tag
    about = SAID | {"X-Linked-Size": "2"}
    endless = Answer(body=b"w" * 65536, endless=True, headers=about)
    yield {"/config.json": endless}, LlmcliError, "more bytes than the file has"
    early = Answer(body=b"{}", headers=SAID | {"X-Linked-Size": "9"})
    sizeless = Answer(body=listing(siblings=[{"rfilename": name} for name in FILES]))
    yield {"/config.json": early, "/api/models/": sizeless}, NetworkError, ""
    for tag in ("../../../evil", "/evil", "..", "a\\evil", "", "e" * 300):
        for header in ("ETag", "X-Linked-ETag"):
            answer = Answer(body=b"{}", headers={header: f'"{tag}"', "X-Repo-Commit": SHA})
            yield {"/config.json": answer}, CheckpointError, "invalid ETag"
    others = Answer(body=listing(siblings=json.loads(listing())["siblings"][1:]))
    for commit in ("f" * 40, "resolve", "../../../evil"):
        about = SAID | {"X-Repo-Commit": commit}
        file = Answer(body=b"{}", headers=about)
        gone = Answer(status=404, headers={"X-Error-Code": "EntryNotFound"} | about)
        moved = Answer(status=307, headers={"Location": "/elsewhere"})
        for answers in (
            {"/config.json": file}, {"/config.json": moved, "/elsewhere": file},
            {"/config.json": gone, "/api/models/": others},  # of which the library keeps a note
        ):  # fmt: skip
            yield answers, CheckpointError, "of a different commit"
    for place in ("/api/models/", "/config.json", "/model.safetensors"):
        same = f"{place}org/name/model.safetensors"
        for target in ("file:///etc/passwd", "ftp://x/y", same, "http://[::1"):
            answer = Answer(status=302, headers={"Location": target, "ETag": '"a"'})
            yield {place: answer}, NetworkError, "", "HF_ENDPOINT"


@pytest.mark.parametrize("answer", [*wrong_answers()], ids=count())
def test_answers_that_cannot_be_are_refused_and_not_kept(hub, tmp_path, answer):
    hub.answers, kind, words, *hint = answer
    refused(kind, words, hint=hint[0] if hint else "")
    assert cached(parse("org/name")) is None
    assert not list(tmp_path.rglob("*evil*"))
    assert not list(hub.cache.rglob("*incomplete*"))
    if "/config.json" in hub.answers:
        assert "config.json" not in files_in(hub.cache)
        hub.answers = {}
        assert (download(parse("org/name")) / "config.json").is_file()
        assert cached(parse(f"org/name@{SHA}"))


ENDLESS = Answer(body=b" " * 65536, endless=True)
MOVED = Answer(status=307, headers={"Location": "/elsewhere"})
# blocks that decode to no bytes
ENCODED = {"ETag": "x", "X-Repo-Commit": SHA, "X-Linked-Size": "2", "Content-Encoding": "deflate"}
NOTHING = Answer(method="GET", body=b"\0\0\0\xff\xff" * 10_000, endless=True, headers=ENCODED)


@pytest.mark.parametrize("answers", [
    *({place: replace(ENDLESS, status=status)}
      for place in ("/api/models/", "/config.json") for status in (200, 404)),
    {"/api/models/": MOVED, "/elsewhere": ENDLESS},
    {"/api/models/": replace(ENDLESS, status=307, headers=MOVED.headers), "/elsewhere": Answer()},
    {"/config.json": NOTHING},
], ids=count())  # fmt: skip
def test_answers_without_an_end(hub, monkeypatch, answers):
    monkeypatch.setattr("llmcli.checkpoints.hub.client.MAX_JSON_BYTES", 1_000_000)
    hub.answers = answers
    refused(LlmcliError)
    assert sum(hub.sent.values()) < 50_000_000
    assert cached(parse("org/name")) is None


def test_a_file_is_no_listing_whatever_its_folder(hub, monkeypatch):
    monkeypatch.setattr("llmcli.checkpoints.hub.client.MAX_JSON_BYTES", 1_000_000)
    file = hub.repositories["org/name"] / "api" / "models" / "a.gguf"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"w" * 3_000_000)
    assert download(parse("hf:org/name/api/models/a.gguf")).stat().st_size == 3_000_000


@pytest.mark.parametrize("name", [
    "../evil.safetensors", "/etc/evil.safetensors", "a/../../evil.safetensors", "..\\e.safetensors",
    "./evil.gguf", "a//evil.gguf", "evil\0.gguf", "evil\udcff.gguf", "", "evil/",
    "e" * 256 + ".gguf",
])  # fmt: skip
def test_names_that_lead_out_of_the_cache(hub, tmp_path, name):
    hub.answers["/api/models/"] = Answer(body=listing(siblings=[{"rfilename": name, "size": 1}]))
    for model in (parse("org/name"), HubId(repository="org/name", file=name or "x.gguf")):
        for ask in (download, headers_of):
            refused(CheckpointError, "invalid", spec=model, ask=ask)
    assert not list(tmp_path.rglob("*evil*"))


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_wrong_body_is_removed(hub, name):
    hub.corrupt.add(name)
    refused(CheckpointError, f"wrong sha{256 if name == 'model.safetensors' else 1}")
    assert name not in files_in(hub.cache)
    assert cached(parse("org/name")) is None
    assert cached(parse("org/name"), whole=False) is None
    hub.corrupt.clear()
    assert (download(parse("org/name")) / name).read_bytes() == FILES[name]


@pytest.mark.parametrize("spec", ["org/name", "hf:org/name/model.safetensors"])
def test_who_is_killed_before_the_digest_leaves_nothing_that_counts(hub, monkeypatch, spec):
    verify = hub_download._verify

    def killed(name, *arguments):
        if name == "model.safetensors":
            os.kill(os.getpid(), signal.SIGKILL)
        verify(name, *arguments)

    monkeypatch.setattr(hub_download, "_verify", killed)
    child = os.fork()
    if not child:
        try:
            download(parse(spec))
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    monkeypatch.undo()
    hub.here(monkeypatch, hub.cache.parents[1])
    (left,) = hub.cache.rglob("*.incomplete")
    assert left.stat().st_size == 3_000_000, "the bytes are all there, without a name"
    assert cached(parse(spec)) is cached(parse(spec), whole=False) is None
    path = download(parse(spec))
    assert (path if path.is_file() else path / "model.safetensors").read_bytes() == b"w" * 3_000_000
    assert cached(parse(spec)) == path
    assert not left.exists()


def test_a_blob_without_a_snapshot_is_verified_before_it_is_used(hub):
    """Another program's, or of a killed process between the blob and the link to it."""
    blob = (download(parse("org/name")) / "model.safetensors").resolve()
    for content, bodies in ((b"x" * 3_000_000, 1), (FILES["model.safetensors"], 0)):
        blob.write_bytes(content)
        next(hub.cache.rglob("snapshots/*/model.safetensors")).unlink()
        hub.requests.clear()
        assert download(parse("org/name")) == cached(parse("org/name"))
        assert blob.read_bytes() == FILES["model.safetensors"]
        asked = [one for one in hub.requests if one.method == "GET" and one.host == "storage"]
        assert len(asked) == bodies


def test_a_sound_blob_is_not_taken_for_the_one_of_another_tag(hub):
    """The listing names a blob that is there, the hub's answer for the file another one."""
    link = download(parse("org/name")) / "model.safetensors"
    link.resolve().with_name("other").write_bytes(b"x" * 3_000_000)
    link.unlink()
    about = {"ETag": '"other"', "X-Repo-Commit": SHA, "X-Linked-Size": "3000000"}
    hub.answers["/model.safetensors"] = Answer(method="HEAD", headers=about)
    refused(CheckpointError, "wrong sha256")
    assert cached(parse("org/name")) is None
    hub.answers.clear()
    assert (download(parse("org/name")) / link.name).read_bytes() == b"w" * 3_000_000


def test_a_blob_in_the_store_that_repositories_share(hub):
    """Its name there is no sha256 of its bytes, and no partial download lies beside it."""
    from huggingface_hub.utils import _shared_blobs as shared

    link = download(parse("org/name")) / "model.safetensors"
    blob = link.resolve()
    assert shared.publish_blob_to_shared_store(
        blob_path=str(blob), xet_hash="ab" * 32, cache_dir=hub.cache, expected_size=3_000_000
    )
    link.unlink()
    (half := blob.with_name(f"{blob.name}.00ff00ff.incomplete")).write_bytes(b"half")
    hub.answers["/api/models/"] = Answer(body=listing_but(size=3_000_000))
    assert (download(parse("org/name")) / link.name).read_bytes() == b"w" * 3_000_000
    assert blob.is_symlink()
    assert not half.exists()


@pytest.mark.parametrize("size", [1, 3_000_001, 0])
@pytest.mark.parametrize("digests", [True, False])
def test_another_size_than_the_listed_one(hub, size, digests):
    lfs = {"sha256": hashlib.sha256(FILES["model.safetensors"]).hexdigest()}
    lfs |= {"size": size, "pointerSize": 134}
    more = {"lfs": lfs} if digests else {}
    hub.answers["/api/models/"] = Answer(body=listing_but(size=size, **more))
    refused(CheckpointError, f"sends 3000000 bytes for a file listed with {size}")
    assert "model.safetensors" not in files_in(hub.cache)
    hub.answers.clear()
    assert (download(parse("org/name")) / "model.safetensors").stat().st_size == 3_000_000


@pytest.mark.parametrize("emptied", FILES)
@pytest.mark.parametrize("spec", ["org/name", "hf:org/name/model.safetensors"])
def test_what_a_power_loss_emptied_is_fetched_again(hub, spec, emptied):
    path = download(parse(spec))
    file = (path if path.is_dir() else path.parent) / emptied
    os.truncate(file, 0)
    assert file.is_symlink()
    if path.is_dir() or emptied == path.name:
        assert cached(parse(spec)) is None
    assert download(parse(spec)) == path
    assert file.read_bytes() == FILES[emptied]
    assert cached(parse(spec)) == path


def test_a_file_that_is_empty_on_the_hub_is_no_loss(hub):
    (hub.repositories["org/name"] / "merges.txt").write_bytes(b"")
    path = download(parse("org/name"))
    assert (path / "merges.txt").read_bytes() == b""
    assert cached(parse("org/name")) == path


def test_the_bytes_are_on_the_disk_before_a_name_leads_to_them(hub, monkeypatch):
    synced, renamed, fsync, rename = set(), [], os.fsync, os.rename

    def noted(descriptor):
        synced.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def moved(source, target):
        renamed.append((Path(source).suffix, os.stat(source).st_ino in synced))
        rename(source, target)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(os, "rename", moved)
    download(parse("org/name"))
    assert renamed == [(".incomplete", True)] * len(FILES)
    assert next(hub.cache.rglob("refs/main")).stat().st_ino in synced


@pytest.mark.parametrize("size", [10**30, 1 << 62, 10**15])
def test_absurd_sizes_find_no_room(hub, size):
    hub.answers["/api/models/"] = Answer(body=listing_but(size=size))
    refused(WriteFailed, hint="free")
    assert not files_in(hub.cache)
    refused(CheckpointError, "impossible size", ask=headers_of)


def test_sizes_that_are_none_are_asked_for_file_by_file(hub):
    siblings = [
        {"rfilename": name, "size": size} for name, size in zip(FILES, (-1, "9", True), strict=True)
    ]
    hub.answers["/api/models/"] = Answer(body=listing(siblings=siblings))
    assert (download(parse("org/name")) / "model.safetensors").read_bytes() == b"w" * 3_000_000


@pytest.mark.filterwarnings("ignore::UserWarning")  # of the library, as in a process of ours
@pytest.mark.parametrize("listed", [True, False])
def test_room_is_asked_for_before_anything_is_fetched(hub, monkeypatch, listed):
    """A size that the listing does not say is asked for with the file."""
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1_000_000))
    if not listed:
        hub.answers["/api/models/"] = Answer(body=listing_but(size=None))
    refused(WriteFailed, str(hub.cache), hint="free 3 MB there, or set HF_HOME")
    assert "model.safetensors" not in files_in(hub.cache)
    assert not listed or not files_in(hub.cache)


@pytest.mark.parametrize(("number", "words"), [
    (errno.ENOSPC, "free "), (errno.EDQUOT, "free "), (errno.EROFS, "that can be written"),
    (errno.EACCES, "that can be written"),
])  # fmt: skip
def test_a_cache_that_cannot_be_written(hub, monkeypatch, number, words):
    def fail(*arguments, **more):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("huggingface_hub.file_download.http_get", fail)
    error = refused(WriteFailed, os.strerror(number).lower(), hint="HF_HOME")
    assert words in error.hint
    assert not [name for name in files_in(hub.cache) if name in FILES or "incomplete" in name]


@pytest.fixture
def anew():
    """The library's client is made again inside the test, and again after it."""
    from huggingface_hub import close_session

    close_session()
    prepare.cache_clear()
    yield
    prepare.cache_clear()
    close_session()


@pytest.mark.parametrize(("name", "values"), [
    ("HF_ENDPOINT", ["garbage", "http://[::1", "http://127.0.0.1:99999", "http://127.0.0.1:x",
                     "file:///etc", "http://a b", "http://a\x1b[31m"]),
    ("HF_HUB_DOWNLOAD_TIMEOUT", ["garbage", "-1"]),
    ("HF_HUB_ETAG_TIMEOUT", ["99999999999999999999", "\x1b[31m\n"]),
    ("HTTP_PROXY", ["socks9://127.0.0.1:1", "ftp://q", "\x1b[31m", "http://a:x"]),
    ("ALL_PROXY", ["socks9://127.0.0.1:1", "ftp://q"]),
    ("SSL_CERT_FILE", ["/none.pem", __file__]),
])  # fmt: skip
def test_settings_that_cannot_be(hub, anew, monkeypatch, name, values):
    kind, words, asks = UsageError, f"`{name}` is", [download, cached, lambda _: hub_cache()]
    if "HF" not in name:
        words = "the proxy cannot be used" if "PROXY" in name else "certificates cannot be read"
        kind, asks = NetworkError, [download]
        for variable in ("NO_PROXY", "no_proxy"):
            monkeypatch.delenv(variable)
    for value in values:
        monkeypatch.setenv(name, value)
        for ask in asks:
            refused(kind, words, hint=name, ask=ask)
        assert not reachable()
    assert not hub.requests


@pytest.mark.parametrize("name", ["HF_ENDPOINT", "HF_HUB_DOWNLOAD_TIMEOUT", "HF_HUB_ETAG_TIMEOUT"])
def test_empty_settings_are_none(monkeypatch, name):
    monkeypatch.setenv(name, "")
    check_settings()
    assert name not in os.environ


def test_what_the_library_says_by_itself(monkeypatch):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for level, kept in (("\x1b[31m", False), ("INFO", True)):
            monkeypatch.setenv("HF_HUB_VERBOSITY", level)
            check_settings()
            assert ("HF_HUB_VERBOSITY" in os.environ) is kept
        library = "huggingface_hub.file_download"
        warnings.warn_explicit("no disk space", UserWarning, "x.py", 1, module=library)
        warnings.warn_explicit("of others", UserWarning, "x.py", 1, module="huggingface_hubs")
    assert [str(one.message) for one in told] == ["of others"]


def test_a_cache_that_is_a_link_to_itself(hub, anew, monkeypatch):
    hub.cache.parent.mkdir()
    hub.cache.symlink_to(hub.cache.name)
    for folder, words in ((str(hub.cache), "to itself"), ("~no-such-user/x", "unknown user")):
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", folder)
        for ask in (download, cached, lambda _: hub_cache()):
            refused(UsageError, words, hint="HF_HUB_CACHE", ask=ask)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_a_branch_in_the_cache_that_is_no_file(hub, make):
    download(parse("org/name"))
    reference = hub.cache / "models--org--name" / "refs" / "main"
    reference.unlink()
    make(reference)
    for spec in ("org/name", "hf:org/name/model.safetensors"):
        assert cached(parse(spec)) is None
    if make is os.mkfifo:
        assert download(parse("org/name"))
        assert reference.read_text() == SHA
    else:
        refused(WriteFailed)


def test_no_place_for_headers(hub, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr("tempfile._candidate_tempdir_list", lambda: ["/nowhere/at/all"])
    refused(WriteFailed, "no temporary directory", hint="TMPDIR", ask=headers_of)


def test_a_weight_file_of_no_use_is_named_as_on_the_hub(hub):
    """An empty one, and one with a broken header."""
    (hub.repositories["org/name"] / "model.gguf").write_bytes(b"")
    for name, words in (("model.gguf", "is empty"), ("model.safetensors", "is not")):
        spec = f"hf:org/name/{name}"
        with pytest.raises(CheckpointError) as caught, fetched_headers(parse(spec)) as (path, _):
            open_checkpoint(path)
        assert caught.value.message.startswith(f"`{spec}` {words}")
        assert "llmcli-headers" not in caught.value.message


def test_a_repository_without_an_end(hub, monkeypatch):
    monkeypatch.setattr("llmcli.checkpoints.hub.listing._MOST_FILES", 2)
    refused(CheckpointError, "more than 2 files")


_OK = b"HTTP/1.1 200 OK\r\nConnection: close\r\n"
_LONG = _OK + b"Content-Length: 3000000\r\n\r\n"
_CHUNKED = _OK + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(("place", "method", "drip"), few([
    pytest.param("/api/models/", "", (b"", b"HTTP/1.1 100 Continue\r\n\r\n")),
    pytest.param("/config.json", "HEAD", (b"", b"HTTP/1.1 103 Early Hints\r\n\r\n")),
    pytest.param("/config.json", "GET", (_OK, b"X: a\r\n")),
    pytest.param("/model.safetensors", "GET", (_CHUNKED, b"1\r\nw\r\n")),
    pytest.param("/model.safetensors", "GET", (_LONG + b"w" * 1_000_000, b"w")),
    pytest.param("/api/models/", "", (b"HTTP/1.1 200 OK\r\nX: ", b"a")),
    pytest.param("/api/models/", "", (b"HTTP/1.1 200 OK\r\n", b"X: a\r\n")),
    pytest.param("/api/models/", "", (_CHUNKED + b"5;", b"a")),
    pytest.param("/model.safetensors", "GET", (_LONG, b"w")),
    pytest.param("/model.safetensors", "GET", (_CHUNKED + b"5;", b"a")),
    pytest.param("/model.safetensors", "GET", (_CHUNKED + b"0\r\n", b"X: a\r\n")),
    pytest.param("/model.safetensors", "GET", (_OK + b"\r\n", b"w")),
], 5))
def test_every_wait_has_an_end(hub, monkeypatch, place, method, drip):
    """Though something comes before each timeout of a read."""
    hub.answers[place] = Answer(method=method, drip=drip)
    with monkeypatch.context() as patched:
        patched.setattr("llmcli.checkpoints.hub.client._patience", lambda request: 0.6)
        began = perf_counter()
        refused(NetworkError, "does not end")
        assert 0.6 <= perf_counter() - began < 5
        patched.setattr("llmcli.checkpoints.hub.client._LEAST", 1)
        if place == "/api/models/":  # read into memory: to be whole in time, however it comes
            refused(NetworkError, "does not end")
    hub.answers.clear()
    assert (download(parse("org/name")) / "model.safetensors").read_bytes() == b"w" * 3_000_000


def test_a_slow_line_is_no_drip(hub, monkeypatch):
    """Nor is a process that is stopped meanwhile: to it, one wait is over at once."""
    stopped = Mock(wraps=wait, side_effect=chain([wait([])], repeat(DEFAULT)))
    monkeypatch.setattr("llmcli.checkpoints.hub.client.wait", stopped)
    monkeypatch.setattr("llmcli.checkpoints.hub.client._patience", lambda request: 0.6)
    monkeypatch.setattr("llmcli.checkpoints.hub.client._LEAST", 10)
    body = b"{" + b" " * 60 + b"}"
    length = b"Content-Length: %d\r\n\r\n" % len(body)
    hub.answers["/config.json"] = Answer(method="GET", drip=(_OK + length, body))
    (hub.repositories["org/name"] / "config.json").write_bytes(body)
    assert (download(parse("org/name")) / "config.json").read_bytes() == body

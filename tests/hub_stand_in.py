"""A hub on this machine: the calls of the hub's protocol that huggingface_hub makes.

    with HubStandIn({"org/name": folder}, cut={"model.safetensors": [1000, 5000]}) as hub:
        subprocess.run([...], env=os.environ | hub.environment(tmp_path))
        hub.requests  # [Asked(method="GET", path="/api/models/org/name", headers={...}), ...]
        hub.sent      # bytes of bodies: {"/org/name/resolve/main/config.json": 612, ...}

Weights and tokenizers are large files (LFS): their bytes come from another host, reached by a
redirect, as on the real hub. Every fault can also be set while the hub runs (`hub.cut[...] = `).
"""

from __future__ import annotations

import hashlib
import itertools
import json
import socket
import struct
import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

SHA = "0123456789abcdef0123456789abcdef01234567"  # the commit, unless `commits` says another
LARGE = (".safetensors", ".gguf", ".bin", ".model", "tokenizer.json")


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What the hub says instead of the truth, to paths that contain the key in `answers`.

    `endless` repeats the body for ever, without a length. `drip`: instead of all that, these bytes
    at once, then one byte of the others after another, again and again, `pause` seconds apart.
    """

    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    endless: bool = False
    drip: tuple[bytes, bytes] | None = None
    pause: float = 0.02
    method: str = ""  # only for this one


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A request: `host` is "hub", or "storage" for the bytes of large files."""

    method: str
    path: str
    host: str
    headers: Mapping[str, str]


@dataclass(eq=False)
class HubStandIn:
    """Serves `repositories` (id -> directory) while the context is open.

    - `cut`: file -> numbers of bytes; each GET of that file's bytes takes the next number, sends
      so many and closes the connection (`reset=True`: with a TCP reset). Then it is served whole.
    - `hold`: file -> number of bytes after which a GET waits until `hub.release.set()`;
      `hub.holding` is set once one waits.
    - `corrupt`: files whose bytes are served with one bit turned.
    - `gated`, `private`: ids that need one of `tokens`; gone ids need no list.
    - `revisions`: (branches and tags) name -> directory, of the same repository id.
    - `commits`: of the default branch, where it is not `SHA`.
    - `answers`: part of a path -> `Answer`; `slow`: seconds before any answer.
    - `ranges=False`: a server that sends everything whatever the range.
    """

    repositories: dict[str, Path]
    cut: dict[str, list[int]] = field(default_factory=dict)
    hold: dict[str, int] = field(default_factory=dict)
    corrupt: set[str] = field(default_factory=set)
    gated: set[str] = field(default_factory=set)
    private: set[str] = field(default_factory=set)
    tokens: Collection[str] = ("hf_good",)
    revisions: dict[str, dict[str, Path]] = field(default_factory=dict)
    commits: dict[str, str] = field(default_factory=dict)
    answers: dict[str, Answer] = field(default_factory=dict)
    reset: bool = False
    ranges: bool = True
    slow: float = 0.0
    release: threading.Event = field(default_factory=threading.Event)
    holding: threading.Event = field(default_factory=threading.Event)
    requests: list[Asked] = field(default_factory=list)
    sent: dict[str, int] = field(default_factory=dict)
    _servers: list[ThreadingHTTPServer] = field(default_factory=list)

    def __enter__(self) -> HubStandIn:
        for host in ("hub", "storage"):
            server = _Server(("127.0.0.1", 0), _Handler)
            server.hub, server.host = self, host
            threading.Thread(target=server.serve_forever, args=(0.002,), daemon=True).start()
            self._servers.append(server)
        return self

    def __exit__(self, *_: object) -> None:
        self.release.set()
        for server in self._servers:
            server.shutdown()
            server.server_close()

    @property
    def url(self) -> str:
        """What HF_ENDPOINT is to be."""
        return f"http://127.0.0.1:{self._servers[0].server_port}"

    @property
    def storage(self) -> str:
        """The other host, which must never see a token."""
        return f"http://localhost:{self._servers[1].server_port}"

    def environment(self, tmp_path: Path, **more: str) -> dict[str, str]:
        """Variables for a process that knows this hub and caches below `tmp_path` alone."""
        return {
            "HF_ENDPOINT": self.url, "HF_HOME": str(tmp_path / "hf"),
            "HF_HUB_CACHE": str(tmp_path / "hf" / "hub"), "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_TOKEN": "",
            "HF_TOKEN_PATH": str(tmp_path / "hf" / "token"),
            "LLMCLI_CACHE": str(tmp_path / "llmcli"), "LLMCLI_OFFLINE": "0", "LLMCLI_MODEL": "",
            "NO_PROXY": "*", "no_proxy": "*",
        } | more

    def here(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
        """The same for this process, whose huggingface_hub has read its environment already.

        Returns the hub's cache.
        """
        from huggingface_hub import constants

        cache = tmp_path / "hf" / "hub"
        monkeypatch.setattr(constants, "ENDPOINT", self.url)
        template = self.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "hf" / "token"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        for name, value in self.environment(tmp_path).items():
            monkeypatch.setenv(name, value)
        return cache

    def known(self, repository: str) -> dict[str | None, tuple[str, Path]]:
        """Branch, tag or commit -> the commit and its directory; None is the default branch."""
        folder = self.repositories[repository]
        default = (self.commits.get(repository, SHA), folder)
        found: dict[str | None, tuple[str, Path]] = {None: default, "main": default}
        for name, other in self.revisions.get(repository, {}).items():
            commit = hashlib.sha1(str(other).encode()).hexdigest()
            found[name] = default if other == folder else (commit, other)
        return found | {commit: (commit, folder) for commit, folder in found.values()}

    def bytes_of(self, name: str) -> int:
        """How many bytes of bodies went out for the files called `name`, from both hosts."""
        return sum(count for path, count in self.sent.items() if path.endswith("/" + name))


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    hub: HubStandIn
    host: str

    def handle_error(self, *_: object) -> None:
        """A client that went away is what many tests are about."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else a body waits 40 ms for the headers to be acknowledged
    server: _Server

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        hub = self.server.hub
        url = urlsplit(self.path)
        self.clean, self.commit = unquote(url.path), ""
        headers = {name.lower(): value for name, value in self.headers.items()}
        hub.requests.append(
            Asked(method=self.command, path=self.clean, host=self.server.host, headers=headers)
        )
        time.sleep(hub.slow)
        for part, answer in list(hub.answers.items()):
            wanted = answer.method in ("", self.command)
            if wanted and (part in self.path or part in self.clean):
                if answer.drip is not None:
                    return self._drip(*answer.drip, answer.pause)
                return self._send(answer.status, answer.body, answer.headers, answer.endless)
        parts = [unquote(part) for part in url.path.strip("/").split("/")]
        if parts[:2] == ["api", "models"] and len(parts) >= 4:
            if parts[4:5] == ["revision"] and len(parts) > 6:  # its slashes belong to it
                return self._refuse(404, "", "no such page")
            return self._about("/".join(parts[2:4]), "/".join(parts[5:]) or None, url.query)
        if len(parts) >= 5 and parts[2] == "resolve":
            return self._file("/".join(parts[:2]), parts[3], "/".join(parts[4:]))
        return self._refuse(404, "", "no such page")

    do_HEAD = do_GET

    def _folder(self, repository: str, revision: str | None) -> Path | None:
        """Where the repository lies; None once it was refused."""
        hub = self.server.hub
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token and token not in hub.tokens:
            return self._refuse(401, "", "Invalid credentials in Authorization header")
        hidden = repository in hub.private and not token
        if repository not in hub.repositories or hidden:
            # who is not logged in is not told whether there is such a repository
            return self._refuse(404 if token else 401, "RepoNotFound", "Repository not found")
        known = hub.known(repository)
        if revision not in known:
            return self._refuse(404, "RevisionNotFound", "Invalid rev id")
        self.commit, folder = known[revision]
        return folder

    def _about(self, repository: str, revision: str | None, query: str) -> None:
        folder = self._folder(repository, revision)
        if folder is None:
            return
        files = []
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            about = {"rfilename": path.relative_to(folder).as_posix()}
            if "blobs" in parse_qs(query):
                about |= {"size": path.stat().st_size, "blobId": blob_id(path)}
                if path.name.endswith(LARGE):
                    about["lfs"] = about | {"pointerSize": 134, "sha256": sha256(path)}
            files.append(about)
        told = {"id": repository, "_id": "x", "sha": self.commit, "siblings": files}
        told["gated"] = "auto" if repository in self.server.hub.gated else False
        self._send(200, json.dumps(told).encode(), {"Content-Type": "application/json"})

    def _file(self, repository: str, revision: str, name: str) -> None:
        hub = self.server.hub
        if self.server.host == "hub":
            folder = self._folder(repository, revision)
            if folder is None:
                return
            token = self.headers.get("Authorization", "")
            if repository in hub.gated and not token:
                return self._refuse(401, "GatedRepo", f"Access to model {repository} is restricted")
        else:
            self.commit, folder = hub.known(repository)[revision]
        path = folder / name
        if not path.is_file():
            return self._refuse(404, "EntryNotFound", "Entry not found")
        data = path.read_bytes()
        if name.endswith(LARGE) and self.server.host == "hub":
            there = f"{hub.storage}/{repository}/resolve/{self.commit}/{name}"
            about = {"X-Linked-ETag": f'"{sha256(path)}"', "X-Linked-Size": str(len(data))}
            return self._send(302, b"", {"Location": there, "ETag": '"pointer"'} | about)
        if name in hub.corrupt:
            data = data[:-1] + bytes([data[-1] ^ 1])
        self._bytes(name, data, blob_id(path))

    def _bytes(self, name: str, data: bytes, etag: str) -> None:
        """A file or the range of it that was asked for."""
        hub, total = self.server.hub, len(data)
        about = {"ETag": f'"{etag}"', "Accept-Ranges": "bytes"}
        ranged = self.headers.get("Range", "")
        status = 200
        if ranged and hub.ranges:
            first, _, last = ranged.removeprefix("bytes=").partition("-")
            start, stop = int(first), int(last) + 1 if last else total
            if start >= total:
                return self._refuse(416, "", "Range Not Satisfiable")
            data = data[start:stop]
            about["Content-Range"] = f"bytes {start}-{start + len(data) - 1}/{total}"
            status = 206
        stop = None
        if self.command == "GET" and hub.cut.get(name):
            stop = hub.cut[name].pop(0)
        self._send(status, data, about, stop=stop, hold=hub.hold.get(name))

    def _refuse(self, status: int, code: str, message: str) -> None:
        headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
        self._send(status, json.dumps({"error": message}).encode(), headers)

    def _send(
        self,
        status: int,
        body: bytes,
        headers: Mapping[str, str],
        endless: bool = False,
        *,
        stop: int | None = None,
        hold: int | None = None,
    ) -> None:
        """The answer; `stop`: cut after so many bytes; `hold`: wait there for `release`."""
        hub = self.server.hub
        self.send_response(status)
        about = dict(headers)
        if self.commit:
            about.setdefault("X-Repo-Commit", self.commit)
        if endless:
            self.close_connection = True
            about["Connection"] = "close"
        else:
            about.setdefault("Content-Length", str(len(body)))
        for key, value in about.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if hold is not None and len(body) > hold:
            self._write(body[:hold])
            hub.holding.set()
            hub.release.wait(60)
            self._write(body[hold:])
        elif stop is not None:
            self._write(body[:stop])
            self.close_connection = True
            if hub.reset:
                time.sleep(0.1)  # a reset overtakes bytes that were not read yet
                off = struct.pack("ii", 1, 0)
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, off)
                self.connection.close()
        else:
            self._write(body)
            while endless and body:
                self._write(body)

    def _drip(self, first: bytes, then: bytes, pause: float) -> None:
        self.close_connection = True
        self._write(first)
        for byte in itertools.cycle(then):
            if self.server.hub.release.wait(pause):
                return
            self._write(bytes([byte]))

    def _write(self, data: bytes) -> None:
        self.wfile.write(data)
        self.wfile.flush()
        sent = self.server.hub.sent
        sent[self.clean] = sent.get(self.clean, 0) + len(data)


def blob_id(path: Path) -> str:
    """What git calls the file: the ETag of those that are not large."""
    data = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def sha256(path: Path) -> str:
    """The digest of a large file, by which the hub calls it."""
    return hashlib.sha256(path.read_bytes()).hexdigest()

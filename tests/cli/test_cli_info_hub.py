"""`info` of a model on the hub: headers alone, from a hub of our own on this machine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from cli_tiny import write_tiny

SHA = "0123456789abcdef0123456789abcdef01234567"
REFUSALS = {"gone": (404, "RepoNotFound"), "gated": (403, "GatedRepo"), "broken": (500, "")}


class Hub(BaseHTTPRequestHandler):
    """The three calls that are made: what a repository holds, heads of files, their bytes."""

    protocol_version = "HTTP/1.1"

    def do_HEAD(self):
        self.answer(body=False)

    def do_GET(self):
        self.answer(body=True)

    def answer(self, body):
        parts = self.path.partition("?")[0].strip("/").split("/")
        if len(parts) < 4:
            return self.send(404, b"", body, {})
        name = parts[3] if parts[0] == "api" else parts[1]
        if name in REFUSALS:
            code, error = REFUSALS[name]
            return self.send(code, b"{}", body, {"X-Error-Code": error} if error else {})
        folder = self.server.folders.get(name, self.server.folder)
        if parts[0] == "api":
            files = [
                {"rfilename": file.name, "size": file.stat().st_size} for file in folder.iterdir()
            ]
            told = {"id": f"org/{name}", "_id": "x", "sha": SHA, "siblings": files}
            return self.send(200, json.dumps(told).encode(), body, {})
        data = (folder / parts[-1]).read_bytes()
        about = {"ETag": f'"{parts[-1]}"', "X-Repo-Commit": SHA, "Accept-Ranges": "bytes"}
        ranged = self.headers.get("Range", "")
        if ranged and name != "simple":  # a simple server sends all
            first, _, last = ranged.removeprefix("bytes=").partition("-")
            return self.send(206, data[int(first) : int(last) + 1], body, about)
        return self.send(200, data, body, about)

    def send(self, code, data, body, headers):
        self.send_response(code)
        for key, value in (headers | {"Content-Length": str(len(data))}).items():
            self.send_header(key, value)
        self.end_headers()
        if body:
            try:
                self.wfile.write(data)
                self.server.sent[self.path] = self.server.sent.get(self.path, 0) + len(data)
            except ConnectionError:
                pass

    def log_message(self, *args):
        pass


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
    return shards


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub") / "m"
    write_tiny(folder, weights=True, hidden_size=256, intermediate_size=1024, vocab_size=2000)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.folder, server.sent = folder, {}
    server.folders = {"shards": in_shards(folder), "ggufs": folder.parent / "ggufs"}
    server.folders["ggufs"].mkdir()
    (server.folders["ggufs"] / "x.gguf").write_bytes(b"GGUF")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def ask(hub, tmp_path):
    """Runs `llmcli info` in a process of its own that knows no other hub."""

    def run(*argv, **environ):
        hub.sent.clear()
        done = subprocess.run(
            [sys.executable, "-m", "llmcli", "info", "--device", "cpu", *argv],
            capture_output=True,
            check=False,
            timeout=60,
            env=os.environ
            | {
                "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}",
                "HF_HOME": str(tmp_path / "hf"),
                "TMPDIR": str(tmp_path),
                "HF_HUB_OFFLINE": "0",
                "NO_PROXY": "*",
            }
            | environ,
        )
        return done.returncode, done.stdout.decode(), done.stderr.decode()

    return run


@pytest.mark.parametrize("name", ["ranged", "simple"])
def test_only_headers_are_fetched_and_nothing_is_left(hub, ask, tmp_path, name):
    code, out, err = ask("-m", f"org/{name}", "--json")
    assert code == 0, err
    document = json.loads(out)
    here = json.loads(ask("-m", str(hub.folder), "--json")[1])
    for key in ("architecture", "tokenizer", "checks"):
        assert document[key] == here[key]
    assert document["model"]["parameters"] == here["model"]["parameters"] > 2_000_000
    assert document["file"]["bytes"] == (hub.folder / "model.safetensors").stat().st_size
    assert document["file"]["path"] == f"org/{name}@{SHA} on the hub"
    assert not list(tmp_path.glob("llmcli-headers-*"))


def test_the_weights_stay_where_they_are(hub, ask):
    assert ask("-m", "org/ranged@main")[0] == 0
    size = (hub.folder / "model.safetensors").stat().st_size
    sent = sum(count for path, count in hub.sent.items() if path.endswith(".safetensors"))
    assert 0 < sent <= 100_000 < size / 10
    assert ask("-m", "org/ranged@main")[0] == 0
    assert not any(path.endswith("tokenizer.json") for path in hub.sent), "cached the first time"


def test_shards_are_one_model(ask):
    code, out, err = ask("-m", "org/shards", "--json")
    assert code == 0, err
    document = json.loads(out)
    assert document["file"]["files"] == 2
    assert all(check["ok"] for check in document["checks"].values())


@pytest.mark.parametrize(
    ("argv", "environ", "code", "words"),
    [
        (["-m", "org/gone"], {}, 3, "no model `org/gone` on the hub"),
        (["-m", "org/gated"], {}, 6, "is gated"),
        (["-m", "org/ggufs"], {}, 4, "has no safetensors files"),
        (["-m", "org/broken"], {}, 6, "does not answer"),
        (["-m", "org/x"], {"HF_ENDPOINT": "http://127.0.0.1:9"}, 6, "does not answer"),
        (["-m", "org/x", "--offline"], {}, 6, "offline mode allows no download"),
        (["-m", "hf:org/x/file.gguf"], {}, 6, "not in the hub cache"),
    ],
)
def test_what_cannot_be_had_is_said(ask, argv, environ, code, words):
    found, out, err = ask(*argv, **environ)
    assert (found, out) == (code, ""), err
    assert words in err
    assert "hint:" in err

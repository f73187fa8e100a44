"""`info`, `shapes` and `tokens` of a model on the hub: headers alone, from a hub of our own."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys

import children
import pytest
from cli_tiny import write_tiny
from gguf_bytes import ARRAY, F32, STRING, U16, U32, gguf, pair, tensor
from hub_stand_in import SHA, Answer, HubStandIn

from llmcli.checkpoints.catalog import CATALOG, CatalogEntry, HubFile

CONSTANTS = {"HF_ENDPOINT": "ENDPOINT", "HF_HUB_CACHE": "HF_HUB_CACHE"}
LAYERS = ("attn_norm", "ffn_norm")


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


def llama_gguf(words: int, *, part: int = 0, parts: int = 0) -> bytes:
    """A Llama of one layer with a vocabulary of `words`; with `parts`, every other tensor."""
    width, head = 64, 16
    pairs = [
        pair("general.architecture", STRING, "llama"),
        pair("llama.block_count", U32, 1),
        pair("llama.context_length", U32, 128),
        pair("llama.embedding_length", U32, width),
        pair("llama.feed_forward_length", U32, width),
        pair("llama.attention.head_count", U32, 4),
        pair("llama.attention.layer_norm_rms_epsilon", F32, 1e-5),
        pair("tokenizer.ggml.model", STRING, "gpt2"),
        pair("tokenizer.ggml.pre", STRING, "gpt-2"),
        pair("tokenizer.ggml.tokens", ARRAY, (STRING, [f"word{i:08}" for i in range(words)])),
        pair("tokenizer.ggml.merges", ARRAY, (STRING, [])),
    ]
    if part > 1:
        pairs = []
    if parts:
        pairs += [pair("split.no", U16, part - 1), pair("split.count", U16, parts)]
        pairs += [pair("split.tensors.count", U32, 11)]
    names = ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"]
    shapes = {f"blk.0.{name}.weight": [width, width] for name in names}
    shapes |= {f"blk.0.{name}.weight": [width] for name in LAYERS}
    shapes |= {"token_embd.weight": [width, words], "output_norm.weight": [width]}
    assert head * 4 == width
    chosen = [name for i, name in enumerate(shapes) if not parts or i % parts == part - 1]
    rows, at = [], 0
    for name in chosen:
        rows.append(tensor(name, shapes[name], 0, at))
        size = 4
        for dim in shapes[name]:
            size *= dim
        at += size
    return gguf(pairs, rows, bytes(at))


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """id -> directory; everything that a hub of these tests can have."""
    root = tmp_path_factory.mktemp("hub")
    m = write_tiny(
        root / "m", weights=True, hidden_size=256, intermediate_size=1024, vocab_size=2000
    )
    files = {"ggufs": {"x.gguf": b"GGUF"}, "short": {"a.gguf": llama_gguf(1000)}}
    files["long"] = {"a.gguf": llama_gguf(120_000), "README.md": b"x"}
    files["split"] = {
        f"a-{part:05}-of-00002.gguf": llama_gguf(9000, part=part, parts=2) for part in (1, 2)
    }
    files["several"] = files["short"] | {"b.gguf": b"x"}
    files["none"] = {"pytorch_model.bin": b"x"}
    for name, contents in files.items():
        (root / name).mkdir()
        for file, content in contents.items():
            (root / name / file).write_bytes(content)
    return {f"org/{name}": root / name for name in files} | {"org/m": m, "org/shards": in_shards(m)}


@pytest.fixture
def hub(served):
    with HubStandIn(served) as hub:
        yield hub


@pytest.fixture
def ask(hub, tmp_path, cli):
    """Runs a command that knows no other hub: in this process, or `alone` in one of its own."""

    def run(*argv, command="info", alone=False, **environ):
        hub.sent.clear()
        hub.requests.clear()
        line = [command, *argv, *(["--device", "cpu"] if command == "info" else [])]
        if alone:
            done = children.run(
                [sys.executable, "-m", "llmcli", *line],
                capture_output=True,
                check=False,
                timeout=60,
                stdin=subprocess.DEVNULL,
                env=os.environ | hub.environment(tmp_path, TMPDIR=str(tmp_path)) | environ,
            )
            return done.returncode, done.stdout.decode(), done.stderr.decode()
        with pytest.MonkeyPatch.context() as patch:
            hub.here(patch, tmp_path)
            patch.setattr("tempfile.tempdir", str(tmp_path))
            for name, value in environ.items():
                patch.setenv(name, value)
                if name in CONSTANTS:  # the library has read them already
                    patch.setattr(f"huggingface_hub.constants.{CONSTANTS[name]}", value)
            done = cli(*line)
        return done.code, done.out, done.err

    return run


def weights_sent(hub: HubStandIn) -> int:
    """Bytes that went out for weight files."""
    kinds = (".safetensors", ".gguf")
    return sum(count for path, count in hub.sent.items() if path.endswith(kinds))


@pytest.mark.parametrize("ranges", [True, False])
def test_only_headers_are_fetched_and_nothing_is_left(hub, ask, tmp_path, served, ranges):
    hub.ranges = ranges
    code, out, err = ask("-m", "org/m", "--json", alone=ranges)
    assert code == 0, err
    document = json.loads(out)
    here = json.loads(ask("-m", str(served["org/m"]), "--json")[1])
    for key in ("architecture", "tokenizer", "checks"):
        assert document[key] == here[key]
    assert document["model"]["parameters"] == here["model"]["parameters"] > 2_000_000
    assert document["file"]["bytes"] == (served["org/m"] / "model.safetensors").stat().st_size
    assert document["file"]["path"] == f"org/m@{SHA} on the hub"
    assert not list(tmp_path.glob("llmcli-headers-*"))


def test_the_weights_stay_where_they_are(hub, ask, served):
    assert ask("-m", "org/m@main")[0] == 0
    size = (served["org/m"] / "model.safetensors").stat().st_size
    assert 0 < weights_sent(hub) <= 100_000 < size / 10
    code, out, err = ask("-m", "org/m@main", "--params", command="shapes")
    assert code == 0, err
    assert "W_q" in out or "attn" in out
    assert 0 < weights_sent(hub) <= 100_000
    assert hub.bytes_of("tokenizer.json") == 0, "cached the first time"


def test_shards_are_one_model(ask):
    code, out, err = ask("-m", "org/shards", "--json")
    assert code == 0, err
    document = json.loads(out)
    assert document["file"]["files"] == 2
    assert all(check["ok"] for check in document["checks"].values())


@pytest.mark.parametrize(
    ("name", "ranges", "most"),
    [
        ("org/short", True, 1 << 20),
        ("hf:org/short/a.gguf", False, 1 << 20),
        ("org/long", True, 1 << 22),
        ("org/long", False, 6 << 20),
    ],
)
def test_the_header_of_a_gguf_file(hub, ask, served, tmp_path, name, ranges, most):
    hub.ranges = ranges
    code, out, err = ask("-m", name, "--json")
    assert code == 0, err
    document = json.loads(out)
    file = served["org/long" if "long" in name else "org/short"] / "a.gguf"
    assert weights_sent(hub) <= min(most, file.stat().st_size)
    assert document["file"]["bytes"] == file.stat().st_size
    assert not list(tmp_path.rglob("*.gguf"))
    here = json.loads(ask("-m", str(file), "--json")[1])
    for key in ("architecture", "tokenizer", "checks"):
        assert document[key] == here[key]


def test_one_of_the_hubs_classics_by_its_bare_name(hub, ask, served):
    hub.repositories["openai-community/gpt2"] = served["org/m"]
    code, out, err = ask("-m", "gpt2", "--json")
    assert code == 0, err
    assert json.loads(out)["file"]["path"] == f"openai-community/gpt2@{SHA} on the hub"
    assert ask("pull", "gpt2", command="models")[0] == 0
    assert "openai-community/gpt2" in ask(command="models")[1]


def test_a_catalog_model_that_is_not_here_is_looked_at_by_its_header(
    hub, ask, served, tmp_path, monkeypatch
):
    """Its license and its purpose are in the list before that; after `pull` it is in our cache."""
    file = served["org/long"] / "a.gguf"
    entry = CatalogEntry(
        name="small", summary="a small one", purpose="tests", license="Public Domain",
        size=file.stat().st_size, sha256=hashlib.sha256(file.read_bytes()).hexdigest(),
        hub=HubFile(repository="org/long", revision=SHA, file="a.gguf"),
    )  # fmt: skip
    monkeypatch.setitem(CATALOG, "small", entry)
    code, out, err = ask("-m", "small", "--json")
    assert code == 0, err
    assert json.loads(out)["file"]["path"] == f"org/long@{SHA} on the hub"
    assert weights_sent(hub) < entry.size
    listed = ask(command="models")[1]
    assert re.search(r"^small +[\d.]+ MiB +not fetched", listed, re.MULTILINE)
    assert "\nsmall: tests · Public Domain\n" in listed
    assert ask("pull", "small", command="models")[0] == 0
    assert weights_sent(hub) >= entry.size
    (model,) = (m for m in json.loads(ask("--json", command="models")[1])["models"]
                if m["name"] == "small")  # fmt: skip
    assert (model["place"], model["license"]) == ("llmcli cache", "Public Domain")
    assert ask("-m", "small", "--offline")[0] == 0
    assert weights_sent(hub) == 0


def test_the_headers_of_all_parts_of_a_split_model(hub, ask):
    code, out, err = ask("-m", "hf:org/split/a-00002-of-00002.gguf", "--json")
    assert code == 0, err
    document = json.loads(out)
    assert document["file"]["files"] == 2
    assert document["architecture"]["layers"][0]["count"] == 1
    assert weights_sent(hub) <= 2 << 20
    whole = json.loads(ask("-m", "org/split", "--json")[1])
    assert (whole["architecture"], whole["file"]) == (document["architecture"], document["file"])


def test_a_gguf_file_whose_header_never_ends_is_given_up(hub, ask, tmp_path):
    lying = gguf([pair("a", STRING, "x")], keys=60_000) + bytes(40_000_000)
    served = tmp_path / "lying"
    served.mkdir()
    (served / "a.gguf").write_bytes(lying)
    hub.repositories["org/lying"] = served
    code, out, err = ask("-m", "org/lying")
    assert (code, out) == (4, "")
    assert "not a usable GGUF file" in err
    assert weights_sent(hub) <= len(lying), "no byte twice"


def test_tokens_need_no_weights_and_then_no_network(hub, ask):
    code, out, err = ask("-m", "org/m", "hello", "--json", command="tokens")
    assert code == 0, err
    assert len(json.loads(out)["tokens"]) == 5
    assert weights_sent(hub) == 0
    again = json.loads(ask("-m", "org/m", "hello", "--json", command="tokens")[1])
    assert again["tokens"] == json.loads(out)["tokens"]
    assert not hub.requests


def test_tokens_of_a_model_in_shards_that_are_not_here(hub, ask, tmp_path):
    code, _, err = ask("-m", "org/shards", "hello", "--json", command="tokens")
    assert code == 0, err
    assert weights_sent(hub) == hub.bytes_of("model.safetensors.index.json") == 0
    code, _, err = ask("-m", "org/shards", "--json")
    assert code == 0, err
    assert hub.bytes_of("model.safetensors.index.json") > 0, "now the cache has it, and no shard"
    for name in ("org/shards", f"org/shards@{SHA}"):
        code, again, err = ask("-m", name, "hello", "--json", command="tokens")
        assert code == 0, err
        assert json.loads(again)["tokens"]
        assert not hub.requests


def test_what_only_headers_were_read_of_is_known_by_its_branch(ask, tmp_path):
    assert ask("-m", "org/m")[0] == 0
    assert (tmp_path / "hf/hub/models--org--m/refs/main").read_text() == SHA


def test_a_model_without_anything_beside_its_weights(hub, ask, served, tmp_path):
    (tmp_path / "bare").mkdir()
    shutil.copy(served["org/m"] / "model.safetensors", tmp_path / "bare")
    hub.repositories["org/bare"] = tmp_path / "bare"
    code, out, err = ask("-m", "org/bare", "hello", command="tokens")
    assert (code, out) == (4, "")
    assert "has no tokenizer" in err


def test_a_cache_that_cannot_be_written_is_not_needed(hub, ask, tmp_path):
    (tmp_path / "file").write_text("")
    cache = str(tmp_path / "file" / "hub")
    code, out, err = ask("-m", "org/m", "--json", HF_HUB_CACHE=cache)
    assert code == 0, err
    assert json.loads(out)["tokenizer"]
    assert not list(tmp_path.glob("llmcli-headers-*"))


@pytest.mark.parametrize(
    ("argv", "answer", "environ", "code", "words"),
    [
        (["-m", "org/gone"], {}, {}, 3, "no model `org/gone` on the hub"),
        (["-m", "org/ggufs"], {}, {}, 4, "not a usable GGUF file"),
        (["-m", "org/several"], {}, {}, 4, "several models: `a.gguf`, `b.gguf`"),
        (["-m", "org/none"], {}, {}, 4, "as pickles alone"),
        (["-m", "org/m"], {"/api/": Answer(status=500)}, {}, 6, "error (500"),
        (["-m", "org/m"], {}, {"HF_ENDPOINT": "http://127.0.0.1:9"}, 6, "cannot be reached"),
        (["-m", "org/m", "--offline"], {}, {}, 6, "offline mode allows no download"),
        (["-m", "org/m"], {}, {"HF_HUB_OFFLINE": "1"}, 6, "offline mode allows no download"),
        (["-m", "hf:org/short/x.gguf"], {}, {}, 3, "no file `x.gguf`"),
    ],
)
def test_what_cannot_be_had_is_said(hub, ask, argv, answer, environ, code, words):
    hub.answers |= answer
    found, out, err = ask(*argv, **environ)
    assert (found, out) == (code, ""), err
    assert words in err.replace("\n", " ")
    assert "hint:" in err
    offline = "cannot be reached" in words or "offline" in words
    assert ("`llmcli models` lists what is on this machine" in err) == offline
    assert "Traceback" not in err


def test_a_gated_model(hub, ask):
    hub.gated.add("org/m")
    code, out, err = ask("-m", "org/m")
    assert (code, out) == (6, "")
    assert "is gated" in err
    assert ask("-m", "org/m", HF_TOKEN="hf_good")[0] == 0
    assert not [
        one for one in hub.requests if one.host == "storage" and "authorization" in one.headers
    ]

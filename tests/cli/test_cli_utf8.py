"""Whatever a name, an argument or a file has in it: stdout, stderr and files stay valid UTF-8."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import children
import pytest
from cli_tiny import write_tiny
from covers import few
from safetensors import safe_open

ODD = "m\udcff"  # the name that Python has for the bytes `m\xff`
LOCALE = {"LC_ALL": "C.UTF-8", "LLMCLI_CACHE": "cache"}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A directory with the model `m\\xff`, whose template writes half a surrogate pair."""
    root = tmp_path_factory.mktemp("utf8")
    folder = write_tiny(root / "m", weights=True).rename(root / ODD)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = "\ud800{{ messages[-1].content }}"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return root


@pytest.fixture
def run(place):
    def run(*argv, code=0, model=True, fresh=False):
        argv = [sys.executable, "-m", "llmcli", *argv, *(["-m", f"./{ODD}"] if model else [])]
        environ = {name: value for name, value in os.environ.items() if name[:2] != "LC"} | LOCALE
        done = children.run(
            list(map(os.fsencode, argv)), cwd=place, env=environ, stdin=subprocess.DEVNULL,
            capture_output=True, timeout=120, check=False, fresh=fresh,
        )  # fmt: skip
        out, err = done.stdout.decode(), done.stderr.decode()  # raises where it is not UTF-8
        assert done.returncode == code, err
        assert "internal error" not in err
        return out, err

    return run


def document(text):
    """JSON that has no half of a surrogate pair, which readers in other languages refuse."""
    found = json.loads(text)
    json.dumps(found, ensure_ascii=False).encode()
    return found


@pytest.mark.parametrize(
    "argv",
    few([
        ["generate", "ab", "-n", "2", "--chat"], ["load", "--check"],
        ["generate", "ab", "-n", "2"], ["tokens", "ab"], ["tokens", "ab", "--chat"], ["info"],
    ], 2),
    ids=" ".join,
)  # fmt: skip
def test_a_directory_that_is_not_utf8(run, argv):
    found = document(run(*argv, "--json")[0])
    assert found["model"]["name"] == "./m\\udcff"


def test_the_tokenizer_of_such_a_directory_is_found(run):
    assert document(run("info", "--json")[0])["tokenizer"]["vocabulary"] == 261


@pytest.mark.exhaustive
def test_the_files_that_are_written_of_it(run, place):
    run("dump", "ab", "--name", "embed", "-o", "out.safetensors")
    with safe_open(place / "out.safetensors", "np") as file:
        assert file.metadata()["model"] == "./m\\udcff"
    run("attention", "ab", "-o", "out.json")
    assert document((place / "out.json").read_text())["model"]["name"] == "./m\\udcff"
    run("bench", "-p", "2", "-n", "0", "-r", "1", "--json")
    (row,) = document(run("bench", "-p", "2", "-n", "0", "-r", "1", "-o", "json")[0])
    assert row["model_filename"] == "./m\\udcff"
    run("timing", "ab", "--pairs", "1", "-n", "1", "--trace", "trace.json", "-q")
    about = document((place / "trace.json").read_text())["otherData"]
    assert about["name"] == "./m\\udcff"


def test_a_path_that_cannot_be_written_is_no_path(run):
    _, err = run("models", "path", f"./{ODD}", code=1, model=False, fresh=True)
    assert err.startswith("error: the path of `./m\\udcff` is not UTF-8")


@pytest.mark.parametrize(
    "argv",
    [
        ["generate", "\udcff"], ["generate", "ab", "--stop", "a\udcff"],
        ["generate", "ab", "--system", "\udcff"], ["tokens", "ab", "--system", "\udcff"],
        ["generate", "ab", "-m", "./none\udcff"],
    ],
)  # fmt: skip
def test_arguments_that_are_not_utf8_are_refused(run, argv):
    code = 3 if "-m" in argv else 2
    out, err = run(*argv, "--json", code=code, model="-m" not in argv)
    found = document(out)
    assert found["schema"] == "llmcli.error/1"
    assert err.startswith(f"error: {found['error']['message']}")
    if code == 2:
        name = "PROMPT" if argv[1] == "\udcff" else f"`{argv[2]}`"
        assert found["error"]["message"] == f"{name} is not UTF-8 text"


@pytest.mark.parametrize("line", few(['{"prompt": "\\udcff"}', '"a\\ud800"'], 1))
def test_half_a_surrogate_pair_in_a_batch_is_refused(run, place, line):
    (place / "b.jsonl").write_text(f'"\\ud83d\\ude00"\n{line}\n')
    out, err = run("generate", "--batch", "b.jsonl", "-n", "1", "--json", code=2)
    assert document(out)["schema"] == "llmcli.error/1"
    half = "line 2 of `b.jsonl` has half a surrogate pair, which is not a character"
    assert err.splitlines()[0].endswith(half)
    (place / "b.jsonl").write_text('"\\ud83d\\ude00"\n')
    out, _ = run("generate", "--batch", "b.jsonl", "-n", "1", "--json")
    assert document(out)["prompt"]["text"] == "😀"

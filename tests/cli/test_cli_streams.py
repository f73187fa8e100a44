"""The process as a shell sees it: closed pipes, full disks, signals, closed streams."""

import io
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import children
import pytest
from covers import few

from llmcli.shell.streams import escape_unencodable, spelled

ROOT = Path(__file__).parents[2]
ENDLESS = ("--raw", "--ignore-eos", "-n", "100000", "--context-length", "100000", "-q")


def start(tiny, *argv, **streams):
    model = ("-m", tiny, "--random-weights", "--seed", "1")
    given = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return children.start(
        [sys.executable, "-m", "llmcli", *argv, *(() if argv[0] in ("--help", "env") else model)],
        cwd=ROOT, **(given | streams),
    )  # fmt: skip


def finished(process, code, timeout=60):
    out, err = process.communicate(timeout=timeout)
    assert process.returncode == code, err.decode()
    return out or b"", err.decode()


def test_a_closed_pipe_is_silent_and_succeeds(tiny):
    process = start(tiny, "generate", "x", *ENDLESS)
    assert process.stdout.read(1)
    process.stdout.close()
    process.stdout = None
    assert finished(process, 0)[1] == ""


@pytest.mark.parametrize(("argv", "code", "said"), [
    (["--help"], 0, ""), (["env"], 0, ""), (["tokens", "x", "-q"], 0, ""),
    (["generate", "--raw", "-n", "3", "x", "-q"], 0, ""),
    # an error keeps its code where nobody reads it
    (["generate", "-n", "x", "--json"], 2, "takes a whole number"),
])  # fmt: skip
def test_a_pipe_closed_before_the_first_word(tiny, argv, code, said):
    reading, writing = os.pipe()
    os.close(reading)
    process = start(tiny, *argv, stdout=writing)
    os.close(writing)
    err = finished(process, code)[1]
    assert said in err if said else err == ""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
@pytest.mark.parametrize("argv", few([
    ["generate", "--raw", "-n", "3", "--json", "x", "-q"], ["--help"],
    ["generate", "--raw", "-n", "3", "x", "-q"], ["tokens", "x", "-q"],
], 1))  # fmt: skip
def test_a_full_disk_is_one_line_and_exit_1(tiny, argv):
    with open("/dev/full", "wb") as full:
        err = finished(start(tiny, *argv, stdout=full), 1)[1]
    assert err.splitlines() == [
        "error: could not write the output: no space left on device",
        "hint: write to another file or directory",
    ]


@pytest.fixture(scope="module")
def whole(tiny):
    """The beginning of the text that the interrupted runs were writing."""
    return finished(start(tiny, "generate", "x", *ENDLESS, "-n", "60"), 0)[0]


@pytest.mark.parametrize(("number", "code"), few([
    pytest.param(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143),
    pytest.param(signal.SIGHUP, 143),
], 2))  # fmt: skip
def test_signals_keep_what_was_printed(tiny, whole, number, code):
    process = start(tiny, "generate", "x", *ENDLESS)
    first = process.stdout.read(5)
    assert len(first) == 5
    process.send_signal(number)
    rest, err = finished(process, code)
    assert err == ""
    printed = first + rest
    shorter = min(len(printed), len(whole)) - 4
    assert printed[:shorter] == whole[:shorter]


def test_an_interrupted_json_run_prints_what_it_has(tiny):
    """The note about the room that is left comes just before the first token is computed."""
    process = start(tiny, "generate", "abcd", *(flag for flag in ENDLESS if flag != "-q"), "--json")
    assert b"trained for 128 tokens" in process.stderr.readline()
    assert b"leaves room for 99997" in process.stderr.readline()
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    out, err = finished(process, 130)
    document = json.loads(out)
    assert err == ""
    assert document["schema"] == "llmcli.generate/1"
    assert document["outputs"][0]["finish_reason"] == "interrupted"
    assert len(document["outputs"][0]["ids"]) == document["timings"]["generated_tokens"]


@pytest.mark.parametrize("delay", few([0.2, 0.7, 0.1, 0.4, 1.0], 2))
def test_an_interruption_while_it_starts_is_silent(tiny, delay):
    process = start(tiny, "generate", "x", *ENDLESS)
    time.sleep(delay)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    if b"init_import_site" in err:
        return  # a busy machine: Python has not begun with the first line of ours
    # before `main` runs the system answers; from then on it is ours
    assert process.returncode in (130, -signal.SIGINT)
    assert err == b"" or process.returncode != 130


def test_what_the_parent_ignores_stays_ignored_and_who_imports_us_keeps_ctrl_c():
    found = "print(repr(signal.getsignal(signal.SIGINT)))"
    running = f"import os, signal; import llmcli.__main__, llmcli.cli.app; {found}; "
    running += f"os._exit = lambda code: {found}; llmcli.__main__.script()"
    for before, after in [
        ("", ["default_int_handler", "Signals._handle"]), ("trap '' INT;", ["SIG_IGN", "SIG_IGN"]),
    ]:  # fmt: skip
        done = shell(f"{before} \"$PY\" -c '{running}' --version", "tiny")
        lines = [line for line in done.stdout.splitlines() if not line.startswith("llmcli ")]
        assert len(lines) == 2, done.stderr
        assert all(word in line for word, line in zip(after, lines, strict=True)), lines


def shell(command, tiny):
    """`$EACH` is a program that runs each of its arguments; it says their exit codes."""
    program = children.EACH + (
        "sys.argv = ['llmcli', *words.split()]\nfrom llmcli.__main__ import script; script()"
    )
    return children.run(
        ["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=False,
        env={**os.environ, "LLMCLI_MODEL": tiny, "PY": sys.executable, "EACH": program},
    )  # fmt: skip


def test_closed_streams(tiny):
    closed = shell('"$PY" -c "$EACH" "tokens x" "tokens -" <&-', tiny)
    assert '"x"' in closed.stdout
    assert closed.stdout.splitlines()[-1] == "exit codes: 0 2"
    commands = (
        "tokens x", "--help", "generate -h", "--version", "--show-completion zsh", "help",
    )  # fmt: skip
    nowhere = shell(f'"$PY" -c "$EACH" {shlex.join(commands)} >&-', tiny)
    *said, codes = nowhere.stderr.splitlines()
    assert codes == "exit codes: 1 1 1 1 1 1"
    assert "stdout is closed" in said[0]
    assert said == said[: len(said) // 6] * 6
    assert shell('"$PY" -m llmcli tokens 2>&-', tiny).returncode == 2


def test_a_directory_that_is_gone(tiny, tmp_path):
    gone = f"mkdir '{tmp_path}/x' && cd '{tmp_path}/x' && rmdir '{tmp_path}/x' && "
    commands = [f"{words} -m tiny" for words in ("generate -n 2 x", "timing x", "bench -p 4 -n 0")]
    environ = f'PYTHONPATH="{ROOT}"'
    done = shell(f'{gone} {environ} "$PY" -c "$EACH" {shlex.join(commands)} </dev/null', tiny)
    assert done.stdout == "exit codes: 1 1 1\n"
    assert [line for line in done.stderr.splitlines() if not line.startswith("note: ")] == [
        "error: the current directory no longer exists",
        "hint: change to another one with `cd`, then run this command again",
    ] * 3


def test_a_redirected_file_and_a_pipe_are_read(tiny, tmp_path):
    (tmp_path / "f").write_text("ab\n")
    for argv, stdin, piped in (
        ([], (tmp_path / "f").open(), None), ([], subprocess.PIPE, b"ab\n"),
        (["-f", str(tmp_path / "f")], subprocess.DEVNULL, None), (["-"], subprocess.PIPE, b"ab\n"),
    ):  # fmt: skip
        out, _ = start(tiny, "tokens", "--json", *argv, stdin=stdin).communicate(piped)
        assert [token["text"] for token in json.loads(out)["tokens"]] == ["a", "b"], argv
    finished(start(tiny, "tokens"), 2)


@pytest.mark.parametrize("level", few(["full", "short"], 1))
def test_statistics_begin_a_line_of_their_own_where_streams_are_merged(tiny, level):
    command = [sys.executable, "-m", "llmcli", "generate", "x", "--raw", "-m", tiny, "--seed", "1",
               "--random-weights", "-n", "5", "--ignore-eos", "--stats", level]  # fmt: skip
    streams = {"cwd": ROOT, "stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE}
    apart = children.run(command, stderr=subprocess.PIPE, **streams, check=True)
    merged = children.run(command, stderr=subprocess.STDOUT, **streams, check=True)
    assert not apart.stdout.endswith(b"\n")
    first = b"prompt " if level == "short" else b"model "
    assert apart.stderr.startswith(first)
    assert merged.stdout.startswith(apart.stdout + b"\n" + first)


@pytest.mark.parametrize(("argv", "shown"), few([
    pytest.param(["tokens", "中 T¹"], "7 tokens . 7 bytes"),
    pytest.param(["attention", "中 abcabc", "--checks"], "ok in the pattern shown every query"),
    pytest.param(["tokens", "中 T¹", "--json"], r"\u00b9"),
    pytest.param(["score", "中 T¹"], "bits per byte"),
    pytest.param(["explain", "blocks.0.resid_mid[0,0]", "中", "--depth", "1"], "T^3[0,0] = "),
    pytest.param(["attention", "中 abcabc"], " checks . --checks"),
], 2))
def test_an_encoding_without_the_character_is_no_error(tiny, argv, shown):
    """The locale C, where Python's own streams escape surrogates and refuse everything else."""
    plain = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    plain.pop("PYTHONIOENCODING", None)
    out, err = finished(start(tiny, *argv, env=plain), 0)
    assert shown in out.decode("ascii")
    assert "error" not in err
    assert "\\u" not in err


# signs that a stream's encoding lacks; in the locale C.UTF-8 Python writes the bytes that a lone
# surrogate stands for
@pytest.mark.parametrize(("encoding", "text", "written"), [
    ("ascii", "✓ a · b ≥ −1 × 2 → 中", b"ok a . b >= -1 x 2 -> ?"), ("ascii", "✗✓", b"FAILok"),
    ("latin-1", "✗ × ² …", b"FAIL \xd7 \xb2 ..."), ("utf-8", "✗ ä \udcff", "✗ ä ?".encode()),
])
@pytest.mark.parametrize("errors", ["strict", "surrogateescape", "backslashreplace"])
def test_what_an_encoding_lacks_is_spelled(encoding, text, written, errors):
    if encoding == "utf-8" and errors == "backslashreplace":
        return  # which then has a way of its own, and needs none for signs
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors=errors)
    escape_unencodable(stream)
    stream.write(text)
    stream.flush()
    assert stream.buffer.getvalue() == written


def test_spelling_leaves_ascii_alone():
    text = "".join(map(chr, range(128)))
    assert spelled(text) == text

"""What is left of a run that Ctrl-C ends, and what a terminal shows meanwhile."""

import json
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import children
import pytest
from covers import in_turn

import llmcli.engine.stream

ROOT = Path(__file__).parents[2]
LONG = ("--ignore-eos", "-n", "12")


@pytest.fixture
def ctrl_c(monkeypatch):
    """`ctrl_c(n)`: the next run is interrupted before its token number n."""
    stream = llmcli.engine.stream.stream

    def after(count):
        def cut(*args, **options):
            for number, token in enumerate(stream(*args, **options)):
                if number == count:
                    raise KeyboardInterrupt
                yield token

        monkeypatch.setattr(llmcli.engine.stream, "stream", cut)

    return after


def test_text_has_what_there_is_of_every_sample(run_tiny, ctrl_c):
    argv = ("generate", "one", "--num-samples", "3", *LONG)
    whole = [output["text"] for output in run_tiny(*argv, "--json").json()["outputs"]]
    ctrl_c(12)
    result = run_tiny(*argv)
    assert result.code == 130
    parts = result.out.split("--- ")[1:]
    for index, (part, text) in enumerate(zip(parts, whole, strict=True)):
        shown = part.removeprefix(f"{index}\n").removesuffix("\n")
        assert shown
        assert text.startswith(shown)


def test_json_lines_end_with_a_line_for_every_unfinished_sequence(run_tiny, ctrl_c):
    ctrl_c(7)
    result = run_tiny("generate", "one", "--num-samples", "3", *LONG, "--stream-json")
    lines = [json.loads(line) for line in result.out.splitlines()]
    assert result.code == 130
    assert len(lines) == 7 + 3
    assert [line["sequence"] for line in lines[7:]] == [0, 1, 2]
    assert [line["index"] for line in lines[7:]] == [3, 2, 2]
    assert all("finish_reason" not in line for line in lines[:7])
    last = {"sequence": 2, "index": 2, "id": None, "text": "", "logprob": None}
    assert lines[-1] == {**last, "ms": lines[6]["ms"], "finish_reason": "interrupted"}


def test_while_the_prompt_is_read_there_are_no_statistics(run_tiny, ctrl_c):
    ctrl_c(0)
    argv = ("generate", "hello", *LONG, "--stats", "short")
    result = run_tiny(*argv)
    assert (result.code, result.out) == (130, "")
    read = result.err.removeprefix("interrupted while reading the prompt (").split()
    assert read[1:] == ["of", "8", "tokens)"]
    assert len(result.err.splitlines()) == 1
    (line,) = run_tiny(*argv, "--stream-json").out.splitlines()
    assert json.loads(line)["finish_reason"] == "interrupted"
    assert run_tiny(*argv, "-q").err == ""


def on_terminal(argv, *, until=None, send=None):
    """`python ARGV…` on a terminal; `send` is called once `until` was shown. Code, and stderr.

    The text of a model with random weights can be anything, so stdout goes elsewhere.
    """
    controller, terminal = pty.openpty()
    process = children.start(
        [sys.executable, *argv], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=terminal,
        stdin=terminal,
        env={**os.environ, "TERM": "xterm", "FORCE_COLOR": "1", "COLUMNS": "200"},
    )  # fmt: skip
    os.close(terminal)
    seen, end = "", time.monotonic() + 60
    while time.monotonic() < end:
        if select.select([controller], [], [], 0.2)[0]:
            try:
                seen += os.read(controller, 65536).decode(errors="replace")
            except OSError:  # Linux: nobody has the terminal open any more
                break
        elif process.poll() is not None:
            break
        if send is not None and until in seen:
            send(process, controller)
            send = None
    os.close(controller)
    return process.wait(timeout=60), seen


@pytest.fixture
def small(tiny):
    """`small("generate", …)`: the arguments of Python for that command on the small model."""
    return lambda *argv: ["-m", "llmcli", *argv, "-m", tiny, "--random-weights", "--seed", "1"]


@pytest.mark.parametrize(("number", "code", "word"), [
    (signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated"),
])
def test_a_terminal_is_left_on_a_new_line_with_a_word(small, number, code, word):
    def send(process, controller):
        time.sleep(0.5)
        process.send_signal(number)

    argv = ("generate", "ab", "--raw", "--ignore-eos", "-n", "100000", "--context-length", "100000")
    got, seen = on_terminal(small(*argv), until="leaves room", send=send)
    assert got == code
    assert seen.endswith(f"\r\x1b[K{word}\r\n")
    got, seen = on_terminal(small(*argv, "--json"), until="leaves room", send=send)
    assert got == code
    assert word not in seen
    assert seen.endswith("\r\x1b[K")


def test_a_terminal_sees_the_loading_and_the_legend(small, tiny):
    argv = ("generate", "x", "--raw", "-n", "3", "--logprobs", "0")
    code, seen = on_terminal(small(*argv))
    assert code == 0
    shown, erased, rest = seen.partition("\r\x1b[K")
    assert shown.startswith("loading ")
    assert Path(tiny).name in shown
    assert erased
    assert "probability of each token" in rest
    assert on_terminal(small(*argv, "-q")) == (0, "")


def test_a_prompt_from_the_terminal_says_how_it_ends(small):
    def finish(process, controller):
        os.write(controller, b"hello\n\x04")

    code, seen = on_terminal(small("tokens", "-"), until="end it with Ctrl-D", send=finish)
    assert code == 0
    assert "note: reading the prompt from the terminal" in seen


WRITER = """
import os, signal, sys
from llmcli.shell import exits
from llmcli.shell.options import OutputOptions
from llmcli.shell.output import Output

def action(argv):
    out = Output("x", OutputOptions(json=True))
    if argv[1] == "full":
        os.set_blocking(1, False)
        try:
            while os.write(1, b" " * 4096):
                pass
        except BlockingIOError:
            os.set_blocking(1, True)
    print("writes", file=sys.stderr, flush=True)
    out.document({"text": "x" * int(argv[2])}, model=None, environment=None)
    signal.raise_signal(signal.SIGINT)

sys.exit(exits.run(action, sys.argv[1:]))
"""


# a pipe that nobody reads is full in the middle of the document, or before it
@pytest.mark.parametrize(("before", "size"), [("empty", 1 << 20), ("full", 9)])
def test_a_document_that_is_cut_short_is_not_followed_by_another(before, size):
    process = children.start(
        [sys.executable, "-c", WRITER, "--json", before, str(size)],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": ""},  # so that Python has something left to flush
    )  # fmt: skip
    assert process.stderr.readline() == b"writes\n"
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=30) == 130  # before anybody reads
    begun = process.stdout.read()
    assert begun.lstrip()[:20] == (b'{"schema": "llmcli.x' if before == "empty" else b"")
    assert b"llmcli.error" not in begun


def test_a_whole_document_is_not_followed_by_another(tmp_path):
    (tmp_path / "writer.py").write_text(WRITER)
    argv = [sys.executable, str(tmp_path / "writer.py"), "--json", "empty", "9"]
    ended = children.run(argv, cwd=ROOT, capture_output=True, check=False, timeout=30)
    assert ended.returncode == 130
    assert json.loads(ended.stdout)["text"] == "x" * 9


# interrupted at import number `words`, or at that of the module `words`
EARLY = children.EACH + """
import _signal

at = words
for number, stream in ((1, "out"), (2, "err")):
    os.dup2(os.open(at + "." + stream, os.O_CREAT | os.O_WRONLY), number)
begun, left = False, int(at) if at.isdigit() else -1

def imported(event, found):
    global begun, left
    if event == "import" and begun and found[0] not in ("llmcli", "llmcli.limits"):
        left -= 1
        if left == 0 or found[0] == at:
            _signal.raise_signal(_signal.SIGINT)
    begun = begun or (event == "import" and found[0] == "llmcli.__main__")

sys.addaudithook(imported)
sys.argv = ["llmcli", "tokens", "x"] if left < 0 else ["llmcli", "--version"]
from llmcli.__main__ import script
script()
"""
FIRST = ("llmcli.cli.app", "llmcli.shell.streams", "llmcli.errors", "typer")


def test_ctrl_c_among_the_first_imports_ends_the_program_without_a_word(tmp_path):
    """At each of the first modules that are read; later ones are sampled, and some are named.

    But for the package itself and the limits that it sets before PyTorch can be imported: whoever
    imports it as a library gets them too, and until then no line of the program has run.
    """
    places = [*map(str, [*range(1, 9), *range(9, 80, 10)]), *FIRST]
    ended = children.run(
        [sys.executable, "-c", EARLY, *places], cwd=tmp_path, capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True, timeout=120,
    )  # fmt: skip
    codes = map(int, ended.stdout.removeprefix("exit codes:").split())
    for at, code in zip(places, codes, strict=True):
        assert (tmp_path / f"{at}.err").read_text() == "", at
        may = {130} if at == "typer" else {-signal.SIGINT} if at in FIRST else {-signal.SIGINT, 130}
        assert code in may, at
        assert at not in FIRST or (tmp_path / f"{at}.out").read_text() == "", at


TOLD = """
import os, signal, sys
from llmcli.shell import exits
told = exits.tell
def tell(line):
    told(line)
    signal.raise_signal(signal.SIGINT)
exits.tell = tell
os._exit(exits.run(lambda argv: 1 / 0, []))
"""


def test_ctrl_c_while_an_error_is_told_ends_the_program_without_a_traceback(tmp_path):
    (program := tmp_path / "told.py").write_text(TOLD)
    ended = children.run(
        [sys.executable, str(program)], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert ended.stderr == "error: internal error: ZeroDivisionError: division by zero\n"
    assert ended.returncode == 130


def until(done):
    end = time.monotonic() + 20
    while not done():
        assert time.monotonic() < end
        time.sleep(0.02)


LIKE_LESS = """#!/bin/sh
echo $$ >> "$PAGERS"
trap '%s' TERM HUP
stty -echo -icanon < /dev/tty
cat > /dev/null
echo ready >> "$PAGERS"
while :; do sleep 0.1; done
"""


TRAPS = {"tidy": "stty sane < /dev/tty; exit 0", "untidy": "exit 0", "stubborn": ""}


@pytest.mark.parametrize(
    ("trap", "starts_another", "number"),
    in_turn(list(TRAPS), [False, True], [signal.SIGTERM, signal.SIGHUP]),
)
def test_a_pager_ends_with_what_started_it(tmp_path, trap, starts_another, number):
    """It would eat what is typed at the shell's prompt, in a terminal without echo."""
    pager, outer = tmp_path / "less", tmp_path / "bat"
    pager.write_text(LIKE_LESS % TRAPS[trap])
    outer.write_text(f'#!/bin/sh\necho $$ >> "$PAGERS"\n{pager}\nexit 0\n')
    for path in (pager, outer):
        path.chmod(0o755)
    told = tmp_path / "pagers"
    controller, inner = pty.openpty()
    before = termios.tcgetattr(inner)
    process = children.start(
        [sys.executable, "-m", "llmcli", "help", "formats"],
        terminal=True,
        stdin=inner, stdout=inner, stderr=inner, cwd=ROOT,
        env={**os.environ, "TERM": "xterm", "PAGERS": str(told),
             "LLMCLI_PAGER": str(outer if starts_another else pager)},
    )  # fmt: skip
    until(lambda: told.exists() and "ready" in told.read_text())
    assert termios.tcgetattr(inner) != before
    process.send_signal(number)
    assert process.wait(timeout=60) == 143
    pids = [int(line) for line in told.read_text().split() if line != "ready"]
    assert len(pids) == 1 + starts_another
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
    assert termios.tcgetattr(inner) == before
    os.close(controller)
    os.close(inner)

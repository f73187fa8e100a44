"""The process as a shell and a terminal see it: closed pipes, full disks, signals, Ctrl-C."""

import io
import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import children
import programs
import pytest
from cli_tiny import write_tiny
from covers import few, in_turn
from programs import ROOT, ended, on_terminal

import llmcli.engine.stream
from llmcli.shell.streams import escape_unencodable, spelled
from llmcli.text.template_renderer import SERVER

ENDLESS = ("--raw", "--ignore-eos", "-n", "100000", "--context-length", "100000", "-q")
LONG = ("--ignore-eos", "-n", "12")
DRAWN = ("--random-weights", "--seed", "1")


def start(tiny, *argv, **options):
    model = () if argv[0] in ("--help", "env") else ("-m", tiny, *DRAWN)
    return programs.start(*argv, *model, **options)


def test_a_closed_pipe_is_silent_and_succeeds(tiny):
    process = start(tiny, "generate", "x", *ENDLESS)
    assert process.stdout.read(1)
    process.stdout.close()
    process.stdout = None
    assert ended(process, 0)[1] == ""


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
    err = ended(process, code)[1]
    assert said in err if said else err == ""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
def test_a_full_disk_is_one_line_and_exit_1(tiny):
    """Also when Python flushes its streams; of other commands test_cli_full_disk tells."""
    with open("/dev/full", "wb") as full:
        argv = ("generate", "--raw", "-n", "3", "--json", "x", "-q")
        err = ended(start(tiny, *argv, stdout=full), 1)[1]
    assert err.splitlines() == [
        "error: could not write the output: no space left on device",
        "hint: write to another file or directory",
    ]


@pytest.fixture(scope="module")
def whole(tiny):
    """The beginning of the text that the interrupted runs were writing."""
    return ended(start(tiny, "generate", "x", *ENDLESS, "-n", "60"), 0)[0]


@pytest.mark.parametrize(("number", "code"), few([
    pytest.param(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143),
    pytest.param(signal.SIGHUP, 143),
], 2))  # fmt: skip
def test_signals_keep_what_was_printed(tiny, whole, number, code):
    process = start(tiny, "generate", "x", *ENDLESS)
    first = process.stdout.read(5)
    assert len(first) == 5
    process.send_signal(number)
    rest, err = ended(process, code)
    assert err == ""
    printed = first + rest
    shorter = min(len(printed), len(whole)) - 4
    assert printed[:shorter] == whole[:shorter]


def test_an_interrupted_json_run_prints_what_it_has(tiny):
    """The note about the room that is left comes just before the first token is computed."""
    process = start(tiny, "generate", "abcd", *(flag for flag in ENDLESS if flag != "-q"), "--json")
    assert b"trained for 128 tokens" in process.stderr.readline()
    assert b"leaves room for 99997" in process.stderr.readline()
    children.until_computed(process.pid, 0.2)
    process.send_signal(signal.SIGINT)
    out, err = ended(process, 130)
    document = json.loads(out)
    assert err == ""
    assert document["schema"] == "llmcli.generate/1"
    assert document["outputs"][0]["finish_reason"] == "interrupted"
    assert len(document["outputs"][0]["ids"]) == document["timings"]["generated_tokens"]


@pytest.mark.parametrize("delay", few([0.05, 0.3, 0.02, 0.1, 0.6], 2))
def test_an_interruption_while_it_starts_is_silent(tiny, delay):
    process = start(tiny, "generate", "x", *ENDLESS)
    children.until_computed(process.pid, delay)
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
    commands = ("tokens x", "--help", "generate -h", "--version", "--show-completion zsh", "help")
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


@pytest.mark.parametrize("level", few(["full", "short"], 1))
def test_statistics_begin_a_line_of_their_own_where_streams_are_merged(tiny, level):
    argv = ("generate", "x", "--raw", "-n", "5", "--ignore-eos", "--stats", level)
    out, err = ended(start(tiny, *argv))
    merged, _ = ended(start(tiny, *argv, stderr=subprocess.STDOUT))
    assert not out.endswith(b"\n")
    first = "prompt " if level == "short" else "model "
    assert err.startswith(first)
    assert merged.startswith(out + b"\n" + first.encode())


# a command, and what of it is spelled in ASCII
SPELLED = {
    "tokens 中T¹": "6 tokens . 6 bytes", "tokens 中T¹ --json": r"\u00b9",
    "attention 中abcabc --checks": "ok in the pattern shown every query",
    "attention 中abcabc": " checks . --checks", "score 中T¹": "bits per byte",
    "explain blocks.0.resid_mid[0,0] 中 --depth 1": "T^3[0,0] = ",
}


def test_an_encoding_without_the_character_is_no_error(tiny):
    """The locale C, where Python's own streams escape surrogates and refuse everything else."""
    lines = shlex.join(f"{words} {shlex.join(DRAWN)}" for words in SPELLED)
    plain = "LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0 PYTHONIOENCODING="
    early = "import torch, llmcli.inspect.passes, llmcli.loading.load"
    done = shell(f'{plain} "$PY" -c "{early}$EACH" {lines} </dev/null', tiny)
    assert done.stdout.isascii()
    assert done.stdout.splitlines()[-1] == "exit codes:" + " 0" * len(SPELLED), done.stderr
    assert [shown for shown in SPELLED.values() if shown not in done.stdout] == []
    assert "error" not in done.stderr
    assert "\\u" not in done.stderr


# signs that a stream's encoding lacks; in the locale C.UTF-8 Python writes the bytes that a lone
# surrogate stands for
@pytest.mark.parametrize(("encoding", "text", "written"), [
    ("ascii", "✓ a · b ≥ −1 × 2 → 中", b"ok a . b >= -1 x 2 -> ?"), 
    ("ascii", "✗✓δ▌Uₛ", b"FAILokdelta#U_s"),
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


# interrupted


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


@pytest.fixture
def shown(tiny):
    """`shown("generate", …)`: that command on the small model, with stderr on a terminal."""
    how = {"stdout": subprocess.DEVNULL, "FORCE_COLOR": "1"}  # its text can be anything
    return lambda *argv: on_terminal(*argv, "-m", tiny, *DRAWN, **how)


@pytest.mark.parametrize(("number", "code", "options", "word"), [
    (signal.SIGINT, 130, (), "interrupted\r\n"), (signal.SIGTERM, 143, (), "terminated\r\n"),
    (signal.SIGINT, 130, ("--json",), ""),
])
def test_a_terminal_is_left_on_a_new_line_with_a_word(shown, number, code, options, word):
    argv = ("generate", "ab", "--raw", "--ignore-eos", "-n", "100000", "--context-length", "100000")
    window = shown(*argv, *options)
    window.wait("leaves room")
    children.until_computed(window.process.pid, 0.2)
    window.process.send_signal(number)
    assert window.end() == code
    assert window.raw.endswith(f"\r\x1b[K{word}")


def test_a_terminal_sees_the_loading_and_the_legend(shown, tiny):
    argv = ("generate", "x", "--raw", "-n", "3", "--logprobs", "0")
    window = shown(*argv)
    assert window.end() == 0
    loading, erased, rest = window.raw.partition("\r\x1b[K")
    assert loading.startswith("loading ")
    assert Path(tiny).name in loading
    assert erased
    assert "probability of each token" in rest
    quiet = shown(*argv, "-q")
    assert (quiet.end(), quiet.raw) == (0, "")


def test_a_prompt_from_the_terminal_says_how_it_ends(shown):
    window = shown("tokens", "-")
    assert "note: reading the prompt from the terminal" in window.wait("end it with Ctrl-D")
    assert window.end("hello\n\x04") == 0


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
    children.until(lambda: children.process(process.pid).waits)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=30) == 130  # before anybody reads
    begun = process.stdout.read()
    assert begun.lstrip()[:20] == (b'{"schema": "llmcli.x' if before == "empty" else b"")
    assert b"llmcli.error" not in begun


def test_a_whole_document_is_not_followed_by_another(tmp_path):
    (program := tmp_path / "writer.py").write_text(WRITER)
    done = children.run(
        [sys.executable, str(program), "--json", "empty", "9"], cwd=ROOT, capture_output=True
    )
    assert done.returncode == 130
    assert json.loads(done.stdout)["text"] == "x" * 9


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
    done = children.run(
        [sys.executable, "-c", EARLY, *places], cwd=tmp_path, capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True, timeout=120,
    )  # fmt: skip
    codes = map(int, done.stdout.removeprefix("exit codes:").split())
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
    done = children.run([sys.executable, str(program)], cwd=ROOT, capture_output=True)
    assert done.stderr == b"error: internal error: ZeroDivisionError: division by zero\n"
    assert done.returncode == 130


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
    own = {"PAGERS": str(told), "LLMCLI_PAGER": str(outer if starts_another else pager)}
    window = on_terminal("help", "formats", **own)
    children.until(lambda: told.exists() and "ready" in told.read_text())
    assert not window.restored()
    window.process.send_signal(number)
    assert window.process.wait(timeout=60) == 143
    pids = [int(line) for line in told.read_text().split() if line != "ready"]
    assert len(pids) == 1 + starts_another
    children.until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
    window.end()  # its modes are as before


# a chat template without an end


TEMPLATES = [
    "{{ ('a' * 8000000).rfind('ab' ~ 'a' * 4000000) }}",
    "{{ ('a' * 1000000).strip('b' * 1000000 ~ 'a') }}",
    "{{ ('a' * 8000000) | wordwrap }}",
]
COMMANDS = [("tokens", "--chat"), ("generate", "--random-weights", "-n", "1")]


@pytest.mark.parametrize(("source", "command"), in_turn(TEMPLATES, COMMANDS))
def test_a_template_without_an_end_is_an_error(cli, tmp_path, monkeypatch, command, source):
    monkeypatch.setattr("llmcli.text.template_renderer.MAX_SECONDS", 0.2)
    folder = write_tiny(tmp_path / "m", template=source)
    result = cli(*command, "-m", folder, "hi", "--json")
    assert result.code == 4
    words = "the chat template failed: it takes more than 0.2 seconds of processor time"
    assert json.loads(result.out)["error"]["message"] == words
    error, hint = result.err.splitlines()[-2:]
    assert error == f"error: {words}"
    assert hint.startswith("hint: `llmcli generate --raw` goes without it")


def rendering(parent):
    """The process id of the parent's renderer once it has computed for a while, else None."""
    for one in children.processes():
        if one.parent == parent and SERVER.name in one.words and one.seconds >= 0.2:
            return one.pid
    return None


@pytest.mark.parametrize(
    ("command", "number", "group"),
    in_turn(COMMANDS, [signal.SIGINT, signal.SIGTERM], [False, True]),
)
def test_a_signal_ends_a_program_whose_template_does_not(tmp_path, command, number, group):
    prompt = tmp_path / "prompt"
    prompt.write_text("a" * 20_000_000)  # gives the template 22 seconds
    folder = write_tiny(tmp_path / "m", template=TEMPLATES[0])
    program = programs.start(*command, "-m", folder, "-f", prompt)
    child = children.until(lambda: rendering(program.pid))
    (os.killpg if group else os.kill)(program.pid, number)
    out, err = program.communicate(timeout=60)
    assert (program.returncode, out, err) == (128 + number, b"", b"")
    assert child not in [one.pid for one in children.processes()]  # it was killed before

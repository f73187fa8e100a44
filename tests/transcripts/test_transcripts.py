"""Commands and all that they print: a file here is a session in a shell, run in this process.

    # What follows is said of the next command.
    $ printf 'abc' | COLUMNS=40 llmcli tokens - -m ./llama
      what it writes to stdout, by two columns to the right
    2 what it writes to stderr
    ? 2

`? CODE` is missing where the exit code is 0. `tty 40 llmcli …` has a terminal of 40 columns and 24
lines for its stdout; its colours are left out, but with `tty 40 colour llmcli …`. `typed LINES |
llmcli chat …` types into a terminal without an editor: what is written where, in order, with the
lines behind their prompts. `< FILE`, `> FILE`, `cat FILE`, `printf TEXT > FILE`, `sed 's/A/B/'
FILE`, `| grep PATTERN` and `jq -c 'keys, .a.b, .c[].d, [.c[].d]' FILE`, also behind a pipe, are as
in a shell, but that a document with a schema has to keep to it; nothing else of one is known.
`./NAME` is a model of `MODELS`, and `./NAME-KIND` another one in a folder of that name. The first
lines may be `#! measured` (numbers, bars and the spaces between columns are replaced), `#! timed`
(only times and speeds are), `#! flowing` (so are the ends of lines) and `#! wide` (lines may be
longer than the terminal is wide).

`pytest tests/transcripts --update` writes them anew: read the difference before it goes in. The
machine is one that was made up and times are replaced; numbers are of float64 where they are
shown, so that no processor's rounding is in them.
"""

import fcntl
import io
import json
import os
import pty
import re
import shlex
import shutil
import struct
import sys
import tempfile
import termios
import textwrap
import threading
from pathlib import Path

import pytest
from json_schemas import errors
from made_up import MODELS, made_up_machine
from needs import needs_kernels
from rich.cells import cell_len

from llmcli.cli.app import main

HERE = Path(__file__).parent
FILES = sorted(file.stem for file in HERE.glob("*.txt"))
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
MEASURED = re.compile(
    r"\b(\d[\d,.]*)([  ]?)([kMGTP]?i?(?=B|FLOP)|[µnm]?(?=s)|)(B/s|FLOP/s|FLOP|B|s|tok/s)\b"
)
TIMED = re.compile(r"\b\d[\d,.]* (?:[mµn]?(s)|[kM]?(tok/s))\b")
NOISE = re.compile(r"\d(?:\.\d+)?e[-−](?:0[89]|[1-9]\d|[89](?!\d))")
NOTHING = re.compile(r"(?<= )0(?= of\s+1e-0\s+allowed)")  # some processors round nothing
DIGITS = re.compile(r"\d+\.\d{7,}(?:e[-+]\d+)?")

CONTROLS = {code: 0x2400 + code for code in range(32) if code != 10}  # ␛ is the escape


@pytest.fixture
def home(monkeypatch):
    """The folder that a session is in: its name is of one length on all machines."""
    with tempfile.TemporaryDirectory(prefix="llmcli-", dir="/tmp") as folder:
        monkeypatch.chdir(folder)
        made_up_machine(monkeypatch, Path(folder))
        yield Path(folder)


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """`models(name)`: the folder of a model, written by the first session that names it."""
    root = tmp_path_factory.mktemp("models")

    def written(name):
        if not (root / name).exists():
            MODELS[name](root / name)
        return root / name

    return written


class Session:
    """Runs the commands of one file and writes down what they print."""

    def __init__(self, text, home, monkeypatch):
        self.home, self.monkeypatch = home, monkeypatch
        self.directives = set(re.findall(r"(?m)^#! (\w+)$", text))
        assert self.directives <= {"measured", "timed", "flowing", "wide"}

    def transcript(self, text):
        """The same comments and commands, and what these print now, an empty line before each."""
        lines, gap = [], False
        for line in text.splitlines():
            if line[:1] in ("#", "$"):
                if lines and (gap or not lines[-1].startswith("#")):
                    lines.append("")
                lines += [line, *(self.shown(line[2:]) if line[0] == "$" else ())]
            gap = not line
        return "\n".join(lines).rstrip() + "\n"

    def shown(self, command):
        code, out, err = self.run(command)
        if isinstance(out, list):  # of what is typed
            for mark, text in out:
                yield from marked(mark, self.settled(text, measured=False))
            out = ""
        out = self.settled(out, measured="measured" in self.directives)
        if "flowing" in self.directives:
            out = textwrap.fill(" ".join(out.replace(" · ", " ").split()), 98) + "\n"
        yield from marked("  ", out)
        yield from marked("2 ", self.settled(err, measured="measured" in self.directives))
        if code:
            yield f"? {code}"

    def run(self, command):
        words, given, to = pieces(command)
        words, chosen = filtered(words)
        typed = command.startswith("typed ")
        with self.monkeypatch.context() as patch:
            while re.match(r"[A-Z_]+=", words[0]):
                patch.setenv(*words.pop(0).split("=", 1))
            stdin = Keyboard(given) if typed or given is None else tempfile.TemporaryFile()  # noqa: SIM115
            if given is not None and not typed:
                stdin.write(given)
                stdin.seek(0)
            patch.setattr(sys, "stdin", io.TextIOWrapper(stdin, "utf-8"))
            if given is None or typed:
                patch.setattr(sys.stdin, "isatty", lambda: True)
            if typed:
                code, lines = conversation(words[1:], patch)
                if to is not None:
                    Path(to).write_text("".join(line for mark, line in lines if mark == "  "))
                    lines = [(mark, line) for mark, line in lines if mark != "  "]
                return code, lines, ""
            code, out, err = self.started(words, patch)
        out = chosen(out)
        if to is not None:
            Path(to).unlink(missing_ok=True)  # of a model it is a hard link, which others have
            Path(to).write_text(out, encoding="utf-8", errors="surrogateescape")
            out = ""
        return code, out, err

    def started(self, words, patch):
        match words:
            case ["cat", *files]:
                return 0, "".join(Path(file).read_text(encoding="utf-8") for file in files), ""
            case ["printf", "%s", text]:
                return 0, text, ""
            case ["printf", text]:
                return 0, unescaped(text).decode("utf-8", "surrogateescape"), ""
            case ["sed", script, file]:
                _, old, new, _ = script.split(script[1])
                return 0, re.sub(old, new, Path(file).read_text(encoding="utf-8")), ""
            case ["jq", "-c", paths, file]:
                return 0, "".join(picked(Path(file).read_text(encoding="utf-8"), paths)), ""
            case ["llmcli", *argv]:
                return in_a_pipe(argv, patch)
            case ["tty", columns, "colour", "llmcli", *argv]:
                return on_terminal(argv, int(columns), patch)
            case ["tty", columns, "llmcli", *argv]:
                code, out, err = on_terminal(argv, int(columns), patch)
                out = ESCAPE.sub("", out)
                too_wide = [
                    line for line in out.splitlines()
                    if cell_len(line) > int(columns) and not line.startswith("llmcli ")
                ]  # fmt: skip
                assert not too_wide or "wide" in self.directives, too_wide[0]
                return code, out, err
        raise ValueError(f"no such command: {shlex.join(words)}")

    def settled(self, text, *, measured):
        """`text` without what differs from run to run and from machine to machine."""
        text = text.replace(str(self.home), "~").translate(CONTROLS)
        if measured:
            text = MEASURED.sub(lambda found: f"#{found[2]}{found[4]}", text)
            text = re.sub(r"(?m)^build: .*$", "build: BUILD", text)
            text = re.sub(r"\d[\d,.]*(e[-+−]\d+)?( [kMGTP]\b)?", "#", text)
            text = re.sub(r"[█▉▊▋▌▍▎▏▁▂▃▄▅▆▇─━╸╺]+", "▄", text)
            text = re.sub(r" {2,}", " ", text)
        if "timed" in self.directives:
            text = TIMED.sub(lambda found: f"# {found[1] or found[2]}", text)
        text = DIGITS.sub(lambda found: f"{float(found[0]):.6g}", text)
        text = re.sub(r"\[[\d,]+\](?=, where they differ most)", "[#]", text)
        return NOTHING.sub("1e-0", NOISE.sub("1e-0", text))


def pieces(command):
    """The words of a command, what is given to its stdin (None: a terminal), the file it writes."""
    given = to = None
    if found := re.match(r"(?:printf|typed) ('[^']*') \| ", command):
        given = unescaped(shlex.split(found[1])[0])
        command = command[found.end() :]
    words = shlex.split(command)
    if ">" in words:
        *words, arrow, to = words
        assert arrow == ">"
    if "<" in words:
        *words, arrow, file = words
        assert arrow == "<"
        given = Path(file).read_bytes()
    return words, given, to


def unescaped(text):
    """What `printf` writes: `\\xff` is a byte, `\\u2028` a character."""
    return b"".join(
        bytes.fromhex(part[2:]) if part.startswith("\\x")
        else part.encode("latin-1", "backslashreplace").decode("unicode_escape").encode()
        if part.startswith("\\") else part.encode()
        for part in re.split(r"(\\x..|\\u....|\\.)", text)
    )  # fmt: skip


def filtered(words):
    """The words of a command before `| grep PATTERN` or `| jq -c PATHS`, and what that leaves."""
    match words:
        case [*words, "|", "grep", pattern]:
            return words, lambda text: "".join(
                line for line in text.splitlines(keepends=True) if re.search(pattern, line)
            )
        case [*words, "|", "jq", "-c", paths]:
            return words, lambda text: "".join(picked(text, paths))
    return words, str


def picked(text, paths):
    """A line for what stands at each of `.a.b, .c[0], .d[].e` in each of the JSON documents."""
    while text := text.strip():
        document, end = json.JSONDecoder().raw_decode(text)
        text = text[end:]
        if isinstance(document, dict) and "schema" in document:
            assert errors(document, re.split("[./]", document["schema"])[1]) == []
        for path in paths.split(", "):
            found = [sorted(document) if path == "keys" else document]
            for name, number in re.findall(r"\.([\w-]+)|\[(-?\d*)\]", path):
                if number:
                    found = [one[int(number)] for one in found]
                elif name:
                    found = [None if one is None else one.get(name) for one in found]
                else:
                    members = (one.values() if isinstance(one, dict) else one for one in found)
                    found = [inner for one in members for inner in one]
            if path.startswith("[."):
                found = [found]
            yield from (json.dumps(one, ensure_ascii=False) + "\n" for one in found)


def marked(mark, text):
    """The lines of a text behind their mark; a last one that is not ended says so."""
    for line in text.split("\n")[:-1]:
        yield (mark + line).rstrip()
    if not text.endswith("\n") and text:
        yield mark + text.split("\n")[-1] + "⏎"


def in_a_pipe(argv, patch):
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", newline="\n") for _ in range(2))
    patch.setattr(sys, "stdout", out)
    patch.setattr(sys, "stderr", err)
    code = main(list(argv))
    for stream in (out, err):
        stream.flush()
    return code, out.buffer.getvalue().decode(), err.buffer.getvalue().decode()


class Side(io.RawIOBase):
    """A stream whose pieces stand among those of others."""

    def __init__(self, mark, written):
        self.mark, self.written = mark, written

    def writable(self):
        return True

    def write(self, piece):
        for line in re.findall(rb"[^\n]*\n|[^\n]+", bytes(piece)):
            if not self.written or self.written[-1][1].endswith(b"\n"):
                self.written.append([self.mark, b""])
            self.written[-1][1] += line
        return len(piece)


class Keyboard(io.BytesIO):
    """Shows a line where it is read, as a terminal does."""

    def readline(self, size=-1):
        line = super().readline(size)
        sys.stderr.write(line.decode())
        return line


def conversation(argv, patch):
    """What is written to both streams, by the mark of the one that began the line."""
    written = []
    for name, mark in (("stdout", "  "), ("stderr", "2 ")):
        side = io.TextIOWrapper(Side(mark, written), "utf-8", newline="\n", write_through=True)
        patch.setattr(sys, name, side)
    patch.setenv("TERM", "dumb")
    code = main(argv)
    return code, [(mark, text.decode()) for mark, text in written]


def on_terminal(argv, columns, patch):
    """What `main(argv)` writes to a terminal of 24 lines, and to stderr, which is a pipe."""
    controller, inner = pty.openpty()
    fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    attributes = termios.tcgetattr(inner)
    attributes[1] &= ~termios.OPOST  # a newline stays one character
    termios.tcsetattr(inner, termios.TCSANOW, attributes)
    read = []

    def reading():
        while True:
            try:
                if not (piece := os.read(controller, 65536)):
                    return
            except OSError:  # the other end was closed
                return
            read.append(piece)

    reader = threading.Thread(target=reading)
    reader.start()
    err = io.StringIO()
    with os.fdopen(inner, "w", encoding="utf-8") as out:
        patch.setattr(sys, "stdout", out)
        patch.setattr(sys, "stderr", err)
        code = main(list(argv))
    reader.join(30)
    os.close(controller)
    return code, b"".join(read).decode(), err.getvalue()


# whatever is quantized needs kernels
@pytest.mark.parametrize("name", [
    pytest.param(name, marks=needs_kernels) if name.startswith("quantize") else name
    for name in FILES
])
def test_transcript(name, home, models, monkeypatch, as_written):
    file = HERE / f"{name}.txt"
    text = file.read_text(encoding="utf-8")
    for model in set(re.findall(r"\./([\w-]+)", text)) & MODELS.keys():
        folder = home / model.partition("-")[0]
        shutil.copytree(models(model), folder, symlinks=True, copy_function=os.link)
    as_written(file, Session(text, home, monkeypatch).transcript(text))

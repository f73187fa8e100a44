"""Whatever a name, an argument, metadata or a token has in it.

What would move a cursor never reaches a terminal as it is; stdout, stderr and files stay valid
UTF-8.
"""

import csv
import io
import json
import os
import re
from pathlib import Path

import pytest
import torch
from cli_tiny import write_tiny
from covers import few
from programs import ended, on_terminal, start
from safetensors import safe_open
from tiny_checkpoints import llama_tensors, write_llama
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

BAD = "=\x1b[31m\x1b]0;own\x07 \x9b2J\u202e\u061cevil\u2028\x7f\r\x00"
# Controls, overrides of the writing direction, and ends of lines that are no newline.
FORBIDDEN = {
    *map(chr, (*range(0x20), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A))),
    *"\u061c\u200e\u200f\u2028\u2029",
} - {"\n"}


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """A directory, tensors, settings, tokens and a template that are all called `BAD`."""
    name = BAD.replace("\x00", "").replace("/", "")
    extra = {f"model.layers.0.{BAD}": torch.zeros(3), f"{BAD}.weight": torch.zeros(2)}
    odd = {"_name_or_path": BAD, "torch_dtype": BAD, BAD: BAD}
    folder = tmp_path_factory.mktemp("hostile") / name
    return write_tokenizer(write_llama(folder, llama_tensors() | extra, **odd))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """One that can be run, with those tokens."""
    return write_tokenizer(
        write_llama(tmp_path_factory.mktemp("runs") / BAD.replace("\x00", ""), _name_or_path=BAD)
    )


def write_tokenizer(folder):
    vocab = {f"{BAD}{index}": index for index in range(90)}
    vocab |= {"\x1b[2J": 90, "\u202e": 91, "\x9b": 92, "<unk>": 93, "a": 94, "\x07": 95, "\x7f": 96}
    library = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    library.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    library.decoder = decoders.Fuse()
    library.save(str(folder / "tokenizer.json"))
    settings = {"chat_template": f"{{{{ '{BAD}' ~ messages[0].content }}}}", "eos_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return str(folder)


# command lines of views and messages, then of what leaves for files, pipes and other programs
COMMANDS, EXPORTS = (
    [json.loads(line) for line in part.splitlines()]
    for part in Path(__file__).with_name("hostile-commands.jsonl").read_text().split("\n\n")
)


@pytest.mark.parametrize("argv", COMMANDS, ids=lambda argv: " ".join(argv).encode("unicode_escape"))
def test_no_view_and_no_message_has_a_raw_control_character(cli, hostile, argv):
    model = [] if "-m" in argv else ["-m", hostile]
    result = cli(*argv, *model)
    assert result.code in (0, 1, 2, 3, 4, 7), result.err
    assert result.out or result.err
    for text in (result.out, result.err):
        assert not FORBIDDEN & set(text), [c for c in text if c in FORBIDDEN]


@pytest.mark.parametrize("argv", EXPORTS, ids=lambda argv: " ".join(argv).encode("unicode_escape"))
def test_nothing_that_leaves_drives_a_terminal_or_computes_in_a_spreadsheet(
    cli, runs, argv, tmp_path
):
    """Where a document is JSON, it is ASCII; a table has no control character and no formula."""
    model = [] if "-m" in argv else ["-m", runs]
    short = ["-p", "4", "-n", "2", "-r", "1", "--no-ceilings"] if argv[0] == "bench" else []
    result = cli(*(word.format(tmp_path / "out") for word in argv), *model, *short)
    assert result.code in (0, 1, 3), result.err
    file = next(tmp_path.iterdir(), None)
    text = result.out if file is None else file.read_bytes().decode()
    assert text
    if "json" in " ".join(argv):
        assert text.isascii()
        assert "\x7f" not in text
    elif "sql" not in argv:
        cells = [cell for row in csv.reader(io.StringIO(text), strict=True) for cell in row]
        assert not FORBIDDEN & set("".join(cells))
        texts = [cell for cell in cells if not re.fullmatch(r"-?[\d.]+(e[+-]\d+)?", cell)]
        assert not [cell for cell in texts if cell.startswith(tuple("=+-@"))]
    assert not FORBIDDEN & set(text.replace("\r\n", "\n"))


def test_what_a_model_writes_on_a_terminal_has_no_control_character(runs):
    argv = ("generate", "--raw", "--ids", "94,90", "-n", "8", "--seed", "1", "--dtype", "float32")
    window = on_terminal(*argv, "-m", runs, NO_COLOR="1", TERM="dumb")
    code, text = window.end(), window.raw.replace("\r\n", "\n")
    assert code == 0, text
    assert "\\x1b" in text, "a token's escape is spelled out"
    assert not FORBIDDEN & set(text), [c for c in text if c in FORBIDDEN]


# what is not UTF-8

ODD = "m\udcff"  # the name that Python has for the bytes `m\xff`
LOCALE = {"LC_ALL": "C.UTF-8", "LLMCLI_CACHE": "cache"}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A directory with the model `m\\xff`, whose template writes half a surrogate pair."""
    root = tmp_path_factory.mktemp("utf8")
    template = "\ud800{{ messages[-1].content }}"
    write_tiny(root / "m", weights=True, template=template).rename(root / ODD)
    return root


@pytest.fixture
def run(place):
    def run(*argv, code=0, model=True, fresh=False):
        argv = [*argv, *(["-m", f"./{ODD}"] if model else [])]
        environ = {name: value for name, value in os.environ.items() if name[:2] != "LC"} | LOCALE
        out, err = ended(start(*argv, cwd=place, env=environ, fresh=fresh), code)
        assert "internal error" not in err
        return out.decode(), err  # raises where it is not UTF-8

    return run


def document(text):
    """JSON that has no half of a surrogate pair, which readers in other languages refuse."""
    found = json.loads(text)
    json.dumps(found, ensure_ascii=False).encode()
    return found


@pytest.mark.parametrize("argv", [
    ["generate", "ab", "-n", "2", "--chat"], ["load", "--check"], ["info"],
], ids=" ".join)  # fmt: skip
def test_a_directory_that_is_not_utf8(run, argv):
    found = document(run(*argv, "--json")[0])
    assert found["model"]["name"] == "./m\\udcff"
    assert argv != ["info"] or found["tokenizer"]["vocabulary"] == 261


@pytest.mark.exhaustive
def test_the_files_that_are_written_of_it(cli, monkeypatch, place):
    monkeypatch.chdir(place)
    for line in (
        "dump ab --name embed -o out.safetensors", "attention ab -o out.json",
        "timing ab --pairs 1 -n 1 --trace trace.json -q",
    ):  # fmt: skip
        assert cli(*line.split(), "-m", f"./{ODD}").code == 0
    with safe_open("out.safetensors", "np") as file:
        assert file.metadata()["model"] == "./m\\udcff"
    assert document(Path("out.json").read_text())["model"]["name"] == "./m\\udcff"
    assert document(Path("trace.json").read_text())["otherData"]["name"] == "./m\\udcff"
    bench = ("bench", "-m", f"./{ODD}", "-p", "2", "-n", "0", "-r", "1", "--no-ceilings")
    assert document(cli(*bench, "--json").out)["model"]["name"] == "./m\\udcff"
    (row,) = document(cli(*bench, "-o", "json").out)
    assert row["model_filename"] == "./m\\udcff"


def test_a_path_that_cannot_be_written_is_no_path(run):
    _, err = run("models", "path", f"./{ODD}", code=1, model=False, fresh=True)
    assert err.startswith("error: the path of `./m\\udcff` is not UTF-8")


@pytest.mark.parametrize("argv", [
    ["generate", "\udcff"], ["generate", "ab", "--stop", "a\udcff"],
    ["generate", "ab", "--system", "\udcff"], ["tokens", "ab", "--system", "\udcff"],
    ["generate", "ab", "-m", "./none\udcff"],
])  # fmt: skip
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

"""Names, metadata and tokens that would move a cursor never reach a terminal as they are."""

import contextlib
import csv
import io
import json
import os
import pty
import re
import sys

import children
import pytest
import torch
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
    folder = write_llama(
        tmp_path_factory.mktemp("hostile") / name,
        llama_tensors() | extra,
        _name_or_path=BAD,
        **{BAD: BAD},
        torch_dtype=BAD,
    )
    return write_tokenizer(folder)


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


COMMANDS = [
    ["tokens", "a \x1b[2J \x9b \u202e \x07"], ["tokens", "--chat", "a"],
    ["tokens", "--raw", "--ids", "3,90,91,92,95,96"], ["info"], ["info", "--metadata"], ["shapes"],
    ["shapes", "--params"], ["load"], ["load", "--all"], ["load", "--check"],
    ["generate", "--raw", "a", "-n", "2", "--block", "\x1b[31m"],
    ["tokens", "a", "-m", "\x1b[31m\u202e/none"],
]  # fmt: skip


@pytest.mark.parametrize("argv", COMMANDS, ids=lambda argv: " ".join(argv).encode("unicode_escape"))
def test_no_view_and_no_message_has_a_raw_control_character(cli, hostile, argv):
    model = [] if "-m" in argv else ["-m", hostile]
    result = cli(*argv, *model)
    assert result.code in (0, 1, 2, 3, 4, 7), result.err
    assert result.out or result.err
    for text in (result.out, result.err):
        assert not FORBIDDEN & set(text), [c for c in text if c in FORBIDDEN]


EXPORTS = [
    ["lens", "a", "-o", "{}.json"],
    ["attention", "a", "-o", "{}.json"],
    ["bench", "-o", "csv"], ["bench", "-o", "sql"], ["bench", "-o", "json"],
    ["bench", "-o", "jsonl"], ["bench", "--json"],
    ["generate", "--raw", "a", "-n", "2", "--json"],
    ["generate", "--raw", "a", "-n", "2", "--stream-json"], ["score", "a a", "--json"],
    ["tokens", "a \u202e ü", "--json"], ["info", "--json"], ["shapes", "--json"],
    ["load", "--json"], ["info", "-m", "./=\x1b[31m\u202e", "--json"],
]  # fmt: skip


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


def test_what_a_model_writes_on_a_terminal_has_no_control_character(tmp_path):
    folder = write_tokenizer(write_llama(tmp_path / BAD.replace("\x00", "")))
    argv = [sys.executable, "-m", "llmcli", "generate", "--raw", "--ids", "94,90", "-n", "8"]
    argv += ["--seed", "1", "-m", folder, "--dtype", "float32"]
    read, terminal = pty.openpty()
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), terminal)
    child = children.start(argv, env=os.environ | {"NO_COLOR": "1", "TERM": "dumb"}, **streams)
    os.close(terminal)
    seen = b""
    with contextlib.suppress(OSError):  # how Linux says that the other side is closed
        while chunk := os.read(read, 65536):
            seen += chunk
    os.close(read)
    text = seen.decode().replace("\r\n", "\n")
    assert child.wait(60) == 0, text
    assert "\\x1b" in text, "a token's escape is spelled out"
    assert not FORBIDDEN & set(text), [c for c in text if c in FORBIDDEN]

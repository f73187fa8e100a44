"""What `tokens` prints: exact bytes, and nothing to show without a tokenizer."""

from __future__ import annotations

import shutil

from gguf_model import write_model


def test_a_template_that_is_too_long_stops_only_who_asks_for_it(cli, tiny, tmp_path):
    folder = shutil.copytree(tiny, tmp_path / "m")
    (folder / "chat_template.jinja").write_text("x" * 300_000)
    assert cli("tokens", "-m", str(folder), "hi").code == 0
    result = cli("tokens", "-m", str(folder), "hi", "--chat")
    assert result.code == 4
    assert "the chat template has 262145 characters, more than 262144" in result.err
    assert "without `--chat`" in result.err


def test_an_unknown_pre_tokenizer_is_a_note_wherever_text_is_read(cli, tmp_path):
    path, = write_model(tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes().replace(b"smollm", b"newone"))
    for command in (("tokens", "hi"), ("score", "hi"), ("generate", "hi", "-n", "1")):
        result = cli(command[0], "-m", str(path), *command[1:])
        assert result.code == 0, result.err
        assert "the pre-tokenizer `newone` is unknown (`tokenizer.ggml.pre`)" in result.err
    for command in ("info", "load"):
        assert "`newone` is unknown" in "".join(cli(command, "-m", str(path), "--json").out)

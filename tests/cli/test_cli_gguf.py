"""A GGUF model on the command line: in several files the same answers as in one, and a note."""

import pytest
from gguf_model import write_model


@pytest.fixture
def models(tmp_path):
    """(the model in one file, the same in three parts)."""
    return write_model(tmp_path / "whole.gguf")[0], write_model(tmp_path / "m.gguf", parts=3)


def test_any_part_is_the_whole_model(cli, models):
    whole, parts = models

    def said(*argv, of):
        found = cli(*argv, "-m", of)
        assert found.code == 0, found.err
        return found

    argv = ["generate", "hello", "--temperature", "0", "-n", "8", "--dtype", "float32"]
    text = said(*argv, of=whole).out
    assert text
    assert [said(*argv, of=part).out for part in (parts[0], parts[2])] == [text, text]
    one, other = (said("info", "--json", of=path).json() for path in (whole, parts[1]))
    for key in ("tensors", "formats"):
        assert other["file"][key] == one["file"][key]
    assert other["file"]["bytes"] == sum(part.stat().st_size for part in parts)
    assert other["file"]["files"] == 3
    assert other["checks"] == one["checks"]
    shapes = [said("shapes", "--params", of=path).out for path in (whole, parts[1])]
    one, other = (text.partition("\n")[2] for text in shapes)
    assert other.replace(str(parts[0]), "") == one.replace(str(whole), "")
    parts[1].unlink()
    for command in ("info", "shapes"):
        found = cli(command, "-m", parts[0])
        assert (found.code, found.out) == (4, "")
        assert "`m-00002-of-00003.gguf`" in found.err
        assert "Traceback" not in found.err


def test_an_unknown_pre_tokenizer_is_a_note_wherever_text_is_read(cli, models):
    path, _ = models
    path.write_bytes(path.read_bytes().replace(b"smollm", b"newone"))
    for command in (("tokens", "hi"), ("score", "hi"), ("generate", "hi", "-n", "1")):
        result = cli(*command, "-m", path)
        assert result.code == 0, result.err
        assert "the pre-tokenizer `newone` is unknown (`tokenizer.ggml.pre`)" in result.err
    for command in ("info", "load"):
        assert "`newone` is unknown" in cli(command, "-m", path, "--json").out

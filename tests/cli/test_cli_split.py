"""A GGUF model in several files on the command line: the same answers as in one file."""

import pytest
from gguf_model import write_model


@pytest.fixture
def models(tmp_path):
    """(the model in one file, the same in three parts)."""
    return write_model(tmp_path / "whole.gguf")[0], write_model(tmp_path / "m.gguf", parts=3)


def test_generate_says_the_same_from_any_part(cli, models):
    whole, parts = models
    argv = ["generate", "hello", "--temperature", "0", "-n", "8", "--dtype", "float32"]
    expected = cli(*argv, "-m", whole)
    assert expected.code == 0, expected.err
    assert expected.out
    for part in (parts[0], parts[2]):
        found = cli(*argv, "-m", part)
        assert found.code == 0, found.err
        assert found.out == expected.out


def test_info_counts_all_files(cli, models):
    whole, parts = models
    expected, found = (cli("info", "--json", "-m", path) for path in (whole, parts[1]))
    assert found.code == 0, found.err
    one, other = expected.json()["file"], found.json()["file"]
    assert other["tensors"] == one["tensors"]
    assert other["formats"] == one["formats"]
    assert other["bytes"] == sum(part.stat().st_size for part in parts)
    assert other["files"] == 3
    assert found.json()["checks"] == expected.json()["checks"]


def test_shapes_are_the_same(cli, models):
    whole, parts = models
    expected, found = (cli("shapes", "--params", "-m", path) for path in (whole, parts[1]))
    assert found.code == 0, found.err
    assert (
        found.out.replace(str(parts[0]), "").splitlines()[1:]
        == (expected.out.replace(str(whole), "").splitlines()[1:])
    )


def test_a_missing_part_is_one_line_with_its_name(cli, models):
    _, parts = models
    parts[1].unlink()
    for command in ("info", "shapes"):
        found = cli(command, "-m", parts[0])
        assert found.code == 4
        assert found.out == ""
        assert "`m-00002-of-00003.gguf`" in found.err
        assert "Traceback" not in found.err

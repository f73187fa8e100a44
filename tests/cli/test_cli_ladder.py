"""`llmcli ladder`: what it prints, refuses and writes."""

from __future__ import annotations

import json

import pytest
from cli_tiny import write_tiny

from llmcli.commands.ladder.measure.rungs.heads import HeadsAsDimension


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_tiny(tmp_path_factory.mktemp("ladder") / "m", weights=True))


@pytest.fixture
def ladder(cli, folder):
    return lambda *argv: cli("ladder", "-m", folder, *argv)


def test_the_table(ladder):
    result = ladder("ab")
    assert result.code == 0
    assert result.err == ""
    lines = result.out.splitlines()
    assert lines[0].endswith("(float32 on cpu)")
    assert lines[1].startswith('"a" "b" and then, one by one, ')
    assert "✓ every rung agrees with the one before (float32)" in lines
    assert len(lines) <= 22  # a screen, the command line and the next prompt included
    for number, name in enumerate(
        ("loops", "rows", "matrices", "heads", "combined", "cache", "batch", "fused"), 1
    ):
        assert any(line.startswith(f"{number}   {name}") for line in lines)


def test_the_rungs_that_are_named_are_shown_with_their_formulas(ladder):
    lines = ladder("ab", "--rung", "3-4").out.splitlines()
    for number, name in ((3, "matrices"), (4, "heads")):
        assert any(line.startswith(f"{number}  {name}") for line in lines)  # the formulas
        assert any(line.startswith(f"{number}   {name}") for line in lines)  # the table
    assert any(line.startswith("  copy    C as n × d, heads merged") for line in lines)


def test_json_has_every_rung(ladder):
    document = ladder("ab", "--json", "--dtype", "float64", "-n", "1", "--batch", "2").json()
    assert document["schema"] == "llmcli.ladder/1"
    assert document["ok"] is True
    assert document["tokens"] == ["a", "b"]
    assert dict(document["letters"])["b"] == 2
    assert [rung["number"] for rung in document["rungs"]] == list(range(1, 9))
    assert all(rung["ok"] for rung in document["rungs"])
    assert all(rung["difference"] <= 1e-9 for rung in document["rungs"][1:])
    assert document["rungs"][0]["difference"] is None
    assert document["environment"]["torch"]
    steps = document["rungs"][3]["steps"]
    assert {
        "formula",
        "shape",
        "strides",
        "source",
        "moved",
        "values",
        "section",
        "axes",
        "note",
        "token",
    } == set(steps[0])


def test_one_rung_is_explained(ladder):
    result = ladder("ab", "--rung", "4", "--explain")
    assert result.code == 0
    assert "without numbers: steps of rung 3 that have more axes here" in result.out
    assert "copy  C as n × d, heads merged" in result.out
    assert "rung 4: logits differ from the rung before by at most" in result.out
    assert "tok/s" not in result.out


def test_rungs_have_names(ladder):
    document = ladder("ab", "--rung", "cache,4", "--json").json()
    assert [rung["name"] for rung in document["rungs"]] == ["heads", "cache"]
    hint = ladder("ab", "--rung", "cashe").err
    assert "1 loops, 2 rows" in hint


def test_no_prompt_means_the_built_in_one(ladder):
    result = ladder("--rung", "6")
    assert result.err == "note: no prompt was given: `In the beginning` is used\n"
    assert '"I" "n" " " "t" "h" "e"' in result.out


def test_a_wrong_rung_fails_and_is_still_shown(ladder, monkeypatch):
    right = HeadsAsDimension.forward
    monkeypatch.setattr(
        HeadsAsDimension, "forward", lambda self, ids, until=None: right(self, ids, until) * 1.01
    )
    result = ladder("ab", "--rung", "3-4")
    assert result.code == 1
    assert "rung 4: logits differ from the rung before by at most" in result.out
    assert result.err.startswith("error: rung 4 differs from the rung before by more than rounding")
    failed = ladder("ab", "--rung", "3-4", "--json")
    assert failed.code == 1
    assert failed.json()["ok"] is False  # one document, and it says so


def test_files(ladder, tmp_path):
    assert ladder("ab", "--rung", "4-6", "-o", str(tmp_path / "c.png")).code == 0
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
    assert ladder("ab", "--rung", "4-6", "-o", str(tmp_path / "c.json")).code == 0
    assert json.loads((tmp_path / "c.json").read_text())["schema"] == "llmcli.ladder/1"
    nowhere = ladder("ab", "--rung", "6", "-o", str(tmp_path / "no" / "c.png"))
    assert nowhere.code == 1
    assert "there is no such directory" in nowhere.err
    assert nowhere.out == ""  # refused before the rungs are run
    (tmp_path / "d.png").mkdir()
    failed = ladder("ab", "--rung", "6", "--json", "-o", str(tmp_path / "d.png"))
    assert failed.code == 1
    assert failed.json()["error"]["kind"] == "write_failed"


def test_a_pipe_is_read_only_where_it_is_asked_for(ladder, monkeypatch, tmp_path):
    (tmp_path / "text").write_text("xyz")
    with (tmp_path / "text").open() as stream:
        monkeypatch.setattr("sys.stdin", stream)
        assert '"a" "b"' in ladder("ab", "--rung", "8").out
    with (tmp_path / "text").open() as stream:
        monkeypatch.setattr("sys.stdin", stream)
        assert '"x" "y" "z"' in ladder("-", "--rung", "8").out


@pytest.mark.parametrize("rung", [1, 4])
def test_ctrl_c_keeps_the_rungs_that_were_reached(ladder, monkeypatch, rung):
    from llmcli.commands.ladder.measure.runner import RUNGS

    def interrupted(self, ids, until=None):
        raise KeyboardInterrupt

    monkeypatch.setattr(RUNGS[rung - 1], "forward", interrupted)
    result = ladder("ab", "--json")
    assert result.code == 130
    if rung == 1:
        assert json.loads(result.out)["error"]["kind"] == "interrupted"
        return
    document = json.loads(result.out)
    assert [found["number"] for found in document["rungs"]] == [1, 2, 3]
    assert document["interrupted"] is True
    assert "interrupted after rung 3" in result.err


def test_rotations_that_depend_on_the_length_are_refused_where_they_do(cli, tmp_path):
    folder = write_tiny(
        tmp_path / "m", weights=True, max_position_embeddings=8,
        rope_scaling={"rope_type": "dynamic", "factor": 2.0},
    )  # fmt: skip
    result = cli("ladder", "-m", str(folder), "abcdefg", "--context-length", "20")
    assert result.code == 2
    assert "beyond 8 tokens this model rotates by the length" in result.err
    short = cli("ladder", "-m", str(folder), "abcdef", "--rung", "5-7", "--context-length", "20")
    assert short.code == 0


def test_the_names_are_those_of_the_rungs():
    """The command keeps its own list, for the rungs' would import torch."""
    from llmcli.commands.ladder.command import NAMES
    from llmcli.commands.ladder.measure.runner import RUNGS

    assert tuple(rung.name for rung in RUNGS) == NAMES

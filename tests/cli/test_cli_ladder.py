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


def test_json_has_every_rung(ladder):
    document = ladder("ab", "--json", "--dtype", "float64", "-n", "1", "--batch", "2").json()
    assert all(rung["difference"] <= 1e-9 for rung in document["rungs"][1:])
    assert document["environment"]["torch"]
    steps = document["rungs"][3]["steps"]
    assert set(steps[0]) == {
        "formula", "shape", "strides", "source", "moved", "values", "section", "axes", "note",
        "token",
    }  # fmt: skip


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


def test_the_names_are_those_of_the_rungs():
    """The command keeps its own list, for the rungs' would import torch."""
    from llmcli.commands.ladder.command import NAMES
    from llmcli.commands.ladder.measure.runner import RUNGS

    assert tuple(rung.name for rung in RUNGS) == NAMES

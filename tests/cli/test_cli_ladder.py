"""`llmcli ladder`: what it writes, and how it ends."""

import json
import re

import pytest
from cli_tiny import write_tiny

from llmcli.commands.ladder.measure import runner
from llmcli.commands.ladder.measure.record import Recorder
from llmcli.commands.ladder.measure.runner import RUNGS


@pytest.fixture
def ladder(cli, tmp_path, monkeypatch):
    """Each rung is timed once."""
    monkeypatch.setattr(runner, "ROUNDS_S", 0.0)
    folder = str(write_tiny(tmp_path / "m", weights=True))
    return lambda *argv: cli("ladder", "-m", folder, "ab", *argv)


@pytest.fixture
def wrong(monkeypatch):
    """Rung 4 is off by a hundredth."""
    right = RUNGS[3].forward
    monkeypatch.setattr(
        RUNGS[3], "forward", lambda self, ids, until=None: right(self, ids, until) * 1.01
    )


def test_a_wrong_rung_fails_and_is_still_shown(ladder, wrong):
    result = ladder("--rung", "3-4")
    assert result.code == 1
    assert "rung 4: logits differ from the rung before by at most" in result.out
    assert result.err.startswith("error: rung 4 differs from the rung before by more than rounding")
    failed = ladder("--rung", "3-4", "--json")
    assert failed.code == 1
    assert failed.json()["ok"] is False  # one document, and it says so


def test_a_wrong_rung_is_red(ladder, wrong, monkeypatch):
    """Its difference in the table and the verdict below; the rung before it is green."""
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm-256color")
    out = ladder("--rung", "2-4", "--no-pager").out
    red, green = (set(re.findall(rf"\x1b\[{code}m([^\x1b]*)", out)) for code in ("1;31", "32"))
    differences = {words for words in red | green if re.fullmatch(r" *\d\.\de[+-]\d\d", words)}
    assert [len(differences & colour) for colour in (red, green)] == [1, 1]
    assert any(words.startswith("rung 4: logits differ") for words in red)
    assert not any("every rung agrees" in words for words in green)


@pytest.mark.parametrize("agrees", [True, False])
def test_nothing_is_as_on_a_rung_that_disagrees(ladder, request, agrees):
    """All functions of a wrong rung are shown with their numbers: any may be the wrong one."""
    if not agrees:
        request.getfixturevalue("wrong")
    result = ladder("--rung", "4", "--explain")
    assert result.code == (0 if agrees else 1)
    assert ("as on rung 3: read, embed, block" in result.out) is agrees
    assert bool(re.search(r"^embed$", result.out, re.MULTILINE)) is not agrees


def test_nothing_is_recorded_where_nobody_looks(ladder, monkeypatch):
    """The plain table traces no line and taps no tensor: what it times is the arithmetic alone."""
    seen = []
    monkeypatch.setattr(Recorder, "_call", lambda self, *event: seen.append(event))
    monkeypatch.setattr(Recorder, "tap", lambda self, *tensor: seen.append(tensor))
    ladder()
    assert not seen
    ladder("--rung", "8")
    assert seen


@pytest.mark.parametrize("rung", [1, 4])
def test_ctrl_c_keeps_the_rungs_that_were_reached(ladder, monkeypatch, rung):
    def interrupted(self, ids, until=None):
        raise KeyboardInterrupt

    monkeypatch.setattr(RUNGS[rung - 1], "forward", interrupted)
    result = ladder("--json")
    assert result.code == 130
    document = json.loads(result.out)
    if rung == 1:
        assert document["error"]["kind"] == "interrupted"
        return
    assert [found["number"] for found in document["rungs"]] == [1, 2, 3]
    assert document["interrupted"] is True
    assert "interrupted after rung 3" in result.err

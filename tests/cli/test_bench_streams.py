"""Where the rows of a benchmark go, and what becomes of a stream that takes no more."""

from __future__ import annotations

import io
import os
from typing import Any

import pytest

from llmcli.cli.options import OutputOptions
from llmcli.cli.output import Output
from llmcli.commands.bench.streams import Streams
from llmcli.errors import WriteFailed

ROW: Any = object()


class Words:
    """A writer whose rows are words."""

    def header(self) -> str:
        return "head\n"

    def row(self, row: object) -> str:
        return "row\n"

    def footer(self) -> str:
        return ""


def streams() -> Streams:
    return Streams(Output("bench", OutputOptions()), None, Words())


def test_rows_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    both = streams()
    both.begin()
    both.row(ROW)
    both.end()
    assert tuple(capsys.readouterr()) == ("", "head\nrow\n")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
@pytest.mark.parametrize("step", ["begin", "row"])
def test_rows_on_a_full_stderr_are_missed(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.FileIO("/dev/full", "w")
    monkeypatch.setattr("sys.stderr", io.TextIOWrapper(raw, write_through=True))
    with pytest.raises(WriteFailed, match="rows of `-oe`: no space left on device"):
        streams().begin() if step == "begin" else streams().row(ROW)
    raw.close()


def test_rows_on_a_closed_stderr_are_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", None)
    with pytest.raises(WriteFailed, match="rows of `-oe`: stderr is closed"):
        streams().begin()

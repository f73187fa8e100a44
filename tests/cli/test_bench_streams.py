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


class Words:
    """A writer whose rows are words."""

    def header(self) -> str:
        return "head\n"

    def row(self, row: object) -> str:
        return "row\n"

    def footer(self) -> str:
        return ""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
def test_a_stderr_that_takes_no_more(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row: Any = object()
    both = Streams(Output("bench", OutputOptions()), None, Words())
    both.begin()
    both.row(row)
    both.end()
    assert tuple(capsys.readouterr()) == ("", "head\nrow\n")
    raw = io.FileIO("/dev/full", "w")
    monkeypatch.setattr("sys.stderr", io.TextIOWrapper(raw, write_through=True))
    for write in (both.begin, lambda: both.row(row)):
        with pytest.raises(WriteFailed, match="rows of `-oe`: no space left on device"):
            write()
    raw.close()
    monkeypatch.setattr("sys.stderr", None)
    with pytest.raises(WriteFailed, match="rows of `-oe`: stderr is closed"):
        both.begin()

"""The kit for a visit to a card, where there is none: every stage runs to its end, small."""

import os
import sys
from pathlib import Path

import children
import pytest

VISIT = Path(__file__).with_name("visit.sh")


@pytest.mark.exhaustive
def test_a_dry_run(tmp_path):
    """Tests are collected alone, `plain` is `rates` again, and the receipt is `selftest`'s."""
    names = "tests", "commands", "rates", "kernels"
    done = children.run(
        ["bash", str(VISIT), *names], capture_output=True, text=True,
        env={**os.environ, "OUT": str(tmp_path), "PYTHON": sys.executable, "VISIT_TOTAL": "900",
             "VISIT_STAGE": "600", "PYTEST_ADDOPTS": "--collect-only -q"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    log = (tmp_path / "log.txt").read_text()
    assert all(f"{name}: exit 0" in log for name in names)
    screens = (tmp_path / "commands.txt").read_text()
    assert screens.count("\n$ llmcli") == 14
    assert "1B default" in (tmp_path / "rates.txt").read_text()
    alone = (tmp_path / "kernels.txt").read_text()
    assert alone.count("by triton error") == alone.count("by pytorch error") == 27

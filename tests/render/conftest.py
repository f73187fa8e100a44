"""`golden`: what is drawn from made-up reports, kept as text that is read like a document."""

from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "golden"


@pytest.fixture
def golden(as_written):
    """`golden(name, {title: text})`: they are those of golden/NAME.txt, to the letter."""
    return lambda name, screens: as_written(FOLDER / f"{name}.txt", screens)

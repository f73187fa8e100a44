"""`golden`: what is drawn from made-up reports, kept as text that is read like a document."""

from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "golden"


def written(screens):
    """Each text below its title, by two columns to the right."""
    lines = []
    for title, text in screens.items():
        text = text if isinstance(text, str) else "\n".join(text)
        lines += ["", f"# {title}", *(f"  {line}".rstrip() for line in text.split("\n"))]
    return "\n".join(lines[1:]).replace("\x1b", "␛") + "\n"


@pytest.fixture
def golden(as_written):
    """`golden(name, {title: text})`: they are those of golden/NAME.txt, to the letter.

    `pytest tests/render --update` writes it anew: read the difference before it goes in.
    """
    return lambda name, screens: as_written(FOLDER / f"{name}.txt", written(screens))

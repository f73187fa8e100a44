"""Signs that a stream's encoding lacks."""

import io

import pytest

from llmcli.cli.streams import spelled, tolerate


@pytest.mark.parametrize(
    ("encoding", "text", "written"),
    [
        ("ascii", "✓ a · b ≥ −1 × 2 → 中", b"ok a . b >= -1 x 2 -> ?"),
        ("ascii", "✗✓", b"FAILok"),
        ("latin-1", "✗ × ² …", b"FAIL \xd7 \xb2 ..."),
        ("utf-8", "✗ \udcff", "✗ ?".encode()),
    ],
)
@pytest.mark.parametrize("errors", ["strict", "surrogateescape", "backslashreplace"])
def test_what_an_encoding_lacks_is_spelled(encoding, text, written, errors):
    if encoding == "utf-8" and errors != "strict":
        return  # which then has a way of its own, and needs none for signs
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors=errors)
    tolerate(stream)
    stream.write(text)
    stream.flush()
    assert stream.buffer.getvalue() == written


def test_spelling_leaves_ascii_alone():
    text = "".join(map(chr, range(128)))
    assert spelled(text) == text

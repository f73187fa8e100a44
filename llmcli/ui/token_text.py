"""How views name tokens, their probabilities, and rows of the residual stream."""

from __future__ import annotations

from llmcli.ui.cells import Ink
from llmcli.ui.theme import SPACE, quoted

EMBEDDING = "embedding"  # where there is room for the word


def short(name: str, *, embedding: str = "embed") -> str:
    """`embed`, `3 mid` for the stream before that layer's feed-forward part, `3` after it."""
    _, layer, place = name.split(".")
    if place == "resid_pre":
        return embedding
    return f"{layer} mid" if place == "resid_mid" else layer


def in_cell(id: int, text: str, ink: Ink) -> str:
    """A token in a cell: without quotes, its spaces visible; the id where it has no text."""
    shown = quoted(text)[1:-1].replace(" ", space(ink)) or str(id)
    return shown.encode("ascii", "backslashreplace").decode() if ink.ascii else shown


def space(ink: Ink) -> str:
    """The sign for a space."""
    return "_" if ink.ascii else SPACE


def in_words(id: int, text: str) -> str:
    """A token in a sentence: quoted, or its id."""
    return quoted(text) if text else f"id {id}"


def percent(probability: float) -> str:
    """`50.00%`, and two significant digits of what is less than a tenth of a percent: `0.0082%`."""
    value = 100 * probability
    return f"{value:.2f}%" if value >= 0.1 else f"{value:.2g}%"

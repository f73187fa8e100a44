"""Colours and words of everything that is shown. The 16 standard colours: any terminal has them."""

from __future__ import annotations

import unicodedata
from collections.abc import Collection, Mapping

HEADING = "bold"
FAINT = "dim"
NUMBER = "cyan"
SPECIAL = "magenta"

# least probability of each band, from sure to surprising
CONFIDENCE: tuple[tuple[float, str, str], ...] = (
    (0.75, "green", "75 % and more"),
    (0.25, "cyan", "25 %"),
    (0.05, "yellow", "5 %"),
    (0.0, "red", "less"),
)


def confidence_style(probability: float) -> str:
    """The style for a token that the model gave this probability (0 … 1; NaN is the lowest)."""
    bands = (style for least, style, _ in CONFIDENCE if probability >= least)
    return next(bands, CONFIDENCE[-1][1])


SPACE = "␣"  # what stands for one where it has to be seen


def printable(text: str) -> str:
    """`text` for a terminal: control characters other than newline and tab are spelled out.

    A model can be made to write escape sequences that move the cursor or set the title, and
    characters that reorder the text around them. Other characters that are not seen stay: emoji
    and many scripts need joiners, variation selectors and tags, and none of them moves anything.
    """
    return _spelled(text, {"\n": "\n", "\t": "\t"}, _UNSEEN)


def quoted(text: str) -> str:
    """`text` in double quotes with every invisible character spelled out: `" Paris\\n"`.

    Backslashes stay: a token that is half a character comes with `\\xf0` in it already.
    """
    return f'"{_spelled(text, _NAMED, (*_UNSEEN, "Cf"))}"'


def one_line(text: str) -> str:
    """`text` with every control character spelled out, newlines too: for messages."""
    return _spelled(text, _NAMED, _UNSEEN)


def markdown_cell(text: str) -> str:
    """A text of one line as a cell of a Markdown table: a bar in it would begin the next one."""
    return text.replace("|", "\\|")


def csv_cell(text: str) -> str:
    """`text` as a cell of a table: on one line, and where it would be a formula behind a `'`.

    Spreadsheets compute what begins with one of these signs, and a token or a name can be anything.
    """
    cell = quoted(text)[1:-1]
    return f"'{cell}" if cell.startswith(("=", "+", "-", "@", "＝", "＋", "－", "＠")) else cell


def encodable(text: str) -> str:
    """`text` as UTF-8 and every reader of JSON can have it: lone surrogates are spelled out.

    Python makes them of bytes that are not UTF-8, in a name of a file or an argument.
    """
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


# Unicode's property Bidi_Control, and after it the deprecated controls of mirroring and digits
_REORDERING = frozenset(
    map(chr, (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x2070)))
)
_UNSEEN = ("Cc", "Cs", "Zl", "Zp")
_NAMED = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}


def _spelled(text: str, named: Mapping[str, str], unseen: Collection[str]) -> str:
    """`text` with `named` characters replaced; others are escaped if of the categories `unseen`.

    Those that reorder the text around them always are.
    """
    if text.isprintable():
        return text
    return "".join(
        named[character]
        if character in named
        else escaped(character)
        if character in _REORDERING or unicodedata.category(character) in unseen
        else character
        for character in text
    )


def escaped(character: str) -> str:
    """`\\x1b`, `\\u202e` or `\\U000e0001` for a character."""
    code = ord(character)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"

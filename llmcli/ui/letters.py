"""The letters of the documents: what each counts, and what other documents call it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

# letter → words for so many of them, and the other names of the same size
LETTERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "b": ("sequences", ()),
    "n": ("tokens", ("N",)),
    "d": ("width", ("d_model", "hidden_dim")),
    "h": ("heads", ("A", "n_heads")),
    "h_kv": ("heads of keys and values", ("n_kv_heads",)),
    "h_k": ("heads of queries and keys", ()),
    "d/h": ("a head", ("d_k", "d_v", "head_dim")),
    "d_k": ("a head", ("d_v", "head_dim")),  # where h heads are not d wide
    "d_v": ("a value", ()),
    "F": ("neurons", ()),
    "Fₛ": ("neurons of the shared expert", ()),
    "Fₑ": ("neurons of an expert", ()),
    "E": ("experts", ()),
    "K": ("chosen experts", ()),
    "v": ("in the vocabulary", ("vocab_size",)),
    "layers": ("", ("blocks",)),
}


# axes of tensors → words for so many of them
AXES = {
    "B": "sequences",
    "T": "new tokens",
    "S": "tokens so far",
    "D": "width",
    "H": "heads",
    "Hk": "heads of keys and values",
    "dh": "a head's query and key",
    "dv": "a head's value",
    "F": "neurons",
    "Fs": "neurons of the shared expert",
    "Fe": "neurons of an expert",
    "E": "experts",
    "K": "of them that a token chooses",
    "V": "in the vocabulary",
    "P": "learned positions",
    "dn": "of these for content",
    "dr": "of these rotated",
    "dc": "a token's latent of keys and values",
    "dq": "a token's latent of queries",
    "dk": "a head's query and key",
    "C": "channels of a convolution",
    "G": "groups of heads that share queries and keys",
    "N": "a group's query and key",
    "L": "tokens that a convolution sees",
    "W": "of them before the last",
    "Lp": "layers",
    "Dp": "numbers of a token's embedding for each",
    "Vp": "tokens with such embeddings",
}


def letter_lines(values: Sequence[tuple[str, int]]) -> Iterator[str]:
    """A line for each letter of one model: F as a multiple of d, a name with one meaning only."""
    sizes = dict(values)
    for letter, value in values:
        number, width = str(value), sizes.get("d", 0)
        if letter == "F" and width and value > width and value % width == 0:
            number = f"{value // width}d = {value}"
        words = _counted(LETTERS[letter][0], (value,))
        others = ", ".join(name for name in LETTERS[letter][1] if name not in sizes)
        parts = (f"{letter} = {number}", words, f"({others})" if others else "")
        yield " ".join(filter(None, parts))


def _counted(words: str, values: Sequence[int]) -> str:
    """`heads of keys and values`, `new tokens`; of one `head of keys and values`, `new token`."""
    return re.sub(r"^(\w+ )?(\w+)s\b", r"\1\2", words) if tuple(values) == (1,) else words


def axis_line(letter: str, documents: str, values: tuple[int, ...]) -> str:
    """`T = 12 new tokens, then 1 (n, N)`: an axis, its sizes, and what the documents call it."""
    first, later = values, ""
    if letter in "TS":  # one size in each phase
        first, later = values[:1], "".join(f", then {n}" for n in values[1:])
    sizes = "/".join(map(str, first))
    known = LETTERS.get(documents, ("", ()))[1]
    others = [name for name in (documents, *known) if name != letter]
    called = f" ({', '.join(others)})" if others else ""
    words = AXES.get(letter, "")  # of a part that is not known here it is nothing
    return f"{letter} = {sizes} {_counted(words, first)}{later}{called}".rstrip()

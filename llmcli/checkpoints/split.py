"""What the parts of a split GGUF model are called: `x-00002-of-00003.gguf`.

Source: `llama_split_path` of llama.cpp, whose `gguf-split` writes the parts and which looks
for the others by name alone.
"""

from __future__ import annotations

import re

# The largest models known have some fifty parts. A name is typed or comes from a listing, and
# five digits of it must not make a hundred thousand look-ups.
MAX_PARTS = 1024

_PART = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})(\.gguf)", re.DOTALL | re.IGNORECASE)


def part_names(name: str) -> tuple[str, ...] | None:
    """Names of all parts of the group that `name` belongs to, in order; None for another name.

    `name` may have folders before it, which the parts share. None also where the numbers make
    no sense: part 0, part 4 of 3, no parts, more than `MAX_PARTS`.
    """
    found = _PART.fullmatch(name)
    if found is None:
        return None
    stem, part, count, suffix = found[1], int(found[2]), int(found[3]), found[4]
    if not 1 <= part <= count <= MAX_PARTS:
        return None
    return tuple(f"{stem}-{number:05d}-of-{count:05d}{suffix}" for number in range(1, count + 1))

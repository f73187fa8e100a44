"""A byte-pair vocabulary in which any two bytes may merge, in a scrambled order.

Where a pre-tokenizer cuts, no merge happens: two splits of a text that differ nearly always
give different ids.
"""

import random


def letters() -> list[str]:
    """GPT-2's letter for every byte 0 … 255 (openai/gpt-2, encoder.py), written down again."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def pair_vocabulary() -> tuple[list[str], list[str]]:
    """(tokens, merges): 256 letters, then the 65,536 pairs in the order of their merges."""
    alphabet = letters()
    pairs = [(first, second) for first in alphabet for second in alphabet]
    random.Random(0).shuffle(pairs)
    tokens = alphabet + [first + second for first, second in pairs]
    return tokens, [f"{first} {second}" for first, second in pairs]

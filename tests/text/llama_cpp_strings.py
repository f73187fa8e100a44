"""Strings that try a tokenizer: written text, whitespace, code, digits, look-alikes, any Unicode.

And a vocabulary that shows where they are cut. Deterministic; used by make_llama_cpp_ids.py, which
freezes what llama.cpp makes of them.
"""

import random
import unicodedata

WORDS = [
    "a", "I", "the", "Hello", "HELLO", "world", "don't", "DON'T", "we'll", "We'LL",
    "you're", "I'm", "they'd", "it's", "'tis", "O'Neil", "camelCase", "XMLHttpRequest",
    "snake_case", "__init__", "naïve", "café", "CAFÉ", "straße", "Ünïcödé", "señor",
    "ДОБРО", "добрый", "день", "Ελληνικά", "中文", "中文字符", "日本語", "ひらがな",
    "カタカナ", "한국어", "العربية", "עברית", "हिन\u094dदी", "ไทย", "👍", "🙂",
    "👨\u200d👩\u200d👧", "🏳️\u200d🌈", "é", "e\u0301", "ﬁ", "ǅ",
]  # fmt: skip
NUMBERS = [
    "0", "1", "12", "123", "1234", "12345", "1234567", "3.14", "-2.5e-10", "1,000,000",
    "0x1F", "٣٤٥", "Ⅷ", "½", "²", "५", "2024-01-31", "10:45",
]  # fmt: skip
SPACES = [
    " ", "  ", "   ", "        ", "\n", "\n\n", "\n\n\n", "\r\n", "\r", "\t", "\t\t", " \n",
    "\n ", " \n \n", "\xa0", "\u2003", "\u3000", "\u2028", "\u200b", "\x85", "\x0b", "\x0c",
    "\ufeff",
]  # fmt: skip
MARKS = [
    ".", ",", "!", "?!", "...", "…", "--", "—", "/", "//", "/*", "*/", "()", "{}", "[]",
    "$", "+", "<=", "=>", "^", "~", "|", "||", "`", "```", "'", "''", "\"", "“", "”", "«",
    "。", "，", "、", "।", "€", "×", "°", "_", "#", "##", "@", "&", "&&", "%", "\\", "\\n",
    ";", ":", "::", "->", "\x00", "\x01", "\x7f",
]  # fmt: skip
CODE = [
    "def f(x):\n    return x", "for (int i = 0; i < n; ++i) {", "#include <stdio.h>\n",
    "x = a[i+1]", "if (a && !b) { return; }", "SELECT * FROM t WHERE id = 3;",
    "<div class=\"a\">text</div>", "http://a.example/b?c=1&d=2", "user@example.org",
    "lambda x: x**2", "println!(\"{}\", x)", "\tgo func() {}()\n",
    "# heading\n\n- item\n- item 2\n", "{\"key\": [1, 2.5, null]}", "\\frac{1}{2}",
]  # fmt: skip
LOOKALIKES = [
    "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<reponame>", "<repo_name>",
    "<file_sep>", "<filename>", "<empty_output>", "<|im_start|", "|im_end|>", "<|im_end|>>",
    "<<|im_end|>", "<|im_", "< |im_end|>", "<|IM_END|>", "<|im_start|>user\n",
    "<|im_end|>\n<|im_start|>assistant\n", "<s>", "</s>", "<unk>", "<0x0A>", "<|eot_id|>",
    "[INST]", "▁", "Ġ", "ĠĠ", "Ċ",
]  # fmt: skip


def strings(count: int, seed: int) -> list[str]:
    """`count` distinct strings of up to some 60 characters, a quarter of them from all Unicode."""
    draw = random.Random(seed)
    found: dict[str, None] = {"": None}
    while len(found) < count:
        found[_one(draw)] = None
    return list(found)


def _one(draw: random.Random) -> str:
    kind = draw.random()
    if kind < 0.25:
        return "".join(_character(draw) for _ in range(draw.randint(1, 24)))
    pools = [WORDS, NUMBERS, SPACES, MARKS, CODE]
    if kind < 0.45:
        pools.append(LOOKALIKES)
        pools.append(LOOKALIKES)
    if kind < 0.7:
        return "".join(draw.choice(draw.choice(pools)) for _ in range(draw.randint(1, 9)))
    sentence = " ".join(draw.choice(draw.choice([WORDS, WORDS, NUMBERS, MARKS])) for _ in range(9))
    return draw.choice(SPACES) + sentence if draw.random() < 0.3 else sentence


def _character(draw: random.Random) -> str:
    ranges = ((1, 0x80), (0x80, 0x300), (0x300, 0x3000), (0x3000, 0xD800), (0xE000, 0x110000))
    return chr(draw.randrange(*draw.choice(ranges)))


def comparable(pre: str, text: str) -> bool:
    """Whether `pre` should split `text` as llama.cpp does (see llmcli/text/pretokenizers.py).

    Left out: characters that are newer than this Python's Unicode (llama.cpp and the
    `tokenizers` library each have a version of their own), for `tekken` and `gpt-4o` cased
    letters outside ASCII and combining marks, for DeepSeek's spaces outside ASCII.
    """
    if any(unicodedata.category(c) in ("Cn", "Co") for c in text):
        return False
    beyond = [c for c in text if ord(c) > 127]
    if pre in ("tekken", "gpt-4o"):
        kept_apart = ("Lu", "Ll", "Lt", "Mn", "Mc", "Me")
        return all(unicodedata.category(c) not in kept_apart for c in beyond)
    if pre in ("deepseek-llm", "deepseek-coder"):
        return not any(c.isspace() for c in beyond)
    return True


def letters() -> list[str]:
    """GPT-2's letter for every byte 0 … 255 (openai/gpt-2, encoder.py), written down again."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def pair_vocabulary() -> dict[str, list[str]]:
    """Tokens and merges: 256 letters, and the 65,536 pairs of them in a scrambled order.

    Any two bytes may merge. Where a pre-tokenizer cuts, no merge happens: two splits of a text that
    differ nearly always give different ids.
    """
    alphabet = letters()
    pairs = [(first, second) for first in alphabet for second in alphabet]
    random.Random(0).shuffle(pairs)
    return {
        "tokens": alphabet + [first + second for first, second in pairs],
        "merges": [f"{first} {second}" for first, second in pairs],
    }

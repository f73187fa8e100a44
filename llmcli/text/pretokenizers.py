"""How text is cut before byte-pair merging, by the name that a GGUF file gives it.

`tokenizer.ggml.pre` names a list of regular expressions (llama.cpp, src/llama-vocab.cpp,
`llm_tokenizer_bpe`). They apply one after the other, each inside the pieces that the one before
left; both what matches and what lies between matches become pieces. Most are the expressions of
the models' own tokenizer.json. llama.cpp's engine knows neither `(?i:…)` nor the letter classes
Lu, Lt, Lm, Lo and Ll, and approximates them: there the model's own expression stands here, since
that is what the model was trained with (the two differ on cased letters outside ASCII, and on
combining marks, for `tekken` and `gpt-4o`; on `'ſ` and the like for the others).

A name that is not in the table is an error: a wrong split gives plausible ids and worse text.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmcli.errors import UnsupportedModel

if TYPE_CHECKING:
    from tokenizers.pre_tokenizers import PreTokenizer


@dataclass(frozen=True, kw_only=True)
class PreTokenizerRule:
    """Expressions in the order of their application, and what else the name implies.

    `ignore_merges`: a piece that is a token as a whole is taken whole, without merging.
    `add_bos`: BOS goes in front of text unless the file's own `add_bos_token` says otherwise.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_OTHER = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_LLAMA3 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_OTHER}|{_SPACES}"
_QWEN2 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}|{_OTHER}|{_SPACES}"
_QWEN35 = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+@|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*@|#"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_TEKKEN = _CASED.replace("@", "").replace("#", r"\p{N}")
_GPT4O = _CASED.replace("@", f"{_CONTRACTION}?").replace("#", r"\p{N}{1,3}")
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
)
_DEEPSEEK_CODER = (
    r"[\r\n]",
    r"\s?\p{L}+",
    r"\s?\p{P}+",
    "[一-龥ࠀ-一가-퟿]+",
    r"\p{N}",
)
_BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
_SEED_CODER = (
    rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
)
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"

_DIGITS_GPT2 = PreTokenizerRule(patterns=(r"\p{N}", _GPT2))
_RULES: dict[tuple[str, ...], PreTokenizerRule] = {
    ("default",): PreTokenizerRule(
        patterns=(r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")
    ),
    ("falcon",): PreTokenizerRule(
        patterns=(r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")
    ),
    (
        "gpt-2",
        "phi-2",
        "mpt",
        "olmo",
        "jais",
        "trillion",
        "granite-docling",
        "exaone4",
        "gigachat",
        "a.x-4.0",
        "mellum",
        "modern-bert",
        "roberta-bpe",
    ): PreTokenizerRule(patterns=(_GPT2,)),
    (
        "smollm",
        "starcoder",
        "refact",
        "command-r",
        "codeshell",
        "exaone",
        "minerva-7b",
    ): _DIGITS_GPT2,
    (
        "llama-bpe",
        "llama3",
        "llama-v3",
        "falcon3",
        "falcon-h1",
        "pixtral",
        "midm-2.0",
        "lfm2",
    ): PreTokenizerRule(patterns=(_LLAMA3,), ignore_merges=True, add_bos=True),
    ("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"): PreTokenizerRule(patterns=(_LLAMA3,)),
    (
        "qwen2",
        "deepseek-r1-qwen",
        "stablelm2",
        "megrez",
        "hunyuan",
        "grok-2",
    ): PreTokenizerRule(patterns=(_QWEN2,)),
    ("qwen35",): PreTokenizerRule(patterns=(_QWEN35,)),
    ("tekken",): PreTokenizerRule(patterns=(_TEKKEN,), ignore_merges=True, add_bos=True),
    ("gpt-4o", "llama4", "minimax-m2"): PreTokenizerRule(patterns=(_GPT4O,)),
    ("deepseek-coder",): PreTokenizerRule(patterns=_DEEPSEEK_CODER),
    ("deepseek-v3", "hunyuan-dense"): PreTokenizerRule(patterns=_DEEPSEEK3),
    ("bailingmoe", "bailingmoe2"): PreTokenizerRule(patterns=(_BAILING,)),
    ("seed-coder",): PreTokenizerRule(patterns=(_SEED_CODER,)),
    ("bloom", "poro-chat", "gpt3-finnish"): PreTokenizerRule(patterns=(_BLOOM,)),
    ("viking",): PreTokenizerRule(patterns=(_BLOOM, r"\p{N}")),
}
PRE_TOKENIZERS: dict[str, PreTokenizerRule] = {
    name: rule for names, rule in _RULES.items() for name in names
}


def find_rule(name: str) -> PreTokenizerRule:
    """The rule of a pre-tokenizer name; `UnsupportedModel` with close matches for others."""
    rule = PRE_TOKENIZERS.get(name)
    if rule is not None:
        return rule
    known = sorted(PRE_TOKENIZERS)
    close = difflib.get_close_matches(name, known, n=3)
    listed = f"close: {', '.join(close)}; " if close else ""
    raise UnsupportedModel(
        f"the pre-tokenizer `{name[:60]}` is not one that llmcli knows",
        hint=f"{listed}known: {', '.join(known)}",
    )


def build_pre_tokenizer(rule: PreTokenizerRule) -> PreTokenizer:
    """The rule as a `tokenizers` pre-tokenizer: the splits, then bytes to printable letters."""
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

    splits = [Split(Regex(pattern), "isolated") for pattern in rule.patterns]
    return Sequence([*splits, ByteLevel(add_prefix_space=False, use_regex=False)])

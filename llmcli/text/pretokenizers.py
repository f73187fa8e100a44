"""Pre-tokenizer rules for BPE, by their names in GGUF files.

`tokenizer.ggml.pre` names a list of regular expressions (llama.cpp, src/llama-vocab.cpp,
`llm_tokenizer_bpe`). They apply in order, each within the pieces of the one before; matches and the
text between them become pieces. Most are the expressions of the models' tokenizer.json. llama.cpp's
engine supports neither `(?i:…)` nor the letter classes Lu, Lt, Lm, Lo and Ll, and approximates
them; the table has the model's own expression, with which the model was trained. The two differ on
cased letters outside ASCII and on combining marks for `tekken` and `gpt-4o`, on spaces outside
ASCII for `deepseek-llm` and `deepseek-coder`, on `'ſ` for the others, and on characters in only one
of the two engines' Unicode tables. Otherwise every rule is tested to split like llama.cpp. As in
llama.cpp, there is no Unicode normalization: encoded text decodes exactly.

Without a name, or with an unknown one, llama.cpp's default rule is used with a note, since a wrong
split gives plausible ids and worse text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers.pre_tokenizers import PreTokenizer


@dataclass(frozen=True, kw_only=True)
class PreTokenizerRule:
    """Expressions in order of application, and other properties of the name.

    `ignore_merges`: a piece that is a token is not merged from parts. `add_bos`: default of the
    file's `add_bos_token`. `raw`: text is characters with `▁` for spaces and `<0x0A>` for bytes,
    instead of byte letters. `line_ends`: a run of line ends that is a token is not merged from
    parts, and BOS is always added.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    raw: bool = False
    line_ends: bool = False


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
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
)
_DEEPSEEK_CODER = (
    r"[\r\n]",
    r"\s?\p{L}+",
    r"\s?\p{P}+",
    "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
    r"\p{N}",
)
# Cased letters as DeepSeek's tokenizer.json lists them, one by one.
_CASED_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293"
    "\u0295-\u02af\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c"
    "\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5"
    "\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59"
    "\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc"
    "\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107"
    "\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee"
    "\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e"
    "\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2"
    "\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_CASED_LETTERS}]+",
    r"\s?[!-/:-~" + "\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
    r"\p{N}+",
)
_BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
_SEED_CODER = rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
_EXAONE_MOE = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
_MINICPM5 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}+|{_OTHER}|{_SPACES}"
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"

# From here on llama.cpp's approximations, which do not distinguish letter case. Digits are grouped
# by three from the right; text before a number stays with its first group.
_FROM_THE_RIGHT = r"[^\p{N}]*\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"
_WORDS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+{_CONTRACTION}?|@"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_HAN = (
    "[\u4e00-\u9fff\u3400-\u4dbf\U00020000-\U0002a6df\U0002a700-\U0002ebef\uf900-\ufaff"
    "\U0002f800-\U0002fa1f]"
)
_KIMI_K2 = (
    rf"{_HAN}+|[^\r\n\p{{L}}\p{{N}}]?(?:(?!{_HAN})\p{{L}})+{_CONTRACTION}?|\p{{N}}{{1,3}}"
    rf"|{_OTHER}|{_SPACES}"
)
_YOUTU = (
    "[\uac00-\ud7a3\u3131-\u318e]+|[！…“”‘’—：；，\u3001-\u303f\ufe30-\ufe4f]+|[\u3105-\u312f]+"
    "|[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    _WORDS.replace("@", r"\p{N}"),
)
_TINY_AYA = (
    _FROM_THE_RIGHT,
    _WORDS.replace("@", r"\p{N}{1,3}"),
)
_MARKED = r"[^\r\n\p{L}\p{N}]?(?:(?=[\p{L}\p{M}])[^a-z])@(?:(?=[\p{L}\p{M}])[^A-Z])#" + _CONTRACTION
_GRANITE_97M = (
    _MARKED.replace("@", "*").replace("#", "+")
    + "?|"
    + _MARKED.replace("@", "+").replace("#", "*")
    + r"?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|"
    + _SPACES
)
_SPARK = (*_DEEPSEEK3[:2], _DEEPSEEK3[2].replace(r"[\r\n]*|\s*[\r\n]+", r"|[\r\n]"), r"\p{N}")
_AFMOE = (
    _FROM_THE_RIGHT,
    "[一-鿿㐀-䶿豈-﫿぀-ゟ゠-ヿ･-ﾟ⼀-⿟เ-๿຀-໿ក-៿က-႟ꩠ-ꩿꧠ-꧿가-힯ᄀ-ᇿ]+",
    _DEEPSEEK3[2],
)
_JAIS2 = "|".join(
    [_CONTRACTION, _WORD, r"\p{N}{1,3}", _OTHER, r"\s*[\r\n]+"]
    + [rf"\s{{{count}}}(?!\S)" for count in (512, 256, 128, 64, 32, 16, 8, 4, "1,2")]
    + [r"\s"]
)
_CHAMELEON = (
    "<sentinel:[0-9]+>",
    "IMGIMG[A-I]{1,4}Z",
    "[\t\n]|    |  ",
    r"\p{N}",
    r"[\p{P}!-/:-@\[-`{-~]",
    _GPT2,
)
_LINES = r"[^\n]+|\n+"

_DIGITS_GPT2 = PreTokenizerRule(patterns=(r"\p{N}", _GPT2))
_RULES: dict[str, PreTokenizerRule] = {  # by their names
    "default": PreTokenizerRule(
        patterns=(r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")
    ),
    "falcon": PreTokenizerRule(patterns=(r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    (
        "gpt-2 phi-2 mpt olmo jais trillion granite-docling exaone4 gigachat a.x-4.0 mellum "
        "modern-bert roberta-bpe jina-es jina-de jina-v2-es jina-v2-de jina-v1-en jina-v2-code"
    ): PreTokenizerRule(patterns=(_GPT2,)),
    "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2": _DIGITS_GPT2,
    (
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano"
    ): PreTokenizerRule(patterns=(_LLAMA3,), ignore_merges=True, add_bos=True),
    "dbrx smaug-bpe glm4 chatglm-bpe": PreTokenizerRule(patterns=(_LLAMA3,)),
    (
        "qwen2 deepseek-r1-qwen stablelm2 megrez hunyuan grok-2 kormo f2llmv2 solar-open"
    ): PreTokenizerRule(patterns=(_QWEN2,)),
    "qwen35": PreTokenizerRule(patterns=(_QWEN35,)),
    "tekken": PreTokenizerRule(patterns=(_TEKKEN,), ignore_merges=True, add_bos=True),
    "gpt-4o llama4 minimax-m2 kanana2 talkie": PreTokenizerRule(patterns=(_GPT4O,)),
    "deepseek-llm": PreTokenizerRule(patterns=_DEEPSEEK_LLM),
    "deepseek-coder": PreTokenizerRule(patterns=_DEEPSEEK_CODER),
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": PreTokenizerRule(patterns=_DEEPSEEK3),
    "bailingmoe bailingmoe2 llada-moe": PreTokenizerRule(patterns=(_BAILING,)),
    "seed-coder": PreTokenizerRule(patterns=(_SEED_CODER,)),
    "exaone-moe": PreTokenizerRule(patterns=(_EXAONE_MOE,)),
    "minicpm5": PreTokenizerRule(patterns=(r"\p{N}{1,3}", _MINICPM5), ignore_merges=True),
    "bloom poro-chat gpt3-finnish": PreTokenizerRule(patterns=(_BLOOM,)),
    "viking": PreTokenizerRule(patterns=(_BLOOM, r"\p{N}")),
    "kimi-k2": PreTokenizerRule(patterns=(_KIMI_K2,)),
    "youtu": PreTokenizerRule(patterns=_YOUTU, ignore_merges=True),
    "tiny_aya cohere2moe": PreTokenizerRule(patterns=_TINY_AYA),
    "superbpe": PreTokenizerRule(patterns=(r"\p{N}+", "(?=(?:[0-9]{3})+(?![0-9]))")),
    "granite-embed-multi-97m": PreTokenizerRule(patterns=(_GRANITE_97M,), ignore_merges=True),
    "spark2_5": PreTokenizerRule(patterns=_SPARK),
    "afmoe": PreTokenizerRule(patterns=_AFMOE),
    "jais-2": PreTokenizerRule(patterns=(_JAIS2,)),
    "chameleon": PreTokenizerRule(patterns=_CHAMELEON, add_bos=True),
    "laguna": PreTokenizerRule(patterns=(_LINES, _QWEN2)),
    "gemma4 granite-embed-multi-311m": PreTokenizerRule(
        patterns=(_LINES,), raw=True, line_ends=True
    ),
    "sarvam-moe": PreTokenizerRule(patterns=(_LINES,), raw=True),
    "ufakzeka": PreTokenizerRule(patterns=(_QWEN2.removeprefix(f"{_CONTRACTION}|"),)),
}
PRE_TOKENIZERS: dict[str, PreTokenizerRule] = {
    name: rule for names, rule in _RULES.items() for name in names.split()
}


def build_pre_tokenizer(rule: PreTokenizerRule) -> PreTokenizer:
    """Build a `tokenizers` pre-tokenizer: the splits, then bytes → printable letters."""
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

    splits = [Split(Regex(pattern), "isolated") for pattern in rule.patterns]
    if rule.raw:
        return Sequence(splits)
    return Sequence([*splits, ByteLevel(add_prefix_space=False, use_regex=False)])

"""Token types of a GGUF vocabulary, and its end-of-generation tokens.

As in llama.cpp (src/llama-vocab.cpp, `llama_vocab::impl::load`), types are corrected and end tokens
found by the tokens' text. The lists are llama.cpp's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from llmcli.text.specials import SpecialToken

# llama.cpp's token attributes, as flags. Plain integers: vocabularies have 250k tokens.
UNDEFINED, UNKNOWN, UNUSED, NORMAL, CONTROL, USER_DEFINED, BYTE = 0, 1, 2, 4, 8, 16, 32
# Tokens hidden in text by default; and tokens matched before merging.
HIDDEN = CONTROL | UNKNOWN
_MATCHED = HIDDEN | USER_DEFINED
# `tokenizer.ggml.token_type` numbers (gguf.TokenType) → attribute.
_BY_NUMBER = {1: NORMAL, 2: UNKNOWN, 3: CONTROL, 4: USER_DEFINED, 5: UNUSED, 6: BYTE}
_ENDINGS = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",  # gpt-oss
    "<|call|>",  # gpt-oss
    "<|flush|>",  # solar-open
    "<|calls|>",  # solar-open
    "<end_of_turn>",
    "<|endoftext|>",
    "</s>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
    "<｜end▁of▁sentence｜>",  # DeepSeek
    "[e~[",  # MiniMax
)
# Fill-in-the-middle tokens that also end a text: kind → texts.
_FIM_ENDINGS = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
# Fill-in-the-middle tokens that do not end a text; also always control tokens.
_FIM_PARTS = {
    "fim_pre": (
        "<|fim_prefix|>",
        "<fim-prefix>",
        "<fim_prefix>",
        "<｜fim▁begin｜>",
        "<PRE>",
        "▁<PRE>",
        "<|code_prefix|>",
        "<|prefix|>",
    ),
    "fim_suf": (
        "<|fim_suffix|>",
        "<fim-suffix>",
        "<fim_suffix>",
        "<｜fim▁hole｜>",
        "<SUF>",
        "▁<SUF>",
        "<|code_suffix|>",
        "<|suffix|>",
    ),
    "fim_mid": (
        "<|fim_middle|>",
        "<fim-middle>",
        "<fim_middle>",
        "<｜fim▁end｜>",
        "<MID>",
        "▁<MID>",
        "<|code_middle|>",
        "<|middle|>",
    ),
}
# gpt-oss's channel tokens: part of the text, never hidden.
_SHOWN = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")
_KNOWN = frozenset(chain(_ENDINGS, _SHOWN, *_FIM_ENDINGS.values(), *_FIM_PARTS.values()))


def settle(
    strings: Sequence[str], numbers: Sequence[int], ids: Mapping[str, int | None]
) -> tuple[list[int], frozenset[int]]:
    """Determine the attributes of every token, and the ids that end a generation.

    `strings` and `numbers`: the file's tokens and token types; `ids`: its special ids (`eos`,
    `eot`, `eom`, `fim_…`). Missing ones are found by text; for several matches llama.cpp takes the
    first in its hash table, here the lowest id.
    """
    at = {string: index for index, string in enumerate(strings) if string in _KNOWN}
    known = {number: _BY_NUMBER.get(number, UNDEFINED) for number in set(numbers)}
    types = list(map(known.__getitem__, numbers))
    ends: set[int] = set()
    for kind, texts in (_FIM_ENDINGS | _FIM_PARTS).items():
        named = ids.get(kind)
        found = sorted(at[text] for text in texts if text in at)[:1] if named is None else []
        for index in found:
            types[index] |= CONTROL
        if kind in _FIM_ENDINGS:
            ends.update(found if named is None else [named])
    for index in (at[text] for text in _ENDINGS if text in at):
        types[index] |= CONTROL
        ends.add(index)
    for index in (at[text] for text in _SHOWN if text in at):
        types[index] = USER_DEFINED
    ends.update(named for kind in ("eos", "eot", "eom") if (named := ids.get(kind)) is not None)
    _correct(types, ends, at)
    return types, frozenset(ends)


@dataclass(frozen=True, kw_only=True)
class Marked:
    """Tokens with a special treatment.

    `specials` are matched in a text before merging, in this order (longest first, in bytes).
    `silent` ids decode to nothing.
    """

    specials: tuple[SpecialToken, ...]
    silent: frozenset[int]

    @property
    def literal(self) -> frozenset[int]:
        """Ids of all `specials`, which decode to their own string."""
        return frozenset(special.id for special in self.specials)

    @property
    def hidden(self) -> frozenset[int]:
        """Ids hidden in decoded text by default."""
        return frozenset(special.id for special in self.specials if special.control)


def marked(
    strings: Sequence[str], types: Sequence[int], *, rstrip: Callable[[str], bool]
) -> Marked:
    """Group tokens by their attributes; `rstrip(text)`: whether a token absorbs whitespace."""
    odd = [index for index, kind in enumerate(types) if kind != NORMAL]  # few of very many
    found = [index for index in odd if types[index] & _MATCHED]
    found.sort(key=lambda index: (-len(strings[index].encode("utf-8", "replace")), index))
    specials = tuple(
        SpecialToken(
            text=strings[index],
            id=index,
            control=bool(types[index] & HIDDEN),
            rstrip=rstrip(strings[index]),
        )
        for index in found
    )
    silent = frozenset(index for index in odd if types[index] in (UNUSED, UNDEFINED))
    return Marked(specials=specials, silent=silent)


def _correct(types: list[int], ends: set[int], at: Mapping[str, int]) -> None:
    """Fix `ends` for two families that use another family's end token inside their texts."""
    asked = ("<|call|>", "<|calls|>", "<|return|>", "<|flush|>", "<|end|>", "<|tool_response>")
    written = {text for text in (*asked, "</s>") if at.get(text) in ends}
    call = bool(written & {"<|call|>", "<|calls|>"})
    if call and written & {"<|return|>", "<|flush|>"} and "<|end|>" in written:
        ends.discard(at["<|end|>"])
        types[at["<|end|>"]] = USER_DEFINED
    if {"<|tool_response>", "</s>"} <= written:
        ends.discard(at["</s>"])
        types[at["</s>"]] = NORMAL

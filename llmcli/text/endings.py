"""Token types of a GGUF vocabulary, and which tokens end a text.

llama.cpp corrects the types that converters wrote, and finds the tokens that end a generation,
by the tokens' text (src/llama-vocab.cpp, `llama_vocab::impl::load`). The lists here are its lists.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from llmcli.text.specials import SpecialToken

# What a token is: llama.cpp's attributes. A corrected token may be several things at once.
# Plain integers: a vocabulary has a quarter of a million of them.
UNDEFINED, UNKNOWN, UNUSED, NORMAL, CONTROL, USER_DEFINED, BYTE = 0, 1, 2, 4, 8, 16, 32
# Tokens that a text shows only where it is asked for them; and those that are cut out of it.
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
# Those that do not; they too are control tokens whatever the converter wrote.
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
# gpt-oss writes its channels with these: they are part of the text, never hidden.
_SHOWN = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")
_KNOWN = frozenset(chain(_ENDINGS, _SHOWN, *_FIM_ENDINGS.values(), *_FIM_PARTS.values()))


def settle(
    strings: Sequence[str], numbers: Sequence[int], ids: Mapping[str, int | None]
) -> tuple[list[int], frozenset[int]]:
    """Attributes of every token, and the ids that end a generation.

    `strings` and `numbers` are the file's tokens and token types, `ids` the special ids that it
    names (`eos`, `eot`, `eom`, `fim_…`). A kind that the file does not name is found by text;
    llama.cpp takes whichever its hash table holds first, here the lowest id.
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
    """The tokens that do not simply stand for their own text.

    `specials` are cut out of a text before anything else, in this order: longest first, in
    bytes. `silent` ids stand for nothing.
    """

    specials: tuple[SpecialToken, ...]
    silent: frozenset[int]

    @property
    def literal(self) -> frozenset[int]:
        """Ids of all `specials`: they stand for what they are written as."""
        return frozenset(special.id for special in self.specials)

    @property
    def hidden(self) -> frozenset[int]:
        """Ids that a text shows only where it is asked for them."""
        return frozenset(special.id for special in self.specials if special.control)


def marked(
    strings: Sequence[str], types: Sequence[int], *, rstrip: Callable[[str], bool]
) -> Marked:
    """Sort the tokens out by their attributes; `rstrip` says which take whitespace along."""
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
    """Two families use a token that ends a text elsewhere inside their texts."""
    asked = ("<|call|>", "<|calls|>", "<|return|>", "<|flush|>", "<|end|>", "<|tool_response>")
    written = {text for text in (*asked, "</s>") if at.get(text) in ends}
    call = bool(written & {"<|call|>", "<|calls|>"})
    if call and written & {"<|return|>", "<|flush|>"} and "<|end|>" in written:
        ends.discard(at["<|end|>"])
        types[at["<|end|>"]] = USER_DEFINED
    if {"<|tool_response>", "</s>"} <= written:
        ends.discard(at["</s>"])
        types[at["</s>"]] = NORMAL

"""SentencePiece models trained here, as a `tokenizer.model` and as a GGUF file's metadata."""

import io
import tempfile
from functools import cache
from typing import Any

import sentencepiece
from gguf_bytes import ARRAY, BOOL, F32, I32, STRING, U8, U32, pair
from gguf_bytes import gguf as file
from llama_cpp_strings import CODE, MARKS, NUMBERS, WORDS, strings

from llmcli.text.sentencepiece import parse_pieces

_LETTERS = set("".join(WORDS + NUMBERS + MARKS + CODE))
CORPUS = [
    *(text for text in strings(3000, seed=3) if set(text) <= _LETTERS),
    *["the quick brown fox, said the other one; they're here"] * 40,
]
RULES = ["FB01\t66 69", "BD\t31 2F 32", "65 301\tE9", "3000\t20", "A0\t20", "FF21\t41", "200B\t"]
UNIGRAM = ("t5", "small")


@cache
def trained(kind: str) -> bytes:
    """A model of 1,000 pieces: `llama` merges, as Llama 2's; `gemma` without a space in front
    and with runs of spaces as pieces; `t5` Unigram with NFKC and merged spaces, `small` the same
    with a table of replacements of a few lines.
    """
    unigram = dict(model_type="unigram", pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
    settings: dict[str, dict[str, Any]] = {
        "llama": dict(
            model_type="bpe", normalization_rule_name="identity", byte_fallback=True,
            remove_extra_whitespaces=False, split_digits=True, allow_whitespace_only_pieces=True,
        ),
        "gemma": dict(
            model_type="bpe", normalization_rule_name="identity", byte_fallback=True,
            remove_extra_whitespaces=False, add_dummy_prefix=False,
            allow_whitespace_only_pieces=True, user_defined_symbols=["<think>", "\n\n", "  "],
        ),
        "t5": unigram | dict(normalization_rule_name="nmt_nfkc"),
        "small": unigram,
    }  # fmt: skip
    model = io.BytesIO()
    with tempfile.NamedTemporaryFile("w", suffix=".tsv") as rules:
        if kind == "small":
            rules.write("\n".join(RULES))
            rules.flush()
            settings[kind]["normalization_rule_tsv"] = rules.name
        _train(model, settings[kind])
    return model.getvalue()


def _train(model: io.BytesIO, settings: dict[str, Any]) -> None:
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text for text in CORPUS if text.strip()), model_writer=model,
        vocab_size=1000, character_coverage=0.98, minloglevel=2, hard_vocab_limit=False,
        num_threads=1, **settings,
    )  # fmt: skip


def metadata(kind: str, *, end: str = "<|end|>", **more: Any) -> dict[str, Any]:
    """The model as a converter writes it into a GGUF file, with three further special tokens."""
    model = parse_pieces(trained(kind))
    kinds = list(model.kinds)  # the numbers of the types are the same
    pieces = [
        string.replace("▁", " ") if type == 4 else string  # as convert_hf_to_gguf.py does
        for string, type in zip(model.strings, kinds, strict=True)
    ]
    values = {
        "model": "t5" if kind in UNIGRAM else "llama",
        "tokens": [*pieces, "<|user|>", end, "<think>"], "scores": [*model.scores, *[-1000.0] * 3],
        "token_type": [*kinds, 3, 3, 4], "bos_token_id": 1, "eos_token_id": 2,
        "unknown_token_id": 0, "add_space_prefix": kind != "gemma",
    }  # fmt: skip
    if kind == "gemma":
        values["tokens"][-1] = "<other>"  # the model has a `<think>` of its own
    if kind in UNIGRAM:
        values |= {
            "bos_token_id": None, "eos_token_id": None, "unknown_token_id": None,
            "remove_extra_whitespaces": True,
            "precompiled_charsmap": list(model.charsmap),
        }  # fmt: skip
    given = {key: value for key, value in (values | more).items() if value is not None}
    return {f"tokenizer.ggml.{key}": value for key, value in given.items()}


def gguf(values: dict[str, Any]) -> bytes:
    """The smallest GGUF file that llama.cpp loads for its vocabulary."""
    lists = {
        "tokens": STRING, "merges": STRING, "scores": F32, "token_type": I32,
        "precompiled_charsmap": U8,
    }  # fmt: skip
    numbers = {
        "context_length": 128, "embedding_length": 64, "block_count": 1,
        "attention.head_count": 4, "feed_forward_length": 64,
    }  # fmt: skip
    pairs = [pair("general.architecture", STRING, "llama")]
    pairs += [pair(f"llama.{key}", U32, value) for key, value in numbers.items()]
    pairs.append(pair("llama.attention.layer_norm_rms_epsilon", F32, 1e-5))
    for key, value in values.items():
        name = key.rpartition(".")[2]
        if name in lists:
            pairs.append(pair(key, ARRAY, (lists[name], value)))
        else:
            kind = STRING if isinstance(value, str) else BOOL if isinstance(value, bool) else U32
            pairs.append(pair(key, kind, value))
    return file(pairs)

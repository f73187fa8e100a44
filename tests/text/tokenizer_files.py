"""Small tokenizers of every kind, trained here and written as checkpoints write them."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from llama_cpp_strings import strings
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.trainers import BpeTrainer

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CORPUS = [*strings(1500, seed=3), *["the quick brown fox, said the other one; they're here"] * 40]


def gpt2() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return _train(tokenizer, ["<|endoftext|>"])


def llama3() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = _split(LLAMA3)
    tokenizer.decoder = decoders.ByteLevel()
    names = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"]
    return _with_bos(_train(tokenizer, names), "<|begin_of_text|>", byte_level=True)


def qwen2() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _split(LLAMA3.replace("{1,3}", ""))
    tokenizer.decoder = decoders.ByteLevel()
    return _train(tokenizer, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"])


def llama2() -> Tokenizer:
    """As converted from SentencePiece: `▁` for spaces, one in front, bytes for the rest."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    spaces, strip = decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)
    tokenizer.decoder = decoders.Sequence([spaces, decoders.ByteFallback(), decoders.Fuse(), strip])
    return _with_bos(_train(tokenizer, _sentencepiece(), latin=True), "<s>")


def metaspace() -> Tokenizer:
    """The newer form: Metaspace cuts and writes, and adds its space only in front."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    return _with_bos(_train(tokenizer, _sentencepiece(), latin=True), "<s>")


def spaced() -> dict[str, Any]:
    """BPE over characters with `▁` for spaces, as GGUF metadata without its prefix."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    trainer = BpeTrainer(vocab_size=500, limit_alphabet=150, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    named = {"<bos>": 3, "<eos>": 3, "<unk>": 2, "<|user|>": 3, "<|end|>": 3, "<think>": 4}
    others = dict.fromkeys((f"<0x{byte:02X}>" for byte in range(256)), 6)
    others |= dict.fromkeys(("\n", "\n\n", "\n\n\n\n"), 1)  # no merges make them
    learned = dict.fromkeys(model["vocab"], 1)
    tokens = named | others | learned
    return {
        "tokens": list(tokens), "token_type": list(tokens.values()),
        "merges": list(map(" ".join, model["merges"])), "bos_token_id": 0, "eos_token_id": 1,
        "unknown_token_id": 2,
    }  # fmt: skip


KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "gpt2": (gpt2, {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}),
    "llama3": (llama3, {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}),
    "qwen2": (qwen2, {"eos_token": "<|im_end|>", "add_bos_token": False}),
    "llama2": (llama2, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}),
    "metaspace": (metaspace, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}),
}


def write(directory: Path, kind: str, **settings: Any) -> Path:
    """A directory with tokenizer.json and tokenizer_config.json (`None` leaves a key out)."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.json").write_text(trained(kind), encoding="utf-8")
    given = KINDS[kind][1]
    merged = {"tokenizer_class": "PreTrainedTokenizerFast", **given, **settings}
    content = {key: value for key, value in merged.items() if value is not None}
    (directory / "tokenizer_config.json").write_text(json.dumps(content))
    return directory


@cache
def trained(kind: str) -> str:
    return KINDS[kind][0]().to_str()


def _split(pattern: str) -> Any:
    cut = pre_tokenizers.Split(Regex(pattern), "isolated")
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([cut, letters])


def _sentencepiece() -> list[str]:
    return ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]


def _train(tokenizer: Tokenizer, special: list[str], *, latin: bool = False) -> Tokenizer:
    trainer = BpeTrainer(
        vocab_size=900, special_tokens=special,
        initial_alphabet=[] if latin else pre_tokenizers.ByteLevel.alphabet(),
        limit_alphabet=120 if latin else 1000, show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(CORPUS, trainer)
    if latin:  # the byte tokens are part of the vocabulary, not special
        content = json.loads(tokenizer.to_str())
        content["added_tokens"] = [t for t in content["added_tokens"] if t["id"] < 3]
        tokenizer = Tokenizer.from_str(json.dumps(content))
    return tokenizer


def _with_bos(tokenizer: Tokenizer, bos: str, *, byte_level: bool = False) -> Tokenizer:
    template = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1",
        special_tokens=[(bos, tokenizer.token_to_id(bos))],
    )  # fmt: skip
    steps = [processors.ByteLevel(trim_offsets=False), template]
    tokenizer.post_processor = processors.Sequence(steps) if byte_level else template
    return tokenizer

"""transformers' classes for vocab.json and merges.txt, and their settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmcli.checkpoints.files import shown
from llmcli.errors import UnsupportedModel

_OTHER_WAY = "load it with transformers' AutoTokenizer and save it: that writes tokenizer.json"


@dataclass(frozen=True, kw_only=True)
class PairKind:
    """Settings of a transformers class beyond the files.

    `rule`: pre-tokenizer rule by its GGUF name (None: the library's byte-level step, as in GPT-2).
    `nfc`: normalize first. `defaults`: default special tokens. `encloses`: prefix with `cls_token`.
    """

    defaults: dict[str, str]
    rule: str | None = None
    nfc: bool = False
    encloses: bool = False


_END = {"unk_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}
_GPT2 = PairKind(defaults=_END | {"bos_token": "<|endoftext|>"})
KINDS = {
    "GPT2Tokenizer": _GPT2,
    "CodeGenTokenizer": _GPT2,
    "GPTNeoXTokenizer": PairKind(defaults=_GPT2.defaults | {"pad_token": "<|padding|>"}, nfc=True),
    "Qwen2Tokenizer": PairKind(
        defaults=_END | {"pad_token": "<|endoftext|>"}, rule="qwen2", nfc=True
    ),
    "RobertaTokenizer": PairKind(
        defaults={
            "bos_token": "<s>", "eos_token": "</s>", "sep_token": "</s>", "cls_token": "<s>",
            "unk_token": "<unk>", "pad_token": "<pad>", "mask_token": "<mask>",
        },
        encloses=True,
    ),
}  # fmt: skip
_BY_TYPE = {
    "gpt2": "GPT2Tokenizer",
    "gpt_neox": "GPTNeoXTokenizer",
    "qwen2": "Qwen2Tokenizer",
    "qwen3": "Qwen2Tokenizer",
    "roberta": "RobertaTokenizer",
}
# Model types that always use their own class in transformers.
_ALWAYS = ("qwen2",)


def class_name(settings: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """The transformers class for the files; raises UnsupportedModel if it is unknown."""
    model_type = config.get("model_type")
    model_type = model_type if isinstance(model_type, str) else ""
    named = settings.get("tokenizer_class") or config.get("tokenizer_class")
    if named is None or model_type in _ALWAYS:
        named = _BY_TYPE.get(model_type)
    if named is None:
        raise UnsupportedModel(
            "unknown pre-tokenizer for `vocab.json`: no `tokenizer_class` is named",
            hint=f"name it in tokenizer_config.json; known: {', '.join(KINDS)}",
        )
    name = str(named).removesuffix("Fast")
    if name not in KINDS:
        raise UnsupportedModel(
            f"unsupported tokenizer class `{shown(named)}` of `vocab.json`",
            hint=_OTHER_WAY,
        )
    return name

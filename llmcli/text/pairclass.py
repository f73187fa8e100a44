"""The classes of transformers that read vocab.json and merges.txt, and what each adds to them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmcli.checkpoints.files import shown
from llmcli.errors import UnsupportedModel

_OTHER_WAY = "load it with transformers' AutoTokenizer and save it: that writes tokenizer.json"


@dataclass(frozen=True, kw_only=True)
class PairKind:
    """What a class of transformers adds to the files.

    `rule`: how text is cut, by its GGUF name (None: by the library's byte-level step, which is
    GPT-2's). `nfc`: it is normalized first. `defaults`: the special tokens where the settings
    name none. `encloses`: `cls_token` goes in front of a text.
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
# transformers takes the model's own class for these, whatever the settings name.
_ALWAYS = ("qwen2",)


def class_name(settings: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """The class of transformers that would read the files; UnsupportedModel where none is known."""
    model_type = config.get("model_type")
    model_type = model_type if isinstance(model_type, str) else ""
    named = settings.get("tokenizer_class") or config.get("tokenizer_class")
    if named is None or model_type in _ALWAYS:
        named = _BY_TYPE.get(model_type)
    if named is None:
        raise UnsupportedModel(
            "nothing says how text is cut for `vocab.json`: no `tokenizer_class` is named",
            hint=f"name it in tokenizer_config.json; known: {', '.join(KINDS)}",
        )
    name = str(named).removesuffix("Fast")
    if name not in KINDS:
        raise UnsupportedModel(
            f"`vocab.json` of a `{shown(named)}` is not a kind of tokenizer that llmcli knows",
            hint=_OTHER_WAY,
        )
    return name

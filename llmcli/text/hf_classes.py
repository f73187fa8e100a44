"""transformers' tokenizer classes: what they override in a tokenizer.json, and add to a vocab.json.

The overrides are the leading space, `legacy`, and WordPiece's letters, from tokenizer_config.json
with the class's defaults, and default special tokens. Sources: models/*/tokenization_*.py, and
models/auto/tokenization_auto.py for the choice of the class.

In transformers 5 these classes rebuild all steps, which drops other steps of the file (`Digits`
under `GPT2Tokenizer`). Here they are kept, since the model was trained with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llmcli.checkpoints.files import shown
from llmcli.errors import UnsupportedModel
from llmcli.text.portions import state_of

if TYPE_CHECKING:
    import tokenizers

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
_PAIR_BY_TYPE = {
    "gpt2": "GPT2Tokenizer",
    "gpt_neox": "GPTNeoXTokenizer",
    "qwen2": "Qwen2Tokenizer",
    "qwen3": "Qwen2Tokenizer",
    "roberta": "RobertaTokenizer",
}
# Model types that always use their own class in transformers.
_PAIR_ALWAYS = ("qwen2",)


def class_name(settings: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """The transformers class for the files; raises UnsupportedModel if it is unknown."""
    model_type = config.get("model_type")
    model_type = model_type if isinstance(model_type, str) else ""
    named = settings.get("tokenizer_class") or config.get("tokenizer_class")
    if named is None or model_type in _PAIR_ALWAYS:
        named = _PAIR_BY_TYPE.get(model_type)
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


_BYTE_LEVEL = (*KINDS, "Qwen3_5Tokenizer", "CohereTokenizer")
_WHOLE = ("GPT2Tokenizer", "CodeGenTokenizer", "GPTNeoXTokenizer")  # space prefix before the split
_NFC = ("GPTNeoXTokenizer", "Qwen2Tokenizer", "Qwen3_5Tokenizer", "CohereTokenizer")
_LLAMA = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
_DEFAULTS = {name: kind.defaults for name, kind in KINDS.items()} | {
    "Qwen3_5Tokenizer": KINDS["Qwen2Tokenizer"].defaults,
    "LlamaTokenizer": _LLAMA,
    "CodeLlamaTokenizer": _LLAMA
    | {
        "prefix_token": "▁<PRE>", "middle_token": "▁<MID>", "suffix_token": "▁<SUF>",
        "eot_token": "▁<EOT>", "fill_token": "<FILL_ME>",
    },
    "GemmaTokenizer": {
        "unk_token": "<unk>", "bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>",
        "mask_token": "<mask>",
    },
    "CohereTokenizer": {
        "unk_token": "<UNK>", "bos_token": "<BOS_TOKEN>", "eos_token": "<|END_OF_TURN_TOKEN|>",
        "pad_token": "<PAD>", "cls_token": "<CLS>", "sep_token": "<SEP>",
        "mask_token": "<MASK_TOKEN>",
    },
    "BertTokenizer": {f"{name}_token": f"[{name.upper()}]" for name in (
        "unk", "sep", "pad", "cls", "mask",
    )},
}  # fmt: skip
_BY_TYPE = {
    **dict.fromkeys(("gpt2", "starcoder2"), "GPT2Tokenizer"),
    **dict.fromkeys(("gpt_neox", "mamba2", "olmoe"), "GPTNeoXTokenizer"),
    **dict.fromkeys(("gemma", "gemma2", "gemma3", "gemma3_text"), "GemmaTokenizer"),
    "cohere2": "CohereTokenizer",
    **dict.fromkeys((
        "qwen2", "qwen2_moe", "qwen2_vl", "qwen2_5_vl", "qwen3", "qwen3_moe", "qwen3_next",
        "qwen3_vl",
    ), "Qwen2Tokenizer"),
    **dict.fromkeys((
        "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text",
    ), "Qwen3_5Tokenizer"),
}  # fmt: skip
MARKING = ("Qwen2Tokenizer", "CohereTokenizer")  # these mark every special token in the library
# Model types that always use their own class, and types that never use one.
_ALWAYS = ("qwen2", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text")
_NEVER = (
    "glm", "glm4", "glm4_moe", "glm4_moe_lite", "granite", "granitemoehybrid", "ministral",
    "ministral3", "mistral", "mistral3", "mixtral", "olmo2", "olmo3", "phi3",
)  # fmt: skip


def class_of(settings: Mapping[str, Any], config: Mapping[str, Any], *, byte_level: bool) -> str:
    """The class that AutoTokenizer selects; `byte_level`: the file has a byte-level step."""
    model_type = config.get("model_type")
    named = settings.get("tokenizer_class") or config.get("tokenizer_class") or ""
    named = str(named).removesuffix("Fast")
    if model_type in _NEVER or (named == "LlamaTokenizer" and byte_level):
        return ""
    own = _BY_TYPE.get(model_type, "") if isinstance(model_type, str) else ""
    return own if model_type in _ALWAYS or not named else named


def apply_class(
    backend: tokenizers.Tokenizer, name: str, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Apply the class's settings to `backend`; returns the settings with its special tokens."""
    from tokenizers import normalizers, pre_tokenizers

    settings = {**_DEFAULTS.get(name, {}), **settings}

    def told(key: str, usual: bool) -> bool:
        value = settings.get(key)
        return usual if value is None else bool(value)

    if name in _BYTE_LEVEL:
        spaced = told("add_prefix_space", False)
        if spaced and name in _WHOLE:  # otherwise every split would get a space
            backend.pre_tokenizer = pre_tokenizers.ByteLevel()
        for step in _each(backend.pre_tokenizer):
            if isinstance(step, pre_tokenizers.ByteLevel):
                step.add_prefix_space = spaced
        if backend.normalizer is None and name in _NFC:
            backend.normalizer = normalizers.NFC()
    elif name in ("LlamaTokenizer", "CodeLlamaTokenizer"):
        always = name == "LlamaTokenizer" and told("legacy", False)
        _mark_spaces(backend, told("add_prefix_space", True), "always" if always else "first")
    elif name == "BertTokenizer" and isinstance(backend.normalizer, normalizers.BertNormalizer):
        accents = settings.get("strip_accents")
        backend.normalizer = normalizers.BertNormalizer(
            handle_chinese_chars=told("tokenize_chinese_chars", True),
            strip_accents=accents if isinstance(accents, bool) else None,
            lowercase=told("do_lower_case", True),
        )
    if name == "GPTNeoXTokenizer":
        backend.post_processor = None
    return settings


def _each(step: Any) -> list[Any]:
    several = state_of(step).get("pretokenizers")
    return [step] if several is None else [step[index] for index in range(len(several))]


def _mark_spaces(backend: tokenizers.Tokenizer, spaced: bool, scheme: str) -> None:
    """Replace spaces by `▁`; if `spaced`, also prefix a text or each part between tokens.

    Only if the file has no other step before merging.
    """
    from tokenizers import decoders, pre_tokenizers

    normalizer = state_of(backend.normalizer)
    kinds = {step.get("type") for step in normalizer.get("normalizers", [normalizer])}
    cutter = state_of(backend.pre_tokenizer).get("type", "Metaspace")
    if not kinds <= {None, "Prepend", "Replace"} or cutter != "Metaspace":
        return
    backend.normalizer = None
    scheme = scheme if spaced else "never"
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    strip = [decoders.Strip(" ", 1, 0)] if spaced else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )

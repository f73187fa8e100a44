"""transformers' tokenizer classes: what they override in a tokenizer.json, and add to a vocab.json.

The overrides are the leading space, `legacy`, and WordPiece's letters, from tokenizer_config.json
with the class's defaults, and default special tokens. Sources: models/*/tokenization_*.py, and
models/auto/tokenization_auto.py for the choice of the class.

In transformers 5 these classes rebuild all steps, which drops other steps of the file (`Digits`
under `GPT2Tokenizer`). Here they are kept, since the model was trained with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from llmcli.checkpoints.files import shown
from llmcli.errors import UnsupportedModel
from llmcli.text.portions import state_of

if TYPE_CHECKING:
    import tokenizers

SAVE_AGAIN = "load it with transformers' AutoTokenizer and save it: that writes tokenizer.json"


@dataclass(frozen=True)
class TokenizerClass:
    """Settings of a transformers class beyond the files.

    `texts`: default special tokens, as `role=text`. `byte_level`: `add_prefix_space` applies to the
    byte-level step, if `whole` to the text before it is split. `nfc`: normalize first. `marks`:
    every special token is marked in the library. `reads_pair`: for vocab.json and merges.txt, with
    the pre-tokenizer `rule` by its GGUF name (None: the library's byte-level step, as in GPT-2),
    and a `cls_token` prefix if it `encloses` a text.
    """

    texts: str = ""
    byte_level: bool = False
    whole: bool = False
    nfc: bool = False
    marks: bool = False
    reads_pair: bool = False
    rule: str | None = None
    encloses: bool = False

    @property
    def tokens(self) -> dict[str, str]:
        """The default special tokens as settings, `bos_token` and so on."""
        pairs = (pair.partition("=") for pair in self.texts.split())
        return {f"{role}_token": text for role, _, text in pairs}


_END = "unk=<|endoftext|> eos=<|endoftext|>"
_GPT2 = TokenizerClass(_END + " bos=<|endoftext|>", byte_level=True, whole=True, reads_pair=True)
_QWEN35 = TokenizerClass(_END + " pad=<|endoftext|>", byte_level=True, nfc=True, rule="qwen2")
_LLAMA = "unk=<unk> bos=<s> eos=</s>"
_CODE = " prefix=▁<PRE> middle=▁<MID> suffix=▁<SUF> eot=▁<EOT> fill=<FILL_ME>"
_ROBERTA = "bos=<s> eos=</s> sep=</s> cls=<s> unk=<unk> pad=<pad> mask=<mask>"
_COHERE = (
    "unk=<UNK> bos=<BOS_TOKEN> eos=<|END_OF_TURN_TOKEN|> pad=<PAD> cls=<CLS> sep=<SEP> "
    "mask=<MASK_TOKEN>"
)
CLASSES = {
    "GPT2Tokenizer": _GPT2,
    "CodeGenTokenizer": _GPT2,
    "GPTNeoXTokenizer": replace(_GPT2, texts=_GPT2.texts + " pad=<|padding|>", nfc=True),
    "Qwen2Tokenizer": replace(_QWEN35, marks=True, reads_pair=True),
    "RobertaTokenizer": TokenizerClass(_ROBERTA, byte_level=True, reads_pair=True, encloses=True),
    "Qwen3_5Tokenizer": _QWEN35,
    "LlamaTokenizer": TokenizerClass(_LLAMA),
    "CodeLlamaTokenizer": TokenizerClass(_LLAMA + _CODE),
    "GemmaTokenizer": TokenizerClass("unk=<unk> bos=<bos> eos=<eos> pad=<pad> mask=<mask>"),
    "CohereTokenizer": TokenizerClass(_COHERE, byte_level=True, nfc=True, marks=True),
    "BertTokenizer": TokenizerClass("unk=[UNK] sep=[SEP] pad=[PAD] cls=[CLS] mask=[MASK]"),
}
_BY_TYPE = {
    model_type: name
    for name, types in {
        "GPT2Tokenizer": "gpt2 starcoder2",
        "GPTNeoXTokenizer": "gpt_neox mamba2 olmoe",
        "GemmaTokenizer": "gemma gemma2 gemma3 gemma3_text",
        "CohereTokenizer": "cohere2",
        "Qwen2Tokenizer": "qwen2 qwen2_moe qwen2_vl qwen2_5_vl qwen3 qwen3_moe qwen3_next qwen3_vl",
        "Qwen3_5Tokenizer": "qwen3_5 qwen3_5_text qwen3_5_moe qwen3_5_moe_text",
    }.items()
    for model_type in types.split()
}
_PAIR_BY_TYPE = {type_: _BY_TYPE[type_] for type_ in ("gpt2", "gpt_neox", "qwen2", "qwen3")} | {
    "roberta": "RobertaTokenizer"
}
# Model types that always use their own class (qwen2 also for vocab.json), and that never use one.
_ALWAYS = ("qwen2", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text")
_NEVER = (
    "glm glm4 glm4_moe glm4_moe_lite granite granitemoehybrid ministral ministral3 mistral "
    "mistral3 mixtral olmo2 olmo3 phi3"
)


def pair_class(settings: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """The class for vocab.json and merges.txt; raises UnsupportedModel if it is unknown."""
    model_type = config.get("model_type")
    named = settings.get("tokenizer_class") or config.get("tokenizer_class")
    if named is None or model_type == "qwen2":
        named = _PAIR_BY_TYPE.get(model_type) if isinstance(model_type, str) else None
    known = [name for name, own in CLASSES.items() if own.reads_pair]
    if named is None:
        raise UnsupportedModel(
            "unknown pre-tokenizer for `vocab.json`: no `tokenizer_class` is named",
            hint=f"name it in tokenizer_config.json; known: {', '.join(known)}",
        )
    name = str(named).removesuffix("Fast")
    if name not in known:
        raise UnsupportedModel(
            f"unsupported tokenizer class `{shown(named)}` of `vocab.json`",
            hint=SAVE_AGAIN,
        )
    return name


def class_of(settings: Mapping[str, Any], config: Mapping[str, Any], *, byte_level: bool) -> str:
    """The class that AutoTokenizer selects; `byte_level`: the file has a byte-level step."""
    model_type = config.get("model_type")
    named = settings.get("tokenizer_class") or config.get("tokenizer_class") or ""
    named = str(named).removesuffix("Fast")
    if model_type in _NEVER.split() or (named == "LlamaTokenizer" and byte_level):
        return ""
    own = _BY_TYPE.get(model_type, "") if isinstance(model_type, str) else ""
    return own if model_type in _ALWAYS or not named else named


def apply_class(
    backend: tokenizers.Tokenizer, name: str, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Apply the class's settings to `backend`; returns the settings with its special tokens."""
    from tokenizers import normalizers, pre_tokenizers

    own = CLASSES.get(name, TokenizerClass())
    settings = {**own.tokens, **settings}

    def flag(key: str, usual: bool) -> bool:
        value = settings.get(key)
        return usual if value is None else bool(value)

    if own.byte_level:
        spaced = flag("add_prefix_space", False)
        if spaced and own.whole:  # otherwise every split would get a space
            backend.pre_tokenizer = pre_tokenizers.ByteLevel()
        for step in _each(backend.pre_tokenizer):
            if isinstance(step, pre_tokenizers.ByteLevel):
                step.add_prefix_space = spaced
        if backend.normalizer is None and own.nfc:
            backend.normalizer = normalizers.NFC()
    elif name in ("LlamaTokenizer", "CodeLlamaTokenizer"):
        always = name == "LlamaTokenizer" and flag("legacy", False)
        _mark_spaces(backend, flag("add_prefix_space", True), "always" if always else "first")
    elif name == "BertTokenizer" and isinstance(backend.normalizer, normalizers.BertNormalizer):
        accents = settings.get("strip_accents")
        backend.normalizer = normalizers.BertNormalizer(
            handle_chinese_chars=flag("tokenize_chinese_chars", True),
            strip_accents=accents if isinstance(accents, bool) else None,
            lowercase=flag("do_lower_case", True),
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

"""A family as a record in text, above the function that changes a Llama into it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from textwrap import dedent
from typing import TYPE_CHECKING, Any, get_args

from llmcli.config.mlp import Activation
from llmcli.config.model import ModelConfig
from llmcli.families import llama
from llmcli.families.draft import Draft
from llmcli.families.names import LLAMA, Names, known, table
from llmcli.families.read import GGUF_READS
from llmcli.families.rope import renamed_kinds
from llmcli.families.rules import Rule
from llmcli.families.unsupported import Kind
from llmcli.families.values import ConfigReader

if TYPE_CHECKING:
    from llmcli.checkpoints import TensorInfo

# what `options` may be, and their types
_OPTIONS: Mapping[str, type] = {
    "rotary": bool, "lacking": bool, "rotated": float, "expansion": int, "function": str,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Family:
    """Translates a checkpoint's configuration and tensor names into ours, without torch.

    `hf_types` are `model_type`s of config.json, `gguf_archs` are `general.architecture`s.
    `words` describe its variants. `hf_multimodal`: `model_type`s of multimodal models whose
    `text_config` has one of `hf_types`, or of `hf_texts`, which occur nowhere else. `gguf_reads`:
    metadata keys that llama.cpp reads for these architectures and ignores for others. `ran`: models
    whose published weights were run. `mixers` and `feed_forwards`: the parts of its blocks.

    `build` changes the Llama that a checkpoint of either format describes. Without `rotary` no
    layer has RoPE, and its settings are not read. `function`: the activation unless config.json has
    one, and always in GGUF.

    Of a config.json: `defaults` are those that differ from Llama's, by model type (`""`: of all),
    `fixed` are settings that Llama does not read here, and by model type those that a type ignores;
    `keys` are the types' names of settings, by Llama's; `prepare` rewrites the settings that Llama
    reads. `rotated`: the default share of a head with RoPE. `rope`: RoPE settings of a file without
    any; `ropes`: kinds of RoPE → the kind that is meant. `expansion`: the default size of a hidden
    layer in widths.

    In GGUF, `metadata` and `fill` are what Llama reads instead of the file's. `lacking`: layers may
    have 0 heads or neurons.
    """

    name: str
    words: str
    build: Callable[[Draft], None]
    hf_types: tuple[str, ...]
    gguf_archs: tuple[str, ...]
    hf_multimodal: tuple[str, ...] = ()
    hf_texts: tuple[str, ...] = ()
    gguf_reads: tuple[str, ...] = ()
    ran: tuple[str, ...] = ()
    mixers: tuple[str, ...] = ("attention",)
    feed_forwards: tuple[str, ...] = ("gated MLP",)
    names: Names | Callable[[ModelConfig], Names] = LLAMA
    rotary: bool = True
    function: Activation = "silu"
    defaults: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    fixed: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    prepare: Callable[[dict[str, Any]], Mapping[str, Any]] | None = None
    rotated: float | None = None
    rope: Mapping[str, Any] = field(default_factory=dict)
    ropes: Mapping[str, str] = field(default_factory=dict)
    expansion: int | None = None
    lacking: bool = False
    metadata: Mapping[str, Any] = field(default_factory=dict)
    fill: Callable[[ConfigReader], Mapping[str, Any]] | None = None

    def types(self, kind: Kind) -> tuple[str, ...]:
        """The model types of this family in checkpoints of this kind."""
        return self.hf_types if kind == "safetensors" else self.gguf_archs

    def from_hf(self, config: Mapping[str, Any]) -> ModelConfig:
        """config.json → ModelConfig. Raises CheckpointError and UnsupportedModel."""
        kind = config["model_type"]
        defaults, fixed = self.defaults, self.fixed
        settings = {**defaults.get("", {}), **defaults.get(kind, {}), **config}
        if self.rope and settings.get("rope_parameters") is None:
            settings["rope_parameters"] = self.rope
        settings = {**renamed_kinds(settings, self.ropes), **fixed.get(kind, {})}
        prepared = self.prepare(settings) if self.prepare else settings
        values = ConfigReader({**prepared, **fixed.get("", {})}, keys=self.keys)
        model = llama.from_hf(
            values,
            function=self.function,
            rotary=self.rotary,
            rotated=self.rotated,
            expansion=self.expansion,
        )
        return self._built(Draft(model, ConfigReader(settings, keys=self.keys), kind, None), kind)

    def from_gguf(
        self, metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo]
    ) -> ModelConfig:
        """GGUF metadata → ModelConfig. Raises CheckpointError and UnsupportedModel."""
        kind = ConfigReader(metadata).text("general.architecture")
        values = ConfigReader(metadata, prefix=f"{kind}.")
        filled = {**self.metadata, **(self.fill(values) if self.fill else {})}
        whole = {**metadata, **{f"{kind}.{key}": value for key, value in filled.items()}}
        model = llama.from_gguf(
            whole, tensors, function=self.function, rotary=self.rotary, lacking=self.lacking
        )
        called = self.hf_types[0] if len(self.hf_types) == 1 else kind
        return self._built(Draft(model, values, kind, tensors), called)

    def rules_hf(self, config: ModelConfig) -> tuple[Rule, ...]:
        """Rules for transformers' names."""
        return self._names(config).hf(config)

    def rules_gguf(self, config: ModelConfig) -> tuple[Rule, ...]:
        """Rules for llama.cpp's names."""
        return self._names(config).gguf(config)

    def _names(self, config: ModelConfig) -> Names:
        return self.names if isinstance(self.names, Names) else self.names(config)

    def _built(self, draft: Draft, model_type: str) -> ModelConfig:
        self.build(draft)
        return draft.finished(self.name, model_type)


def family(text: str, **functions: Any) -> Callable[[Callable[[Draft], None]], Family]:
    """Make the decorated function the `build` of a family, whose other fields `text` has.

    The first line is `name: words`, each other one a field; more indented lines continue it.

        types           model types of config.json | architectures of GGUF
        hf_multimodal, hf_texts, ran
                        words
        mixers, feed_forwards
                        words, separated by `, `
        defaults, fixed `key=value …` of all types; `defaults qwen2 qwen3` of some of those above
        rope, metadata  `key=value …`
        keys, ropes     `name=other …`
        options         `field=value …` of `rotary`, `lacking`, `rotated`, `expansion`, `function`
        names           a table of `names.TABLES`, and below how it differs (`Names.but`)
        gguf_reads      keys, or groups of `GGUF_READS`

    A value is JSON, or a string without quotes if it is a word. `functions` are the fields that
    are functions: `prepare`, `fill`, `names`. Raises ValueError, which names the family and the
    line, for what is none of this.
    """
    first, *lines = filter(None, re.split(r"\n(?! )", dedent(text).strip()))
    name, _, words = first.partition(":")
    fields: dict[str, Any] = {"name": name, "words": " ".join(words.split())}
    fields |= {"defaults": {}, "fixed": {}}
    seen = set[str]()
    for line in lines:
        key, colon, value = line.partition(":")
        try:
            if not colon or key in seen:
                raise ValueError("it is there twice" if colon else "it has no `:`")
            _read(fields, key, value)
        except ValueError as error:
            raise ValueError(f"family `{name}`, line `{key}`: {error}") from None
        seen.add(key)
    if "types" not in seen:
        raise ValueError(f"family `{name}` has no line `types`")
    return lambda build: Family(build=build, **fields, **functions)


def _read(fields: dict[str, Any], key: str, value: str) -> None:
    """Add what a line says to the fields; raises ValueError."""
    match key.split():
        case ["types"]:
            hf_types, bar, gguf_archs = value.partition("|")
            if not bar:
                raise ValueError("no `|` between types of config.json and architectures of GGUF")
            fields |= {"hf_types": tuple(hf_types.split()), "gguf_archs": tuple(gguf_archs.split())}
        case [("defaults" | "fixed") as what, *kinds]:
            types = (*fields.get("hf_types", ()), *fields.get("hf_texts", ()))
            for kind in kinds:
                known(kind, types, "type above")
            for kind in kinds or [""]:
                fields[what].setdefault(kind, {}).update(_settings(value))
        case ["options"]:
            fields |= _options(value)
        case [("rope" | "metadata" | "keys" | "ropes") as what]:
            fields[what] = _settings(value)
        case [("mixers" | "feed_forwards") as what]:
            fields[what] = tuple(filter(None, " ".join(value.split()).split(", ")))
        case ["names"]:
            usual, _, changes = value.strip().partition("\n")
            fields["names"] = table(usual).but(changes)
        case ["gguf_reads"]:
            groups = {key: (key,) for keys in GGUF_READS.values() for key in keys} | GGUF_READS
            named = (groups[known(one, groups, "key or group")] for one in value.split())
            fields["gguf_reads"] = tuple(key for group in named for key in group)
        case [("hf_multimodal" | "hf_texts" | "ran") as what]:
            fields[what] = tuple(value.split())
        case _:
            raise ValueError("there is no such field; `record.family` lists them")


def _options(text: str) -> dict[str, Any]:
    found = _settings(text)
    for key, value in found.items():
        wanted = _OPTIONS[known(key, _OPTIONS, "option")]
        if type(value) is not wanted:
            raise ValueError(f"`{key}` is {json.dumps(value)}, which is no {wanted.__name__}")
        if key == "function":
            known(value, get_args(Activation), "activation")
    return found


def _settings(text: str) -> dict[str, Any]:
    """`key=value …` with values as in JSON; a word that is none is a string."""
    found: dict[str, Any] = {}
    for one in text.split():
        key, _, value = one.partition("=")
        if not key or not value:
            raise ValueError(f"`{one}` is not `key=value`")
        if key in found:
            raise ValueError(f"`{key}` is there twice")
        try:
            found[key] = json.loads(value)
        except ValueError:
            if not re.fullmatch(r"[A-Za-z]\w*", value) or value in ("True", "False", "None"):
                raise ValueError(f"`{one}`: the value is neither JSON nor a word") from None
            found[key] = value
    return found

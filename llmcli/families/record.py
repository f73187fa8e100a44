"""A family as a record in text, above the function that changes a Llama into it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from textwrap import dedent
from typing import TYPE_CHECKING, Any

from llmcli.config.mlp import Activation
from llmcli.config.model import ModelConfig
from llmcli.families import llama
from llmcli.families.draft import Draft
from llmcli.families.names import LLAMA, TABLES, Names
from llmcli.families.read import GGUF_READS
from llmcli.families.rope import renamed_kinds
from llmcli.families.rules import Rule
from llmcli.families.unsupported import Kind
from llmcli.families.values import Values

if TYPE_CHECKING:
    from llmcli.checkpoints import TensorInfo

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
    fill: Callable[[Values], Mapping[str, Any]] | None = None

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
        values = Values({**prepared, **fixed.get("", {})}, keys=self.keys)
        model = llama.from_hf(
            values,
            function=self.function,
            rotary=self.rotary,
            rotated=self.rotated,
            expansion=self.expansion,
        )
        return self._built(Draft(model, Values(settings, keys=self.keys), kind, None), kind)

    def from_gguf(
        self, metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo]
    ) -> ModelConfig:
        """GGUF metadata → ModelConfig. Raises CheckpointError and UnsupportedModel."""
        kind = Values(metadata).text("general.architecture")
        values = Values(metadata, prefix=f"{kind}.")
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
    """Make the decorated function the `build` of a family, whose fields `text` has.

    The first line is `name: words`, each other one a field; more indented lines continue it.

        types           model types of config.json | architectures of GGUF
        defaults, fixed `key=value …` of all types; `defaults qwen2 qwen3` of some
        keys, ropes     `name=other …`
        options         fields with a single value
        names           a table of `names.TABLES`, and below how it differs (`Names.but`)
        gguf_reads      keys, or groups of `GGUF_READS`

    `functions` are fields that are functions.
    """
    fields: dict[str, Any] = {"defaults": {}, "fixed": {}}
    lines = (one.partition(":") for one in re.split(r"\n(?! )", dedent(text).strip()))
    (name, _, words), *rest = lines
    for key, _, value in rest:
        what, _, kind = key.partition(" ")
        match what:
            case "types":
                types = (tuple(of.split()) for of in value.split("|"))
                fields["hf_types"], fields["gguf_archs"] = types
            case "defaults" | "fixed":
                for one in kind.split() or [""]:
                    fields[what].setdefault(one, {}).update(_settings(value))
            case "options":
                fields |= _settings(value)
            case "rope" | "metadata" | "keys" | "ropes":
                fields[what] = _settings(value)
            case "mixers" | "feed_forwards":
                fields[what] = tuple(filter(None, " ".join(value.split()).split(", ")))
            case "names":
                table, _, changes = value.strip().partition("\n")
                fields[what] = TABLES[table].but(changes)
            case "gguf_reads":
                groups = (GGUF_READS.get(one, (one,)) for one in value.split())
                fields[what] = tuple(key for group in groups for key in group)
            case _:
                fields[what] = tuple(value.split())
    fields |= {"name": name, "words": " ".join(words.split())}
    return lambda build: Family(build=build, **fields, **functions)


def _settings(text: str) -> dict[str, Any]:
    """`key=value …` with values as in JSON; a word that is none is a string."""
    found: dict[str, Any] = {}
    for key, _, value in (one.partition("=") for one in text.split()):
        try:
            found[key] = json.loads(value)
        except ValueError:
            found[key] = value
    return found

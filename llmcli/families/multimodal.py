"""The text model of a multimodal checkpoint: its configuration and tensor names.

The config.json nests the text model's settings under `text_config`, and tensor names begin with
their module. This reader serves all families, which only see a text model's settings and names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from llmcli.errors import CheckpointError
from llmcli.families.rules import Drop, Rename, Rule
from llmcli.families.values import ConfigReader

# Prefixes of the text model's names: none in some older files; transformers before 4.52; and since
# then (without the text model's `model.`).
PREFIXES = ("", "language_model.", "model.language_model.")

# Other modules than the text model, by their names in transformers.
_OTHERS = {
    "the vision tower": "vision_tower vision_model visual",
    "the audio tower": "audio_tower",
    "the projector of images or sounds": "multi_modal_projector embed_vision embed_audio"
    " image_newline",
}

# Settings of the whole model that also apply to its text model.
_OF_THE_WHOLE = (
    *("tie_word_embeddings", "bos_token_id", "eos_token_id", "use_bidirectional_attention"),
    *("quantization_config", "compression_config", "quantization"),
)


def text_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Extract the text model's configuration.

    Raises CheckpointError if it or its type is missing. In old files it is at the top level and has
    the type of the whole model.
    """
    if "text_config" not in settings and "hidden_size" in settings:  # Qwen's first files
        return {**settings, "model_type": f"{settings['model_type']}_text"}
    if ConfigReader(settings).section("text_config") is None:
        raise CheckpointError("the configuration of a multimodal model has no `text_config`")
    text: Mapping[str, Any] = settings["text_config"]
    if not isinstance(text.get("model_type"), str):
        raise CheckpointError("the `text_config` of the configuration has no `model_type`")
    whole = {key: settings[key] for key in _OF_THE_WHOLE if settings.get(key) is not None}
    return {**text, **whole}


def with_prefixes(rules: Sequence[Rule]) -> tuple[Rule, ...]:
    """A text model's rules under every prefix, and drops of all other modules."""
    found: list[Rule] = []
    for prefix in PREFIXES:
        for rule in rules:
            if isinstance(rule, Rename):
                source = prefix + rule.source
                found.append(Rename(source, rule.target, *rule.ops, within=rule.within))
            else:
                found.append(replace(rule, pattern=prefix + rule.pattern))
    for what, modules in _OTHERS.items():
        for module in modules.split():
            for name in (module, f"model.{module}"):
                reason = f"of {what}, which text does not need"
                found += [Drop(name, reason), Drop(f"{name}.*", reason)]
    return tuple(found)

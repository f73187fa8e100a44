"""The text model of a multimodal checkpoint: its configuration, and the names of its tensors.

Its config.json nests the text model's own under `text_config`, and the name of every tensor begins
with the module that it belongs to. One reader for all families: what a family reads is a text
model's configuration, and its rules have the names of a text model alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from llmcli.errors import CheckpointError
from llmcli.families.rules import Drop, Rename, Rule
from llmcli.families.values import Values

# What stands before a text model's names: nothing in some older files; the rest as transformers
# wrote it before version 4.52, and as it writes it since (there without the text model's `model.`).
PREFIXES = ("", "language_model.", "model.language_model.")

# Modules beside the text model, as transformers' classes call them, and what they are.
_OTHERS = {
    "the vision tower": ("vision_tower", "vision_model", "visual"),
    "the audio tower": ("audio_tower",),
    "what puts images or sounds into the text": (
        "multi_modal_projector", "embed_vision", "embed_audio", "image_newline",
    ),
}  # fmt: skip

# Settings of the whole that hold for its text, too.
_OF_THE_WHOLE = (
    *("tie_word_embeddings", "bos_token_id", "eos_token_id", "use_bidirectional_attention"),
    *("quantization_config", "compression_config", "quantization"),
)


def text_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The text model's configuration. Raises CheckpointError where it has none or no type.

    It may stand beside that of the vision tower, and its type is then that of the whole.
    """
    if "text_config" not in settings and "hidden_size" in settings:  # Qwen's first files
        return {**settings, "model_type": f"{settings['model_type']}_text"}
    if Values(settings).section("text_config") is None:
        raise CheckpointError("the configuration of a multimodal model has no `text_config`")
    text: Mapping[str, Any] = settings["text_config"]
    if not isinstance(text.get("model_type"), str):
        raise CheckpointError("the `text_config` of the configuration has no `model_type`")
    whole = {key: settings[key] for key in _OF_THE_WHOLE if settings.get(key) is not None}
    return {**text, **whole}


def with_prefixes(rules: Sequence[Rule]) -> tuple[Rule, ...]:
    """The rules of a text model, under every prefix, and drops of what is beside it."""
    found: list[Rule] = []
    for prefix in PREFIXES:
        for rule in rules:
            if isinstance(rule, Rename):
                source = prefix + rule.source
                found.append(Rename(source, rule.target, *rule.ops, within=rule.within))
            else:
                found.append(replace(rule, pattern=prefix + rule.pattern))
    for what, modules in _OTHERS.items():
        for module in modules:
            for name in (module, f"model.{module}"):
                reason = f"of {what}, which a text does not need"
                found += [Drop(name, reason), Drop(f"{name}.*", reason)]
    return tuple(found)

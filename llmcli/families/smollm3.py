"""SmolLM3 (Hugging Face 2025): Llama without RoPE in every fourth layer."""

from __future__ import annotations

from llmcli.families.draft import Draft, llama_like
from llmcli.families.read import hf_window
from llmcli.families.values import MOST

_INTERVAL = 4


def _smollm3(m: Draft) -> None:
    """GGUF files do not record which layers lack RoPE, and llama.cpp has no windows here."""
    values, count = m.values, len(m.attention)
    if m.hf and values.has("no_rope_layers"):  # 1: a layer with rotary positions
        listed = values.raw("no_rope_layers")
        if not isinstance(listed, list) or len(listed) != count or not all(
            isinstance(one, int) and one in (0, 1) for one in listed
        ):  # fmt: skip
            raise values.wrong("no_rope_layers", f"0 or 1 for each of {count} layers")
        rotated = [bool(one) for one in listed]
    else:
        interval = _INTERVAL
        if m.hf:
            interval = values.integer("no_rope_layer_interval", interval, most=MOST["layers"])
        rotated = [(index + 1) % interval != 0 for index in range(count)]
    window = hf_window(values) if m.hf and values.flag("use_sliding_window", False) else None
    slides = [not one for one in rotated]
    if m.hf and values.has("layer_types"):
        kinds = values.layer_types(count, ("full_attention", "sliding_attention"))
        slides = [kind == "sliding_attention" for kind in kinds]
    m.by_layer(
        rope=[m.attention[0].rope if one else None for one in rotated],
        window=[window if one else None for one in slides],
    )


FAMILIES = (
    llama_like(
        _smollm3,
        name="smollm3", words="as llama, some layers without rotary positions",
        hf=("smollm3",), gguf=("smollm3",),
        defaults={
            "num_key_value_heads": 4, "max_position_embeddings": 32768, "rope_theta": 2e6,
            "bos_token_id": 128_000, "eos_token_id": 128_001, "tie_word_embeddings": True,
        },
    ),
)  # fmt: skip

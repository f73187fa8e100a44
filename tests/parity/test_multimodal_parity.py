"""The text model inside of a multimodal checkpoint of transformers, against transformers."""

import json

import pytest
import torch
from parity_models import opened, randomize
from parity_reference import really_float64
from transformers import AutoConfig, AutoModelForImageTextToText
from zoo import TYPES

from llmcli.checkpoints import open_checkpoint
from llmcli.families import describe

_TOWER = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 8, "patch_size": 4,
}  # fmt: skip
_AUDIO = {
    "model_type": "gemma4_audio", "hidden_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "subsampling_conv_channels": [8, 4], "output_proj_dims": 16,
}  # fmt: skip
_QWEN_TOWER = {
    "depth": 1, "hidden_size": 16, "embed_dim": 16, "intermediate_size": 16, "num_heads": 2,
    "out_hidden_size": 48, "patch_size": 4, "deepstack_visual_indexes": [],
}  # fmt: skip
_SECTIONS = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 1, 1]}


def text(kind, **changes):
    base = dict(TYPES[kind.removesuffix("_text") if "vl" in kind else kind].base)
    return base | {"model_type": kind} | changes


def gated(kind):
    """Qwen 3.5's text model, with rotary positions in sections."""
    return text(kind, rope_parameters=_SECTIONS | {
        "mrope_section": [1, 1, 0], "mrope_interleaved": True, "partial_rotary_factor": 0.25,
    })  # fmt: skip


# model_type: the text model, the vision tower, and how its tensors begin
CASES = {
    "gemma3": (text("gemma3_text"), {"model_type": "siglip_vision_model"} | _TOWER,
               {"mm_tokens_per_image": 4}),
    "gemma4": (
        text("gemma4_text", use_bidirectional_attention="vision"),
        {"model_type": "gemma4_vision", "num_key_value_heads": 2, "head_dim": 8}
        | {key: value for key, value in _TOWER.items() if key != "image_size"},
        {"audio_config": _AUDIO},
    ),
    "llama4": (text("llama4_text"), _TOWER | {"model_type": "llama4_vision_model",
               "num_channels": 3, "vision_output_dim": 16, "projector_input_dim": 16,
               "projector_output_dim": 16}, {}),
    "mistral3": (text("mistral"), {"model_type": "pixtral", "head_dim": 8} | _TOWER, {}),
    "qwen2_5_vl": (
        TYPES["qwen2"].base | {"model_type": "qwen2_5_vl_text", "rope_parameters": _SECTIONS},
        {"model_type": "qwen2_5_vl"} | _QWEN_TOWER, {},
    ),
    "qwen3_vl": (
        TYPES["qwen3"].base | {"model_type": "qwen3_vl_text", "rope_parameters": _SECTIONS
                               | {"mrope_section": [4, 2, 2], "mrope_interleaved": True}},
        {"model_type": "qwen3_vl"} | _QWEN_TOWER, {},
    ),
    "qwen3_5": (gated("qwen3_5_text"), {"model_type": "qwen3_5_vision"} | _QWEN_TOWER, {}),
    "qwen3_5_moe": (
        gated("qwen3_5_moe_text"), {"model_type": "qwen3_5_moe_vision"} | _QWEN_TOWER, {},
    ),
}  # fmt: skip


IDS = torch.arange(3, 60)[None]


@torch.no_grad()
def written(kind, folder):
    """A random checkpoint in `folder`, and what transformers makes of a text: `[1, T, V]`."""
    inside, tower, more = CASES[kind]
    config = AutoConfig.for_model(kind, text_config=inside, vision_config=tower, **more)
    theirs = AutoModelForImageTextToText.from_config(config, attn_implementation="eager")
    randomize(theirs, 0)
    theirs.save_pretrained(folder)
    theirs = AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    with really_float64():
        if kind == "llama4":  # whose whole model does not run without an image
            theirs = theirs.language_model
        inner = theirs.model if kind == "llama4" else theirs.model.language_model
        inner.rotary_emb = type(inner.rotary_emb)(inner.config)
        return theirs(input_ids=IDS).logits.log_softmax(-1)


@pytest.mark.parametrize("kind", CASES)
def test_without_an_image_it_is_its_text_model(kind, tmp_path):
    right = written(kind, tmp_path)
    model = opened(tmp_path, "float64")
    assert any("vision tower" in reason for _, reason in model.ledger.dropped)
    assert (model.decoder(IDS).log_softmax(-1) - right).abs().max() < 1e-9


def test_the_first_files_of_qwen_have_no_text_config(tmp_path):
    flat = TYPES["qwen2"].base | {
        "model_type": "qwen2_5_vl", "vision_config": {"depth": 1},
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]}, "rope_theta": 1e6,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(flat))
    found = describe(open_checkpoint(tmp_path))
    assert found.family == "llama" or found.layers[0].attention.qkv_bias
    assert found.layers[0].attention.rope.theta == 1e6


def test_gemma_3_leaves_sizes_out(tmp_path):
    """As `google/gemma-3-4b-it` has it: neither a vocabulary nor heads."""
    inside = {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
        "num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }  # fmt: skip
    whole = {"model_type": "gemma3", "text_config": inside, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    found = describe(open_checkpoint(tmp_path))
    attention = found.layers[5].attention
    assert (found.vocab, attention.heads, attention.kv_heads, attention.head_dim) == (
        262_208, 8, 4, 256,
    )  # fmt: skip
    assert [layer.window for layer in found.layers[:7]] == [1024] * 5 + [None, 1024]
    assert (attention.rope.theta, attention.rope.scaling.factor) == (1e6, 8.0)
    assert found.layers[0].attention.rope.theta == 10_000.0
    assert found.layers[0].attention.rope.scaling is None

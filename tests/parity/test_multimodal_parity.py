"""The text model inside of a multimodal checkpoint of transformers, against transformers."""

import pytest
import torch
from parity_models import opened, randomize
from parity_reference import really_float64
from transformers import AutoConfig, AutoModelForImageTextToText
from zoo import TYPES

_TOWER = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
    patch_size=4)
_IMAGES = _TOWER | {"image_size": 8}
_AUDIO = dict(model_type="gemma4_audio", hidden_size=16, num_hidden_layers=1,
    num_attention_heads=2, subsampling_conv_channels=[8, 4], output_proj_dims=16)
_QWEN_TOWER = dict(depth=1, hidden_size=16, embed_dim=16, intermediate_size=16, num_heads=2,
    out_hidden_size=48, patch_size=4, deepstack_visual_indexes=[])


def text(kind, of="", **changes):
    """The text model of that type, as the zoo has it or another one."""
    return TYPES[of or kind].base | {"model_type": kind} | changes


def sections(*pairs, **more):
    """Rotary positions in sections."""
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": list(pairs)}
    return {"rope_parameters": rope | more}


_THREE = sections(2, 1, 1)
_MIXED = sections(4, 2, 2, mrope_interleaved=True)
_PARTIAL = sections(1, 1, 0, mrope_interleaved=True, partial_rotary_factor=0.25)
# model_type: the text model, the vision tower, and other settings
CASES = {
    "gemma3": (text("gemma3_text"), _IMAGES | {"model_type": "siglip_vision_model"},
               {"mm_tokens_per_image": 4}),
    "gemma4": (text("gemma4_text", use_bidirectional_attention="vision"),
               _TOWER | {"model_type": "gemma4_vision", "num_key_value_heads": 2, "head_dim": 8},
               {"audio_config": _AUDIO}),
    "llama4": (text("llama4_text"), _IMAGES | dict(model_type="llama4_vision_model",
               num_channels=3, vision_output_dim=16, projector_input_dim=16,
               projector_output_dim=16), {}),
    "mistral3": (text("mistral"), _IMAGES | {"model_type": "pixtral", "head_dim": 8}, {}),
    "qwen2_5_vl": (text("qwen2_5_vl_text", "qwen2", **_THREE),
                   _QWEN_TOWER | {"model_type": "qwen2_5_vl"}, {}),
    "qwen3_vl": (text("qwen3_vl_text", "qwen3", **_MIXED),
                 _QWEN_TOWER | {"model_type": "qwen3_vl"}, {}),
    "qwen3_5": (text("qwen3_5_text", **_PARTIAL),
                _QWEN_TOWER | {"model_type": "qwen3_5_vision"}, {}),
    "qwen3_5_moe": (text("qwen3_5_moe_text", **_PARTIAL),
                    _QWEN_TOWER | {"model_type": "qwen3_5_moe_vision"}, {}),
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

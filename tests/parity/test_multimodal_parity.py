"""The text model inside of a multimodal checkpoint of transformers, against transformers."""

from dataclasses import replace

import torch
from parity_reference import really_float64
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

from llmcli.checkpoints import open_checkpoint
from llmcli.families import families
from llmcli.families.llama import LLAMA
from llmcli.loading import load_checkpoint


def test_llava_without_an_image_is_its_text_model(tmp_path, monkeypatch):
    """No family reads LLaVA's files yet: here Llama's does."""
    known = [replace(one, hf_multimodal=("llava",)) if one is LLAMA else one for one in families()]
    monkeypatch.setattr("llmcli.families.family.families", lambda: tuple(known))
    eye = CLIPVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        image_size=8, patch_size=4, projection_dim=16,
    )  # fmt: skip
    text = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=97, max_position_embeddings=64, initializer_range=0.3,
    )  # fmt: skip
    torch.manual_seed(0)
    config = LlavaConfig(vision_config=eye, text_config=text, image_token_index=96)
    with really_float64():
        theirs = LlavaForConditionalGeneration(config).double().eval()
    theirs.save_pretrained(tmp_path)
    model = load_checkpoint(open_checkpoint(tmp_path), device="cpu", dtype="float64")
    dropped = dict(model.ledger.dropped)
    assert any("vision_tower" in name for name in dropped)
    assert any("multi_modal_projector" in name for name in dropped)
    ids = torch.arange(9)[None]
    with torch.no_grad(), really_float64():
        right = theirs(input_ids=ids).logits
    torch.testing.assert_close(model.decoder(ids), right, rtol=0, atol=1e-9)

"""The text model of a multimodal checkpoint, whose family is one of text models.

Llama's reads it here, under a `model_type` that exists in these tests only; those that there are
are in `parity/test_transformers_parity`. What describes no text model is in `table.txt`.
"""

import json
from dataclasses import replace
from functools import partial

import pytest
import torch
from decoder_parameters import parameters_of
from safetensors.torch import save_file
from tiny_checkpoints import LLAMA, llama_tensors, loaded, write_llama

from llmcli.checkpoints import open_checkpoint
from llmcli.commands.info.measure import measure_info, supported_families
from llmcli.commands.load.measure.run import check_files
from llmcli.errors import CheckpointError, UnsupportedModel, WeightMismatch
from llmcli.families import describe, families
from llmcli.families.dense import llamas as FAMILY
from llmcli.measure.machine import cpu
from llmcli.records.work import LoadTimings

TEXT = {key: value for key, value in LLAMA.items() if key != "tie_word_embeddings"}
WHOLE = {"model_type": "seeing", "text_config": TEXT, "vision_config": {"model_type": "eye"}}
EYE = {
    "vision_tower.blocks.17.mlp.1.weight": torch.ones(3, 3),
    "multi_modal_projector.linear_1.bias": torch.ones(3), "image_newline": torch.ones(3),
}  # fmt: skip


@pytest.fixture(autouse=True)
def reader(monkeypatch):
    ours = replace(FAMILY, hf_multimodal=("seeing",))
    known = [ours if one is FAMILY else one for one in families()]
    monkeypatch.setattr("llmcli.families.family.families", lambda: tuple(known))
    monkeypatch.setattr("llmcli.commands.info.measure.families", lambda: tuple(known))


def named(style):
    """The tiny Llama's tensors, called as in that style of multimodal checkpoints."""
    tensors = llama_tensors()
    if style == "as alone":
        return tensors
    if style == "before 4.52":
        return {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    return {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in tensors.items()
    }


def write(folder, tensors, **config):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(WHOLE | config))
    save_file(tensors, folder / "model.safetensors")
    return folder


load = partial(loaded, dtype="float32")


@pytest.mark.parametrize("style", ["as alone", "before 4.52", "since 4.52"])
@pytest.mark.parametrize("before", ["", "model."])
def test_the_text_is_read_and_the_rest_is_dropped_by_name(tmp_path, style, before):
    plain = load(write_llama(tmp_path / "plain"))
    others = {before + name: tensor for name, tensor in EYE.items()}
    folder = write(tmp_path / "m", named(style) | others)
    model = load(folder)
    assert (model.config.family, model.config.model_type) == ("llama", "llama")
    assert model.config == plain.config
    for name, slot in parameters_of(plain.decoder).items():
        assert torch.equal(parameters_of(model.decoder)[name], slot)
    dropped = dict(model.ledger.dropped)
    assert set(dropped) == set(others)
    assert dropped[f"{before}vision_tower.blocks.17.mlp.1.weight"].startswith("of the vision tower")
    report = check_files(open_checkpoint(folder), LoadTimings())
    assert report.ok
    info = measure_info(open_checkpoint(folder), [cpu()])
    assert all(check.ok for check in info.checks)
    assert info.architecture.parameters.total == plain.parameter_count


@pytest.mark.parametrize("head", ["lm_head.weight", "language_model.lm_head.weight"])
@pytest.mark.parametrize("equal", [True, False])
def test_a_head_that_is_stored_is_believed(tmp_path, head, equal):
    tensors = named("since 4.52")
    del tensors["lm_head.weight"]
    table = tensors["model.language_model.embed_tokens.weight"]
    tensors[head] = table.clone() if equal else 2 * table
    model = load(write(tmp_path, tensors, tie_word_embeddings=True))
    assert model.config.head.tied == equal
    assert (head in dict(model.ledger.dropped)) == equal
    if not equal:
        assert torch.equal(parameters_of(model.decoder)["head.W"], 2 * table)


def test_a_head_may_be_all_there_is_of_the_pair(tmp_path):
    tensors = named("before 4.52")
    table = tensors.pop("language_model.model.embed_tokens.weight")
    tensors["language_model.lm_head.weight"] = table
    model = load(write(tmp_path, tensors, tie_word_embeddings=True))
    assert torch.equal(parameters_of(model.decoder)["embed.W"], table)


def test_settings_of_the_whole_hold_for_the_text(tmp_path):
    tensors = named("since 4.52")
    del tensors["lm_head.weight"]
    text = TEXT | {"tie_word_embeddings": False, "eos_token_id": 5}
    config = {"text_config": text, "tie_word_embeddings": True, "eos_token_id": [7, 8]}
    model = load(write(tmp_path, tensors, **config))
    assert model.config.head.tied
    assert model.config.eos == (7, 8)
    with pytest.raises(UnsupportedModel, match="bidirectional attention"):
        load(write(tmp_path, tensors, **config, use_bidirectional_attention=True))
    with pytest.raises(UnsupportedModel, match="quantized with `awq`"):
        load(write(tmp_path, tensors, **config, quantization_config={"quant_method": "awq"}))


@pytest.mark.parametrize("name", [
    "vision_tower2.x", "language_model.vision_tower.x", "model.language_model.model.extra.weight",
    "eye.x", "lm_head.bias", "model.image_newline2", "vision_tower_weight",
])  # fmt: skip
def test_any_other_name_is_surplus(tmp_path, name):
    model = load(write(tmp_path, named("since 4.52") | {name: torch.ones(2)}))
    assert model.ledger.surplus == (name,)


def test_a_tensor_under_two_prefixes_is_refused(tmp_path):
    tensors = named("since 4.52") | {"language_model.model.norm.weight": torch.ones(32)}
    with pytest.raises(CheckpointError, match=r"two tensors of the checkpoint are both `ln_final"):
        load(write(tmp_path, tensors))


def test_prefixes_are_for_multimodal_models_alone(tmp_path):
    with pytest.raises(WeightMismatch, match=r"no tensor for `embed\.W`"):
        load(write_llama(tmp_path, named("since 4.52")))


def test_the_list_of_families_has_them():
    listed = {family.name: family.hf_types for family in supported_families()}
    assert listed["llama"] == ("llama", "mistral", "ministral", "seeing")


def test_a_text_model_mistral_is_not_taken_for_a_ministral(tmp_path):
    types = {"layer_types": ["full_attention", "full_attention"], "sliding_window": 5}
    write_llama(tmp_path / "alone", model_type="mistral", **types)
    whole = json.loads((tmp_path / "alone" / "config.json").read_text())
    write_llama(tmp_path / "nested", model_type="seeing", text_config=whole)
    windows = {
        name: {layer.window for layer in describe(open_checkpoint(tmp_path / name)).layers}
        for name in ("alone", "nested")
    }
    assert windows == {"alone": {None}, "nested": {5}}  # as transformers reads the two

"""From an opened checkpoint to a configuration and rules; what is refused, and how it is said."""

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from tiny_checkpoints import write_llama
from zoo import TYPES

from llmcli.checkpoints import open_checkpoint
from llmcli.checkpoints.files import read_object
from llmcli.config.model import ModelConfig
from llmcli.errors import CheckpointError, UnsupportedModel
from llmcli.families import families, find, translate, unsupported
from llmcli.families.rules import plan
from llmcli.families.values import ConfigReader, shortened
from llmcli.loading.load import load_checkpoint

LLAMA = {
    "model_type": "llama", "vocab_size": 20, "hidden_size": 8, "intermediate_size": 12,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "hidden_act": "silu", "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LFM2 = {"model_type": "lfm2", **TYPES["lfm2"].base}
QWEN = LLAMA | {"model_type": "qwen3", "head_dim": 4, "use_sliding_window": True}
GPT2 = {
    "model_type": "gpt2", "vocab_size": 20, "n_embd": 8, "n_layer": 2, "n_head": 4,
    "n_positions": 64, "n_inner": None, "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
}  # fmt: skip
GGUF = {
    "general.architecture": "llama", "llama.block_count": 2, "llama.context_length": 64,
    "llama.embedding_length": 8, "llama.feed_forward_length": 12, "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2, "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 10000.0, "llama.vocab_size": 20, "tokenizer.ggml.eos_token_id": 2,
}  # fmt: skip


EMBED, OTHER = torch.arange(160.0).view(20, 8), torch.zeros(20, 8)


def stored(folder, config, **tensors):
    """A directory as the hub has it."""
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    tensors = {name.replace("__", "."): value.clone() for name, value in tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    return open_checkpoint(folder)


@pytest.mark.parametrize(("settings", "embed", "head", "targets"), [
    (LLAMA, EMBED, EMBED, ["embed.W"]),
    *((LLAMA, EMBED, other, ["embed.W", "head.W"]) for other in (OTHER, EMBED.half(), EMBED[:19])),
    *((settings, None, EMBED, ["embed.W"]) for settings in (LLAMA, GPT2)),
])  # fmt: skip
def test_a_stored_head_of_a_tied_model(settings, embed, head, targets, tmp_path):
    """Dropped where it equals the embedding, kept where it differs; alone it is the embedding."""
    tensors = {} if embed is None else {"model__embed_tokens__weight": embed}
    checkpoint = stored(tmp_path, settings, **tensors, lm_head__weight=head)
    config, rules = translate(checkpoint)
    planned = plan(checkpoint.tensors, rules, config)
    assert sorted(load.target for load in planned.loads) == targets
    assert config.head.tied == (targets == ["embed.W"])
    dropped = embed is not None and config.head.tied
    assert planned.dropped == (("lm_head.weight", "tied: the head is `embed.W`"),) * dropped


@pytest.mark.parametrize(("config", "says", "hint"), [
    (None, None, "config.json"),
    *((LLAMA | {"quantization_config": {"quant_method": method, "bits": 4}},
       f"quantized with `{method}`", "GGUF") for method in ("gptq", "awq", "bitsandbytes")),
    (LLAMA | {"use_bidirectional_attention": True}, "it needs `bidirectional attention`", ""),
])  # fmt: skip
def test_what_is_refused_whatever_the_type(config, says, hint, tmp_path):
    with pytest.raises(CheckpointError, match=says) as caught:
        translate(stored(tmp_path, config, x=EMBED))
    assert isinstance(caught.value, UnsupportedModel) == (config is not None)
    assert hint in caught.value.hint


def test_what_is_switched_off_is_no_reason(tmp_path):
    for off in ({"quantization_config": None}, {"use_bidirectional_attention": False}):
        translate(stored(tmp_path, LLAMA | off, x=EMBED))


def test_the_types_that_need_a_part_exist_and_are_not_supported():
    """As transformers spells them, or the gguf package, so that no entry is a misspelling."""
    from gguf import MODEL_ARCH_NAMES
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    for column, names in ((1, CONFIG_MAPPING_NAMES), (2, MODEL_ARCH_NAMES.values())):
        kind = ("safetensors", "gguf")[column - 1]
        listed = {name for row in unsupported._NEEDED_BY for name in row[column].split()}
        assert listed <= {*names, "gemma3n_text"}
        for family in families():
            assert listed.isdisjoint(family.types(kind))
    for name in unsupported._INSTEAD:
        assert unsupported.needed_parts(name, "gguf" if "-" in name else "safetensors")


def test_every_type_belongs_to_one_family():
    for kind in ("safetensors", "gguf"):
        names = [name for family in families() for name in family.types(kind)]
        assert len(names) == len(set(names))
        assert all(find(name, kind).name for name in names)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=6,
)
EXTRA = ("head_dim", "sliding_window", "layer_types", "rope_scaling", "attention_bias", "mlp_bias")
ROPE = ("rope_type", "type", "factor", "rope_theta", "original_max_position_embeddings", "truncate")
rope_values = st.dictionaries(
    st.sampled_from([*ROPE, "low_freq_factor", "short_factor", "partial_rotary_factor", "mscale"]),
    json_values | st.sampled_from(["linear", "dynamic", "yarn", "llama3", "longrope"]),
)


def read_or_refused(read):
    """What is read; None where that is refused, in one short line."""
    try:
        return read()
    except CheckpointError as caught:
        error = caught
    assert error.message.isprintable()
    assert len(error.message) < 300
    assert error.hint
    return None


def described_or_refused(read):
    found = read_or_refused(read)
    assert found is None or isinstance(found, ModelConfig)
    hash(found)


@settings(max_examples=200)
@given(
    st.sampled_from([LLAMA, LLAMA | {"model_type": "mistral"}, QWEN, GPT2]),
    st.dictionaries(st.sampled_from([*LLAMA, *GPT2, *EXTRA]), json_values, max_size=3),
    st.none() | rope_values,
)
def test_any_config_json_is_described_or_refused(whole, changes, rope):
    changes.pop("model_type", None)
    changed = whole | changes | ({} if rope is None else {"rope_parameters": rope})
    described_or_refused(lambda: find(whole["model_type"], "safetensors").from_hf(changed))


@settings(max_examples=200)
@given(
    st.dictionaries(
        st.sampled_from([*GGUF, "llama.expert_count", "llama.rope.scaling.type"]), json_values,
        max_size=3,
    )
)  # fmt: skip
def test_any_metadata_is_described_or_refused(changes):
    changes.pop("general.architecture", None)
    described_or_refused(lambda: find("llama", "gguf").from_gguf(GGUF | changes, {}))


def test_values_are_shown_short_and_printable():
    assert shortened("a\x1b[31m\nb") == r"a\x1b[31m\nb"
    assert len(shortened("\x1b" * 40)) == 40
    assert shortened({"a": {"b": 1}}) == "dict of 1 entries"
    assert len(shortened("x" * 10**6)) == 40


@pytest.mark.parametrize("infinity", ["Infinity", '{"__float__": "Infinity"}'])
def test_infinity_as_transformers_writes_it(tmp_path, infinity):
    """`time_step_limit` of Mamba-2: read as a number where a family allows it, and nowhere else."""
    path = tmp_path / "config.json"
    path.write_text(f'{{"limit": [0.0, {infinity}], "low": -{infinity}, "one": {infinity}}}'
                    if infinity == "Infinity" else
                    f'{{"limit": [0.0, {infinity}], "one": {infinity}, '
                    '"low": {"__float__": "-Infinity"}}')  # fmt: skip
    values = ConfigReader(read_object(path))
    assert values.numbers("limit", 2, above=False, infinite=True) == (0.0, math.inf)
    assert values.number("one", infinite=True) == math.inf
    assert values.number("low", least=-math.inf, above=False, infinite=True) == -math.inf
    with pytest.raises(CheckpointError, match=r"`low` is .*: it must be a number above 0"):
        values.number("low", infinite=True)
    for key in ("limit", "one"):
        with pytest.raises(CheckpointError, match="it must be a finite number"):
            values.numbers(key, 2, above=False) if key == "limit" else values.number(key)


@pytest.mark.parametrize("other", [
    math.nan, {"__float__": "NaN"}, {"__float__": 1.0}, {"__float__": "1"}, {"__float__": []}, {},
    {"__float__": "Infinity", "more": 1}, "Infinity", True, None, [math.inf], 10**400,
])  # fmt: skip
def test_no_other_thing_is_infinite(other):
    with pytest.raises(CheckpointError, match="must be a number"):
        ConfigReader({"limit": other}).number("limit", infinite=True)


def test_a_setting_that_nobody_reads_may_be_infinite(tmp_path):
    folder = write_llama(tmp_path, time_step_limit=[0.0, math.inf])
    assert load_checkpoint(open_checkpoint(folder), device="cpu").config.context == 64
    folder = write_llama(tmp_path, rms_norm_eps=math.inf)
    with pytest.raises(CheckpointError, match="`rms_norm_eps` is `inf`: it must be a finite"):
        load_checkpoint(open_checkpoint(folder), device="cpu")

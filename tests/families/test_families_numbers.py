"""Configurations whose numbers cannot be, alone or together, and keys without a default."""

import copy
from types import SimpleNamespace

import pytest
from zoo import variant

from llmcli.config.frequencies import frequencies
from llmcli.errors import CheckpointError
from llmcli.families import describe

# a kind of rotation each, and mixers whose sizes are products
NAMES = ("rope-yarn", "rope-llama3", "rope-longrope", "rope-dynamic", "rope-linear", "gemma4",
         "ministral3", "deepseek_v3-yarn", "granite", "lfm2", "mamba2", "gpt_oss")  # fmt: skip
ODD = (0, -1, 1e308, 1e-308, 2**70, 10**400, 1.5, "x", None, [], True, {}, float("nan"))


def read(settings):
    kind = settings["model_type"]
    return describe(SimpleNamespace(kind="safetensors", model_type=kind, config=settings))


def settings_of(name):
    return copy.deepcopy(variant(name).settings)


def paths(settings, before=()):
    for key, value in settings.items():
        yield (*before, key)
        if isinstance(value, dict):
            yield from paths(value, (*before, key))


def changed(settings, path, value):
    settings = copy.deepcopy(settings)
    section = settings
    for key in path[:-1]:
        section = section[key]
    section[path[-1]] = value
    return settings


@pytest.mark.parametrize("name", NAMES)
def test_whatever_a_key_says_it_is_read_or_refused_and_rotates_by_finite_angles(name):
    settings = settings_of(name)
    for path in paths(settings):
        if path == ("model_type",):
            continue
        for value in ODD:
            try:
                model = read(changed(settings, path, value))
            except CheckpointError:
                continue
            ropes = {getattr(part, "rope", None) for one in model.layers for part in one.parts}
            for rope in ropes - {None}:
                frequencies(rope, model.context)


@pytest.mark.parametrize(("name", "path"), [
    ("rope-yarn", ("rope_parameters", "factor")),
    ("gemma4", ("rope_parameters", "full_attention", "rope_theta")),
    ("gemma4", ("rope_parameters", "sliding_attention", "rope_theta")),
    ("ministral3", ("rope_parameters", "llama_4_scaling_beta")), ("lfm2_moe", ("layer_types",)),
])  # fmt: skip
def test_a_key_that_has_no_default_is_missed_by_name(name, path):
    settings = copy.deepcopy(settings_of(name))
    if name == "gemma4":
        settings["rope_parameters"] = {
            kind: {"rope_theta": 1e4} for kind in ("full_attention", "sliding_attention")
        }
    read(settings)
    section = settings
    for key in path[:-1]:
        section = section[key]
    del section[path[-1]]
    with pytest.raises(CheckpointError, match=f"has no `{path[-1]}`"):
        read(settings)


@pytest.mark.parametrize(("name", "path"), [
    ("deepseek_v3", ("rope_interleave",)), ("deepseek_v3-experts", ("norm_topk_prob",)),
    ("granitemoehybrid", ("mamba_conv_bias",)), ("gpt_oss", ("rope_parameters", "truncate")),
    ("gpt2", ("tie_word_embeddings",)),
])  # fmt: skip
def test_a_null_flag_is_false_even_where_absence_is_true(name, path):
    def config(value):
        try:
            return read(changed(settings_of(name), path, value))
        except CheckpointError as refused:
            return str(refused)

    assert config(None) == config(False) != config(True)


def test_a_null_factor_of_yarn_is_the_ratio_of_the_lengths():
    settings = changed(settings_of("rope-yarn"), ("rope_parameters", "factor"), None)
    rope = read(settings).layers[0].attention.rope
    original = settings["rope_parameters"]["original_max_position_embeddings"]
    assert rope.scaling.factor == settings["max_position_embeddings"] / original


def test_rotations_of_layer_types_are_objects():
    with pytest.raises(CheckpointError, match="`full_attention` is `3`: it must be an object"):
        read(settings_of("gemma3") | {"rope_parameters": {"full_attention": 3}})


def test_cohere_2_has_heads_of_a_size_of_their_own():
    assert read(settings_of("cohere2") | {"head_dim": 12}).layers[0].attention.head_dim == 12

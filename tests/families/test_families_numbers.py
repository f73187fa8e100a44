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


def changed(settings, path, *value):
    """With that value, or as they are; `...` takes the key out."""
    settings = copy.deepcopy(settings)
    section = settings
    for key in path[:-1]:
        section = section[key]
    for one in value:
        section[path[-1]] = one
    if value == (...,):
        del section[path[-1]]
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

"""What enters the product and is cached: the last form of queries and keys that a model has."""

from anatomy_configs import models
from hypothesis import given, settings

from llmcli.anatomy.graph import graph


@settings(max_examples=40, deadline=None)
@given(models())
def test_the_last_form_that_the_configuration_makes(config):
    found = graph(config)
    for number, layer in enumerate(config.layers):
        mixer, prefix = layer.attention, f"blocks.{number}.attn"
        form = "_rot" if mixer.rope else "_norm" if mixer.qk_norm else ""
        assert found.entering(number) == (f"{prefix}.q{form}", f"{prefix}.k{form}")
        assert found.states[f"cache.{number}.k"].holds == f"{prefix}.k{form}"
        assert found.states[f"cache.{number}.v"].holds == f"{prefix}.v"

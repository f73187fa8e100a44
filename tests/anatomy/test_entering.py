"""What enters the product and is cached: the last form of queries and keys that a model has."""

import pytest
from anatomy_configs import models
from hypothesis import given, settings

from llmcli.anatomy.attention import cached, entering
from llmcli.anatomy.names import known


@settings(max_examples=40, deadline=None)
@given(models())
def test_the_last_form_that_the_configuration_makes(config):
    there = known(config)
    for number, layer in enumerate(config.layers):
        mixer, prefix = layer.mixer, f"blocks.{number}.attn"
        form = "_rot" if mixer.rope else "_norm" if mixer.qk_norm else ""
        assert entering(prefix, there) == (f"{prefix}.q{form}", f"{prefix}.k{form}")
        assert cached(f"cache.{number}.k", there) == f"{prefix}.k{form}"
        assert cached(f"cache.{number}.v", there) == f"{prefix}.v"


@pytest.mark.parametrize("form", ["", "_norm", "_rot"])
def test_what_comes_last_counts(form):
    forms = ("", "_norm", "_rot")
    there = [f"a.{part}{one}" for part in "qk" for one in forms[: forms.index(form) + 1]]
    assert entering("a", there) == (f"a.q{form}", f"a.k{form}")

"""What a family's text may not say: the error names the family and the line, on import."""

import re

import pytest
from zoo import TYPES, ZOO

from llmcli.families import families
from llmcli.families.record import family
from llmcli.families.values import ConfigReader

TEXT = """
    other: a test
    types: other others | other
    hf_multimodal: another
    keys: rms_norm_eps=norm_eps
    options: rotated=0.5 function=gelu
    defaults others: norm_eps=1e-5 layer_types=["a","b"] sliding_window=null
    rope: type=yarn factor=2.0

    names: llama
        attn.q+attn.k+attn.v@head  attn.qkv|turned  attn_qkv
        without: mlp.gate
"""


def made(text):
    return family(text)(lambda draft: None)


def test_a_text_is_a_family():
    one = made(TEXT)
    assert (one.name, one.words, one.hf_types) == ("other", "a test", ("other", "others"))
    assert (one.gguf_archs, one.rotated, one.function) == (("other",), 0.5, "gelu")
    told = {"norm_eps": 1e-5, "layer_types": ["a", "b"], "sliding_window": None}
    assert one.defaults == {"others": told}
    assert one.rope == {"type": "yarn", "factor": 2.0}
    assert one.names.rows[0] == ("attn.q+attn.k+attn.v@head", "attn.qkv|turned", "attn_qkv")
    assert "mlp.gate" not in {ours for ours, _, _ in one.names.rows}


WRONG = [
    ("options: rotated", "optoins: rotated", "optoins", "there is no such field"),
    ("keys:", "keys other:", "keys other", "there is no such field"),
    ("keys: ", "keys ", "keys rms_norm_eps=norm_eps", "it has no `:`"),
    ("keys:", "hf_multimodal:", "hf_multimodal", "it is there twice"),
    ("types: other others | other", "types: other others", "types", "no `|` between types"),
    ("rotated=0.5", "roatted=0.5", "options", "`roatted` is no option: rotary, lacking, rotated"),
    ("rotated=0.5", "rotated=half", "options", '`rotated` is "half", which is no float'),
    ("rotated=0.5", "rotary=False", "options", "`rotary=False`: the value is neither JSON nor"),
    ("rotated=0.5", "rotated=.5", "options", "`rotated=.5`: the value is neither JSON nor a word"),
    ("function=gelu", "function=glue", "options", "`glue` is no activation: silu"),
    ("defaults others:", "defaults otters:", "defaults otters", "`otters` is no type above: other"),
    ("=norm_eps", "= norm_eps", "keys", "`rms_norm_eps=` is not `key=value`"),
    ("factor=2.0", "factor=2.0 factor=3.0", "rope", "`factor` is there twice"),
    ("hf_multimodal: another", "gguf_reads: windwos", "gguf_reads", "`windwos` is no key or group"),
    ("names: llama", "names: lama", "names", "`lama` is no table of names: llama"),
    ("without: mlp.gate", "without: mlp.gat", "names", "`mlp.gat` is no row of the table: embed"),
    ("without: mlp", "witout: mlp", "names", "`witout` is no field of a table of names"),
    ("without: mlp.gate", "also: lama", "names", "`lama` is no table of names"),
    ("without: mlp.gate", "conv1d: yes", "names", "`yes` is no value of `conv1d`: true, false"),
    ("without: mlp.gate", "interleaved: on", "names", "`on` is no value of `interleaved`: never"),
    ("|turned", "|turnd", "names", "`turnd` is no operation on a tensor: shape, log, turned"),
    ("without: mlp.gate", "mlp.gate", "names", "`mlp.gate` is no row of names"),
    ("without:", "a b c", "names", "`a b c mlp.gate` is no row of names"),
]


@pytest.mark.parametrize(("right", "wrong", "line", "says"), WRONG)
def test_what_a_text_may_not_say(right, wrong, line, says):
    assert right in TEXT
    told = re.escape(f"family `other`, line `{line}`: {says}")
    with pytest.raises(ValueError, match=f"^{told}"):
        made(TEXT.replace(right, wrong, 1))


def test_a_family_has_types():
    with pytest.raises(ValueError, match=r"^family `other` has no line `types`$"):
        made("other: a test")


def test_every_setting_that_a_text_names_is_read(monkeypatch):
    """By a reader of some model of its type: what nothing asks for is misspelt, or of no use."""
    asked, name = set(), ConfigReader.name

    def watched(self, key):
        asked.update((key, name(self, key)))
        return name(self, key)

    monkeypatch.setattr(ConfigReader, "name", watched)
    for one in families():
        read = {}
        for kind in (*one.hf_types, *one.hf_texts):
            asked.clear()
            given = [variant.settings for variant in ZOO if variant.model_type == kind]
            if kind in one.hf_texts:  # "qwen3_vl_text": a qwen3
                given = [TYPES[kind.partition("_")[0]].base | {"model_type": kind}]
            assert given, f"`{kind}` has no rows in tests/zoo.py"
            for settings in (*given, given[0] | {"rope_parameters": one.rope or None}):
                one.from_hf(settings)
            read[kind] = {*asked}
        read[""] = {key for keys in read.values() for key in keys}
        assert one.keys.keys() | one.rope.keys() <= read[""], one.name
        for settings in (one.defaults, one.fixed):
            for kind, named in settings.items():
                assert named.keys() <= read[kind], (one.name, kind)

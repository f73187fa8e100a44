"""The usual block, a norm before attention and one before the feed-forward: its pieces."""

from dataclasses import replace
from functools import partial

from llmcli.config.model import Branch, LayerConfig


def two_norms(mixer, ffn, ln1, ln2):
    """Such a block with two kinds of norm."""
    pairs = ((mixer, ln1), (ffn, ln2))
    return LayerConfig(sublayers=tuple((Branch(part=p, pre_norm=n),) for p, n in pairs))


def ffn_of(block):
    """What computes the feed-forward of a decoder's block."""
    return list(block.parts.values())[-1]


def norm_of(block, number):
    """The norm `ln1` or `ln2` of a decoder's block."""
    return block.sublayers[number - 1][1][0].pre_norm


def configure(one, **values):
    """A part of a decoder computes with another configuration."""
    change = getattr(one.config, "changed", None) or partial(replace, one.config)
    one.config = change(**values)

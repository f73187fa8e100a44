"""A family of models made of these parts, and all of the tests' families with checkpoints."""

import linear_family
from linear_family import RMS, family_of

from llmcli.config.embedding import EmbeddingConfig, HeadConfig
from llmcli.config.model import ModelConfig, sequential
from llmcli.decoder.block import FORWARDS
from llmcli.families.family import families
from llmcli.graph.parts.registry import PARTS
from unplanned.experts import part as experts
from unplanned.experts.forward import Experts
from unplanned.running_mean import part as mean
from unplanned.running_mean.forward import RunningMean


def config(_=None):
    mixer, ffn = mean.RunningMeanConfig(heads=3, size=8), experts.ExpertsConfig(hidden=20)
    return ModelConfig(
        family="unplanned", model_type="unplanned", vocab=2048, width=24, context=256,
        layers=(sequential(mixer, ffn, norm=RMS),) * 2, embedding=EmbeddingConfig(),
        final_norm=RMS, head=HeadConfig(tied=False), bos=0, eos=(0,),
    )  # fmt: skip


CONFIGS = {"linear": linear_family.config, "sunk": linear_family.sunk, "unplanned": config}


def register(patch):
    """Adds parts and families to those of llmcli, until `patch`, a MonkeyPatch, is undone."""
    known = (*families(), *(family_of(name, made) for name, made in CONFIGS.items()))
    patch.setattr("llmcli.families.family.families", lambda: known)
    patch.setitem(PARTS, mean.RunningMeanConfig, mean.PART)
    patch.setitem(PARTS, experts.ExpertsConfig, experts.PART)
    patch.setitem(FORWARDS, mean.RunningMeanConfig, RunningMean)
    patch.setitem(FORWARDS, experts.ExpertsConfig, Experts)

"""A family of models made of these parts."""

from linear_family import RMS

from llmcli.config.embedding import EmbeddingConfig, HeadConfig
from llmcli.config.model import ModelConfig, sequential
from unplanned.experts.part import ExpertsConfig
from unplanned.running_mean.part import RunningMeanConfig


def config(_=None):
    mixer, ffn = RunningMeanConfig(heads=3, size=8), ExpertsConfig(hidden=20)
    return ModelConfig(
        family="unplanned", model_type="unplanned", vocab=2048, width=24, context=256,
        layers=(sequential(mixer, ffn, norm=RMS),) * 2, embedding=EmbeddingConfig(),
        final_norm=RMS, head=HeadConfig(tied=False), bos=0, eos=(0,),
    )  # fmt: skip

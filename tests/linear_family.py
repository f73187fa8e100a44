"""Families of the tests, and their checkpoints.

`linear`: a layer each of a gated DeltaNet, Mamba-2 and softmax attention. `sunk`: attention sinks
and clamped gates.
"""

import json
import shutil
from importlib.resources import files

import numpy as np
import torch
from safetensors.torch import save_file
from zoo import llama

from llmcli.config.attention import AttentionConfig, RopeConfig, ScoreConfig
from llmcli.config.delta import DeltaConfig
from llmcli.config.embedding import HeadConfig
from llmcli.config.mlp import GateClamp, MlpConfig
from llmcli.config.model import sequential
from llmcli.config.norm import NormConfig
from llmcli.config.ssm import SsmConfig
from llmcli.families import Family
from llmcli.families.rules import Rename
from llmcli.graph.plan import parameters

RMS = NormConfig(kind="rms", eps=1e-5)
FFN = MlpConfig(hidden=48, activation="silu", gated=True)
DELTA = DeltaConfig(heads=4, key_heads=2, key_dim=8, value_dim=6, length=4, norm=RMS)
SSM = SsmConfig(heads=4, head_dim=6, groups=2, state=8, length=4, norm=RMS)
SOFTMAX = AttentionConfig(
    heads=4, kv_heads=2, head_dim=8, value_dim=8, scores=ScoreConfig(scale=8**-0.5),
    rope=RopeConfig(theta=1000.0, dims=8),
)  # fmt: skip


def config(_=None):
    mixers = (DELTA, SSM, SOFTMAX)
    return llama(
        *(sequential(mixer, FFN, norm=RMS) for mixer in mixers), family="linear",
        model_type="linear", vocab=2048, width=32, context=4096, final_norm=RMS,
        head=HeadConfig(tied=True), bos=0, eos=(0,),
    )  # fmt: skip


def sunk(_=None):
    mixer = AttentionConfig(
        heads=4, kv_heads=2, head_dim=16, value_dim=16, qkv_bias=True, out_bias=True,
        rope=RopeConfig(theta=1000.0, dims=16), scores=ScoreConfig(scale=0.25, sinks=True),
    )  # fmt: skip
    ffn = MlpConfig(
        hidden=48, activation="quick_gelu", gated=True, bias=True,
        clamp=GateClamp(limit=1.0, offset=1.0),
    )  # fmt: skip
    mixers = (mixer.changed(window=6), mixer)
    return llama(
        *(sequential(mixer, ffn, norm=RMS) for mixer in mixers), family="sunk", model_type="sunk",
        vocab=2048, width=32, context=256, final_norm=RMS, head=HeadConfig(tied=True), bos=0,
        eos=(0,),
    )  # fmt: skip


class Given(Family):
    """A family by two functions: `build` translates a config.json, `prepare` gives the rules."""

    def from_hf(self, config):
        return self.build(config)

    def rules_hf(self, config):
        return self.prepare(config)

    def rules_gguf(self, config):
        return ()


def family_of(name, config, stored=str):
    """A family of the tests; `stored`: the name of a parameter's tensor, by default its own."""
    return Given(
        name=name, words="a test", build=config, hf_types=(name,), gguf_archs=(),
        prepare=lambda of: [Rename(stored(one.name), one.name) for one in parameters(of)],
    )  # fmt: skip


def write(folder, config=config):
    """A directory with random weights and a tokenizer."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": config().model_type}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(str(files("llmcli") / "assets" / "tiny" / name), folder)
    draw = np.random.default_rng(7)  # the same on every processor, as torch.randn's are not
    tensors = {}
    for spec in parameters(config()):
        shape = spec.stored_shape or spec.shape
        drawn = torch.from_numpy(draw.standard_normal(shape, np.float32))
        last = spec.name.rpartition(".")[2]
        if last in ("A_log", "dt_bias"):  # decays from e^-0.02 to e^-2 a token
            drawn = drawn - 1
        elif last == "w" and len(shape) == 1:
            drawn = 1 + 0.2 * drawn
        elif len(shape) > 1:
            drawn = 1.5 * drawn / shape[-1] ** 0.5
        tensors[spec.name] = drawn
    save_file(tensors, folder / "model.safetensors")
    return folder

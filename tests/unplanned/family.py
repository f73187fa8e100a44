"""A family of models made of these parts, and a checkpoint of one."""

import json
import shutil
from importlib.resources import files

import torch
from safetensors.torch import save_file

from llmcli.config import ModelConfig, sequential
from llmcli.families.family import Family
from llmcli.families.rules import Rename
from llmcli.parts.embedding.config import EmbeddingConfig, HeadConfig
from llmcli.parts.norm.config import NormConfig
from unplanned.experts.part import ExpertsConfig
from unplanned.running_mean.part import RunningMeanConfig

VOCAB, WIDTH, LAYERS, HEADS, SIZE, HIDDEN = 2048, 24, 2, 3, 8, 20
RMS = NormConfig(kind="rms", eps=1e-5)


def config(_=None):
    mixer, ffn = RunningMeanConfig(heads=HEADS, size=SIZE), ExpertsConfig(hidden=HIDDEN)
    return ModelConfig(
        family="unplanned", model_type="unplanned", vocab=VOCAB, width=WIDTH, context=256,
        layers=(sequential(mixer, ffn, norm=RMS),) * LAYERS, embedding=EmbeddingConfig(),
        final_norm=RMS, head=HeadConfig(tied=False), bos=0, eos=(0,),
    )  # fmt: skip


def rules(of):
    leaves = ("ln1.w", "ln2.w", "mean.W_v", "mean.W_o", "mean.a", "experts.W_router",
              "experts.W_in", "experts.W_out")  # fmt: skip
    whole = [Rename(name, name) for name in ("embed.W", "ln_final.w", "head.W")]
    return (*whole, *(Rename(f"{{layer}}.{leaf}", f"blocks.{{layer}}.{leaf}") for leaf in leaves))


FAMILY = Family(
    name="unplanned", words="a test", hf_types=("unplanned",), gguf_archs=(),
    from_hf=config, from_gguf=config, rules_hf=rules, rules_gguf=rules,
)  # fmt: skip


def write(folder):
    """A directory with random weights and a tokenizer."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "unplanned"}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(str(files("llmcli") / "assets" / "tiny" / name), folder)
    generator = torch.Generator().manual_seed(2)

    def normal(*shape):
        return torch.randn(*shape, generator=generator) / shape[-1] ** 0.5

    tensors = {"embed.W": normal(VOCAB, WIDTH), "head.W": normal(VOCAB, WIDTH),
               "ln_final.w": 1 + 0.2 * torch.randn(WIDTH, generator=generator)}  # fmt: skip
    for i in range(LAYERS):
        tensors |= {f"{i}.{leaf}": normal(*shape) for leaf, shape in (
            ("mean.W_v", (HEADS * SIZE, WIDTH)), ("mean.W_o", (WIDTH, HEADS * SIZE)),
            ("experts.W_router", (2, WIDTH)), ("experts.W_in", (2, HIDDEN, WIDTH)),
            ("experts.W_out", (2, WIDTH, HIDDEN)),
        )}  # fmt: skip
        tensors |= {f"{i}.ln{n}.w": torch.ones(WIDTH) for n in (1, 2)}
        tensors[f"{i}.mean.a"] = torch.tensor([2.0, 0.5, -0.3])
    save_file(tensors, folder / "model.safetensors")
    return folder

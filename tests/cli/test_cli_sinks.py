"""Sinks and clamped gates in every command: a family of the tests whose weights lie in a file."""

import json
import shutil
from importlib.resources import files

import numpy as np
import pytest
import torch
from json_schemas import errors
from safetensors.torch import load_file, save_file
from zoo import MODELS

from llmcli.anatomy import parameters
from llmcli.config import ModelConfig, sequential
from llmcli.families.family import Family, families
from llmcli.families.rules import Rename
from llmcli.parts.attention.config import AttentionConfig, RopeConfig
from llmcli.parts.embedding.config import EmbeddingConfig, HeadConfig
from llmcli.parts.mlp.config import GateClamp, MlpConfig
from llmcli.parts.norm.config import NormConfig

TEXT = "The old house stood at the end of the road, and the old"
RMS = NormConfig(kind="rms", eps=1e-5)
MIXER = AttentionConfig(
    heads=4, kv_heads=2, head_dim=16, value_dim=16, scale=0.25, qkv_bias=True, out_bias=True,
    rope=RopeConfig(theta=1000.0, dims=16), sinks=True,
)  # fmt: skip
FFN = MlpConfig(
    hidden=48, activation="quick_gelu", gated=True, bias=True,
    clamp=GateClamp(limit=1.0, offset=1.0),
)  # fmt: skip


def config(_=None):
    mixers = (AttentionConfig(**{**vars(MIXER), "window": 6}), MIXER)
    return ModelConfig(
        family="sunk", model_type="sunk", vocab=2048, width=32, context=256,
        layers=tuple(sequential(mixer, FFN, norm=RMS) for mixer in mixers),
        embedding=EmbeddingConfig(), final_norm=RMS, head=HeadConfig(tied=True), bos=0, eos=(0,),
    )  # fmt: skip


FAMILY = Family(
    name="sunk", words="a test", hf_types=("sunk",), gguf_archs=(), from_hf=config,
    from_gguf=config, rules_hf=lambda of: [Rename(s.name, s.name) for s in parameters(of)],
    rules_gguf=lambda of: (),
)  # fmt: skip


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sunk")
    (folder / "config.json").write_text(json.dumps({"model_type": "sunk"}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(str(files("llmcli") / "assets" / "tiny" / name), folder)
    generator = torch.Generator().manual_seed(2)
    tensors = {}
    for spec in parameters(config()):
        shape = spec.stored_shape or spec.shape
        drawn = torch.randn(shape, generator=generator)
        if spec.name.endswith(".w"):
            drawn = 1 + 0.2 * drawn
        elif len(shape) > 1:
            drawn = 1.5 * drawn / shape[-1] ** 0.5
        tensors[spec.name] = drawn
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    known = (*families(), FAMILY)
    for module in ("families.family", "commands.info.measure"):
        monkeypatch.setattr(f"llmcli.{module}.families", lambda: known)


@pytest.fixture
def run(cli, path):
    """A command's document, which ends well with every check green."""

    def run(command, *argv):
        result = cli(command, "-m", path, *argv, "--json", "--debug")
        assert result.code == 0, result.err
        document = result.json()
        assert errors(document, command) == []
        checks = document.get("checks", [])
        assert all(one["ok"] for one in (checks.values() if isinstance(checks, dict) else checks))
        return document

    return run


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_every_view_is_green(run, path, dtype, tmp_path):
    file = tmp_path / "all.npz"
    of = (TEXT, "--dtype", dtype)
    document = run("attention", *of, "--metrics", "all", "--generate", "3")
    assert "learned_sink" in [metric["name"] for metric in document["metrics"]]
    assert all(layer["sinks"] for layer in document["layers"])
    taken = [head["metrics"]["learned_sink"] for head in document["layers"][1]["heads"]]
    assert all(0 < share < 1 for share in taken)
    assert "and its head's sink" in document["checks"]["row_sums"]["words"]
    run("attention", *of, "--weighted", "--top-pairs", "3")
    run("lens", *of, "--mid", "--generate", "2")
    run("dump", *of, "--name", "*", "-o", str(file))
    run("timing", *of, "-n", "3", "--unfused", "--pairs", "2")
    with np.load(file) as arrays:
        sums = np.asarray(arrays["blocks.1.attn.pattern"], "f8").sum(-1)
        scores = np.asarray(arrays["blocks.1.attn.scores"], "f8")
    if dtype != "bfloat16":
        sink = load_file(f"{path}/model.safetensors")["blocks.1.attn.sink"].double().numpy()
        e = np.exp(scores)
        expected = 1 - np.exp(sink)[:, None] / (e.sum(-1) + np.exp(sink)[:, None])
        assert np.abs(sums.reshape(expected.shape) - expected).max() < 1e-5


def test_what_is_said_of_it(run, cli, path):
    kinds = run("info")["architecture"]["layers"]
    assert [kind["details"] for kind in kinds] == [
        ["a learned sink in each head", "gates clamped at 1"]
    ] * 2
    names = {tensor["name"]: tensor for tensor in run("shapes", TEXT)["tensors"]}
    assert names["blocks.0.attn.sink"]["shape"] == [4]
    said = cli("attention", "-m", path, TEXT, "--map", "learned-sink")
    assert said.code == 0
    assert "mean of e^sink / (e^sink + Σ_j e^S[i,j])" in said.out
    assert run("generate", TEXT, "--greedy", "-n", "5")["outputs"]
    run("score", TEXT)
    run("load")


def test_the_metric_is_of_sinks_alone(cli):
    said = cli("attention", "-m", "tiny", TEXT, "--metrics", "entropy,learned-sink")
    assert said.code == 2
    assert "no head of this model has a learned sink" in said.err
    document = cli("attention", "-m", "tiny", TEXT, "--metrics", "all", "--json").json()
    assert "learned_sink" not in [metric["name"] for metric in document["metrics"]]
    assert not any(layer["sinks"] for layer in document["layers"])


@pytest.mark.parametrize(
    ("number", "says"),
    [
        ("blocks.1.attn.pattern[2,7,3]", "softmax([Q_rot K_rotᵀ / √d_k + M, sink])"),
        ("blocks.0.attn.pattern[2,9,1]", "M[9,1] = −∞"),
        ("blocks.1.mlp.post[7,3]", "∘ (clip(U, ±1) + 1)"),
        ("blocks.0.mlp.act[4,40]", "QuickGELU(min(G, 1))"),
        ("blocks.1.attn.sink[3]", "sink was learned"),
    ],
)
def test_numbers_are_derived(run, cli, path, number, says):
    assert run("explain", number, TEXT)["ok"]
    assert run("explain", number, TEXT, "--dtype", "float64")["ok"]
    said = cli("explain", "-m", path, number, TEXT, "--depth", "1")
    assert said.code == 0
    assert says in " ".join(said.out.split())


def test_the_ladder_agrees_on_them(cli, path):
    assert cli("ladder", "-m", path, TEXT, "--rung", "3-8").code == 0
    assert MODELS["sinks"].layers[0].attention.sinks

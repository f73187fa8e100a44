"""Sinks and clamped gates in every command: a family of the tests whose weights lie in a file."""

import numpy as np
import pytest
from linear_family import family_of, write
from safetensors.torch import load_file
from zoo import MODELS

from llmcli.config import ModelConfig, sequential
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


FAMILY = family_of("sunk", config)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return str(write(tmp_path_factory.mktemp("sunk") / "m", config))


@pytest.fixture
def run(green, path, registered):
    registered(FAMILY)
    return lambda command, *argv: green(command, "-m", path, *argv)


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


@pytest.mark.usefixtures("run")
def test_the_ladder_agrees_on_them(cli, path):
    assert cli("ladder", "-m", path, TEXT, "--rung", "3-8").code == 0
    assert MODELS["sinks"].layers[0].attention.sinks

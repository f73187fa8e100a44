"""Families of the tests, with weights in files, in every command.

`linear`: gated DeltaNet, Mamba-2 and softmax attention. `sunk`: attention sinks and clamped gates.
`unplanned`: a mixer and two experts that nothing in `llmcli` knows (`tests/unplanned` has a folder
for each); they are registered here, and nothing else is changed.
"""

import json
from dataclasses import replace

import linear_family
import numpy as np
import pytest
from covers import in_turn
from linear_family import RMS, family_of, write
from planned import departures
from safetensors.torch import load_file
from unplanned import family as unplanned
from unplanned.experts import part as experts
from unplanned.experts.forward import Experts
from unplanned.running_mean import forward
from unplanned.running_mean import part as mean

import llmcli.graph.graph
from llmcli.config.attention import AttentionConfig, RopeConfig, ScoreConfig
from llmcli.config.embedding import EmbeddingConfig, HeadConfig
from llmcli.config.mlp import GateClamp, MlpConfig
from llmcli.config.model import ModelConfig, sequential
from llmcli.decoder.block import FORWARDS
from llmcli.engine.session import Session
from llmcli.errors import UsageError
from llmcli.graph.parts.registry import PARTS
from llmcli.loading.load import load
from llmcli.nn.state import LayerState
from llmcli.nn.step import Edit

TEXT = "The old house stood at the end of the road, and the old"
MIXER = AttentionConfig(
    heads=4, kv_heads=2, head_dim=16, value_dim=16, qkv_bias=True, out_bias=True,
    rope=RopeConfig(theta=1000.0, dims=16), scores=ScoreConfig(scale=0.25, sinks=True),
)  # fmt: skip
FFN = MlpConfig(
    hidden=48, activation="quick_gelu", gated=True, bias=True,
    clamp=GateClamp(limit=1.0, offset=1.0),
)  # fmt: skip


def sunk(_=None):
    mixers = (MIXER.changed(window=6), MIXER)
    return ModelConfig(
        family="sunk", model_type="sunk", vocab=2048, width=32, context=256,
        layers=tuple(sequential(mixer, FFN, norm=RMS) for mixer in mixers),
        embedding=EmbeddingConfig(), final_norm=RMS, head=HeadConfig(tied=True), bos=0, eos=(0,),
    )  # fmt: skip


FAMILIES = {"linear": linear_family.config, "sunk": sunk, "unplanned": unplanned.config}


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("foreign")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PARTS, mean.RunningMeanConfig, mean.PART)
        patch.setitem(PARTS, experts.ExpertsConfig, experts.PART)
        patch.setitem(FORWARDS, mean.RunningMeanConfig, forward.RunningMean)
        patch.setitem(FORWARDS, experts.ExpertsConfig, Experts)
        yield {name: str(write(folder / name, config)) for name, config in FAMILIES.items()}


@pytest.fixture(autouse=True)
def known(registered, paths):
    registered(*(family_of(name, config) for name, config in FAMILIES.items()))


@pytest.fixture
def run(green, paths):
    def run(name, command, *argv):
        document = green(command, "-m", paths[name], *argv)
        if command not in ("generate", "score", "info", "bench", "explain", "load", "timing"):
            assert document["checks"]
        return document

    return run


@pytest.mark.parametrize(
    ("name", "dtype"), in_turn(list(FAMILIES), ["float64", "bfloat16", "float32"])
)
def test_every_view_is_green(run, paths, name, dtype, tmp_path):
    file = tmp_path / "all.npz"
    of = (TEXT, "--dtype", dtype)
    attention = run(
        name, "attention", *of, "--generate", "3", "--metrics", "all", "--top-pairs", "3"
    )
    run(name, "lens", *of, "--mid", "--generate", "2")
    assert departures(load(paths[name], dtype=dtype), batch=1) == {}
    run(name, "dump", *of, "--name", "*", "-o", str(file), "--generate", "2")
    with np.load(file) as read:
        arrays = {name: np.asarray(read[name], "f8") for name in read if name != "metadata"}
    near = 1e-5 if dtype != "bfloat16" else np.inf
    if name == "sunk":
        assert "learned_sink" in [metric["name"] for metric in attention["metrics"]]
        assert all(layer["sinks"] for layer in attention["layers"])
        taken = [head["metrics"]["learned_sink"] for head in attention["layers"][1]["heads"]]
        assert all(0 < share < 1 for share in taken)
        assert "and its head's sink" in attention["checks"]["row_sums"]["words"]
        stored = load_file(f"{paths[name]}/model.safetensors")["blocks.1.attn.sink"]
        sink, e = np.exp(stored.double().numpy())[:, None], np.exp(arrays["blocks.1.attn.scores"])
        expected = 1 - sink / (e.sum(-1) + sink)
        assert np.abs(arrays["blocks.1.attn.pattern"].sum(-1) - expected).max() < near
        return
    mixer = {"linear": "linattn", "unplanned": "mean"}[name]
    pattern, v, z = (arrays[f"blocks.0.{mixer}.{leaf}"] for leaf in ("pattern", "v", "z"))
    assert np.abs(pattern @ v - z).max() < near
    if name == "unplanned":
        assert {
            "blocks.1.mean.pattern", "cache.0.sum", "cache.1.count", "blocks.0.experts.hidden",
        } < set(arrays)  # fmt: skip
        return
    assert np.abs(arrays["blocks.1.ssm.state"][:, -1] - arrays["cache.1.state"]).max() < 1e-4
    assert list(attention["checks"]) == [
        "row_sums", "masks", "causal", "values", "formulas", "steps"
    ]  # fmt: skip
    alone = run(name, "attention", *of, "--layer", "0-1", "--top-pairs", "2")
    assert list(alone["checks"]) == ["causal", "values", "formulas"]
    run(name, "attention", *of, "--what", "state", "--generate", "2")


def test_texts_scores_and_shapes(run):
    for name in ("sunk", "unplanned"):
        one, again = (run(name, "generate", TEXT, "--greedy", "-n", "6") for _ in range(2))
        assert one["outputs"][0]["ids"] == again["outputs"][0]["ids"]
        run(name, "generate", TEXT, "-n", "3", "--num-samples", "2", "--temperature", "0.7")
        run(name, "score", TEXT)
        run(name, "load")
    info = run("unplanned", "info")
    (kind,) = info["architecture"]["layers"]
    assert (kind["kind"], kind["details"]) == ("running mean", ["3 decays", "2 experts of 20"])
    assert kind["heads"] is None
    held = 2 * 4 * (3 * 8 + 3)  # of every layer the sums and the counts
    assert info["memory"][0]["cache_bytes_per_token"] == 0
    assert info["memory"][0]["cache_bytes"] == held
    assert run("unplanned", "shapes", TEXT)["cache"]["decode"] == held


def test_times_and_rates(run, cli, paths, tmp_path):
    """`scan` of the running mean is a group that the mixer alone has."""
    trace = tmp_path / "trace.json"
    of = (TEXT, "-n", "3", "--pairs", "2")
    run("sunk", "timing", *of)
    linear = run("linear", "timing", *of)
    parts = {part["part"] for part in linear["phases"][1]["totals"]}
    assert {"linear_in", "conv", "scan", "linear_out"} < parts
    timing = run("unplanned", "timing", *of, "--trace", str(trace))
    assert [part["part"] for part in timing["phases"][1]["totals"]] == [
        "embed", "norm", "qkv", "scan", "out", "ffn_up", "ffn_act", "ffn_down", "residual", "head",
        "sample", "gaps",
    ]  # fmt: skip
    scans = [part for part in timing["phases"][0]["parts"] if part["part"] == "scan"]
    assert [part["layer"] for part in scans] == [0, 1]
    assert all(part["seconds"] > 0 and part["work"]["bytes"] for part in scans)
    assert sum(e["name"] == "scan" for e in json.loads(trace.read_text())["traceEvents"]) == 2 * 4
    said = cli("timing", "-m", paths["unplanned"], *of, "--layers")
    assert said.code == 0
    rows = [line.split() for line in said.out.splitlines()]
    assert sum(row[:1] == ["scan"] for row in rows) == 2
    assert sum(row[:1] == ["layer"] and "scan" in row for row in rows) == 2
    rates = run("unplanned", "bench", "-p", "32", "-n", "4", "-r", "2", "--no-ceilings")["rows"]
    assert len(rates) == 2
    assert all(row["avg_ts"] > 0 for row in rates)


# sinks


def test_what_is_said_of_sinks(run, cli, paths, monkeypatch):
    kinds = run("sunk", "info")["architecture"]["layers"]
    assert [kind["details"] for kind in kinds] == [
        ["a learned sink in each head", "gates clamped at 1"]
    ] * 2
    names = {tensor["name"]: tensor for tensor in run("sunk", "shapes", TEXT)["tensors"]}
    assert names["blocks.0.attn.sink"]["shape"] == [4]
    said = cli("attention", "-m", paths["sunk"], TEXT, "--map", "learned-sink")
    assert said.code == 0
    assert "mean of e^sink / (e^sink + Σ_j e^S[i,j])" in said.out
    monkeypatch.setattr("llmcli.commands.ladder.measure.runner.ROUNDS_S", 0.0)
    assert cli("ladder", "-m", paths["sunk"], "abc", "--rung", "3-8").code == 0


@pytest.mark.parametrize(("number", "says"), [
    ("blocks.1.attn.pattern[2,7,3]", "softmax([Q_rot K_rotᵀ / √d_k + M, sink])"),
    ("blocks.0.attn.pattern[2,9,1]", "M[9,1] = −∞"),
    ("blocks.1.mlp.post[7,3]", "∘ (clip(U, ±1) + 1)"),
    ("blocks.0.mlp.act[4,40]", "QuickGELU(min(G, 1))"),
    ("blocks.1.attn.sink[3]", "sink was learned"),
])
def test_numbers_are_derived(run, cli, paths, number, says):
    assert run("sunk", "explain", number, TEXT)["ok"]
    assert run("sunk", "explain", number, TEXT, "--dtype", "float64")["ok"]
    said = cli("explain", "-m", paths["sunk"], number, TEXT, "--depth", "1")
    assert said.code == 0
    assert says in " ".join(said.out.split())


# what nobody has planned


def test_what_others_call_its_tensors_is_known(cli, paths, tmp_path):
    argv = (TEXT, "--name", "layers.1.values_proj", "-o", str(tmp_path / "x.npz"))
    said = cli("dump", "-m", paths["unplanned"], *argv)
    assert said.code == 2
    assert "did you mean `blocks.*.mean.v`?" in said.err


@pytest.mark.parametrize(
    "number", ["blocks.1.resid_post[5,3]", "blocks.0.mean.z[1,4,2]", "blocks.0.mean.pattern[2,7,3]"]
)
def test_explain_says_where_it_cannot_go_on(run, number):
    said = run("unplanned", "explain", number, TEXT, "--depth", "all")
    assert said["ok"]
    assert any("cannot be derived yet" in step["note"] for step in said["steps"])


def test_what_its_kernel_never_writes_cannot_be_edited(paths):
    model = load(paths["unplanned"], dtype="float32")
    edit = Edit(name="blocks.0.mean.pattern", fn=lambda rows: 2 * rows)
    with pytest.raises(UsageError, match="only shown"):
        Session(model.decoder, 1, 4).extend([[1, 2, 3]], edits=[edit])
    edit = Edit(name="blocks.0.mean.z", fn=lambda rows: 2 * rows)
    Session(model.decoder, 1, 4).extend([[1, 2, 3]], edits=[edit])


def in_place_of(of, name, change):
    """`of.name` becomes `change(what it was)`."""
    return lambda monkeypatch: monkeypatch.setattr(of, name, change(getattr(of, name)))


def a_graph_with_another_value(monkeypatch):
    def graph(c, site):
        made = mean.graph(c, site)
        nodes = [
            replace(node, op=replace(node.op, value=node.op.value.replace("mean.v", "mean.sum")))
            if node.name.endswith(".mean.z") else node
            for node in made.nodes
        ]  # fmt: skip
        return replace(made, nodes=tuple(nodes))

    monkeypatch.setitem(PARTS, mean.RunningMeanConfig, replace(mean.PART, graph=graph))


FAULTS = {
    "a sum that is too large": (in_place_of(
        forward.RunningMean, "recur",
        lambda recur: lambda self, *x: [1.01 * (found := recur(self, *x))[0], found[1]],
    ), ("attention", "dump")),
    "a state that is not kept": (in_place_of(
        LayerState, "__getitem__", lambda item: lambda self, name: item(self, name).clone()
    ), ("attention", "dump")),
    "a map that looks ahead": (in_place_of(
        forward.RunningMean, "derive",
        lambda derive: lambda self, *x, **heads: derive(self, *x, **heads).roll(1, -1),
    ), ("attention", "dump")),
    "a graph with another value": (a_graph_with_another_value, ("attention", "dump")),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_seen(cli, paths, monkeypatch, fault):
    plant, commands = FAULTS[fault]
    plant(monkeypatch)
    llmcli.graph.graph.graph.cache_clear()
    for command in commands:
        argv = ["--name", "*"] if command == "dump" else []
        argv += ["--generate", "3", "--json", "--dtype", "float64"]
        result = cli(command, "-m", paths["unplanned"], TEXT, *argv)
        assert result.code == 1, command
        assert not all(check["ok"] for check in result.json()["checks"].values())
    llmcli.graph.graph.graph.cache_clear()

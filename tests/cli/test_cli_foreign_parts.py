"""Families of the tests, with weights in files, in every command.

`linear`: gated DeltaNet, Mamba-2 and softmax attention. `sunk`: attention sinks and clamped gates.
`unplanned`: a mixer and two experts that nothing in `llmcli` knows (`tests/unplanned` has a folder
for each); they are registered here, and nothing else is changed. What `info`, `shapes`,
`explain` and `attention` say of them is in the transcript foreign-parts.
"""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from covers import few, in_turn
from decoder_faults import wrap
from json_schemas import errors
from linear_family import write
from planned import departures
from safetensors.torch import load_file
from unplanned.family import CONFIGS, register
from unplanned.running_mean import forward
from unplanned.running_mean import part as mean

import llmcli.graph.graph
import llmcli.nn.recurrent as nn
from llmcli.commands.attention.measure.layers import measure_attention
from llmcli.commands.attention.options import AttentionOptions
from llmcli.engine.session import Session
from llmcli.errors import UsageError
from llmcli.graph.parts.registry import PARTS
from llmcli.inspect.passes import Passes
from llmcli.loading.load import load
from llmcli.nn.state import LayerState
from llmcli.nn.step import Edit
from llmcli.ops.recurrence import Map
from llmcli.parts import delta

TEXT = "The old house stood at the end of the road, and the old"


@pytest.fixture(scope="module", autouse=True)
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("foreign")
    with pytest.MonkeyPatch.context() as patch:
        register(patch)
        yield {name: str(write(folder / name, config)) for name, config in CONFIGS.items()}


@pytest.fixture
def run(cli, paths):
    """A command's document, which is as its schema says and has every check green."""

    def run(name, command, *argv):
        result = cli(command, "-m", paths[name], *argv, "--json", "--debug")
        assert result.code == 0, result.err
        document = result.json()
        assert errors(document, command) == []
        checks = document.get("checks", [])
        assert all(one["ok"] for one in (checks.values() if isinstance(checks, dict) else checks))
        assert checks or command in ("generate", "score", "bench", "load", "timing")
        return document

    return run


@pytest.mark.parametrize(("name", "dtype"), in_turn(list(CONFIGS), ["float64", "bfloat16"]))
def test_every_view_is_green(run, paths, name, dtype, tmp_path):
    file = tmp_path / "all.npz"
    of = (TEXT, "--dtype", dtype)
    attention = run(
        name, "attention", *of, "--generate", "3", "--metrics", "all", "--top-pairs", "3"
    )
    run(name, "lens", *of, "--mid", "--generate", "2")
    run(name, "attribute", *of)
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


def test_texts_and_scores(run):
    for name in ("sunk", "unplanned"):
        one, again = (run(name, "generate", TEXT, "--greedy", "-n", "6") for _ in range(2))
        assert one["outputs"][0]["ids"] == again["outputs"][0]["ids"]
        run(name, "generate", TEXT, "-n", "3", "--num-samples", "2", "--temperature", "0.7")
        run(name, "score", TEXT)
        run(name, "load")


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
    said = cli("timing", "-m", paths["unplanned"], TEXT, "-n", "1", "--pairs", "1", "--layers")
    rows = [line.split() for line in said.out.splitlines()]
    assert sum(row[:1] == ["scan"] for row in rows) == 2  # of each phase a row, and a column
    assert sum(row[:1] == ["layer"] and "scan" in row for row in rows) == 2
    rates = run("unplanned", "bench", "-p", "32", "-n", "4", "-r", "2", "--no-ceilings")["rows"]
    assert len(rates) == 2
    assert all(row["avg_ts"] > 0 for row in rates)


# recurrences


def test_metrics_of_signed_maps(run):
    """Each once more by its definition, of |A| / Σ|A|."""
    found = run("linear", "attention", TEXT, "--dtype", "float64", "--patterns", "--metrics", "all",
                "--top-pairs", "20")  # fmt: skip
    for layer in found["layers"][:2]:
        for head in layer["heads"]:
            a = np.asarray(head["pattern"], "f8")
            share = np.abs(a) / np.abs(a).sum(-1, keepdims=True)
            entropy = -(share * np.log(np.where(share > 0, share, 1))).sum(-1)
            metrics = head["metrics"]
            assert metrics["entropy"] == pytest.approx(entropy.mean(), rel=1e-5)
            assert metrics["max_weight"] == pytest.approx(share.max(-1).mean(), rel=1e-5)
            assert metrics["previous_token"] == pytest.approx(np.diag(share, -1).mean(), rel=1e-5)
            negative = np.where(a < 0, share, 0).sum(-1).mean()
            assert metrics["negative"] == pytest.approx(negative, rel=1e-5)
            sigma = np.linalg.svd(a, compute_uv=False)
            p = sigma / sigma.sum()
            rank = np.exp(-(p * np.log(np.where(p > 0, p, 1))).sum())
            assert metrics["effective_rank"] == pytest.approx(rank, rel=1e-4)
    assert {pair["layer"] for pair in found["pairs"]} > {0, 1}
    for pair in found["pairs"]:
        a = np.asarray(found["layers"][pair["layer"]]["heads"][pair["head"]]["pattern"], "f8")
        row = a[pair["query"]]
        value = row[pair["key"]]
        assert pair["weight"] == pytest.approx(value, rel=1e-5)
        assert pair["rank_value"] == pytest.approx(abs(value) / np.abs(row).sum(), rel=1e-5)


@pytest.mark.parametrize("given", [{"layer": "0-1"}, {"layer": "0-1", "top_pairs": 5}])
def test_numbers_do_not_depend_on_blocks(paths, monkeypatch, given):
    monkeypatch.setattr("llmcli.commands.attention.measure.layers.MOST_CELLS", 20)
    model = load(paths["linear"], dtype="float64")
    ids = [(7 * i * i + 3 * i) % 2000 for i in range(150)]
    options = AttentionOptions(**given)
    whole, parts = (
        measure_attention(Passes(model, ids), options, block_rows=rows) for rows in (None, 7)
    )
    assert parts.ok
    for one, other in zip(whole.pairs, parts.pairs, strict=True):
        assert (one.layer, one.head, one.query, one.key) == (
            other.layer, other.head, other.query, other.key,
        )  # fmt: skip
    for one, other in zip(whole.layers, parts.layers, strict=True):
        for mine, theirs in zip(one.heads, other.heads, strict=True):
            assert mine.metrics == pytest.approx(theirs.metrics, nan_ok=True)
    for one, other in zip(whole.matrices, parts.matrices, strict=True):
        assert one.values == pytest.approx(other.values, nan_ok=True, rel=1e-6)
        assert np.nanmin(one.values) < 0, "of either sign the largest"


def test_files_of_signed_maps(cli, run, paths, tmp_path):
    def export(ending, *argv):
        file = tmp_path / f"x.{ending}"
        heads = ("--layer", "0-1", "--head", "0-2")
        said = cli("attention", "-m", paths["linear"], TEXT, *heads, *argv, "-o", str(file))
        assert said.code == 0, said.err
        return file

    with np.load(export("npz")) as arrays:
        assert set(arrays.files) > {"blocks.0.linattn.pattern", "blocks.1.ssm.pattern"}
        pattern = arrays["blocks.0.linattn.pattern"]
        assert pattern.shape == (3, 16, 16)
        assert pattern.min() < 0
        assert not np.triu(pattern, 1).any()
    stored = load_file(export("safetensors"))
    assert torch.equal(stored["blocks.0.linattn.pattern"], torch.tensor(pattern))
    document = json.loads(export("json").read_text("utf-8"))
    assert errors(document, "attention") == []
    page = export("html").read_text("utf-8")
    data = json.loads(page.split('id="data">')[1].split("</script>")[0])
    assert [layer["values"] for layer in data["layers"]] == ["signed", "signed"]
    assert data["layers"][0]["heads"][0]["low"] == -data["layers"][0]["heads"][0]["high"]
    assert export("png").read_bytes().startswith(b"\x89PNG")
    assert export("png", "--map", "half_life").read_bytes().startswith(b"\x89PNG")


def test_states_after_each_token(run, tmp_path):
    of = (TEXT, "--dtype", "float32")
    found = run("linear", "attention", *of, "--what", "state", "--head", "0,2")
    for head in (head for layer in found["layers"] for head in layer["heads"]):
        assert head["effective_ranks"][0] == pytest.approx(1), "one token writes one direction"
        assert all(1 <= rank <= 6 for rank in head["effective_ranks"])
    file = tmp_path / "dump.npz"
    run("linear", "dump", *of, "--name", "blocks.0.linattn.state", "-o", str(file))
    with np.load(file) as arrays:
        states = arrays["blocks.0.linattn.state"]
    norms = np.linalg.norm(states[2], axis=-1)
    assert found["layers"][0]["heads"][1]["norms"] == pytest.approx(norms.tolist(), rel=1e-5)


def test_what_its_kernel_never_writes_cannot_be_edited(paths):
    model = load(paths["unplanned"], dtype="float32")
    edit = Edit(name="blocks.0.mean.pattern", fn=lambda rows, at: 2 * rows)
    with pytest.raises(UsageError, match="only shown"):
        Session(model.decoder, 1, 4).extend([[1, 2, 3]], edits=[edit])
    edit = Edit(name="blocks.0.mean.z", fn=lambda rows, at: 2 * rows)
    Session(model.decoder, 1, 4).extend([[1, 2, 3]], edits=[edit])


# faults


def scans(change):
    """What goes over the tokens, as a function of what it reads and of the state."""
    return wrap(
        nn.Recurrent, "scanned",
        lambda scan, self, x, state, step: change(lambda *of: scan(self, *of, step), x, state),
    )  # fmt: skip


def reads(change):
    """What the kernel reads is changed, whatever was emitted."""
    return scans(lambda scan, x, state: scan(change(x), state))


def decays_times(factor):
    return reads(lambda x: replace(x, log_decay_BHT=factor * x.log_decay_BHT))


def the_map_is(change):
    return wrap(Map, "rows", lambda rows, self, first, stop: change(rows(self, first, stop)))


def conv_is_lost(activated, self, x, state, step):
    out = activated(self, x, state, step)
    state["conv"].zero_()
    return out


def other_bias(decays, self, x, *args, **bounds):
    return decays(self, x - 0.1, *args, **bounds)


# in which layers (0: gated DeltaNet, 1: Mamba-2), what plants it, and which checks see it at least
FAULTS = {
    "decays off by 1 %": ("01", decays_times(1.01), "values state"),
    "decays off by 0.1 %": ("01", decays_times(1.001), "values"),
    "β is ignored": (
        "01", reads(lambda x: replace(x, beta_BHT=torch.ones_like(x.beta_BHT))), "values state"),
    "values of another head": (
        "01", reads(lambda x: replace(x, v_BHTe=x.v_BHTe.roll(1, 1))), "values state"),
    "results too large": (
        "01", scans(lambda scan, x, state: 1.0001 * scan(x, state)), "values"),
    "the map is shifted": ("01", the_map_is(lambda a: a.roll(1, -1)), "causal values"),
    "the map is scaled": ("01", the_map_is(lambda a: 1.0001 * a), "values"),
    "the map is that of another head": ("01", the_map_is(lambda a: a.roll(1, 1)), "values"),
    "the map's rows are late": ("01", the_map_is(lambda a: a.roll(1, 2)), "values"),
    # a head reads the queries and keys of another one, in the kernel and in the map
    "heads are paired otherwise": (
        "01", wrap(nn.Inputs, "of_heads", lambda of, self, x: of(self, x).roll(1, 1)),
        "formulas"),
    "the state is lost": (
        "01", scans(lambda scan, x, state: scan(x, state.snapshot(0))), "state"),
    "the convolution's last rows are lost": (
        "01", wrap(nn.Recurrent, "activated", conv_is_lost), "steps"),
    "decays of another bias": ("01", wrap(nn.Recurrent, "decays", other_bias), "formulas"),
    "nothing is taken off": ("0", reads(lambda x: replace(x, plain=True)), "values state"),
    "something is taken off": ("1", reads(lambda x: replace(x, plain=False)), "values state"),
    "k has another length": (
        "0", wrap(delta, "l2_norm", lambda norm, *args: 1.5 * norm(*args)), "formulas"),
    "B and C change places": (
        "1", reads(lambda x: replace(x, q_BKTd=x.k_BKTd, k_BKTd=x.q_BKTd)), "values state"),
}  # fmt: skip


# by default in one of its layers, in turn
@pytest.mark.parametrize(("layer", "fault"), [
    one for at, (name, (layers, *_)) in enumerate(FAULTS.items())
    for one in few([pytest.param(layer, name) for layer in layers[:: 1 - 2 * (at % 2)]], 1)
])  # fmt: skip
def test_faults_are_seen(cli, paths, monkeypatch, layer, fault):
    _, plant, expected = FAULTS[fault]
    plant(monkeypatch, None)
    argv = ("attention", TEXT, "--layer", layer, "--json", "--dtype", "float32")
    said = cli(*argv, "-m", paths["linear"], "--generate", "3")
    assert said.code == 1
    red = {name for name, check in said.json()["checks"].items() if not check["ok"]}
    assert set(expected.replace("state", "steps").split()) <= red
    if "state" in expected:
        said = cli(*argv, "-m", paths["linear"], "--what", "state")
        assert said.code == 1
        assert not said.json()["checks"]["state"]["ok"]


def test_chunks_go_on_where_the_last_one_ended(cli, paths, monkeypatch, tmp_path):
    def emptied(scan, x, state):
        state["state"].zero_()
        return scan(x, state)

    text = tmp_path / "long.txt"
    text.write_text("the cat sat on 12 mats. " * 80)
    argv = ("lens", "-m", paths["linear"], "-f", str(text), "--json", "--dtype", "float32",
            "--position", "-1")  # fmt: skip
    sound = cli(*argv)
    assert sound.code == 0
    assert sound.json()["checks"]["chunks"]["ok"]
    scans(emptied)(monkeypatch, None)
    said = cli(*argv)
    assert said.code == 1
    assert not said.json()["checks"]["chunks"]["ok"]


def a_graph_with_another_value(monkeypatch, of):
    def graph(c, site):
        made = mean.graph(c, site)
        nodes = [
            replace(node, op=replace(node.op, value=node.op.value.replace("mean.v", "mean.sum")))
            if node.name.endswith(".mean.z") else node
            for node in made.nodes
        ]  # fmt: skip
        return replace(made, nodes=tuple(nodes))

    monkeypatch.setitem(PARTS, mean.RunningMeanConfig, replace(mean.PART, graph=graph))


# of what nobody has planned: `attention` and `dump` see them
UNPLANNED = {
    "a sum that is too large": wrap(
        forward.RunningMean, "recur", lambda recur, *x: [1.01 * (found := recur(*x))[0], found[1]]
    ),
    "a state that is not kept": wrap(LayerState, "__getitem__", lambda item, *x: item(*x).clone()),
    "a map that looks ahead": wrap(
        forward.RunningMean, "derive", lambda derive, *x, **heads: derive(*x, **heads).roll(1, -1)
    ),
    "a graph with another value": a_graph_with_another_value,
}


@pytest.mark.parametrize("fault", UNPLANNED)
def test_faults_of_what_nobody_has_planned_are_seen(cli, paths, monkeypatch, fault):
    UNPLANNED[fault](monkeypatch, None)
    llmcli.graph.graph.graph.cache_clear()
    for argv in (["attention"], ["dump", "--name", "*"]):
        argv += ["--generate", "3", "--json", "--dtype", "float64"]
        result = cli(*argv, "-m", paths["unplanned"], TEXT)
        assert result.code == 1, argv[0]
        assert not all(check["ok"] for check in result.json()["checks"].values())
    llmcli.graph.graph.graph.cache_clear()

"""Gated DeltaNet and Mamba-2 in every command: a family of the tests with weights in a file."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from covers import few
from json_schemas import errors
from linear_family import DELTA, FAMILY, SSM, write
from safetensors.torch import load_file

import llmcli.nn.recurrent as nn
from llmcli.ops.recurrence import Map
from llmcli.parts import delta

TEXT = "The old house stood at the end of the road, and the old"


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return str(write(tmp_path_factory.mktemp("linear") / "m"))


@pytest.fixture(autouse=True)
def known(registered):
    registered(FAMILY)


@pytest.fixture
def run(green, path):
    return lambda command, *argv: green(command, "-m", path, *argv)


def test_what_json_says_of_layers_and_heads(run):
    found = run("attention", TEXT, "--dtype", "float64", "--patterns", "--metrics", "all",
                "--top-pairs", "20")  # fmt: skip
    kinds = [(layer["kind"], layer["signed"]) for layer in found["layers"]]
    assert kinds == [("gated DeltaNet", True), ("Mamba-2", True), ("full", False)]
    note = found["layers"][0]["note"]
    assert "signed" in note
    assert "column j mixes tokens j−3 to j" in note
    assert found["layers"][2]["note"] == ""
    (delta_head, *_), (ssm_head, *_), (softmax, *_) = (
        layer["heads"] for layer in found["layers"]
    )
    assert 0 < delta_head["metrics"]["negative"] < 1
    assert 0 < delta_head["metrics"]["overwritten"] < 0.5
    assert ssm_head["metrics"]["overwritten"] is None
    assert softmax["metrics"]["negative"] is softmax["metrics"]["half_life"] is None
    assert "no distribution" in found["unlabelled"]["broad"]
    assert not any("broad" in head["labels"] for head in found["layers"][0]["heads"])
    # every metric once more by its definition, of |A| / Σ|A|
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
def test_numbers_do_not_depend_on_blocks(path, monkeypatch, given):
    from llmcli.commands.attention.measure.layers import measure_attention
    from llmcli.commands.attention.options import AttentionOptions
    from llmcli.inspect.passes import Passes
    from llmcli.loading.load import load

    monkeypatch.setattr("llmcli.commands.attention.measure.layers.MOST_CELLS", 20)
    model, ids = load(path, dtype="float64"), [(7 * i * i + 3 * i) % 2000 for i in range(150)]
    options = AttentionOptions(**given)
    whole, parts = (
        measure_attention(Passes(model, ids), options, block_rows=rows) for rows in (None, 7)
    )
    assert parts.ok
    assert whole.pairs == pytest.approx(parts.pairs) or [
        (one.layer, one.head, one.query, one.key) for one in whole.pairs
    ] == [(one.layer, one.head, one.query, one.key) for one in parts.pairs]
    for one, other in zip(whole.layers, parts.layers, strict=True):
        for mine, theirs in zip(one.heads, other.heads, strict=True):
            assert mine.metrics == pytest.approx(theirs.metrics, nan_ok=True)
    for one, other in zip(whole.matrices, parts.matrices, strict=True):
        assert one.values == pytest.approx(other.values, nan_ok=True, rel=1e-6)
        assert np.nanmin(one.values) < 0, "of either sign the largest"


def test_files(cli, run, path, tmp_path):
    def export(ending, *argv):
        file = tmp_path / f"x.{ending}"
        heads = ("--layer", "0-1", "--head", "0-2")
        said = cli("attention", "-m", path, TEXT, *heads, *argv, "-o", str(file))
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


def test_states(cli, run, path, tmp_path):
    found = run("attention", TEXT, "--what", "state", "--dtype", "float32", "--head", "0,2")
    assert [layer["kind"] for layer in found["layers"]] == ["gated DeltaNet", "Mamba-2"]
    assert (found["layers"][0]["rows"], found["layers"][0]["columns"]) == (8, 6)
    assert found["layers"][0]["bytes"] == 4 * 4 * 8 * 6
    assert found["positions"] == list(range(16))
    for layer in found["layers"]:
        assert [head["head"] for head in layer["heads"]] == [0, 2]
        for head in layer["heads"]:
            assert head["effective_ranks"][0] == pytest.approx(1), "one token writes one direction"
            assert len(head["norms"]) == len(head["effective_ranks"]) == 16
            assert all(1 <= rank <= 6 for rank in head["effective_ranks"])
    file = tmp_path / "dump.npz"
    run("dump", TEXT, "--dtype", "float32", "--name", "blocks.0.linattn.state", "-o", str(file))
    with np.load(file) as arrays:
        states = arrays["blocks.0.linattn.state"]
    norms = np.linalg.norm(states[2], axis=-1)
    assert found["layers"][0]["heads"][1]["norms"] == pytest.approx(norms.tolist(), rel=1e-5)
    long = run("attention", "--ids", ",".join(str(3 * i) for i in range(100)), "--what", "state")
    assert len(long["positions"]) == 24
    assert long["positions"][-1] == 99


def test_info_and_shapes_tell_what_is_kept(run, cli, path):
    ring = 4 * (DELTA.channels + SSM.channels)
    held = 4 * 2 * 4 * 8 * 6  # float32, of both layers
    info = run("info", "--dtype", "float32")
    states = info["memory"][0]["states"]
    assert states == {
        "layers": 2, "bytes": held + 4 * ring, "against": "attention",
        "against_per_token": 2 * 4 * 2 * (2 * 8),
        "smaller_from": (held + 4 * ring) // (2 * 4 * 2 * 16) + 1,
    }  # fmt: skip
    assert run("shapes", "--dtype", "float32")["cache"]["states"] == states
    said = cli("info", "-m", path, "--all").out
    assert "0 B a token" in said
    assert "less than keys and values of as many of its attention layers from" in said


# faults


def in_place_of(of, name, change):
    """`of.name` becomes a function of what it was and of its arguments."""

    def plant(monkeypatch):
        was = getattr(of, name)
        monkeypatch.setattr(of, name, lambda *args, **rest: change(was, *args, **rest))

    return plant


def scans(change):
    """What goes over the tokens, as a function of what it reads and of the state."""
    return in_place_of(
        nn.Recurrent, "scanned",
        lambda scan, self, x, state, step: change(lambda *of: scan(self, *of, step), x, state),
    )  # fmt: skip


def reads(change):
    """What the kernel reads is changed, whatever was emitted."""
    return scans(lambda scan, x, state: scan(change(x), state))


def decays_times(factor):
    return reads(lambda x: replace(x, log_decay_BHT=factor * x.log_decay_BHT))


def the_map_is(change):
    return in_place_of(
        Map, "rows", lambda rows, self, first, stop: change(rows(self, first, stop))
    )


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
        "01", in_place_of(nn.Inputs, "of_heads", lambda of, self, x: of(self, x).roll(1, 1)),
        "formulas"),
    "the state is lost": (
        "01", scans(lambda scan, x, state: scan(x, state.snapshot(0))), "state"),
    "the convolution's last rows are lost": (
        "01", in_place_of(nn.Recurrent, "activated", conv_is_lost), "steps"),
    "decays of another bias": ("01", in_place_of(nn.Recurrent, "decays", other_bias), "formulas"),
    "nothing is taken off": ("0", reads(lambda x: replace(x, plain=True)), "values state"),
    "something is taken off": ("1", reads(lambda x: replace(x, plain=False)), "values state"),
    "k has another length": (
        "0", in_place_of(delta, "l2_norm", lambda norm, *args: 1.5 * norm(*args)), "formulas"),
    "B and C change places": (
        "1", reads(lambda x: replace(x, q_BKTd=x.k_BKTd, k_BKTd=x.q_BKTd)), "values state"),
}  # fmt: skip


# by default in one of its layers, in turn
@pytest.mark.parametrize(("layer", "fault"), [
    one for at, (name, (layers, *_)) in enumerate(FAULTS.items())
    for one in few([pytest.param(layer, name) for layer in layers[:: 1 - 2 * (at % 2)]], 1)
])  # fmt: skip
def test_faults_are_seen(cli, path, monkeypatch, layer, fault):
    _, plant, expected = FAULTS[fault]
    plant(monkeypatch)
    argv = ("attention", "-m", path, TEXT, "--layer", layer, "--json", "--dtype", "float32")
    said = cli(*argv, "--generate", "3")
    assert said.code == 1
    red = {name for name, check in said.json()["checks"].items() if not check["ok"]}
    assert set(expected.replace("state", "steps").split()) <= red
    if "state" in expected:
        said = cli(*argv, "--what", "state")
        assert said.code == 1
        assert not said.json()["checks"]["state"]["ok"]


def test_chunks_go_on_where_the_last_one_ended(cli, path, monkeypatch, tmp_path):
    def emptied(scan, x, state):
        state["state"].zero_()
        return scan(x, state)

    text = tmp_path / "long.txt"
    text.write_text("the cat sat on 12 mats. " * 80)
    argv = ("lens", "-m", path, "-f", str(text), "--json", "--dtype", "float32", "--position", "-1")
    sound = cli(*argv)
    assert sound.code == 0
    assert sound.json()["checks"]["chunks"]["ok"]
    scans(emptied)(monkeypatch)
    said = cli(*argv)
    assert said.code == 1
    assert not said.json()["checks"]["chunks"]["ok"]

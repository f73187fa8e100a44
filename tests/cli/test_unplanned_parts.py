"""Parts that nothing in `llmcli` knows run in every command: a mixer, and two experts.

`tests/unplanned` has a folder for each and a family of them. They are registered here, and nothing
else is changed. Faults in the mixer, and in its graph, are seen.
"""

import json
from dataclasses import replace

import numpy as np
import pytest
from unplanned.experts.part import PART as EXPERTS
from unplanned.family import FAMILY, write
from unplanned.running_mean import forward
from unplanned.running_mean.part import PART as MEAN

import llmcli.anatomy.graph
from llmcli.engine.session import Session
from llmcli.errors import UsageError
from llmcli.loading.load import load
from llmcli.nn.step import Edit
from llmcli.parts.registry import PARTS

TEXT = "The old house stood at the end of the road, and the old"


@pytest.fixture(autouse=True)
def known(registered, monkeypatch):
    registered(FAMILY)
    for part in (MEAN, EXPERTS):
        monkeypatch.setitem(PARTS, part.config, part)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return str(write(tmp_path_factory.mktemp("unplanned") / "m"))


@pytest.fixture
def run(green, path):
    def run(command, *argv):
        document = green(command, "-m", path, *argv)
        if command not in ("generate", "score", "info", "bench", "explain"):
            assert document["checks"]
        return document

    return run


def test_what_others_call_its_tensors_is_known(cli, path, tmp_path):
    argv = ("-m", path, TEXT, "--name", "layers.1.values_proj", "-o", str(tmp_path / "x.npz"))
    said = cli("dump", *argv)
    assert said.code == 2
    assert "did you mean `blocks.*.mean.v`?" in said.err


DTYPES = ["float64", "float32", "bfloat16"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_view_is_green(run, dtype, tmp_path):
    file = tmp_path / "all.npz"
    of = (TEXT, "--dtype", dtype)
    run("attention", *of)
    run("attention", *of, "--generate", "3", "--weighted", "--metrics", "all", "--top-pairs", "3")
    run("lens", *of, "--mid", "--generate", "2")
    run("shapes", *of)
    run("dump", *of, "--name", "*", "-o", str(file), "--generate", "2")
    with np.load(file) as arrays:
        assert {
            "blocks.1.mean.pattern",
            "cache.0.sum",
            "cache.1.count",
            "blocks.0.experts.hidden",
        } < (set(arrays.files))
        pattern, v = (
            np.asarray(arrays[f"blocks.0.mean.{leaf}"], "f8") for leaf in ("pattern", "v")
        )
        z = np.asarray(arrays["blocks.0.mean.z"], "f8")
    if dtype != "bfloat16":
        assert np.abs(pattern @ v - z).max() < 1e-5


def test_texts_scores_and_shapes(run, path):
    one, again = (run("generate", TEXT, "--greedy", "-n", "6") for _ in range(2))
    assert one["outputs"][0]["ids"] == again["outputs"][0]["ids"]
    run("generate", TEXT, "-n", "3", "--num-samples", "2", "--temperature", "0.7")
    run("score", TEXT)
    info = run("info")
    (kind,) = info["architecture"]["layers"]
    assert (kind["kind"], kind["details"]) == ("running mean", ["3 decays", "2 experts of 20"])
    assert kind["heads"] is None
    held = 2 * 4 * (3 * 8 + 3)  # of every layer the sums and the counts
    assert info["memory"][0]["cache_bytes_per_token"] == 0
    assert info["memory"][0]["cache_bytes"] == held
    assert run("shapes", TEXT)["cache"]["decode"] == held


def test_times_and_rates(run, cli, path, tmp_path):
    """`scan` is a group that the mixer alone has."""
    trace = tmp_path / "trace.json"
    of = (TEXT, "-n", "3", "--unfused", "--pairs", "2")
    timing = run("timing", *of, "--trace", str(trace))
    assert [part["part"] for part in timing["phases"][1]["totals"]] == [
        "embed", "norm", "qkv", "scan", "out", "ffn_up", "ffn_act", "ffn_down", "residual", "head",
        "sample", "gaps",
    ]  # fmt: skip
    scans = [part for part in timing["phases"][0]["parts"] if part["part"] == "scan"]
    assert [part["layer"] for part in scans] == [0, 1]
    assert all(part["seconds"] > 0 and part["work"]["bytes"] for part in scans)
    assert sum(e["name"] == "scan" for e in json.loads(trace.read_text())["traceEvents"]) == 2 * 4
    said = cli("timing", "-m", path, *of, "--layers")
    assert said.code == 0
    rows = [line.split() for line in said.out.splitlines()]
    assert sum(row[:1] == ["scan"] for row in rows) == 2
    assert sum(row[:1] == ["layer"] and "scan" in row for row in rows) == 2
    (prompt, decode) = run("bench", "-p", "32", "-n", "4", "-r", "2", "--no-ceilings")["rows"]
    assert prompt["avg_ts"] > 0
    assert decode["avg_ts"] > 0


@pytest.mark.parametrize(
    "number", ["blocks.1.resid_post[5,3]", "blocks.0.mean.z[1,4,2]", "blocks.0.mean.pattern[2,7,3]"]
)
def test_explain_says_where_it_cannot_go_on(run, number):
    said = run("explain", number, TEXT)
    assert said["ok"]
    notes = [step["note"] for step in said["steps"]]
    assert any("cannot be derived yet" in note for note in notes)


def test_what_its_kernel_never_writes_cannot_be_edited(path):
    model = load(path, dtype="float32")
    edit = Edit(name="blocks.0.mean.pattern", fn=lambda rows: 2 * rows)
    with pytest.raises(UsageError, match="only shown"):
        Session(model.decoder, 1, 4).extend([[1, 2, 3]], edits=[edit])
    edit = Edit(name="blocks.0.mean.z", fn=lambda rows: 2 * rows)
    Session(model.decoder, 1, 4).extend([[1, 2, 3]], edits=[edit])


def wrong_decay(monkeypatch):
    recur = forward.RunningMean.recur

    def other(self, v, state):
        sums, counts = recur(self, v, state)
        return sums * 1.01, counts

    monkeypatch.setattr(forward.RunningMean, "recur", other)


def forgets(monkeypatch):
    """The state is not written."""
    monkeypatch.setattr(
        forward.FixedState, "__getitem__", lambda self, name: self._tensors[name].clone()
    )


def looks_ahead(monkeypatch):
    derive = forward.RunningMean.derive

    def other(self, name, emitted, first, stop, **heads):
        return derive(self, name, emitted, first, stop, **heads).roll(1, -1)

    monkeypatch.setattr(forward.RunningMean, "derive", other)


def a_faulty_graph(changed):
    def plant(monkeypatch):
        def graph(c, site):
            made = MEAN.graph(c, site)
            nodes = [
                replace(node, op=replace(node.op, **changed(node)))
                if node.name.endswith(".mean.z") else node
                for node in made.nodes
            ]  # fmt: skip
            return replace(made, nodes=tuple(nodes))

        monkeypatch.setitem(PARTS, MEAN.config, replace(MEAN, graph=graph))
        llmcli.anatomy.graph.graph.cache_clear()

    return plant


FAULTS = {
    "a sum that is too large": (wrong_decay, ("attention", "dump")),
    "a state that is not kept": (forgets, ("attention", "dump", "shapes")),
    "a map that looks ahead": (looks_ahead, ("attention", "dump")),
    "a graph with another value": (
        a_faulty_graph(lambda node: {"value": node.op.value.replace("mean.v", "mean.sum")}),
        ("attention", "dump"),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_seen(cli, path, monkeypatch, fault):
    plant, commands = FAULTS[fault]
    plant(monkeypatch)
    for command in commands:
        argv = ["--name", "*"] if command == "dump" else []
        argv += [] if command == "shapes" else ["--generate", "3"]
        result = cli(command, "-m", path, TEXT, *argv, "--json", "--dtype", "float64")
        assert result.code == 1, command
        assert not all(check["ok"] for check in result.json()["checks"].values())
    llmcli.anatomy.graph.graph.cache_clear()

"""`llmcli timing`: what it prints, measures, refuses and writes."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from functools import partial
from pathlib import Path
from time import sleep

import numpy as np
import pytest
from cli_tiny import write_tiny
from safetensors.numpy import load_file, save_file

import llmcli.cli.files
import llmcli.measure.ceilings
import llmcli.measure.timing.checks
import llmcli.measure.timing.report
from llmcli.cli.prompts import LOOKED_AT
from llmcli.nn.mlp import Mlp

TEXT = "abcabcab"
LAYERS = 2
WEIGHTS = 4 * LAYERS + 1  # q|k|v, out, gate|up, down, and the head


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("timing") / "m"
    return str(write_tiny(folder, weights=True, max_position_embeddings=256))


@pytest.fixture(autouse=True)
def soon_measured(monkeypatch):
    """The ceilings in less time: how near to them a run comes is not what is looked at here."""
    quick = partial(llmcli.measure.ceilings.measure_ceilings, seconds=0.05)
    monkeypatch.setattr(llmcli.measure.ceilings, "measure_ceilings", quick)


@pytest.fixture
def timing(cli, path):
    quick = ("--pairs", "2", "-n", "3", "--threads", "1", "--dtype", "float32")
    return lambda *argv: cli("timing", "-m", path, *quick, *argv)


@pytest.fixture
def document(timing):
    return lambda *argv: timing(TEXT, "--json", *argv).json()


def test_the_view(timing, path):
    result = timing(TEXT)
    assert result.code == 0
    assert result.err == ""
    lines = result.out.splitlines()
    assert lines[0] == f"{path} (float32 on cpu)"
    loading = r"read the headers .* · load the weights .* \(.*B, .*B/s\)"
    assert re.fullmatch(rf"once · import torch .* · {loading} · tokenize .*", lines[1])
    heads = [line for line in lines if line.startswith(("prefill: ", "decode: "))]
    assert heads[0].startswith("prefill: reading 8 tokens in ")
    assert heads[1].startswith("decode: writing 3 tokens after 8 in ")
    assert sum(line.startswith("looking costs ") for line in lines) == 2
    assert sum(line.startswith("gaps ") for line in lines) == 2
    assert any(
        line.startswith(f"GEMV (one row times a weight matrix): {WEIGHTS} a token, ")
        for line in lines
    )
    assert any(line.startswith("ceilings of this machine (cpu, 1 thread) · ") for line in lines)
    assert len([line for line in lines if line.startswith("✓ ")]) >= 4
    assert not any(line.startswith("✗ ") for line in lines)


def test_parts_and_gaps_add_up_to_the_wall_time(document):
    said = document()
    assert said["ok"] is True
    for phase in said["phases"]:
        for parts in ("parts", "totals"):
            seconds = sum(part["seconds"] for part in phase[parts])
            assert seconds == pytest.approx(phase["seconds"], rel=0.02)
        assert sum(part["share"] for part in phase["totals"]) == pytest.approx(1, rel=0.02)
        assert phase["totals"][-1]["part"] == "gaps"
        assert phase["gaps_s"] == phase["totals"][-1]["seconds"]


def test_layers_and_totals_are_the_same_time_and_work(document):
    for phase in document()["phases"]:
        seconds, flops = defaultdict(float), defaultdict(int)
        for part in phase["parts"]:
            seconds[part["part"]] += part["seconds"]
            flops[part["part"]] += part["work"]["flops"]
        layers = {part["layer"] for part in phase["parts"]} - {None}
        assert layers == set(range(LAYERS))
        for total in phase["totals"]:
            assert total["seconds"] == pytest.approx(seconds[total["part"]])
            assert total["work"]["flops"] == flops[total["part"]]
        assert phase["work"]["flops"] == sum(flops.values())


def test_rates_are_work_by_time(document):
    for phase in document()["phases"]:
        for part in (*phase["parts"], *phase["totals"]):
            work, seconds = part["work"], part["seconds"]
            assert work["bytes"] == work["weights"] + work["cache"] + work["activations"]
            for rate, amount in (("bytes_per_s", "bytes"), ("flops_per_s", "flops")):
                if work[amount] and seconds:
                    assert part[rate] == pytest.approx(work[amount] / seconds)
                else:
                    assert part[rate] is None
        assert phase["tokens_per_s"] == pytest.approx(phase["tokens"] / phase["bare_s"])


def test_overhead_is_of_the_pairs_that_were_asked_for(document):
    for phase in document("--pairs", "3")["phases"]:
        cost = phase["overhead"]
        assert len(cost["watched_s"]) == len(cost["bare_s"]) == len(cost["ratios"]) == 3
        pairs = zip(cost["watched_s"], cost["bare_s"], strict=True)
        assert cost["ratios"] == pytest.approx([watched / bare for watched, bare in pairs])
        assert cost["lowest"] <= cost["median"] <= cost["highest"]
        assert phase["seconds"] in cost["watched_s"]


def test_one_phase_alone(document, timing):
    assert [phase["name"] for phase in document("--phase", "prefill")["phases"]] == ["prefill"]
    decode = document("--phase", "decode")["phases"]
    assert [(phase["name"], phase["past"], phase["calls"]) for phase in decode] == [
        ("decode", len(TEXT), 3)
    ]
    assert "prefill:" not in timing(TEXT, "--phase", "decode").out


def test_stages_and_memory(document, path):
    said = document()
    names = [stage["name"] for stage in said["stages"]]
    assert names == ["import torch", "read the headers", "load the weights", "tokenize"]
    assert said["stages"][2]["nbytes"] == Path(path, "model.safetensors").stat().st_size
    held = [stage["peak"] for stage in said["stages"]] + [p["peak"] for p in said["phases"]]
    assert said["peak"] == max((peak for peak in held if peak is not None), default=None)
    assert said["estimated"] >= said["weight_bytes"] == said["model"]["weight_bytes"]
    assert said["working_set_in"] in {read["level"] for read in said["ceilings"]["reads"]}


def test_random_weights_are_not_read(cli, path):
    argv = ("--random-weights", "--ids", "1,2", "--pairs", "1", "-n", "1", "--threads", "1")
    stages = cli("timing", "-m", path, *argv, "--json").json()["stages"]
    assert [(stage["name"], stage["nbytes"]) for stage in stages] == [
        ("import torch", None),
        ("read the headers", None),
        ("load the weights", None),
    ]


def test_layers(timing):
    lines = timing(TEXT, "--layers").out.splitlines()
    assert sum(line.startswith("layer ") for line in lines) == 2
    assert sum("in no layer" in line for line in lines) == 2
    assert not any(line.startswith("layer ") for line in timing(TEXT).out.splitlines())


def test_a_slow_layer_stands_out(cli, monkeypatch):
    """5 ms in the feed-forward part of layer 2 of 4, in both phases and nowhere else."""
    plain = Mlp.__call__

    def slow(self, x_BTD, step):
        if self.name == "blocks.2.mlp":
            sleep(0.005)
        return plain(self, x_BTD, step)

    monkeypatch.setattr(Mlp, "__call__", slow)
    argv = ("-m", "tiny", TEXT, "--pairs", "3", "-n", "2", "--threads", "1", "--layers")
    lines = cli("timing", *argv).out.splitlines()
    rows = [line.split() for line in lines if re.match(r" +[0-3]  ", line)]
    assert [row[0] for row in rows] == ["0", "1", "2", "3"] * 2
    for row in rows:
        slowest = [cell for cell in row[1:] if float(cell.rstrip("*")) >= 5]
        assert len(slowest) == (2 if row[0] == "2" else 0), "the layer and its part"
        assert [cell.endswith("*") for cell in slowest] in ([], [False, True])
    names = next(line.split() for line in lines if line.lstrip().startswith("layer "))
    assert all(row[names.index("ffn_up")].endswith("*") for row in rows if row[0] == "2")


def test_unfused(document, timing):
    splits = document("--unfused")["splits"]
    assert {split["part"] for split in splits} == {"qkv", "attention", "ffn_up"}
    for split in splits:
        assert split["group_s"] > 0
        assert len(split["pieces"]) >= 2
        assert all(piece["seconds"] > 0 for piece in split["pieces"])
    out = timing(TEXT, "--unfused").out
    assert len(re.findall(r"^\w+ took .* fused; apart its pieces take: ", out, re.M)) == 6
    assert document()["splits"] == []


def test_without_a_prompt_the_built_in_one_is_timed(timing):
    result = timing()
    assert result.code == 0
    assert LOOKED_AT in result.err
    assert f"reading {len(LOOKED_AT)} tokens" in result.out


# the trace


def test_the_trace_is_the_run_that_is_shown(document, tmp_path):
    file = tmp_path / "run.json"
    said = document("--trace", str(file))
    trace = json.loads(file.read_text("utf-8"))
    assert trace["displayTimeUnit"] == "ms"
    assert trace["otherData"]["weight_format"] == "float32"
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    for phase in said["phases"]:
        whole = [event for event in events if event["name"].startswith(f"{phase['name']} of ")]
        assert len(whole) == 1
        seconds = sum(part["seconds"] for part in phase["totals"])
        assert whole[0]["dur"] / 1e6 == pytest.approx(seconds, abs=1e-8)
        for total in phase["totals"][:-1]:
            own = [
                event
                for event in events
                if event["cat"] == "part"
                and (event["name"], event["args"]["phase"]) == (total["part"], phase["name"])
            ]
            within = 1e-9 * len(own)
            assert sum(event["dur"] for event in own) / 1e6 == pytest.approx(
                total["seconds"], abs=within
            )
            flops = sum(event["args"]["flops"] for event in own)
            assert flops == pytest.approx(total["work"]["flops"])
        calls = [event for event in events if event["cat"] == "call"]
        assert len(calls) == 1 + 3


def test_events_of_a_thread_nest(timing, tmp_path):
    """In whole nanoseconds, as Perfetto reads them: what overlaps it leaves out."""
    file = tmp_path / "run.json"
    assert timing(TEXT, "--trace", str(file)).code == 0
    threads = defaultdict(list)
    for event in json.loads(file.read_text("utf-8"))["traceEvents"]:
        if event["ph"] == "X":
            begin, end = (round(us * 1000) for us in (event["ts"], event["ts"] + event["dur"]))
            threads[event["pid"], event["tid"]].append((begin, end, event["cat"]))
    assert len(threads) == 2
    depth = {"stage": 0, "phase": 0, "call": 1, "layer": 2, "part": 3}
    for events in threads.values():
        around = []
        for begin, end, category in sorted(events, key=lambda e: (e[0], -e[1], depth[e[2]])):
            while around and around[-1][0] <= begin:
                around.pop()
            assert not around or end <= around[-1][0], (category, around)
            assert not around or depth[category] > depth[around[-1][1]]
            around.append((end, category))


def test_a_trace_is_told(timing, tmp_path):
    file = tmp_path / "run.json"
    result = timing(TEXT, "--trace", str(file))
    assert re.fullmatch(r"note: wrote `.*run\.json` \(.* KiB\): \d+ spans, for .*\n", result.err)
    assert timing(TEXT, "--trace", str(file), "-q").err == ""


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (["--trace", "run.txt"], 2, "`--trace run.txt` does not end in .json"),
        (["--trace", "/nowhere/run.json"], 1, "there is no such directory"),
        (["--force"], 2, "`--force` is about the size of a file"),
        (["--pairs", "0"], 2, "`--pairs` must be between 1"),
        (["-n", "0"], 2, "`--max-tokens` must be at least 1"),
        (["--phase", "prefil"], 2, "did you mean `prefill`?"),
        (["-n", "249"], 2, "the prompt of 8 tokens and 249 new ones do not fit the context of 256"),
        (["--context-length", "10"], 2, "and 3 new ones do not fit the context of 10"),
        (["--context-length", "7", "--phase", "prefill"], 2, "8 tokens"),
        (["--ids", "1"], 2, "`--ids` goes without PROMPT"),
    ],
)
def test_what_is_refused(timing, argv, code, words):
    result = timing(TEXT, *argv)
    assert result.code == code
    assert result.out == ""
    assert words in " ".join(result.err.split())


def test_the_last_token_that_fits(document):
    assert document("-n", "248", "--pairs", "1", "--phase", "decode")["phases"][0]["tokens"] == 248


def test_a_large_trace_is_asked_for(timing, tmp_path, monkeypatch):
    monkeypatch.setattr(llmcli.cli.files, "FILE_CAP", 1000)
    file = tmp_path / "run.json"
    result = timing(TEXT, "--trace", str(file))
    assert result.code == 2
    assert "write fewer tokens with --max-tokens, or add --force" in " ".join(result.err.split())
    assert not file.exists()
    assert timing(TEXT, "--trace", str(file), "--force").code == 0
    assert file.exists()


def test_a_check_that_does_not_hold_is_shown_and_exits_1(timing, monkeypatch):
    monkeypatch.setattr(llmcli.measure.timing.checks, "_APART", -1.0)
    result = timing(TEXT)
    assert result.code == 1
    assert "✗ not so: parts and gaps add up to the wall time" in result.out
    assert "it is not so that parts and gaps add up" in " ".join(result.err.split())
    said = timing(TEXT, "--json").json()
    assert (said["ok"], said["checks"]["adds_up"]["ok"]) == (False, False)


def test_time_that_is_in_no_part_is_missed(timing, monkeypatch):
    """What the view adds up is what the clock saw: a clock that stops too early is found out."""
    measured = llmcli.measure.timing.report.over_layers
    monkeypatch.setattr(
        llmcli.measure.timing.report,
        "over_layers",
        lambda parts: tuple(part for part in measured(parts) if part.part != "attention"),
    )
    result = timing(TEXT)
    assert result.code == 1
    assert "✗ not so: parts and gaps add up to the wall time" in result.out


def test_nan_in_the_weights_exits_7(cli, path, tmp_path):
    folder = write_tiny(tmp_path / "nan", weights=True)
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][:] = np.nan
    save_file(weights, folder / "model.safetensors")
    result = cli("timing", "-m", str(folder), TEXT, "--pairs", "1", "--threads", "1")
    assert result.code == 7
    assert result.out == ""


def test_interrupted_while_measuring(timing, monkeypatch):
    def interrupted(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(llmcli.measure.timing.report, "run_pairs", interrupted)
    result = timing(TEXT)
    assert (result.code, result.out) == (130, "")
    assert timing(TEXT, "--json").json()["error"]["code"] == 130

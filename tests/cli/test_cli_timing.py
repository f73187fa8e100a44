"""`llmcli timing`: what it prints, measures, refuses and writes."""

import gc
import json
import os
import re
import sys
from collections import defaultdict
from pathlib import Path
from unittest.mock import Mock

import children
import numpy as np
import pytest
from cli_tiny import write_tiny
from safetensors.numpy import load_file, save_file

import llmcli.loading.load
import llmcli.measure.ceilings
import llmcli.shell.files
from llmcli.checkpoints import open_checkpoint
from llmcli.commands.timing.command import TimingOptions, prompt_tokens
from llmcli.commands.timing.measure import run as timing_run
from llmcli.commands.timing.measure.run import Workload
from llmcli.devices import release_freed_memory
from llmcli.errors import UsageError
from llmcli.families import translate
from llmcli.graph.cost import step_bytes
from llmcli.graph.precision import Precision
from llmcli.shell.prompts import LOOKED_AT, Prompt

TEXT = "abcabcab"
LAYERS = 2
DOCUMENT = {}  # of one run, for all tests that read it


@pytest.fixture
def timing(cli, weighted):
    """Other tests' garbage, collected or given back during a run, would count as the run's."""
    quick = ("--pairs", "2", "-n", "3", "--threads", "1", "--dtype", "float32")
    gc.collect()
    release_freed_memory()
    gc.disable()
    yield lambda *argv: cli("timing", "-m", weighted, *quick, *argv)
    gc.enable()


@pytest.fixture
def said(timing):
    if not DOCUMENT:
        DOCUMENT.update(timing(TEXT, "--json").json())
    return DOCUMENT


def test_what_is_printed(timing, weighted):
    """Of a real run; transcripts have the rest: both phases, one with details, by layers."""
    result = timing(TEXT)
    assert (result.code, result.err) == (0, ""), result.out
    lines = result.out.splitlines()
    assert lines[0] == f"{weighted} (float32 on cpu)"
    assert "2 pairs" in lines[3]
    assert [line.partition(" ")[0] for line in lines[5:8]] == ["prefill:", "decode:", "ms"]
    assert re.fullmatch(r"✓ [45] checks · --checks", lines[-1])
    assert len(lines) <= 5 + 2 + 2 + 13 + 3  # all parts where each takes 5 % of so small a model

    assert re.fullmatch("start-up: torch .* · headers .* · weights .* · tokenize .*", lines[2])
    result = timing("--layers")  # of the prompt that is built in
    assert f"prefill: {len(LOOKED_AT)} tokens" in result.out
    assert result.out.count("\nlayer ") == result.out.count("in no layer") == 2


def test_without_pairs_there_are_as_many_as_it_takes(cli, weighted, monkeypatch):
    """Each pair takes a second of a clock that stands still else, and the tenth is the last."""
    plain, now = timing_run.in_turns, [0.0]

    def in_turns(*sides):
        for (out, _), (seen, _) in plain(*sides):
            now[0] += 1.0
            wall = 0.3 + 0.2 * (int(now[0]) % 3)  # never tight
            yield (out, 0.25), (seen, wall)

    monkeypatch.setattr(timing_run, "in_turns", in_turns)
    monkeypatch.setattr(timing_run, "perf_counter", lambda: now[0])
    argv = ("timing", "-m", weighted, TEXT, "-n", "2", "--threads", "1")
    phases = cli(*argv, "--json").json()["phases"]
    assert [phase["pairs"] for phase in phases] == [5, 5]
    assert all(phase["spread"] > 0.03 for phase in phases)
    now[0] = 0.0
    assert cli(*argv, "--json", "--pairs", "12").json()["phases"][0]["pairs"] == 12


def test_parts_and_gaps_add_up_to_the_wall_time_and_rates_are_work_by_time(said):
    assert said["ok"] is True
    for phase in said["phases"]:
        for parts in ("parts", "totals"):
            seconds = sum(part["seconds"] for part in phase[parts])
            assert seconds == pytest.approx(phase["seconds"], rel=0.02)
        assert sum(part["share"] for part in phase["totals"]) == pytest.approx(1, rel=0.02)
        assert phase["totals"][-1]["part"] == "gaps"
        assert phase["gaps_s"] == phase["totals"][-1]["seconds"]
        seconds, flops = defaultdict(float), defaultdict(int)
        for part in phase["parts"]:
            seconds[part["part"]] += part["seconds"]
            flops[part["part"]] += part["work"]["flops"]
        assert {part["layer"] for part in phase["parts"]} - {None} == set(range(LAYERS))
        for total in phase["totals"]:
            assert total["seconds"] == pytest.approx(seconds[total["part"]])
            assert total["work"]["flops"] == flops[total["part"]]
        assert phase["work"]["flops"] == sum(flops.values())
        for part in (*phase["parts"], *phase["totals"]):
            work, seconds = part["work"], part["seconds"]
            assert part["share"] == pytest.approx(seconds / phase["seconds"])
            assert work["bytes"] == work["weights"] + work["cache"] + work["activations"]
            for rate, amount in (("bytes_per_s", "bytes"), ("flops_per_s", "flops")):
                if work[amount] and seconds:
                    assert part[rate] == pytest.approx(work[amount] / seconds)
                else:
                    assert part[rate] is None
        assert phase["tokens_per_s"] == pytest.approx(phase["tokens"] / phase["bare_s"])
        assert phase["pairs"] == len(phase["overhead"]["ratios"]) == 2
        assert phase["seconds"] in phase["overhead"]["watched_s"]


def test_stages_and_memory(said, weighted):
    names = [stage["name"] for stage in said["stages"]]
    assert names == ["import torch", "read the headers", "load the weights", "tokenize"]
    assert said["stages"][2]["nbytes"] == Path(weighted, "model.safetensors").stat().st_size
    held = [stage["peak"] for stage in said["stages"]] + [p["peak"] for p in said["phases"]]
    assert said["peak"] == max((peak for peak in held if peak is not None), default=None)
    assert said["estimated"] >= said["weight_bytes"] == said["model"]["weight_bytes"]
    assert said["base"] is None, "other tests have computed in this process"
    assert said["finish_reason"] == "complete"
    assert said["working_set_in"] in {read["level"] for read in said["ceilings"]["reads"]}
    # from the headers: what a step reads, within what a guess of the tokens may be off
    config, _ = translate(open_checkpoint(Path(weighted)))
    guessed = step_bytes(config, prompt_tokens(Prompt(TEXT)) + 3, precision=Precision.of("float32"))
    assert guessed == pytest.approx(said["working_set"], rel=0.1)
    assert prompt_tokens(Prompt(None, (1, 2, 3))) == 3


def test_one_phase_alone_to_the_last_token_that_fits(timing):
    (decode,) = timing(TEXT, "--json", "--phase", "decode", "-c", "11").json()["phases"]
    found = [decode[key] for key in ("name", "past", "calls", "tokens")]
    assert found == ["decode", len(TEXT), 3, 3]


def test_random_weights_are_said_and_not_read(cli, weighted):
    argv = ("timing", "-m", weighted, "--random-weights", "--ids", "1,2", "--phase", "prefill",
            "--pairs", "1", "--threads", "1", "--dtype", "float32")  # fmt: skip
    said = cli(*argv, "--json").json()
    assert [phase["name"] for phase in said["phases"]] == ["prefill"]
    assert [(stage["name"], stage["nbytes"]) for stage in said["stages"]] == [
        (name, None) for name in ("import torch", "read the headers", "load the weights")
    ]
    lines = cli(*argv).out.splitlines()
    assert lines[0] == f"{weighted} (float32 on cpu), random weights"
    assert "of file" not in lines[2]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not say")
def test_the_model_takes_what_is_estimated_in_a_process_of_its_own():
    argv = ("-m", "tiny", TEXT, "--pairs", "1", "-n", "2", "--threads", "1", "--json")
    dtype = "--dtype", "float32"  # what products of 16 bits take is the processor's own
    run = children.run(
        [sys.executable, "-m", "llmcli", "timing", *argv, *dtype], fresh=True,
        capture_output=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    said = json.loads(run.stdout)
    assert 0 < said["base"] < said["peak"]
    assert said["checks"]["memory"]["ok"] is True


def test_a_loaded_machine_is_said(timing, said, others_take):
    quiet = said["machine_load"]
    assert (quiet["threads"], quiet["others"], quiet["slowed"]) == (1, 0.0, False)
    others_take(1.9)
    result = timing(TEXT, "--json")
    assert result.json()["machine_load"]["slowed"] is True
    assert result.err == (
        "note: other programs took 1.90 of 2 processors: on an idle machine this is faster\n"
    )


# the trace


def test_a_trace_takes_the_place_of_the_last_one(timing, tmp_path, monkeypatch, others_take):
    """As every file that a command writes; a run that fails leaves the old one.

    A large one has to be asked for. With `--quiet` nothing is said of it, nor of a loaded machine.
    """
    file = tmp_path / "run.json"
    file.write_text("old")
    assert timing(TEXT, "--trace", str(file), "-n", "249").code == 2
    with monkeypatch.context() as patch:
        patch.setattr(llmcli.shell.files, "FILE_CAP", 1000)
        result = timing(TEXT, "--trace", str(file))
        assert result.code == 2
        hint = "write fewer tokens with --max-tokens, or add --force"
        assert hint in " ".join(result.err.split())
        assert file.read_text() == "old"
        result = timing(TEXT, "--trace", str(file), "--force")
    trace = json.loads(file.read_text())
    assert (trace["displayTimeUnit"], trace["otherData"]["weight_format"]) == ("ms", "float32")
    assert [event["cat"] for event in trace["traceEvents"][3:]].count("call") == 1 + 3
    assert re.fullmatch(r"note: wrote `.*run\.json` \(.* KiB\): \d+ events, for .*\n", result.err)
    others_take(1.9)
    err = timing(TEXT, "--trace", str(file), "-q").err  # a check may fail on a busy machine
    assert all(line.startswith(("error: check failed: ", "hint: ")) for line in err.splitlines())


def test_the_size_of_a_trace_is_that_of_the_phases_in_it():
    """A prompt of 1,000 tokens is read in two calls, or one on CUDA, where reading is timed."""
    layers, tokens = 1_000_000, 1000
    for device, reading in (("cpu", 2), ("cuda", 1)):
        refused = {}
        for phase in ("prefill", "decode", "both"):
            options = TimingOptions(phase=phase, max_tokens=1, trace="run.json")
            with pytest.raises(UsageError) as error:
                options.check_trace(layers, tokens, device)
            refused[phase] = float(re.search(r"about ([\d.]+) GiB", str(error.value))[1])
        assert refused["prefill"] == pytest.approx(reading * refused["decode"], rel=0.01)
        assert refused["both"] == pytest.approx((reading + 1) * refused["decode"], rel=0.01)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
def test_a_trace_that_cannot_be_written_costs_no_measurement(timing, tmp_path):
    file = tmp_path / "run.json"
    file.symlink_to("/dev/full")
    result = timing(TEXT, "--trace", str(file), "--json")
    assert f"could not write `{file}`: no space left on device" in result.err
    assert (result.code, result.json()["schema"]) == (1, "llmcli.timing/1")
    assert [phase["name"] for phase in result.json()["phases"]] == ["prefill", "decode"]


def test_time_that_is_in_no_part_fails_a_check(timing, monkeypatch):
    """What the view adds up is what the clock saw: without one part it is said, and exits 1."""
    plain = timing_run.over_layers
    monkeypatch.setattr(timing_run, "_APART_S", 0.0)
    monkeypatch.setattr(
        timing_run, "over_layers",
        lambda *of: tuple(part for part in plain(*of) if part.part != "attention"),
    )  # fmt: skip
    result = timing(TEXT, "--json")
    assert result.code == 1
    assert "check failed: parts and gaps add up to the wall time" in " ".join(result.err.split())
    said = result.json()
    assert (said["ok"], said["checks"]["adds_up"]["ok"]) == (False, False)


def test_nan_in_the_weights_exits_7(cli, weighted, tmp_path):
    folder = write_tiny(tmp_path / "nan", weights=True)
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][:] = np.nan
    save_file(weights, folder / "model.safetensors")
    result = cli("timing", "-m", str(folder), TEXT, "--pairs", "1", "--threads", "1")
    assert result.code == 7
    assert len(result.out.splitlines()) == 3, "what is known before the runs"


def test_interrupted_while_measuring(timing, monkeypatch):
    """Ctrl-C in the first run that writes tokens: what was finished is there, and no more.

    Its view is in the transcript timing-views.
    """
    plain = Workload.run

    def run(self, phase, *args, **options):
        if phase == "decode":
            raise KeyboardInterrupt
        return plain(self, phase, *args, **options)

    monkeypatch.setattr(Workload, "run", run)
    result = timing(TEXT, "--json")
    said = result.json()
    assert (result.code, said["schema"]) == (130, "llmcli.timing/1")
    assert "interrupted after prefill" in result.err
    assert said["finish_reason"] == "interrupted"
    assert [phase["name"] for phase in said["phases"]] == ["prefill"]
    assert said["stages"][0]["name"] == "import torch"
    said = timing(TEXT, "--phase", "decode", "--json").json()
    assert (said["finish_reason"], said["phases"]) == ("interrupted", [])


def test_interrupted_while_loading(timing, monkeypatch):
    """Nothing but the ceilings was measured yet: no run waits for them, and no model is there.

    So what they take belongs to the base.
    """
    measured = Mock()
    measured.ceilings.side_effect = llmcli.measure.ceilings.measure_ceilings
    measured.load.side_effect = KeyboardInterrupt
    monkeypatch.setattr(llmcli.measure.ceilings, "measure_ceilings", measured.ceilings)
    monkeypatch.setattr(llmcli.loading.load, "load_checkpoint", measured.load)
    result = timing(TEXT)
    assert (result.code, result.out) == (130, "")
    assert [name for name, *_ in measured.mock_calls] == ["ceilings", "load"]
    assert timing(TEXT, "--json").json()["error"]["code"] == 130

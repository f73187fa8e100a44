"""`llmcli bench`: llama-bench's options and lists, its outputs, peers, and how it ends."""

import json
import re
import sqlite3
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from unittest.mock import Mock

import peer_reader
import pytest
import torch
from tiny_checkpoints import LLAMA

import llmcli
from llmcli.cli.app import main
from llmcli.cli.tree import root
from llmcli.commands.bench import command
from llmcli.commands.bench.measure import loader
from llmcli.commands.bench.measure.compare import COMPARED
from llmcli.commands.bench.report.plan import IGNORED, OurOptions, Plan, RunOptions, pairs
from llmcli.commands.bench.report.plan import TestOptions as Asked
from llmcli.commands.bench.report.row import KEYS
from llmcli.commands.bench.report.settings import SETTINGS, Settings, SweptOptions, numbers, words
from llmcli.errors import UsageError
from llmcli.measure import ceilings, peers
from llmcli.measure.engines import LlmcliEngine
from llmcli.records.machine import Ceilings, MatrixRate, ReadRate


@pytest.fixture
def bench(cli, weighted):
    """Short tests on the small model, without ceilings."""

    def run(*argv):
        sizes = () if "-p" in argv else ("-p", "8", "-n", "3")
        fixed = ("-m", weighted, "--dtype", "float32", "-r", "2", "-t", "1", "--no-ceilings")
        return cli("bench", *fixed, *sizes, *argv)

    return run


@pytest.mark.parametrize(("format", "first", "second"), [
    ("md", "pp8", "tg3"), ("csv", '"8"', '"3"'), ("json", '"n_prompt": 8', '"n_gen": 3'),
    ("jsonl", '"n_prompt": 8', '"n_gen": 3'), ("sql", "INSERT INTO", "INSERT INTO"),
])  # fmt: skip
def test_rows_are_written_as_they_are_measured(weighted, tmp_path, format, first, second):
    """A pipe has each before the next one begins."""
    argv = ["bench", "-m", weighted, "-p", "8", "-n", "3", "-r", "1", "--dtype", "float32"]
    argv += ["-t", "1", "--no-ceilings", "--progress", "-o", format]
    file = tmp_path / "both"
    with (
        file.open("a") as out, redirect_stdout(out),
        file.open("a", buffering=1) as err, redirect_stderr(err),
    ):  # fmt: skip
        assert main(argv) == 0
    before, after = file.read_text().split("benchmark 2/2: starting")
    assert first in before.split("benchmark 1/1: prompt run 1/1")[-1]
    assert second in after


def test_an_interruption_keeps_what_was_measured(bench, monkeypatch):
    interrupted = Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr(LlmcliEngine, "step", interrupted)  # the first test has none
    said = {
        kind: bench(*([kind] if kind == "--json" else ["-o", kind]))
        for kind in ("json", "csv", "md", "--json")
    }
    for result in said.values():
        assert (result.code, result.err) == (130, "interrupted after 1 test\n")
    assert [row["n_prompt"] for row in said["json"].json()] == [8]
    found = said["--json"].json()
    assert (found["interrupted"], len(found["rows"])) == (True, 1)
    assert found["finish_reason"] == "interrupted"
    assert len(said["csv"].out.splitlines()) == 2
    assert "pp8" in said["md"].out.split("\nbuild: ")[0]


@pytest.mark.parametrize("place", [
    "checkpoints.locate.find", "commands.bench.measure.loader.open_checkpoint",
])
def test_an_array_without_a_row_is_one(cli, weighted, monkeypatch, place):
    monkeypatch.setattr(f"llmcli.{place}", Mock(side_effect=KeyboardInterrupt))
    model = ["-m", weighted] if place.endswith("open_checkpoint") else []
    result = cli("bench", *model, "-p", "8", "-n", "0", "-o", "json")
    assert (result.code, result.out) == (130, "[]\n")


def test_what_is_looked_for(bench, monkeypatch):
    """A revision is one of the hub; nothing is fetched for a row that cannot run."""
    asked = []
    find = loader.find

    def found(spec, *, revision=None, offline=False, **_):
        asked.append((revision, offline))
        return find(spec)

    monkeypatch.setattr(loader, "find", found)
    assert bench("--revision", "v2", "-p", "4", "-n", "0", "-o", "none").code == 0
    result = bench("-ctk", "q8_0", "-o", "json")
    assert (result.code, asked) == (2, [("v2", False), (None, True)])
    assert all(row["model_n_params"] > 0 for row in json.loads(result.out))


def test_ceilings_give_the_share_of_the_roofline_and_verbose_says_them(cli, bench, weighted):
    result = cli("bench", "-m", weighted, "-p", "16", "-n", "0", "-r", "2", "--json", "-v")
    (row,), (measured,) = result.json()["rows"], result.json()["ceilings"]
    assert measured["reads"]
    assert 0 < row["roofline_share"] < 1
    # six decimals, of which a run beside a busy program leaves few; both times are whole ns
    share = row["roofline_ns"] / row["avg_ns"]
    off = 6e-7 + share * (0.5 / row["roofline_ns"] + 0.5 / row["avg_ns"])
    assert row["roofline_share"] == pytest.approx(share, rel=0, abs=off)
    assert re.search(r"\nnote: ceilings \(cpu, \w+\): memory .+B/s, .+FLOP/s", result.err)
    first, second = bench("-v").err.splitlines()
    assert re.fullmatch(r"note: .+, torch [^,]+, \d+ threads?, .+", first)
    assert re.fullmatch(rf"note: loaded {weighted} in [\d.e-]+ s: float32 on cpu", second)
    assert bench("-v", "--quiet").err == ""


def test_a_note_takes_the_place_of_the_status(monkeypatch, capsys):
    for name in ("PATIENCE_S", "BETWEEN_S"):
        monkeypatch.setattr(command, name, 0.0)
    out = command.Output("bench", command.BenchOutput())
    out.err = replace(out.err, animate=True)
    command.Status(out, lines=False)("loading m", 1, 2)
    out.note("it is large")
    out.note("it is slow")
    assert capsys.readouterr().err == "loading m 50 %\r\x1b[Knote: it is large\nnote: it is slow\n"


def test_a_loaded_machine_is_said(bench, others_take):
    assert bench("-o", "json").err == ""
    others_take(1.9)
    words = "note: other programs took 1.90 of 2 processors: on an idle machine this is faster\n"
    assert bench("-o", "json").err == bench("-o", "md").err == words
    document = bench("--json")
    load = document.json()["machine_load"]
    assert document.err == words
    assert (load["threads"], load["others"], load["slowed"]) == (1, 1.9, True)
    others_take(0.9)  # and the one thread has the other processor
    assert bench("-o", "json").err == ""


def test_the_program_is_named_by_its_version_where_it_is_no_checkout(monkeypatch):
    by = command.build_info()
    assert re.fullmatch(r"[0-9a-f]{8}", by.build_commit) or by.build_number == 0
    monkeypatch.setattr(command, "_git", lambda root, *words: "")
    by = command.build_info()
    assert (by.build_commit, by.build_number) == (llmcli.__version__, 0)


# `--device meta`: any size is counted, and nothing of it is computed or made up

LAYERS, TOKENS = 4, 900_000
LARGE = LLAMA | {  # of Llama 3 with 8 billion an eighth of the layers, but more tokens
    "vocab_size": TOKENS, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": LAYERS, "num_attention_heads": 32, "num_key_value_heads": 8,
    "max_position_embeddings": 8192, "rope_theta": 500000.0,
}  # fmt: skip
NUMBERS = 8_245_252_096
NORMS = (2 * LAYERS + 1) * 4096
MATRICES = NUMBERS - TOKENS * 4096 - NORMS  # without the table that is looked up, and norms
RANDOM = ("--random-weights", "--dtype", "bfloat16")


@pytest.fixture
def counted(cli, tmp_path, monkeypatch):
    """A configuration without weights, benchmarked on a machine of round numbers."""
    (tmp_path / "config.json").write_text(json.dumps(LARGE))

    def measured(device, dtype, **options):
        assert device.type != "meta"
        return Ceilings(
            device=str(device), dtype="float32", threads=1, caches=(), seconds=0.0,
            reads=(ReadRate(nbytes=10**9, bytes_per_s=1e10, level="memory"),),
            matrices=(MatrixRate(dtype="bfloat16", flops_per_s=1e15),),
        )  # fmt: skip

    monkeypatch.setattr(ceilings, "measure_ceilings", measured)

    def run(*argv, device="meta"):
        shape = ("-p", "0", "-n", "1", "-t", "1", "--device", device)
        result = cli("bench", "-m", str(tmp_path), *shape, *argv)
        assert (result.code, result.err) == (0, "") or device != "meta"
        return result

    return run


def test_a_model_of_8_billion_is_counted(counted):
    flat, deep = counted(*RANDOM, "-d", "0,100", "--json").json()["rows"]
    for row in (flat, deep):
        assert (row["meta"], row["samples_ns"], row["avg_ts"]) == (True, [], 0)
        assert (row["model_n_params"], row["model_size"]) == (NUMBERS, 2 * NUMBERS)
    products = LAYERS * 2 * 2 * 32 * 128  # of one query with one key in all layers, and its value
    assert flat["flops"] == 2 * MATRICES + products
    assert deep["flops"] - flat["flops"] == 100 * products
    keys = LAYERS * 2 * 8 * 128 * 2  # bytes of a token in the cache
    assert [row["peak_memory_bytes"] for row in (flat, deep)] == [None, None]
    more = deep["estimated_memory_bytes"] - flat["estimated_memory_bytes"]
    assert 0 <= more - 100 * keys < 50e6
    assert 2 * NUMBERS < flat["estimated_memory_bytes"] < 2 * NUMBERS + 600e6
    # a token is a row of the table, all matrices and norms, the cache, and a few activations
    nbytes = 2 * (MATRICES + 4096 + NORMS)
    for row, tokens in ((flat, 1), (deep, 101)):
        assert 0 < row["bytes"] - nbytes - tokens * keys < 2e7
        assert row["roofline_ns"] == pytest.approx(row["bytes"] / 10, rel=1e-6)  # 10 GB a second


def test_without_weights_there_is_a_row_for_the_error_beside_the_shapes(counted):
    result = counted("--no-ceilings", "--json", device="cpu,meta")
    assert result.code == 0
    refused, meta = result.json()["rows"]
    assert refused["error_kind"] == "checkpoint"
    assert meta["flops"] == 2 * MATRICES + LAYERS * 4 * 32 * 128


# `--against`; the rows of both, the ratio, the order and the check are in a transcript


@pytest.fixture
def against(cli, weighted):
    def run(peer, *argv, model=weighted):
        short = ("-p", "12", "-n", "3", "-r", "3", "-t", "1", "--no-ceilings", "--dtype", "float32")
        return cli("bench", "-m", model, "--against", peer, *short, *argv)

    return run


def test_a_model_that_is_not_the_same_is_said(against, weighted, monkeypatch):
    """A planted fault: transformers' weights are changed after it has loaded them."""
    good = peers.read_model

    @torch.no_grad()
    def bad(ours):
        model, seconds = good(ours)
        model.model.layers[1].mlp.down_proj.weight.mul_(-1)
        return model, seconds

    monkeypatch.setattr(peers, "read_model", bad)
    result = against("transformers")
    assert result.code == 0
    note = f"note: transformers does not compute what llmcli does with `{weighted}`: KL "
    assert note in result.err
    assert "✗ check failed: " in result.out
    assert not against("transformers", "--json").json()["checks"]["same_model"]["ok"]


@pytest.mark.parametrize(("name", "module", "package"), [
    ("transformers", "transformers", "transformers"),
    ("llama.cpp", "llama_cpp", "llama-cpp-python"),
])  # fmt: skip
def test_a_peer_that_is_not_installed_is_a_usage_error(against, monkeypatch, name, module, package):
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(command, "find_spec", lambda asked: asked != module or None)
    result = against(name)
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith(f"error: `--against {name}` needs a package that is not ")
    assert f"`pip install {package}`" in result.err


@pytest.mark.real
def test_llama_cpp_beside_us_on_smollm2(against, smollm2_path):
    pytest.importorskip("llama_cpp")
    result = against("llama.cpp", "--json", model=str(smollm2_path))
    assert (result.code, result.err) == (0, "")
    found = result.json()
    assert [row["engine"] for row in found["rows"]] == ["llmcli", "llama.cpp"] * 2
    assert [row["error"] for row in found["rows"]] == [None] * 4
    assert found["rows"][1]["dtype"] == "Q4_1"
    assert found["rows"][1]["bits_per_weight"] == pytest.approx(5.74, abs=0.01)
    assert found["checks"]["same_model"]["ok"]
    assert all(pair["median"] > 0 for pair in found["against"])


# `bench compare`: files in, a table or a document out


def test_our_own_results_in_every_format(cli, tmp_path):
    """By `compare`, and by the programs that read llama-bench's, which fail where it is not."""
    files = {kind: tmp_path / kind for kind in ("json", "jsonl", "csv", "sql", "md", "document")}
    for kind, path in files.items():
        out = ["--json"] if kind == "document" else ["-o", kind]
        argv = ["-m", "tiny", "-p", "4", "-n", "2", "-t", "1", "-r", "3", "--no-ceilings", *out]
        with path.open("w", encoding="utf-8") as file, redirect_stdout(file):
            assert main(["bench", *argv]) == 0
    for kind in ("jsonl", "csv", "document"):
        said = cli("bench", "compare", files["json"], files[kind], "--json").json()
        assert [test["test"] for test in said["tests"]] == ["pp4", "tg2"]
        assert said["lone"] == said["differences"] == []
        for test in said["tests"]:
            assert test["a"]["runs"] == test["b"]["runs"] == 3
            assert test["b"]["mean"] > 0
    for kind in ("json", "jsonl", "csv", "sql"):
        read, text = partial(peer_reader.read, kind), files[kind].read_text("utf-8")
        base = read(text)
        assert [row[:3] for row in peer_reader.paired(base)] == [(4, 0, 0), (0, 2, 0)]
        assert peer_reader.mistyped(base) == []
        with pytest.raises((KeyError, sqlite3.Error)):
            peer_reader.paired(read(text.replace("type_k", "kind_k")))
        size = str(base.execute("SELECT model_size FROM llama_bench").fetchone()[0])
        much = '"much"' if kind.startswith("json") else "much"
        assert peer_reader.mistyped(read(text.replace(size, much))) == [("model_size", "text")]
    found = peer_reader.from_markdown(files["md"].read_text("utf-8"))
    assert [row["test"] for row in found] == ["pp4", "tg2"]
    # their columns of SQL, and rows in a table that is there; ours beside them
    columns = base.execute("PRAGMA table_info(llama_bench)").fetchall()
    assert {name: kind for _, name, kind, *_ in columns} == peer_reader.FIELDS
    base.executescript(text)
    beside = "llama_bench a JOIN llmcli_bench b ON a.rowid = b.llama_bench_rowid"
    joined = base.execute(f"SELECT n_gen, runs, error_code FROM {beside}").fetchall()
    assert joined == [(0, 3, None), (2, 3, None)] * 2
    # their keys of JSON in their order, of their types; a null would be lost in a join
    text = files["json"].read_text("utf-8")
    for row in json.loads(text):
        names = [*peer_reader.FIELDS, "samples_ns", "samples_ts"]
        assert list(row)[: len(names)] == names
        for name, sql in peer_reader.FIELDS.items():
            assert isinstance(row[name], str) is (sql == "TEXT"), name
            assert isinstance(row[name], bool) is (name in peer_reader.BOOLEANS), name
        assert row["avg_ts"] == pytest.approx(fmean(row["samples_ts"]), abs=1e-6)
    nothing = re.sub('"cpu_info": ".*"', '"cpu_info": null', text)
    assert peer_reader.paired(peer_reader.read("json", nothing)) == []


# the spelling of lists and ranges, and the configurations that come of them

LISTS = {
    "16": (16,), "16,32": (16, 32), "16 32,8": (16, 32, 8), "1-4": (1, 2, 3, 4),
    "1-9+2": (1, 3, 5, 7, 9), "1-10+4": (1, 5, 9), "1-8*2": (1, 2, 4, 8), "1-9*2": (1, 2, 4, 8),
    "128-512*2,64,1-2": (128, 256, 512, 64, 1, 2), "5-5": (5,), "0": (0,),
}  # fmt: skip


def plan(models=("m",), *, tests=None, swept=None, ours=None):
    return Plan.of(
        models, 2, Asked(**(tests or {})), SweptOptions(**(swept or {})), RunOptions(),
        OurOptions(**(ours or {})),
    )  # fmt: skip


def test_lists():
    """Of an option that was given several times, too."""
    for given, expected in LISTS.items():
        assert numbers("--n-prompt", given.split()) == expected
    assert pairs(()) == ()
    assert pairs(["512,128", "16,0"]) == ((512, 128), (16, 0))
    assert words("-m", ["a,b", "c"]) == ("a", "b", "c")
    assert Asked().models() == ()
    named = Asked(model=["a,b"], hf_repo=["org/x,org/y"], hf_file=["x.gguf"])
    assert named.models() == ("a", "b", "hf:org/x/x.gguf", "hf:org/y")


def test_settings_from_their_options_to_their_columns(as_written):
    """Option, sweep, default, field of a row, reader: all from the one declaration.

    What is written for each, its values, and what it refuses, in each line of a file.
    """
    file, found = Path(__file__).with_name("bench-settings.txt"), []
    command = root().get_command(None, "bench")
    for row in file.read_text("utf-8").splitlines():
        name, text, wrong = re.fullmatch(r"(\w+): (\S+) → .* · (\S+) → .*", row).groups()
        setting = SETTINGS[name]
        for option in setting.spelled.split()[:-1]:
            given = command.make_context("bench", [option, text]).params
            assert given[setting.name] == [text], option
        swept = plan(swept={setting.name: [text]})
        values = tuple(getattr(one, name) for one in swept.configurations)
        plain = {getattr(one, name) for one in plan().configurations}
        assert plain == {getattr(swept.default, name)}, name
        assert setting.column in {*KEYS} & {*COMPARED}
        refused = ""
        try:
            plan(swept={setting.name: [wrong]})
        except UsageError as error:
            refused = error.message.removeprefix(f"`{setting.option}` ")
        found.append(f"{name}: {text} → {values} · {wrong} → {refused}\n")
    as_written(file, "".join(found))
    assert [row.partition(":")[0] for row in found] == list(SETTINGS)
    assert list(SETTINGS) == [one.name for one in fields(Settings)][1:] != []


def test_tests_are_counted_before_they_are_made():
    """And ranges before they are lists."""
    for tests, count in (
        ({"n_gen": ["0"]}, "1,000,000 tests"),
        ({"n_prompt": ["0-9999"], "n_gen": ["1-9999"], "n_depth": ["1-9999"],
          "n_pg": ["4,4", "0,0"]}, "199,970,001,000,000 tests"),
        ({"n_gen": ["1-999999999"]}, "more than 10,000 values"),
        ({"n_gen": ["1-" + "9" * 5000]}, "must be at most 2147483647"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=count):
            plan(tests=tests, swept={"threads": ["1-1000"], "batch_size": ["1-1000"]})


def test_what_is_run_where_nothing_is_asked_for():
    found = plan()
    assert found.configurations == (found.default,)
    assert [test.name for test in found.tests] == ["pp512", "tg128"]
    assert found.default.n_threads == 2
    assert (found.default.n_batch, found.default.n_ubatch) == (2048, 512)


def test_beside_llama_cpp_there_are_its_activations_too():
    """But where they are named, or the peer has those of the model."""

    def bits(swept=None, **ours):
        found = plan(swept=swept, ours=ours)
        assert found.like_for_like == (swept is None and ours == {"against": "llama.cpp"})
        return [one.activations for one in found.configurations]

    assert bits() == bits(against="transformers") == ["auto"]
    assert bits(against="llama.cpp") == ["auto", "8"]
    assert bits({"activations": ["16"]}, against="llama.cpp") == ["16"]
    assert bits({"activations": ["8,16"]}) == ["8", "16"]


def test_the_order_of_tests_and_configurations():
    """Tests are in the order of llama-bench; models vary outermost, threads innermost."""
    asked = {"n_prompt": ["8,16"], "n_gen": ["4"], "n_pg": ["8,4"], "n_depth": ["0", "32"]}
    assert [test.name for test in plan(tests=asked).tests] == [
        "pp8", "pp16", "tg4", "pp8+tg4",
        "pp8 @ d32", "pp16 @ d32", "tg4 @ d32", "pp8+tg4 @ d32",
    ]  # fmt: skip
    assert [test.name for test in plan(tests={"n_prompt": ["0"]}).tests] == ["tg128"]
    found = plan(models=("a", "b"), swept={"threads": ["1-2"], "batch_size": ["64,32"]})
    assert [(s.model, s.n_batch, s.n_threads) for s in found.configurations] == [
        ("a", 64, 1), ("a", 64, 2), ("a", 32, 1), ("a", 32, 2),
        ("b", 64, 1), ("b", 64, 2), ("b", 32, 1), ("b", 32, 2),
    ]  # fmt: skip


def test_what_has_no_effect_takes_a_value_and_changes_nothing():
    """By each of its names, which are listed nowhere."""
    command = root().get_command(None, "bench")
    plain = command.make_context("bench", ["-p", "8"])
    words = re.split(r"[\s,]+", command.get_help(plain))
    for name in IGNORED.split():
        context = command.make_context("bench", [name, "x,1", "-p", "8", name, "0"])
        assert context.params.pop("ignored") == ["x,1", "0"], name
        assert context.params == {k: v for k, v in plain.params.items() if k != "ignored"}, name
        assert name not in words

"""`llmcli attention`: what it prints, refuses and writes."""

from __future__ import annotations

import csv
import json
import re
import shlex
import sys
from dataclasses import replace

import numpy as np
import pytest
from cli_tiny import write_tiny
from PIL import Image
from rich.cells import cell_len
from safetensors.numpy import load_file

import llmcli.cli.files
import llmcli.commands.attention.command
import llmcli.commands.attention.exports
import llmcli.commands.attention.measure.run
import llmcli.commands.attention.options
import llmcli.loading.load
import llmcli.nn.decoder
import llmcli.parts.attention.forward
from llmcli.cli.output import Screen
from llmcli.commands.attention.exports import Planned

TEXT = "abcabcab"


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("attention") / "m"
    return str(write_tiny(folder, weights=True, max_position_embeddings=256))


@pytest.fixture
def attention(cli, path):
    return lambda *argv: cli("attention", "-m", path, "--no-stdin", *argv)


@pytest.fixture
def matrices(attention):
    """Every matrix of a run, `[layer][head][query, key]`."""

    def read(*argv):
        document = attention(*argv, "--json", "--patterns").json()
        what = document["what"]
        return {
            layer["layer"]: {head["head"]: np.array(head[what], float) for head in layer["heads"]}
            for layer in document["layers"]
        }

    return read


def test_patterns_and_metrics_belong_together(attention, matrices):
    document = attention(TEXT, "--json").json()
    found = matrices(TEXT)
    for layer in document["layers"]:
        for head in layer["heads"]:
            pattern = found[layer["layer"]][head["head"]]
            np.testing.assert_allclose(pattern.sum(1), 1, atol=1e-5)
            assert (pattern[np.triu_indices(8, 1)] == 0).all()
            previous = np.diagonal(pattern, -1).mean()
            assert head["metrics"]["previous_token"] == pytest.approx(previous, abs=1e-5)
            assert head["metrics"]["sink"] == pytest.approx(pattern[1:, 0].mean(), abs=1e-5)


def test_scores_become_the_pattern(matrices):
    scores, patterns = matrices(TEXT, "--what", "scores")[1][2], matrices(TEXT)[1][2]
    scores[np.isnan(scores)] = -np.inf
    weights = np.exp(scores - scores.max(1, keepdims=True))
    np.testing.assert_allclose(weights / weights.sum(1, keepdims=True), patterns, atol=1e-5)


def test_one_head_is_a_heatmap_of_its_weights(attention, matrices):
    lines = attention(TEXT, "--layer", "1", "--head", "2", "--scale", "linear").out.splitlines()
    at = lines.index("layer 1 (full), head 2, kv head 1, 8 tokens, queries down, keys across")
    pattern = matrices(TEXT)[1][2]
    for query in range(8):
        row = lines[at + 1 + query]
        assert row.startswith(f'{query} "{TEXT[query]}"')
        cells = row[14:].ljust(8 * 5)
        for key in range(8):
            cell, weight = cells[5 * key : 5 * key + 5], pattern[query, key]
            if key > query:
                assert cell.strip() == "·"
                continue
            assert cell[0] == " ░▒▓█"[int(weight * 4 + 0.5)]
            assert float(cell[1:]) == pytest.approx(weight, abs=0.00501)
    assert lines[at + 9].split() == ["key", *map(str, range(8))]
    assert lines[at + 10].split() == list(TEXT)
    assert any(line.startswith("pattern: each row sums to 1") for line in lines)


def test_a_part_is_that_part(attention, matrices):
    argv = (TEXT, "--layer", "0", "--head", "1", "--query", "4:7", "--key", "-6:-4")
    lines = attention(*argv).out.splitlines()
    part = matrices(TEXT)[0][1][4:7, 2:4]
    assert "queries 4:7 down, keys 2:4 across" in lines
    rows = [line[14:] for line in lines if re.match(r'[456] "', line)]
    numbers = [float(n) for row in rows for n in re.findall(r"\d?\.\d+", row)]
    assert numbers == pytest.approx(part.ravel().tolist(), abs=0.00501)
    [keys] = [at for at, line in enumerate(lines) if line.split()[:1] == ["key"]]
    assert (lines[keys].split(), lines[keys + 1].split()) == (["key", "2", "3"], ["c", "a"])


def test_a_map_and_a_table_have_the_same_numbers(attention):
    document = attention(TEXT, "--json").json()
    values = [head["metrics"]["sink"] for layer in document["layers"] for head in layer["heads"]]
    rows = re.findall(r"^[01] +(.*)$", attention(TEXT, "--map", "sink").out, re.MULTILINE)
    assert [float(x) for row in rows[:2] for x in re.split(r"[ │]+", row)] == [
        pytest.approx(value, abs=0.0051) for value in values
    ]
    table = attention(TEXT, "--metrics", "sink,effective-rank").out
    found = re.findall(r"^[01]\.\d +\d +(\S+) +(\S+)$", table, re.MULTILINE)
    assert [float(sink) for sink, _ in found] == [pytest.approx(v, abs=1e-3) for v in values]
    assert all(1 <= float(rank) <= 8 for _, rank in found)


def test_top_pairs_are_the_largest_that_count(attention, matrices):
    found = matrices(TEXT)
    cells = sorted(
        ((pattern[query, key], layer, head, query, key)
         for layer, heads in found.items() for head, pattern in heads.items()
         for query in range(8) for key in range(1, query)), reverse=True,
    )  # fmt: skip
    pairs = attention(TEXT, "--top-pairs", "5", "--json").json()["pairs"]
    for pair, (weight, layer, head, query, key) in zip(pairs, cells[:5], strict=True):
        assert pair["weight"] == pytest.approx(weight, abs=1e-6)
        assert (pair["layer"], pair["head"]) == (layer, head)
        assert (pair["query"], pair["key"]) == (query, key)
    every = attention(TEXT, "--top-pairs", "5", "--all-pairs", "--json").json()["pairs"]
    assert {pair["key"] for pair in every} == {0}  # a first token has only itself


def test_pairs_of_some_queries_and_keys(attention, matrices):
    found = matrices(TEXT, "--generate", "3")
    cells = sorted(
        ((pattern[query, key], layer, head, query, key)
         for layer, heads in found.items() for head, pattern in heads.items()
         for query in range(8, 11) for key in range(3, 6)), reverse=True,
    )  # fmt: skip
    argv = (TEXT, "--generate", "3", "--top-pairs", "7", "--query", "8:", "--key", "3:6")
    pairs = attention(*argv, "--json").json()["pairs"]
    assert [pair["weight"] for pair in pairs] == pytest.approx([c[0] for c in cells[:7]], abs=1e-6)
    assert [(p["layer"], p["head"], p["query"], p["key"]) for p in pairs] == [
        cell[1:] for cell in cells[:7]
    ]
    assert "pairs of tokens of queries 8:11 and keys 3:6" in attention(*argv).out


def hints(result):
    """The command lines that a page proposes."""
    return re.findall(r"^head \d+\.\d+.*?:\s+llmcli (attention .*)$", result.out, re.MULTILINE)


def test_what_it_proposes_can_be_run(cli, path, attention, tmp_path):
    tokens = attention("--synthetic", "6", "--seed", "3", "--json").json()["tokens"]
    for argv in ((TEXT, "--generate", "2"), ("--synthetic", "6", "--seed", "3"), ("a 'b'",)):
        found = hints(attention(*argv, "--dtype", "float64"))
        assert len(found) == 1
        for line in found:
            result = cli(*shlex.split(line), "--json")
            assert result.code == 0
            document = result.json()
            assert len(document["layers"]) == len(document["layers"][0]["heads"]) == 1
            assert document["dtype"] == "float64"
            if argv[0] == "--synthetic":
                assert document["tokens"] == tokens
            elif argv[0] == TEXT:
                assert document["prompt_tokens"] == 8
                assert len(document["tokens"]) == 10
    result = attention(TEXT)
    [repeated] = re.findall(r"try:\s+llmcli (attention .*)$", result.out, re.MULTILINE)
    assert len(cli(*shlex.split(repeated), "--json").json()["tokens"]) == 65


def test_a_long_text_is_not_repeated_and_a_pipe_stands_before(
    cli, path, attention, monkeypatch, tmp_path
):
    long = "the cat sat on the mat because the cat was tired"
    assert all(line.startswith("attention PROMPT --no-stdin -m") for line in hints(attention(long)))
    (tmp_path / "a.txt").write_text(long)
    from_file = hints(attention("-f", str(tmp_path / "a.txt")))
    assert all(f"-f {tmp_path / 'a.txt'} " in line for line in from_file)
    with (tmp_path / "a.txt").open() as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        out = cli("attention", "-m", path, "-").out
    assert re.search(r"^head \d.*?:\s+… \| llmcli attention - -m", out, re.MULTILINE)


def test_an_end_before_the_span_is_told(attention, monkeypatch, tmp_path):
    written = attention(TEXT, "--generate", "6", "--json").json()["tokens"][8:]
    at = next(n for n in range(1, 6) if written[n] not in written[:n])
    eos = written[at]["id"]
    load = llmcli.commands.attention.command.load_model

    def ending(*argv, **options):
        loaded = load(*argv, **options)
        return replace(loaded, model=replace(loaded.model, eos_ids=frozenset({eos})))

    monkeypatch.setattr(llmcli.commands.attention.command, "load_model", ending)
    total = len(attention(TEXT, "--generate", "6", "--json").json()["tokens"])
    assert total < 14
    for ending_of_file in ("png", "html", "npz"):
        file = tmp_path / f"a.{ending_of_file}"
        argv = ("--layer", "0", "--head", "0", "--query", "13:", "-o", str(file))
        result = attention(TEXT, "--generate", "6", *argv)
        assert result.code == 2
        assert f"the model ended its text after {total - 8} of 6 tokens" in result.err
        assert f"positions go from 0 to {total - 1}" in result.err
        assert not file.exists()
    result = attention(TEXT, "--generate", "6", "--top-pairs", "3", "--key", "13:")
    assert result.code == 2
    partly = ("--layer", "0", "--head", "0", "--query", f"{total - 1}:")
    assert f"queries {total - 1} down" in attention(TEXT, "--generate", "6", *partly).out


def test_new_tokens_are_looked_at(attention, path, cli):
    document = attention(TEXT, "--generate", "3", "--json", "--patterns").json()
    assert document["prompt_tokens"] == 8
    assert len(document["tokens"]) == 11
    assert np.array(document["layers"][0]["heads"][0]["pattern"]).shape == (11, 11)
    assert any("cache" in check["words"] for check in document["checks"].values())


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_short_text_works(attention, count):
    for argv in ((), ("--layer", "0", "--head", "0"), ("--top-pairs", "3"), ("--metrics", "all")):
        result = attention("abc"[:count], *argv)
        assert (result.code, result.err) == (0, "")


def test_the_model_is_run_once(attention, monkeypatch):
    runs = []
    run = llmcli.nn.decoder.Decoder.__call__

    def counted(self, ids, *argv, **options):
        runs.append(ids.shape[1])
        return run(self, ids, *argv, **options)

    monkeypatch.setattr(llmcli.nn.decoder.Decoder, "__call__", counted)
    attention(TEXT, "--layer", "0", "--top-pairs", "3", "--metrics", "all", "--json", "--patterns")
    assert runs == [8]


def test_the_help_names_every_metric(cli):
    from llmcli.reports.head_metrics import METRICS

    text = " ".join(cli("attention", "--help").out.split())
    listed = re.search(r"Metrics: (.*?)\. ", text)
    assert listed
    assert listed[1].split(", ") == [metric.name for metric in METRICS]


# files


def test_arrays_are_the_matrices(attention, matrices, tmp_path):
    found = matrices(TEXT)
    file, other = tmp_path / "a.safetensors", tmp_path / "a.npz"
    result = attention(TEXT, "-o", str(file))
    size = f"{file.stat().st_size / 1024:.3g} KiB"
    assert result.err == (
        f"note: wrote `{file}` ({size}): blocks.0-1.attn.pattern [4 8 8] each, heads 0-3\n"
    )
    attention(TEXT, "-o", str(other), "-q")
    arrays, npz = load_file(file), np.load(other)
    assert sorted(arrays) == ["blocks.0.attn.pattern", "blocks.1.attn.pattern"]
    for layer in (0, 1):
        array = arrays[f"blocks.{layer}.attn.pattern"]
        assert (array.dtype, array.shape) == (np.float32, (4, 8, 8))
        np.testing.assert_array_equal(array, npz[f"blocks.{layer}.attn.pattern"])
        for head in range(4):
            np.testing.assert_allclose(array[head], found[layer][head], rtol=1e-6)
    about = json.loads(str(npz["metadata"]))
    assert json.loads(about["tokens"]) == list(TEXT)
    assert about["schema"] == "llmcli.attention/1"


def test_arrays_of_float64_hold_float64(attention, tmp_path):
    for what in ("pattern", "scores"):
        by_dtype = {}
        for dtype in ("float64", "float32"):
            files = [tmp_path / f"{what}-{dtype}.{kind}" for kind in ("safetensors", "npz")]
            for file in files:
                run = attention(TEXT, "--what", what, "--dtype", dtype, "-o", str(file))
                assert run.code == 0
            name = f"blocks.1.attn.{what}"
            by_dtype[dtype] = load_file(files[0])[name]
            assert by_dtype[dtype].dtype == np.dtype(dtype)
            np.testing.assert_array_equal(by_dtype[dtype], np.load(files[1])[name])
        wide, narrow = by_dtype["float64"], by_dtype["float32"]
        np.testing.assert_allclose(wide, narrow, rtol=1e-4, atol=1e-5)
        assert (wide != wide.astype(np.float32)).any()
    document = tmp_path / "a.json"
    attention(TEXT, "--what", "scores", "--dtype", "float64", "-o", str(document))
    cells = json.loads(document.read_text())["layers"][1]["heads"][0]["scores"]
    np.testing.assert_array_equal(np.array(cells[-1], np.float32), wide[0, -1].astype(np.float32))
    assert len(str(cells[-1][0])) <= len("-0.123456789")


def test_csv_and_json_have_the_same_cells(attention, matrices, tmp_path):
    pattern = matrices(TEXT)[1][3]
    attention(TEXT, "--layer", "1", "--head", "3", "-o", str(tmp_path / "a.csv"))
    rows = list(csv.DictReader((tmp_path / "a.csv").open(encoding="utf-8", newline="")))
    assert len(rows) == 8 * 9 // 2
    for row in rows:
        assert (row["layer"], row["head"]) == ("1", "3")
        value = pattern[int(row["query"]), int(row["key"])]
        assert float(row["value"]) == pytest.approx(value, rel=1e-6)
    attention(TEXT, "--layer", "1", "--head", "3", "-o", str(tmp_path / "a.json"))
    document = json.loads((tmp_path / "a.json").read_text())
    assert document["schema"] == "llmcli.attention/1"
    [head] = document["layers"][0]["heads"]
    np.testing.assert_allclose(head["pattern"], pattern, rtol=1e-6)


def test_pages_and_pictures(attention, tmp_path):
    page, one, all_heads = (str(tmp_path / name) for name in ("a.html", "a.png", "b.png"))
    attention(TEXT, "-o", page)
    text = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert text.lower().startswith("<!doctype html>")
    assert "http://" not in text
    assert "https://" not in text
    attention(TEXT, "-o", one, "--layer", "0", "--head", "1")
    attention(TEXT, "-o", all_heads)
    sizes = [Image.open(file).size for file in (one, all_heads)]
    assert all(width > 500 and height > 300 for width, height in sizes)
    assert Image.open(one).tobytes() != Image.open(all_heads).tobytes()


@pytest.mark.parametrize("kind", ["safetensors", "npz", "json", "csv", "html"])
def test_the_size_is_known_before_the_run(attention, monkeypatch, tmp_path, kind):
    sizes = []
    check = Planned.check

    def kept(self, **options):
        sizes.append(self.size())
        check(self, **options)

    monkeypatch.setattr(Planned, "check", kept)
    file = tmp_path / f"a.{kind}"
    attention("the cat sat on the mat " * 5, "-o", str(file))
    assert sizes[0] == pytest.approx(file.stat().st_size, rel=0.15 if kind == "json" else 0.1)


def test_a_file_that_gets_too_large_is_refused_before_the_run(attention, monkeypatch, tmp_path):
    monkeypatch.setattr(llmcli.cli.files, "FILE_CAP", 1000)
    monkeypatch.setattr(llmcli.commands.attention.exports, "FILE_CAP", 1000)
    monkeypatch.setattr(
        llmcli.commands.attention.command, "measured", lambda *_: pytest.fail("it was run")
    )
    file = str(tmp_path / "a.npz")
    result = attention(TEXT, "-o", file)
    assert result.code == 2
    assert "more than" in result.err
    assert "--force" in result.err
    assert not list(tmp_path.iterdir())
    result = attention(TEXT, "--json", "--patterns")
    assert result.code == 2
    assert "--force" in result.json()["error"]["hint"]


def test_force_writes_it_all_the_same(attention, monkeypatch, tmp_path):
    monkeypatch.setattr(llmcli.cli.files, "FILE_CAP", 1000)
    assert attention(TEXT, "-o", str(tmp_path / "a.npz"), "--force").code == 0
    assert (tmp_path / "a.npz").stat().st_size > 1000


# what is wrong


def test_a_mask_that_lets_through_exits_1_with_the_whole_view(attention, monkeypatch, tmp_path):
    attend = llmcli.parts.attention.forward.attend

    def unmasked(q, k, v, *, scale, **rest):
        return attend(q, k, v, scale=scale)

    monkeypatch.setattr(llmcli.parts.attention.forward, "attend", unmasked)
    file = tmp_path / "a.npz"
    result = attention(TEXT, "--layer", "0", "--head", "0", "-o", str(file))
    assert result.code == 1
    assert "✗ check failed:" in result.out
    assert "█" in result.out  # the result is shown nevertheless
    assert "error: check failed: " in result.err
    assert json.loads(json.loads(str(np.load(file)["metadata"]))["ok"]) is False
    document = attention(TEXT, "--json")
    assert document.code == 1
    assert document.json()["ok"] is False


@pytest.mark.parametrize("wrong", [lambda q, s: s * 1.01, lambda q, s: s.roll(1, -1)])
def test_a_pattern_that_is_not_the_layers_exits_1(attention, monkeypatch, wrong):
    rows = llmcli.parts.attention.forward.Attention.score_rows

    def planted(self, q, k, first, **rest):
        return wrong(q, rows(self, q, k, first, **rest))

    monkeypatch.setattr(llmcli.parts.attention.forward.Attention, "score_rows", planted)
    result = attention(TEXT)
    assert result.code == 1
    assert "✗ check failed:" in result.out


def test_a_rank_of_a_long_text_is_left_out_of_a_table_and_refused_as_a_map(attention, monkeypatch):
    monkeypatch.setattr(llmcli.commands.attention.options, "MOST_RANKED", 4)
    monkeypatch.setattr(llmcli.commands.attention.measure.run, "MOST_RANKED", 4)
    result = attention(TEXT, "--map", "effective_rank")
    assert result.code == 2
    assert "up to 4 tokens, and there are 8" in result.err
    result = attention(TEXT, "--metrics", "effective_rank,sink")
    assert result.code == 0
    assert "effective_rank was left out: it needs whole matrices" in result.out
    assert "sink: mean over" in result.out


def test_too_many_heads_are_not_drawn_but_written(cli, tmp_path):
    folder = write_tiny(tmp_path / "m", num_attention_heads=16)
    argv = ["attention", "-m", folder, "--random-weights", "abc", "--layer", "0"]
    refused = cli(*argv)
    assert refused.code == 2
    assert "those are 16 matrices, and at most 12 are drawn" in refused.err
    result = cli(*argv, "-o", tmp_path / "a.npz")
    assert result.code == 0
    assert "note: the map is shown: of so many matrices at most 12 are drawn" in result.err
    with np.load(tmp_path / "a.npz") as arrays:
        assert arrays["blocks.0.attn.pattern"].shape == (16, 3, 3)
    part = cli(*argv, "-o", tmp_path / "a.npz", "--query", "0:2")
    assert part.code == 2  # of a part there would be nothing to see


@pytest.mark.parametrize("width", [40, 60, 80, 200])
@pytest.mark.parametrize(
    "argv",
    [
        (),
        ("--layer", "0"),
        ("--layer", "0", "--head", "0"),
        ("--metrics", "all"),
        ("--top-pairs", "5", "--weighted"),
    ],
)
def test_every_screen_fits(attention, monkeypatch, width, argv):
    screen = Screen(terminal=True, animate=False, colour=True, width=width)
    monkeypatch.setattr(Screen, "of", classmethod(lambda *_: screen))
    out = attention("the \x1b[31m 中文 [b]x[/b]\n end", *argv).out
    plain = re.sub(r"\x1b\[[0-9;]*m", "", out)
    assert "\x1b[" in out
    assert "\x1b" not in plain
    # the first line is the model's path, which is not ours to cut; a command is never broken
    lines = [line for line in plain.splitlines()[1:] if not line.startswith("llmcli ")]
    assert max(map(cell_len, lines)) <= width


# what is opened


@pytest.fixture
def launched(monkeypatch):
    """What was opened, and whether that works; no program is started."""
    found = []

    def launch(path):
        found.append(path)
        return found.code

    class Found(list):
        code = 0

    found = Found()
    monkeypatch.setattr("llmcli.cli.files.launch", launch)
    return found


def test_a_page_is_made_and_opened(attention, launched, monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    result = attention(TEXT, "--layer", "0", "--head", "1", "--open")
    assert result.code == 0
    [page] = launched
    assert page.endswith("attention.html")
    text = (tmp_path / page).read_text(encoding="utf-8")
    assert text.lower().startswith("<!doctype html>")
    assert f"note: wrote `{page}`" in result.err
    assert "layer 0 (full), head 1" in result.out  # and it is shown here, too
    assert (tmp_path / page).parent.stat().st_mode & 0o077 == 0  # for nobody else


@pytest.mark.parametrize("kind", ["html", "png"])
def test_the_file_that_is_written_is_opened(attention, launched, tmp_path, kind):
    file = tmp_path / f"a.{kind}"
    assert attention(TEXT, "-o", str(file), "--open", "--json").json()["ok"]
    assert launched == [str(file)]
    assert file.stat().st_size > 1000


def test_where_nothing_can_be_opened_the_result_is_shown_and_the_file_stays(
    attention, launched, tmp_path
):
    launched.code = 1
    file = tmp_path / "a.html"
    result = attention(TEXT, "-o", str(file), "--open")
    assert result.code == 0
    assert re.search(r"^✓ \d checks", result.out, re.MULTILINE)
    assert f"note: wrote `{file}` " in result.err
    assert f"note: no browser could be started: `{file}` is written, open it" in result.err
    assert file.exists()


@pytest.mark.parametrize(
    ("script", "opened"),
    [
        ("exit 0", True), ("echo 'links: not found' >&2; exit 3", False), ("sleep 3", True),
        (None, False),
    ],
)  # fmt: skip
def test_an_opener_that_opens_nothing_is_noticed(
    attention, monkeypatch, tmp_path, script, opened
):
    monkeypatch.setattr(llmcli.cli.files, "OPENING_S", 0.5 if script == "sleep 3" else 30.0)
    opener = tmp_path / ("open" if sys.platform == "darwin" else "xdg-open")
    if script is not None:
        opener.write_text(f"#!/bin/sh\n{script}\n")
        opener.chmod(0o755)
    path = str(tmp_path) + (":/usr/bin:/bin" if script == "sleep 3" else "")
    monkeypatch.setenv("PATH", path)
    file = tmp_path / "a.png"
    result = attention(TEXT, "-o", str(file), "--open")
    assert result.code == 0
    assert ("note: no image viewer could be started" in result.err) == (not opened)
    assert file.exists()


def test_a_run_that_fails_leaves_no_directory(attention, launched, monkeypatch, tmp_path):
    ended = []
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("atexit.register", ended.append)
    monkeypatch.setattr(llmcli.cli.files, "PAGE_CAP", 100)
    result = attention(TEXT, "--open")
    assert result.code == 2
    assert "--force" in result.err
    [end] = ended
    end()
    assert not list(tmp_path.iterdir())
    assert launched == []

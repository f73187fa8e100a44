"""`llmcli lens` through the command line."""

from __future__ import annotations

import csv
import io
import json
import struct

import pytest
import torch
from cli_tiny import write_tiny

import llmcli.commands.lens.measure.run
from llmcli.commands.lens.command import parse_target
from llmcli.errors import UsageError
from llmcli.loading.load import load
from llmcli.parts.norm.forward import Norm
from llmcli.ui.theme import csv_cell

NAMES = ["blocks.0.resid_pre", "blocks.0.resid_post", "blocks.1.resid_post"]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return str(
        write_tiny(tmp_path_factory.mktemp("lens") / "m", weights=True, max_position_embeddings=256)
    )


@pytest.fixture
def lens(cli, path, monkeypatch):
    monkeypatch.setattr("sys.stdin", None)
    return lambda *argv: cli("lens", "-m", path, *argv)


@pytest.fixture
def wrong(monkeypatch):
    """A final norm that does something else than it says."""
    plain = Norm.__call__
    monkeypatch.setattr(
        Norm, "__call__", lambda self, x: plain(self, x) * (1.5 if self.name == "ln_final" else 1)
    )


def test_json_is_the_models_own_output(lens, path):
    document = lens("hello", "--json", "-k", "3", "--mid", "--dtype", "float32").json()
    assert document["schema"] == "llmcli.lens/1"
    assert [row["name"] for row in document["rows"]] == [
        "blocks.0.resid_pre", "blocks.0.resid_mid", "blocks.0.resid_post", "blocks.1.resid_mid",
        "blocks.1.resid_post",
    ]  # fmt: skip
    assert [row["layer"] for row in document["rows"]] == [None, 0, 0, 1, 1]
    assert document["tokens"][0]["text"] == "h"
    assert document["prompt_tokens"] == 5
    assert document["positions"] == [0, 1, 2, 3, 4]
    assert document["ok"] is True
    assert list(document["checks"]) == [
        "output", "output_logprob", "output_kl", "residual_stream", "cache"
    ]  # fmt: skip
    assert all(check["ok"] for check in document["checks"].values())
    assert document["settled"][-1] in [row["name"] for row in document["rows"]]
    ids = [token["id"] for token in document["tokens"]]
    p_TV = load(path, dtype="float32").decoder(torch.tensor([ids]))[0].softmax(-1)
    for t, cell in enumerate(document["rows"][-1]["cells"]):
        top = p_TV[t].topk(3)
        assert [token["id"] for token in cell["top"]] == top.indices.tolist()
        found = [token["probability"] for token in cell["top"]]
        assert found == pytest.approx(top.values.tolist(), abs=1e-5)
        assert cell["entropy"] == pytest.approx(float(torch.special.entr(p_TV[t]).sum()), abs=1e-4)
        assert cell["target_rank"] == 1
        assert document["targets"][t]["id"] == int(top.indices[0])


def test_on_a_narrow_screen_only_what_fits_is_computed(lens, monkeypatch):
    monkeypatch.setattr("llmcli.cli.output.Screen.of", narrow)
    asked = []
    plain = llmcli.commands.lens.measure.run.measure_lens

    def spied(*arguments, **options):
        report = plain(*arguments, **options)
        asked.append(report.positions)
        return report

    monkeypatch.setattr(llmcli.commands.lens.measure.run, "measure_lens", spied)
    out = lens("a text that is longer than the screen").out
    assert asked == [tuple(range(32, 37))]
    assert "positions 34 to 36 of 37 tokens" in out
    assert "more: --position :34" in out
    lens("a text that is longer than the screen", "--json")
    assert asked[-1] == tuple(range(37))


def narrow(stream, environ):
    from llmcli.cli.output import Screen

    return Screen(True, False, False, 40)


def test_targets_that_are_no_token(path):
    tokenizer = load(path, dtype="float32").tokenizer
    assert parse_target("'x'", tokenizer, 261) == parse_target("x", tokenizer, 261)
    assert parse_target("output", tokenizer, 261) == "output"
    with pytest.raises(UsageError, match="is 4 tokens, not one: `n`, `e`, `x`, `t`"):
        parse_target("'next'", tokenizer, 261)
    with pytest.raises(UsageError, match="is 0 tokens, not one"):
        parse_target("", tokenizer, 261)
    assert parse_target("7", None, 261) == 7
    for text in ("261", "x", "-1"):
        with pytest.raises(UsageError, match="no tokenizer, so it takes an id") as caught:
            parse_target(text, None, 261)
        assert caught.value.hint == "ids go from 0 to 260"


def test_a_word_without_its_space_is_pointed_out():
    class Spaced:
        def encode(self, text, add_bos):
            return [1] if text == " Paris" else [2, 3]

        def token_text(self, id):
            return "…"

    with pytest.raises(UsageError) as caught:
        parse_target("Paris", Spaced(), 9)
    assert caught.value.hint.startswith('did you mean `--target " Paris"`?')


def test_generated_tokens_are_marked_everywhere(lens, tmp_path):
    file = tmp_path / "out.csv"
    result = lens("hello", "--generate", "2", "-o", str(file))
    assert "│ from position 5 on the model wrote it" in result.out
    assert "✓ 5 checks" in result.out
    lines = list(csv.DictReader(io.StringIO(file.read_text())))
    marked = {int(line["position"]): line["generated"] for line in lines}
    assert marked == {at: str(int(at >= 5)) for at in range(len(marked))}
    assert len(marked) > 5
    assert "cache" in lens("hello", "--generate", "2", "--json").json()["checks"]


def test_a_last_row_that_is_not_the_output_is_shown_and_exits_1(lens, wrong):
    result = lens("hello")
    assert result.code == 1
    assert "✗ check failed: the last row is the model's output, in probability" in result.out
    assert "check failed: the last row is the model's output, in probability" in result.err
    assert "worst at `position " in result.err
    document = lens("hello", "--json").json()
    assert document["ok"] is False
    assert document["checks"]["output"]["ok"] is False
    assert document["checks"]["residual_stream"]["ok"] is True


def test_files(lens, tmp_path):
    shown = lens("hello", "--json").json()
    for kind in ("json", "csv", "png", "html"):
        result = lens("hello", "-o", str(tmp_path / f"out.{kind}"))
        assert result.code == 0
        assert result.err.startswith(f"note: wrote `{tmp_path / f'out.{kind}'}` (")
        assert result.err.endswith("): 3 rows at 5 positions\n")
        assert "settled" in result.out
    document = json.loads((tmp_path / "out.json").read_text())
    assert {**document, "environment": 0, "rows": 0} == {**shown, "environment": 0, "rows": 0}
    assert len(document["rows"][0]["cells"]) == 5
    lines = list(csv.DictReader(io.StringIO((tmp_path / "out.csv").read_text())))
    assert len(lines) == 3 * 5 * 5
    assert lines[0]["row"] == NAMES[0]
    assert lines[-1]["token"] == csv_cell(shown["rows"][-1]["cells"][-1]["top"][-1]["text"])
    png = (tmp_path / "out.png").read_bytes()
    assert png.startswith(b"\x89PNG")
    assert min(struct.unpack(">II", png[16:24])) > 100
    page = (tmp_path / "out.html").read_text()
    assert page.startswith("<!")
    assert "blocks.1.resid_post" in page


def test_a_page_is_opened(lens, tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr("llmcli.cli.files.launch", lambda path: opened.append(path) or 0)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    result = lens("hello", "--open")
    assert result.code == 0
    assert "settled" in result.out
    (page,) = tmp_path.glob("llmcli-lens-*/lens.html")
    assert opened == [str(page)]
    assert "blocks.1.resid_post" in page.read_text()
    lens("hello", "--open", "-o", str(tmp_path / "a.png"))
    assert opened[1] == str(tmp_path / "a.png")
    refused = lens("hello", "--open", "-o", str(tmp_path / "a.csv"))
    assert refused.code == 2
    assert "`--open` shows .html and .png files" in refused.err


def test_on_a_terminal_the_layers_that_fit_and_all_with_all(cli, monkeypatch):
    from os import terminal_size

    from llmcli.cli.output import Screen

    screen = Screen(True, False, False, 80)
    monkeypatch.setattr("llmcli.cli.output.Screen.of", lambda *_: screen)
    monkeypatch.setattr(
        "llmcli.commands.lens.command.get_terminal_size", lambda: terminal_size((80, 16))
    )
    asked = ("lens", "-m", "tiny", "The capital", "--mid")
    assert "4 of 9 rows · more: --all" in cli(*asked).out
    assert "rows · more" not in cli(*asked, "--all").out
    monkeypatch.setattr("llmcli.cli.output.Screen.of", lambda *_: Screen(False, False, False, 80))
    assert "rows · more" not in cli(*asked).out, "a pipe has no height"


def test_a_file_has_all_positions_whatever_the_screen(lens, tmp_path, monkeypatch):
    monkeypatch.setattr("llmcli.cli.output.Screen.of", narrow)
    file = tmp_path / "out.json"
    lens("a text that is longer than the screen", "-o", str(file))
    assert len(json.loads(file.read_text())["positions"]) == 37


def test_a_file_that_gets_too_large_is_refused_before_anything_runs(lens, tmp_path, monkeypatch):
    monkeypatch.setattr("llmcli.cli.files.FILE_CAP", 1000)
    monkeypatch.setattr(llmcli.commands.lens.measure.run, "measure_lens", pytest.fail)
    result = lens("hello", "-o", str(tmp_path / "out.csv"))
    assert result.code == 2
    assert "would take about 9.45 KiB, more than 1000 B" in result.err
    assert "choose fewer positions with `--position` or layers with `--layer`" in result.err
    assert not (tmp_path / "out.csv").exists()


USUAL = (
    ("The capital of France is",),
    ("-k", "1", "--position", ":20"),
    ("-k", "20", "--position", "-6:", "def f(x):\n    return [x ** 2 for x in range(10)]"),
    ("--mid", "--target", "next", "Hello"),
)


@pytest.mark.parametrize("argv", USUAL, ids=range(len(USUAL)))
@pytest.mark.parametrize("kind", ["csv", "json", "html"])
def test_the_size_is_what_was_said_within_a_tenth(kind, argv, cli, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.stdin", None)
    said = []
    monkeypatch.setattr(
        "llmcli.commands.lens.command.check_size", lambda file, size, **_: said.append(size)
    )
    file = tmp_path / f"out.{kind}"
    assert cli("lens", "-m", "tiny", *argv, "-o", str(file)).code == 0
    assert file.stat().st_size == pytest.approx(said[0], rel=0.1)

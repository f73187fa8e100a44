"""A check that does not hold: the result is shown all the same, and the command exits 1.

And what else the ladder says of its rungs.
"""

import json
import re
from functools import partial
from unittest.mock import Mock

import numpy as np
import pytest
from decoder_faults import wrap
from json_schemas import errors

from llmcli.commands.ladder.measure.record import Recorder
from llmcli.commands.ladder.measure.runner import RUNGS
from llmcli.decoder.block import Block
from llmcli.parts import attention, experts
from llmcli.parts.norm import Norm

unmasked = wrap(
    attention, "attend", lambda attend, q, k, v, *, scale, **_: attend(q, k, v, scale=scale)
)
scaled_twice = wrap(
    attention, "attend",
    lambda attend, *qkv, scale, **mask: attend(*qkv, scale=2 * scale, **mask),
)  # fmt: skip
stream_times_1_001 = wrap(
    Block, "__call__", lambda block, self, x, cache, step: block(self, x * 1.001, cache, step)
)
weights_turned_round = wrap(experts, "weigh", lambda weigh, *x: weigh(*x).flip(-1))
rung_4_times_1_01 = wrap(RUNGS[3], "forward", lambda forward, *args: forward(*args) * 1.01)


def norm_times(factor, name=None):
    return wrap(
        Norm, "__call__",
        lambda norm, self, x: norm(self, x) * (factor if name in (None, self.name) else 1),
    )  # fmt: skip


VALUES = "the pattern shown · values is the kernel's own z, but for roundings"
OUTPUT = "the last row is the model's output, in probability"
# a command, a fault, the words of the first red check, where it is worst, all red checks
VIEWS = [
    ("attention abcabcab --layer 0 --head 0", unmasked, VALUES, "blocks.0.attn.pattern[0,0]",
     "values formulas"),
    ("dump hello --name pattern", unmasked, VALUES, "blocks.0.attn.pattern[", "values"),
    ("dump hello --name scores", scaled_twice, VALUES, "blocks.0.attn.pattern[", "values"),
    ("dump hello --name resid_mid,resid_pre", stream_times_1_001,
     "4 tensors are what the formula makes of the kernel's own inputs", "blocks.0.resid_pre[0,0]",
     "formulas"),
    ("lens hello", norm_times(1.5, "ln_final"), OUTPUT, "position ",
     "output output_logprob output_kl"),
    ("lens hello", stream_times_1_001, "every row is the one before plus its layer, relative",
     "blocks.1.resid_pre, position 4", "residual_stream"),
    ("experts hello -m MIXTURE --random-weights", weights_turned_round,
     "scores and weights are what their formulas make of what was emitted",
     "blocks.1.moe.expert_weight[", "weights"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "plant", "check", "worst", "red"), VIEWS)
def test_a_view(cli, weighted, mixture, monkeypatch, tmp_path, words, plant, check, worst, red):
    command, *argv = words.replace("MIXTURE", mixture).split()
    argv += [] if "-m" in argv else ["-m", weighted]
    argv += ["--dtype", "float32"]  # bfloat16 allows for more
    sound = cli(command, *argv)
    assert sound.code == 0, sound.err
    plant(monkeypatch, None)
    result = cli(command, *argv)
    assert result.code == 1
    assert result.out.count("\n") >= sound.out.count("\n"), "it is shown nevertheless"
    shown = " ".join(result.out.split())
    assert f"✗ check failed: {check} " in shown
    assert f"worst at {worst}" in shown
    assert result.err.startswith(f"error: check failed: {check}")
    assert f", worst at `{worst}" in result.err
    document = cli(command, *argv, "--json")
    assert document.code == 1
    said = document.json()
    assert errors(said, command) == []
    assert errors(said | {"ok": True}, command) != [], "a red check is not ok"
    assert said["ok"] is False
    assert [name for name, one in said["checks"].items() if not one["ok"]] == red.split()
    if command == "dump":
        assert cli(command, *argv, "--no-check").code == 0
    elif command == "attention":
        file = tmp_path / "a.npz"
        assert cli(command, *argv, "-o", str(file)).code == 1
        assert json.loads(json.loads(str(np.load(file)["metadata"]))["ok"]) is False


@pytest.mark.parametrize(("number", "depth", "plant", "name"), [
    ("blocks.0.attn.z[0,1,2]", "4", unmasked, "blocks.0.attn.z"),
    ("blocks.1.resid_post[3,2]", "all", norm_times(1.00002), "blocks.0.ln1.out"),
])
def test_explain_names_the_first_formula(cli, weighted, monkeypatch, number, depth, plant, name):
    """Also of a small fault at the end of a long way, which the number itself does not tell."""
    plant(monkeypatch, None)
    argv = ("explain", number, "-m", weighted, "hello", "--depth", depth)
    result = cli(*argv)
    assert result.code == 1
    seen_in_the_number = plant is unmasked
    assert result.out.splitlines()[1].endswith("✗" if seen_in_the_number else "✓")
    assert f"✗ check failed: the formula of {name} holds on the kernel's own" in result.out
    assert f"error: `{name}` is not what its formula makes of the kernel's own" in result.err
    assert "hint: it is the first failing tensor, in execution order" in result.err
    document = cli(*argv, "--json")
    assert document.code == 1
    said = document.json()
    assert errors(said, "explain") == []
    assert (said["ok"], said["local"]["ok"], said["local"]["name"]) == (False, False, name)
    assert said["steps"][0]["ok"] is not seen_in_the_number


# the ladder


@pytest.fixture
def ladder(cli, weighted):
    return partial(cli, "ladder", "-m", weighted, "ab")


def test_a_loaded_machine_is_said(ladder, others_take):
    assert ladder("--rung", "7").err == ""
    others_take(1.9)
    words = "note: other programs took 1.90 of 2 processors: on an idle machine this is faster\n"
    assert ladder("--rung", "7").err == ladder("--rung", "7", "--json").err == words


def test_a_wrong_rung_fails_and_is_still_shown_in_red(ladder, monkeypatch):
    """Its difference in the table and the verdict below; the rung before it is green."""
    rung_4_times_1_01(monkeypatch, None)
    result = ladder("--rung", "3-4")
    assert result.code == 1
    assert "rung 4: logits differ from the rung before by at most" in result.out
    assert result.err.startswith("error: rung 4 differs from the rung before by more than rounding")
    failed = ladder("--rung", "3-4", "--json")
    assert failed.code == 1
    assert failed.json()["ok"] is False  # one document, and it says so
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "120")
    out = ladder("--rung", "2-4", "--no-pager").out
    red, green = (set(re.findall(rf"\x1b\[{code}m([^\x1b]*)", out)) for code in ("1;31", "32"))
    differences = {words for words in red | green if re.fullmatch(r" *\d\.\de[+-]\d\d", words)}
    assert [len(differences & colour) for colour in (red, green)] == [1, 1]
    assert any(words.startswith("rung 4: logits differ") for words in red)
    assert not any("every rung agrees" in words for words in green)


@pytest.mark.parametrize("agrees", [True, False])
def test_nothing_is_as_on_a_rung_that_disagrees(ladder, monkeypatch, agrees):
    """All functions of a wrong rung are shown with their numbers: any may be the wrong one."""
    if not agrees:
        rung_4_times_1_01(monkeypatch, None)
    result = ladder("--rung", "4", "--explain")
    assert result.code == (0 if agrees else 1)
    assert ("as on rung 3: read, embed, block" in result.out) is agrees
    assert bool(re.search(r"^embed$", result.out, re.MULTILINE)) is not agrees


def test_nothing_is_recorded_where_nobody_looks(ladder, monkeypatch):
    """The plain table traces no line and taps no tensor: what it times is the arithmetic alone."""
    seen = []
    monkeypatch.setattr(Recorder, "_call", lambda self, *event: seen.append(event))
    monkeypatch.setattr(Recorder, "tap", lambda self, *tensor: seen.append(tensor))
    ladder()
    assert not seen
    ladder("--rung", "8")
    assert seen


@pytest.mark.parametrize("rung", [1, 4])
def test_ctrl_c_keeps_the_rungs_that_were_reached(ladder, monkeypatch, rung):
    monkeypatch.setattr(RUNGS[rung - 1], "forward", Mock(side_effect=KeyboardInterrupt))
    result = ladder("--json")
    assert result.code == 130
    document = json.loads(result.out)
    if rung == 1:
        assert document["error"]["kind"] == "interrupted"
        return
    assert [found["number"] for found in document["rungs"]] == [1, 2, 3]
    assert document["interrupted"] is True
    assert "interrupted after rung 3" in result.err

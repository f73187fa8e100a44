"""A check that does not hold: the result is shown all the same, and the command exits 1."""

import json

import numpy as np
import pytest
from json_schemas import errors

from llmcli.decoder.block import Block
from llmcli.parts import attention, experts
from llmcli.parts.norm import Norm


def unmasked(patch):
    attend = attention.attend
    patch.setattr(attention, "attend", lambda q, k, v, *, scale, **_: attend(q, k, v, scale=scale))


def scaled_twice(patch):
    attend = attention.attend
    patch.setattr(
        attention, "attend", lambda *qkv, scale, **mask: attend(*qkv, scale=2 * scale, **mask)
    )


def norm_times(factor, name=None):
    def plant(patch):
        norm = Norm.__call__
        patch.setattr(
            Norm, "__call__",
            lambda self, x: norm(self, x) * (factor if name in (None, self.name) else 1),
        )  # fmt: skip

    return plant


def stream_times_1_001(patch):
    block = Block.__call__
    patch.setattr(
        Block, "__call__", lambda self, x, cache, step: block(self, x * 1.001, cache, step)
    )


def weights_turned_round(patch):
    weigh = experts.weigh
    patch.setattr(experts, "weigh", lambda *x: weigh(*x).flip(-1))


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
    plant(monkeypatch)
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
    plant(monkeypatch)
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

"""`llmcli shapes` as a shell sees it: documents, rows, prompts, files without configuration."""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import replace

import children
import numpy as np
import pytest
from cli_tiny import write_tiny

from llmcli.anatomy.arithmetic import Arithmetic
from llmcli.anatomy.work import total_work
from llmcli.checkpoints import open_checkpoint
from llmcli.commands.shapes.measure import ran
from llmcli.families import translate
from llmcli.graph.spec import Call


@pytest.mark.parametrize(
    "argv",
    [
        ["-m", "tiny"],
        ["-m", "tiny", "--json"],
        ["-m", "tiny", "--names"],
        ["-m", "tiny", "--all"],
        ["--params", "--layer=0"],
    ],
)
def test_torch_is_never_imported_without_a_prompt(argv, tiny):
    code = "import sys; from llmcli.cli.app import main; code = main(sys.argv[1:]); "
    code += "sys.exit(code or (99 if 'torch' in sys.modules else 0))"
    argv = argv if "-m" in argv else ["-m", tiny, *argv]
    done = children.run(
        [sys.executable, "-c", code, "shapes", *argv], capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout


def test_the_document_has_every_tensor(cli, tmp_path):
    folder = write_tiny(tmp_path / "m", weights=True)
    document = cli("shapes", "-m", folder, "--json", "--dtype", "float32", "--tokens", "5").json()
    assert document["schema"] == "llmcli.shapes/1"
    tensors = document["tensors"]
    for tensor in tensors:
        assert {"name", "kind", "axes", "shape", "dtype", "bytes", "phase", "layer", "formula"} <= (
            tensor.keys()
        )
        assert len(tensor["axes"]) == len(tensor["shape"]) == len(tensor["documents"])
        assert tensor["bytes"] == 4 * np.prod(tensor["shape"])
    assert {t["phase"] for t in tensors if t["kind"] == "parameter"} == {None}
    counted = Counter((tensor["name"], tensor["phase"]) for tensor in tensors)
    assert set(counted.values()) == {1}
    config, _ = translate(open_checkpoint(folder))
    for call, (tokens, past) in zip(document["flops"], [(5, 0), (1, 5)], strict=True):
        ran = [tensor for tensor in tensors if tensor["phase"] == call["phase"]]
        shape = Call(batch=1, tokens=tokens, past=past, phase=call["phase"])
        work = total_work(config, shape, numbers=Arithmetic.of("float32"), logits="all")
        for name in ("flops", "flops_full"):
            assert call[name] == sum(tensor[name] for tensor in ran) == vars(work)[name] > 0
    pattern = {t["phase"]: t for t in tensors if t["name"] == "blocks.1.attn.pattern"}
    assert pattern["prefill"]["axes"] == ["B", "H", "T", "S"]
    assert [pattern[phase]["shape"] for phase in ("prefill", "decode")] == [
        [1, 4, 5, 5],
        [1, 4, 1, 6],
    ]
    assert not pattern["decode"]["written"]
    key = next(t for t in tensors if t["name"] == "blocks.0.attn.W_k")
    assert key["source"] == "model.layers.0.self_attn.k_proj.weight"
    assert (key["shape"], key["stored_shape"]) == ([32, 16], [16, 32])
    assert key["shares"] == "blocks.0.attn.W_qkv"
    # 2 layers × keys and values × 2 heads of 8 × 4 bytes
    assert document["cache"]["per_token"] == 2 * 2 * 2 * 8 * 4
    assert document["model"]["parameters"] == sum(
        np.prod(t["shape"]) for t in tensors if t["kind"] == "parameter"
    )
    assert all(check["ok"] for check in document["checks"].values())
    assert {"symbols", "folded", "stored"} == set(document["checks"])
    assert {"name": "blocks.{0-1}.mlp.up", "layers": [0, 1], "formula": "U = T⁴ W_up"} in (
        document["rows"]
    )


def test_a_prompt_is_run_and_compared(run_tiny):
    document = run_tiny("shapes", "abc", "--batch", "2", "--json", "--threads", "1").json()
    assert (document["tokens"], document["batch"], document["ran"]) == (3, 2, True)
    names = ("shapes", "dtypes", "memory", "derived", "cache", "copies", "parameters")
    assert {f"ran_{name}" for name in names} <= set(document["checks"])
    assert all(check["ok"] for check in document["checks"].values())
    assert [token["text"] for token in document["prompt"]] == ["a", "b", "c"]
    ids = run_tiny("shapes", "--ids", "7,8,9,10", "--json").json()
    assert ids["tokens"] == 4
    assert 'prompt of 3 tokens · "a" · "b" · "c"' in run_tiny("shapes", "abc", "--layer=0").out


@pytest.mark.parametrize("command", ["shapes", "dump", "attention", "lens"])
def test_a_models_name_as_text_is_told(run_tiny, command):
    name = ("--name", "embed") if command == "dump" else ()
    note = "note: `tiny` is the text that is read; the model of that name is `-m tiny`"
    assert note in run_tiny(command, "tiny", *name).err
    assert note not in run_tiny(command, "tiny", *name, "-q").err
    assert "of that name" not in run_tiny(command, "tiny words", *name).err


def test_a_check_that_does_not_hold_is_shown_and_exits_1(run_tiny, monkeypatch):
    honest = ran.ShapesRequest.plan

    def lying(self, phase):
        plan = honest(self, phase)
        specs = (
            replace(spec, shape=(9,)) if spec.name == "blocks.1.resid_mid" else spec
            for spec in plan.tensors
        )
        return replace(plan, tensors=tuple(specs))

    monkeypatch.setattr(ran.ShapesRequest, "plan", lying)
    result = run_tiny("shapes", "abc", "--phase", "prefill", "--all")
    assert result.code == 1
    assert "✗ check failed" in result.out
    assert "blocks.0.attn.pattern" in result.out  # what there is is shown, layers apart
    assert "`blocks.1.resid_mid" in result.err
    document = run_tiny("shapes", "abc", "--json")
    assert document.code == 1
    assert not document.json()["checks"]["ran_shapes"]["ok"]


def test_weights_of_another_model_are_seen_without_reading_them(cli, tmp_path):
    folder = write_tiny(tmp_path / "m", weights=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 40}))
    result = cli("shapes", "-m", folder, "--params")
    assert result.code == 4  # as of every command that would load them
    assert "the checkpoint does not fit its own configuration" in result.err
    assert "`model.layers.0.mlp.down_proj.weight` should be [32, 40] but is [32, 48]" in result.err
    assert "✗ check failed" in result.out


def test_a_configuration_alone_is_enough(cli, tiny):
    result = cli("shapes", "-m", tiny, "--all")
    assert result.code == 0
    assert "blocks.{0-1}.mlp.W_down" in result.out
    assert "×2, layers 0-1, identical" in result.out
    assert "checkpoint" not in result.out


def test_what_is_shown_can_be_chosen(cli, tiny):
    def names(*argv):
        document = cli("shapes", "-m", tiny, "--json", *argv).json()
        return {tensor["name"] for tensor in document["tensors"]}

    everything = names()
    assert names("--params") | names("--activations") == everything
    assert not names("--params") & names("--activations")
    assert all(".1." in name for name in names("--layer", "-1"))
    assert names("--filter", "blocks.*.attn.pattern,logits") == {
        "blocks.0.attn.pattern", "blocks.1.attn.pattern", "logits",
    }  # fmt: skip
    theirs = names("--filter", "model.layers.1.self_attn.q_proj.weight,pattern0")
    assert theirs == {"blocks.1.attn.W_q", "blocks.0.attn.pattern"}
    only = cli("shapes", "-m", tiny, "--json", "--phase", "decode", "--activations").json()
    assert {tensor["phase"] for tensor in only["tensors"]} == {"decode"}


@pytest.mark.parametrize("argv", [("--layer", "9"), ("--filter", "nonsense")])
def test_what_is_not_there_is_refused_before_the_weights(cli, tiny, argv, monkeypatch):
    monkeypatch.setattr("llmcli.loading.load.load_checkpoint", lambda *_, **__: pytest.fail("read"))
    assert cli("shapes", "-m", tiny, "text", *argv).code == 2


def test_a_model_is_one_table_and_all_has_everything(cli, tiny, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    brief = cli("shapes", "-m", tiny)
    assert brief.code == 0
    lines = brief.out.splitlines()
    assert len(lines) < 50
    assert "blocks.{0-1} × 2, identical" in lines
    assert "blocks.{0-1} × 2: ln1.w [32] · attn.W_q [32 32]" in brief.out
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in lines if "  [B" in line}
    assert rows["attn.scores"] == "[B H T S] [1 4 12 12] S = Q_rot K_rotᵀ / √(d/h) + M"
    assert rows["resid_pre"] == "[B T D] [1 12 32] X = E, then H of block 0"
    assert lines[-1] == "✓ 2 checks · --checks"
    document = cli("shapes", "-m", tiny, "--json", "--activations").json()
    tensors = {tensor["name"] for tensor in document["tensors"] if tensor["kind"] == "activation"}
    names = {name.removeprefix("blocks.0.").removeprefix("blocks.1.") for name in tensors}
    assert names - set(rows) == {"ln1.scale", "ln2.scale", "ln_final.scale", "logits"}
    decode = cli("shapes", "-m", tiny, "--phase", "decode").out
    assert "[1 4 1 13]" in decode
    monkeypatch.setenv("COLUMNS", "40")
    assert max(map(len, cli("shapes", "-m", tiny).out.splitlines())) <= 40


def test_names_places_formulas_and_aliases(cli):
    result = cli("shapes", "-m", "tiny", "--names")
    assert result.code == 0
    assert "blocks.{0-3}.attn.pattern   [B H T S] = [1 8 12 12]   b × h × n × n" in result.out
    assert "T is an example" in result.out
    asked = cli("shapes", "-m", "tiny", "--names", "--tokens", "7").out
    assert "[B H T S] = [1 8 7 7]" in asked
    assert "example" not in asked
    assert "blocks.{i}.attn.hook_pattern" in result.out
    assert "attention weights" in result.out
    rows = cli("shapes", "-m", "tiny", "--names", "--json").json()["names"]
    assert len({row["name"] for row in rows}) == len(rows)
    (q,) = [row for row in rows if row["name"] == "blocks.{0-3}.attn.q"]
    assert q["formula"] == "Q = T¹ W_q + b_q"

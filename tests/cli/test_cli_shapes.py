"""`llmcli shapes` as a shell sees it: documents, rows, prompts, files without configuration."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from cli_tiny import write_tiny

from llmcli.anatomy.arithmetic import Arithmetic
from llmcli.anatomy.work import total_work
from llmcli.checkpoints import open_checkpoint
from llmcli.commands.shapes.measure import ran
from llmcli.families import translate
from llmcli.graph.spec import Call


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


@pytest.mark.parametrize(
    ("command", "argv", "words"),
    [
        ("shapes", ("--layer", "9"), "`--layer`: there is no 9, for there are 2 layers"),
        ("shapes", ("--filter", "nonsense"), "there is no parameter, activation or state"),
        ("lens", ("--position", "x"), "`--position` takes positions such as"),
        ("lens", ("--layer", "7"), "`--layer`: there is no 7, for there are 2 layers"),
        ("lens", ("--layer", "a"), "`--layer` takes numbers and ranges"),
        ("lens", ("-o", "x.pdf"), "`-o x.pdf` does not end in .html"),
    ],
)
def test_what_is_not_there_is_refused_before_the_weights(
    cli, tiny, command, argv, words, monkeypatch
):
    monkeypatch.setattr("llmcli.loading.load.load_checkpoint", lambda *_, **__: pytest.fail("read"))
    result = cli(command, "-m", tiny, "text", *argv)
    assert result.code == 2
    assert words in result.err


def test_each_name_is_listed_once(cli):
    rows = cli("shapes", "-m", "tiny", "--names", "--json").json()["names"]
    assert len({row["name"] for row in rows}) == len(rows)
    (q,) = [row for row in rows if row["name"] == "blocks.{0-3}.attn.q"]
    assert q["formula"] == "Q = T¹ W_q + b_q"

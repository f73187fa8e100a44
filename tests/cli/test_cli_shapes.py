"""`llmcli shapes` as a shell sees it: documents and what is chosen of them."""

from __future__ import annotations

from collections import Counter

import numpy as np
from cli_tiny import write_tiny

from llmcli.anatomy.arithmetic import Arithmetic
from llmcli.anatomy.work import total_work
from llmcli.checkpoints import open_checkpoint
from llmcli.families import translate
from llmcli.graph.spec import Call


def test_the_document_has_every_tensor(cli, tmp_path):
    folder = write_tiny(tmp_path / "m", weights=True)
    document = cli("shapes", "-m", folder, "--json", "--dtype", "float32", "--tokens", "5").json()
    tensors = document["tensors"]
    for tensor in tensors:
        assert len(tensor["axes"]) == len(tensor["shape"]) == len(tensor["documents"])
        assert tensor["bytes"] == 4 * np.prod(tensor["shape"])
    parameters = [tensor for tensor in tensors if tensor["kind"] == "parameter"]
    assert {tensor["phase"] for tensor in parameters} == {None}
    assert document["model"]["parameters"] == sum(np.prod(t["shape"]) for t in parameters)
    assert set(Counter((tensor["name"], tensor["phase"]) for tensor in tensors).values()) == {1}
    config, _ = translate(open_checkpoint(folder))
    for call, (tokens, past) in zip(document["flops"], [(5, 0), (1, 5)], strict=True):
        ran = [tensor for tensor in tensors if tensor["phase"] == call["phase"]]
        shape = Call(batch=1, tokens=tokens, past=past, phase=call["phase"])
        work = total_work(config, shape, numbers=Arithmetic.of("float32"), logits="all")
        for name in ("flops", "flops_full"):
            assert call[name] == sum(tensor[name] for tensor in ran) == vars(work)[name] > 0
    pattern = {t["phase"]: t for t in tensors if t["name"] == "blocks.1.attn.pattern"}
    assert pattern["prefill"]["axes"] == ["B", "H", "T", "S"]
    shapes = [pattern[phase]["shape"] for phase in ("prefill", "decode")]
    assert shapes == [[1, 4, 5, 5], [1, 4, 1, 6]]
    assert not pattern["decode"]["written"]
    key = next(t for t in tensors if t["name"] == "blocks.0.attn.W_k")
    assert key["source"] == "model.layers.0.self_attn.k_proj.weight"
    assert (key["shape"], key["stored_shape"]) == ([32, 16], [16, 32])
    assert key["shares"] == "blocks.0.attn.W_qkv"
    # 2 layers × keys and values × 2 heads of 8 × 4 bytes
    assert document["cache"]["per_token"] == 2 * 2 * 2 * 8 * 4
    assert {name: check["ok"] for name, check in document["checks"].items()} == {
        "symbols": True,
        "folded": True,
        "stored": True,
    }
    assert {"name": "blocks.{0-1}.mlp.up", "layers": [0, 1], "formula": "U = T⁴ W_up"} in (
        document["rows"]
    )


def test_parameters_and_activations_are_everything(cli, tiny):
    def names(*argv):
        document = cli("shapes", "-m", tiny, "--json", *argv).json()
        return {tensor["name"] for tensor in document["tensors"]}

    assert names("--params") | names("--activations") == names()
    assert not names("--params") & names("--activations")

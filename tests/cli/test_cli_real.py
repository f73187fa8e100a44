"""The real model through the command line; everything else is tested on a small one."""

from __future__ import annotations

import pytest
from needs import needs_kernels

from llmcli.kernels import native

pytestmark = pytest.mark.real


@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16"])
def test_the_first_command_of_the_readme(dtype, cli, smollm2_path):
    """Whatever `auto` is on a processor: the answer is far from a tie (0.97 nats)."""
    result = cli("generate", "What is the capital of Japan?", "--greedy", "--dtype", dtype,
                 "-m", str(smollm2_path))  # fmt: skip
    assert (result.code, result.out) == (0, "The capital of Japan is Tokyo.")


def test_a_text_as_it_stands(cli, smollm2_path):
    result = cli("generate", "The capital of France is", "--greedy", "-n", "8", "--raw",
                 "-m", str(smollm2_path))  # fmt: skip
    assert result.code == 0
    assert result.out.startswith(" Paris")
    assert result.err == ""


def test_an_answer_through_the_chat_template(cli, smollm2_path):
    result = cli("generate", "What is the capital of France?", "--greedy", "-n", "16", "--json",
                 "--dtype", "float32", "-m", str(smollm2_path))  # fmt: skip
    document = result.json()
    assert document["prompt"]["chat"] is True
    assert document["outputs"][0]["text"] == "The capital of France is Paris."
    assert document["outputs"][0]["finish_reason"] == "eos"
    assert document["model"]["family"] == "llama"
    assert document["timings"]["generated_tokens"] == 8


@needs_kernels
def test_every_command_names_the_same_formats_and_bytes(cli, smollm2_path):
    path = ("-m", str(smollm2_path), "--device", "cpu", "--json")
    documents = {
        "info": cli("info", *path).json(),
        "shapes": cli("shapes", *path).json(),
        "load": cli("load", *path).json(),
        "score": cli("score", "Hello there", *path).json(),
        "generate": cli("generate", "Hello", "-n", "2", *path).json(),
    }
    for name, document in documents.items():
        model = document["model"]
        assert model["weight_format"] == "Q4_1 + Q8_0", name
        assert (model["activation_format"], model["cache_format"]) == ("float32", "float16")
        assert (model["product_format"], model["weight_bytes"]) == ("int16", 96576768)
        assert all(check["ok"] for check in document.get("checks", {}).values()), name
    assert documents["generate"]["path"]["product_format"] == "int16"
    for name in ("load", "score", "generate"):
        assert documents[name]["environment"]["kernels"][0] == f"llmcli {native.level()}", name
    shapes = {tensor["name"]: tensor for tensor in documents["shapes"]["tensors"]}
    embed, down = shapes["embed.W"], shapes["blocks.0.mlp.W_down"]
    assert (embed["dtype"], embed["bytes"]) == ("Q8_0", embed["stored_bytes"])
    assert (down["dtype"], down["bytes"]) == ("Q4_1", down["stored_bytes"])

"""The real model through the command line; everything else is tested on a small one."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.real


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
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

"""SmolLM2 itself: transformers on the same bytes, and the figures that llama.cpp gave.

Everything in float32. The page of text is tests/data/page.txt.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from parity_smollm2 import transformers_from_gguf
from torch import Tensor
from transformers import LlamaForCausalLM

from llmcli.checkpoints import open_checkpoint
from llmcli.loading import Model, load_checkpoint

pytestmark = pytest.mark.real

DATA = Path(__file__).parents[1] / "data"
PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a village by the sea,",
)


@pytest.fixture(scope="module")
def ours(smollm2_path: Path) -> Model:
    return load_checkpoint(open_checkpoint(smollm2_path), device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def theirs(smollm2_path: Path) -> LlamaForCausalLM:
    return transformers_from_gguf(smollm2_path)


def encoded(model: Model, text: str) -> Tensor:
    assert model.tokenizer is not None
    return torch.tensor([model.tokenizer.encode(text)])


def scored(logits: Tensor, ids: Tensor) -> Tensor:
    """Log-probability of every token of `ids` `[1, T]` but the first: `[T-1]` float64."""
    logprobs = logits[0, :-1].double().log_softmax(-1)
    return logprobs.gather(1, ids[0, 1:, None])[:, 0]


@torch.no_grad()
def test_a_page_of_text_scores_the_same(ours: Model, theirs: LlamaForCausalLM) -> None:
    ids = encoded(ours, (DATA / "page.txt").read_text())
    assert ids.shape[1] > 300
    mine, reference = scored(ours.decoder(ids), ids), scored(theirs(ids).logits, ids)
    assert abs(mine.mean() - reference.mean()) < 1e-5
    assert (mine - reference).abs().max() < 1e-3


def greedy(model: Model, ids: Tensor, count: int) -> Tensor:
    """The `count` most likely tokens after `ids` `[1, T]`, one by one through the cache."""
    state, out = model.decoder.new_state(1, ids.shape[1] + count), []
    for _ in range(count):
        ids = model.decoder(ids, state, logits="last").argmax(-1)
        out.append(ids)
    return torch.cat(out, dim=1)


@torch.no_grad()
@pytest.mark.parametrize("prompt", PROMPTS)
def test_64_greedy_tokens_are_the_same(
    prompt: str, ours: Model, theirs: LlamaForCausalLM
) -> None:
    """One pass of transformers over our text: each of our tokens is its most likely one too.

    By induction its own greedy text is the same, as long as no two tokens were near a tie.
    """
    ids = encoded(ours, prompt)
    new = greedy(ours, ids, 64)
    logits = theirs(torch.cat((ids, new), dim=1)).logits[0, ids.shape[1] - 1 : -1]
    best = logits.topk(2, dim=-1)
    assert new[0].tolist() == best.indices[:, 0].tolist()
    assert (best.values[:, 0] - best.values[:, 1]).min() > 1e-4

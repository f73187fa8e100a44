"""SmolLM2 itself: transformers on the same bytes, and the figures that llama.cpp gave.

Everything in float32. The page of text is tests/data/page.txt; tests/data/llama_cpp_smollm2.json
holds llama.cpp's figures with their provenance, and the script beside it made them.

How close llama.cpp can be: it rounds the activations of every product with packed weights to 8
bits. That is chaotic (a number on the edge of two steps falls to either side), and emulating it in
transformers gives the same spread between two emulations whose inputs differ by one part in a
million as between either of them and exact arithmetic: 0.085 nats per token of the page, 0.2 in
the distance of the two best tokens.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from parity_reference import reference_inside
from parity_smollm2 import transformers_from_gguf

from llmcli.checkpoints import open_checkpoint
from llmcli.commands.attention.measure.layers import measure_attention
from llmcli.inspect.passes import Passes
from llmcli.loading.load import load_checkpoint

pytestmark = pytest.mark.real

DATA = Path(__file__).parents[1] / "data"
LLAMA_CPP = json.loads((DATA / "llama_cpp_smollm2.json").read_text(encoding="utf-8"))
TOKEN_SPREAD, MARGIN_SPREAD = 0.085, 0.2


@pytest.fixture(scope="module")
def ours(smollm2_path):
    return load_checkpoint(open_checkpoint(smollm2_path), device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def theirs(smollm2_path):
    return transformers_from_gguf(smollm2_path)


def encoded(model, text):
    assert model.tokenizer is not None
    return torch.tensor([model.tokenizer.encode(text)])


def scored(logits, ids):
    """Log-probability of every token of `ids` `[1, T]` but the first: `[T-1]` float64."""
    logprobs = logits[0, :-1].double().log_softmax(-1)
    return logprobs.gather(1, ids[0, 1:, None])[:, 0]


@pytest.fixture(scope="module")
def page(ours):
    """The page's ids, and what ours makes of them."""
    ids = encoded(ours, (DATA / LLAMA_CPP["page"]["file"]).read_text(encoding="utf-8"))
    assert ids.shape[1] > 300
    return ids, scored(ours.decoder(ids), ids)


@torch.no_grad()
def test_a_page_of_text_scores_the_same(page, theirs):
    ids, mine = page
    reference = scored(theirs(ids).logits, ids)
    assert abs(mine.mean() - reference.mean()) < 1e-5
    assert (mine - reference).abs().max() < 1e-3


def greedy(model, ids, count):
    """The `count` most likely tokens after `ids` `[1, T]`, one by one through the cache."""
    state, out = model.decoder.new_state(1, ids.shape[1] + count), []
    for _ in range(count):
        ids = model.decoder(ids, state, logits="last").argmax(-1)
        out.append(ids)
    return torch.cat(out, dim=1)


@torch.no_grad()
def test_64_greedy_tokens_are_the_same(ours, theirs):
    """One pass of transformers over our text: each of our tokens is its most likely one too.

    By induction its own greedy text is the same, as long as no two tokens were near a tie.
    """
    ids = encoded(ours, "Once upon a time, in a village by the sea,")
    new = greedy(ours, ids, 64)
    logits = theirs(torch.cat((ids, new), dim=1)).logits[0, ids.shape[1] - 1 : -1]
    best = logits.topk(2, dim=-1)
    assert new[0].tolist() == best.indices[:, 0].tolist()
    assert (best.values[:, 0] - best.values[:, 1]).min() > 1e-4


def test_a_page_of_text_scores_as_in_llama_cpp(page):
    """Within four standard errors of what the rounding of activations does to the mean."""
    (ids, mine), theirs = page, LLAMA_CPP["page"]
    assert ids[0].tolist() == theirs["ids"]
    assert len(mine) == theirs["tokens_scored"]
    errors = mine - torch.tensor(theirs["logprobs"], dtype=torch.float64)
    assert abs(errors.mean()) < 4 * TOKEN_SPREAD / len(mine) ** 0.5
    assert errors.std() < 1.5 * TOKEN_SPREAD


@pytest.mark.parametrize("figures", LLAMA_CPP["greedy"], ids=lambda figures: figures["prompt"])
def test_greedy_tokens_are_llama_cpps_where_the_choice_is_clear(figures, ours):
    """Along llama.cpp's own text; free-running, the two part where two tokens nearly tie."""
    ids = encoded(ours, figures["prompt"])
    assert ids[0].tolist() == figures["prompt_ids"]
    chosen = torch.tensor(figures["ids"])
    logits = ours.decoder(torch.cat((ids, chosen[None]), dim=1))[0, ids.shape[1] - 1 : -1]
    missed = logits.max(-1).values - logits.gather(1, chosen[:, None])[:, 0]
    margins = torch.tensor(figures["margins"])
    clear = margins > 3 * MARGIN_SPREAD
    assert clear.sum() > 32
    assert (missed[clear] == 0).all()
    assert (missed < 3 * MARGIN_SPREAD).all()


def test_every_layer_and_head(page, ours, theirs):
    """The matrices that `measure_attention` hands on are transformers' eager attentions."""
    ids, found = page[0][:, :44], {}
    report = measure_attention(Passes(ours, ids[0].tolist()), on_matrix=found.__setitem__)
    assert report.ok, report.checks
    _, right = reference_inside(theirs, ids)
    assert len(found) == len(right) == 30
    for layer, pattern in enumerate(right):
        assert found[layer].shape == (9, ids.shape[1], ids.shape[1])
        assert np.abs(found[layer] - pattern[0].numpy()).max() < 1e-5

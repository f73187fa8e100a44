"""Every product is counted: its kind, its FLOPs and its bytes."""

import pytest
import torch
import torch.nn.functional as F
from ladder_models import random_weights

from llmcli import anatomy
from llmcli.commands.ladder.measure.count import count, loop_work, multiply_adds
from llmcli.graph.spec import Call

A, B, X = torch.ones(3, 4), torch.ones(4, 5), torch.ones(4)
BIAS, BATCH = torch.ones(5), torch.ones(2, 3, 4)
HEADS = torch.ones(2, 6, 3, 4)  # two sequences, six heads, three tokens


@pytest.mark.parametrize(
    ("call", "gemv", "gemm", "multiply_adds", "numbers"),
    [
        (lambda: A @ B, 0, 1, 3 * 4 * 5, 12 + 20 + 15),
        (lambda: X @ B, 1, 0, 4 * 5, 4 + 20 + 5),
        (lambda: A @ X, 1, 0, 3 * 4, 12 + 4 + 3),
        (lambda: X @ X, 1, 0, 4, 4 + 4 + 1),
        (lambda: A[:1] @ B, 1, 0, 4 * 5, 4 + 20 + 5),
        (lambda: F.linear(A, B.t(), BIAS), 0, 1, 3 * 4 * 5, 12 + 20 + 15 + 5),
        (lambda: F.linear(BATCH, B.t()), 0, 1, 2 * 3 * 4 * 5, 24 + 20 + 30),
        (lambda: BATCH @ BATCH.transpose(1, 2), 0, 1, 2 * 3 * 4 * 3, 24 + 24 + 18),
        (lambda: torch.einsum("bij,jk->bik", BATCH, B), 0, 1, 2 * 3 * 4 * 5, 24 + 20 + 30),
        (lambda: A + A, 0, 0, 0, 0),
    ],
)
def test_products(call, gemv, gemm, multiply_adds, numbers):
    for context in (torch.inference_mode(), torch.no_grad()):
        with context:
            work = count(call)
        assert (work.gemv, work.gemm) == (gemv, gemm)
        assert (work.flops, work.bytes) == (2 * multiply_adds, 4 * numbers)


def test_fused_attention_is_two_products_over_the_square():
    with torch.inference_mode():
        work = count(lambda: F.scaled_dot_product_attention(HEADS, HEADS, HEADS, is_causal=True))
    assert (work.gemv, work.gemm) == (0, 1)
    assert work.flops == 2 * 2 * 6 * 3 * 3 * (4 + 4)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_the_decoder_runs_the_flops_that_the_anatomy_says(kind):
    decoder = random_weights(kind).decoder
    ids = torch.tensor([[1, 2, 3, 4, 5]])
    specs = anatomy.plan(decoder.config, Call(batch=1, tokens=5, past=0, phase="prefill")).written
    assert count(lambda: decoder(ids)).flops == sum(spec.flops for spec in specs)
    state = decoder.new_state(1, 8)
    decoder(ids, state)
    step = count(lambda: decoder(ids[:, :1], state))
    products = 4 + 1  # qkv, attention, out, up (with gate), down
    assert (step.gemv + step.gemm) == products * len(decoder.config.layers) + 1


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_the_loops_do_more_than_the_matrices(kind):
    weights = random_weights(kind)
    prompt, token = loop_work(weights.config, 4, 2)
    assert prompt.flops == 2 * multiply_adds(weights.config, 4)
    assert prompt.bytes == 8 * prompt.flops
    average = (multiply_adds(weights.config, 5) + multiply_adds(weights.config, 6)) / 2
    assert token.flops == 2 * average
    matrices = count(lambda: weights.decoder(torch.tensor([[1, 2, 3, 4]])))
    assert prompt.flops > matrices.flops

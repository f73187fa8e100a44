"""Scoring against one plain pass over the whole text, and windows against a list of rules."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_models import random_model
from zoo import MODELS, VOCAB

from llmcli.commands.score.measure import measure_score
from llmcli.inspect import windows as scoring
from llmcli.inspect.windows import windows
from llmcli.records.text import covered_bytes


@pytest.fixture(scope="module")
def model():
    return random_model(MODELS["llama"])


def ids_of(count):
    return [(7 * i * i + 3 * i) % VOCAB for i in range(count)]


def scored(model, ids, window=64, stride=32):
    spans = [(2 * i, 2 * i + 2) for i in range(len(ids))]
    return measure_score(model, ids, [""] * len(ids), spans, window=window, stride=stride)


def plainly(model, ids):
    """Log-probabilities of ids[1:] from one pass, and how many tokens were likelier."""
    logprobs = model.decoder(torch.tensor([ids]))[0].log_softmax(-1)
    found = [logprobs[i, id].item() for i, id in enumerate(ids[1:])]
    ranks = [1 + int((logprobs[i] > found[i]).sum()) for i in range(len(found))]
    return found, ranks


@pytest.mark.parametrize("count", [2, 3, 17, 60])
def test_scores_are_those_of_one_plain_pass(model, monkeypatch, count):
    monkeypatch.setattr(scoring, "CHUNK", 8)  # several forward calls
    ids = ids_of(count)
    score = scored(model, ids)
    expected, ranks = plainly(model, ids)
    assert score.tokens[0].logprob is score.tokens[0].rank is None
    assert [token.logprob for token in score.tokens[1:]] == pytest.approx(expected, abs=1e-12)
    assert [token.rank for token in score.tokens[1:]] == ranks
    mean = sum(expected) / len(expected)
    assert score.tokens_scored == count - 1
    assert score.mean_logprob == pytest.approx(mean)
    assert score.perplexity == pytest.approx(math.exp(-mean))
    assert score.bits_per_byte == pytest.approx(-mean / math.log(2) / 2)


@pytest.mark.parametrize(("window", "stride"), [(20, 8), (20, 19), (2, 1), (7, 1)])
def test_long_texts_are_scored_in_their_windows(model, monkeypatch, window, stride):
    monkeypatch.setattr(scoring, "CHUNK", 5)
    ids = ids_of(50)
    score = scored(model, ids, window=window, stride=stride)
    for start, first, stop in windows(50, window, stride):
        expected, _ = plainly(model, ids[start:stop])
        for position in range(first, stop):
            logprob = score.tokens[position].logprob
            assert logprob == pytest.approx(expected[position - start - 1], abs=1e-12)
    whole, _ = plainly(model, ids)
    assert score.tokens[40].logprob != pytest.approx(whole[39], abs=1e-6)


@given(st.integers(0, 300), st.integers(2, 70), st.data())
def test_windows_score_every_token_once_with_enough_before_it(count, window, data):
    stride = data.draw(st.integers(1, window - 1))
    seen = []
    for start, first, stop in windows(count, window, stride):
        assert stop - start <= window
        assert start <= first < stop <= count
        if start:
            assert first - start == window - stride
        seen += range(first, stop)
    assert seen == list(range(1, count))


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9)), max_size=12))
def test_bytes_that_tokens_share_count_once(found):
    spans = [(start, start + size) for start, size in found]
    assert covered_bytes(spans) == len({byte for span in spans for byte in range(*span)})

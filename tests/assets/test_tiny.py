"""`tiny` has learned: measured on chapters that it never saw, against models that only count.

`held_out.txt`, `pair_counts.npz` (how often each pair of ids follows one another in the training
text) and `words.txt.gz` (its words) were written by `llmcli/assets/tiny/train.py --tests`.
"""

import gzip
import json
import math
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from continued import stream
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from llmcli.checkpoints import CATALOG
from llmcli.engine.sampling import Sampling
from llmcli.loading.load import load
from llmcli.ops.attention import scores, visible_keys

HERE = Path(__file__).parent
TINY = CATALOG["tiny"].file
REPORT = json.loads((TINY / "losses.json").read_text(encoding="utf-8"))
CHAPTERS = {
    text.partition("\n")[0]: text + "\n" * (not text.endswith("\n"))
    for text in (HERE / "held_out.txt").read_text(encoding="utf-8").split("\n\n")
}


@pytest.fixture(scope="module")
def tiny():
    return load("tiny", device="cpu", dtype="float32", offline=True)


@pytest.fixture(scope="module")
def passages(tiny):
    """The ids of each held-out chapter, between two ends of text."""
    return {name: [0, *tiny.tokenizer.encode(text), 0] for name, text in CHAPTERS.items()}


def nats(model, ids, context=512):
    """The loss of each id but the first, in windows of the context that overlap by one id."""
    losses = []
    for start in range(0, len(ids) - 1, context):
        window = torch.tensor(ids[start : start + context + 1])
        logprobs = model.decoder(window[None, :-1])[0].log_softmax(-1)
        losses.append(-logprobs.gather(1, window[1:, None])[:, 0])
    return torch.cat(losses)


class Counting:
    """Unigram with one added to each count, and the interpolated Kneser-Ney bigram."""

    def __init__(self, vocab):
        with np.load(HERE / "pair_counts.npz") as file:
            pairs, counts = file["pairs"].astype(int), file["counts"].astype(float)
        self.two = np.zeros((vocab, vocab))
        self.two[pairs[:, 0], pairs[:, 1]] = counts
        one = self.two.sum(0) + 1
        self.unigram = one / one.sum()
        kinds = (self.two > 0).sum(0) + 1
        self.kinds = kinds / kinds.sum()
        once, twice = (counts == 1).sum(), (counts == 2).sum()
        self.discount = once / (once + 2 * twice)

    def after(self, a):
        """The bigram's distribution over the id that follows `a`: [V]."""
        row = self.two[a]
        if not row.any():
            return self.kinds
        rest = self.discount * (row > 0).sum()
        return (np.maximum(row - self.discount, 0) + rest * self.kinds) / row.sum()

    def nats(self, ids):
        """(unigram, bigram) per id but the first."""
        one = -np.log(self.unigram[ids[1:]]).mean()
        return one, np.mean([-math.log(self.after(a)[b]) for a, b in pairwise(ids)])


@pytest.fixture(scope="module")
def counting(tiny):
    return Counting(tiny.config.vocab)


def test_the_shape_is_what_every_block_format_can_hold(tiny):
    config = tiny.config
    assert (config.width, len(config.layers), config.vocab, config.context) == (256, 4, 2048, 512)
    assert all(layer.parts[-1].hidden % 256 == 0 for layer in config.layers)
    assert 1e6 < tiny.describe()["parameters"] < 4e6
    assert tiny.describe()["stored_formats"] == ["F16"]
    assert sum(file.stat().st_size for file in TINY.iterdir()) < 9e6


def test_the_loss_of_each_chapter_is_what_the_report_says(tiny, passages):
    stated = {row["name"]: row for row in REPORT["held_out_chapters"]}
    assert len(passages) == 4
    for name, ids in passages.items():
        found = nats(tiny, ids)
        assert len(found) == stated[name]["tokens"]
        assert found.mean().item() == pytest.approx(stated[name]["nats_per_token"], abs=1e-4)
        assert len(CHAPTERS[name].encode()) == stated[name]["bytes"]


def test_it_predicts_better_than_counting_does(tiny, passages, counting):
    """On each chapter; and the report's averages over all held-out chapters say the same."""
    for a in (0, 17, 300, 2047):
        assert counting.after(a).sum() == pytest.approx(1)
    for ids in passages.values():
        unigram, bigram = counting.nats(ids)
        assert bigram < unigram - 1  # the bigram is no straw man
        assert nats(tiny, ids).mean() < bigram - 0.1
    whole = {name: REPORT[f"{name}_nats_per_token"] for name in ("held_out", "bigram", "unigram")}
    assert whole["held_out"] < whole["bigram"] - 0.2 < whole["unigram"] - 1


def test_weights_that_learned_nothing_are_worse_than_counting(passages, counting):
    drawn = load("tiny", device="cpu", dtype="float32", offline=True, random_weights=1)
    ids = passages["Psalm 33"]
    assert nats(drawn, ids).mean() > counting.nats(ids)[0]


def previous_token(model, ids):
    """[layers, heads, 2] from what the taps show: the mean weight on the token just before, and
    the share of queries to which that token is the most important one.
    """
    seen = {}
    model.decoder(torch.tensor([ids]), tap=seen.__setitem__)
    rows = []
    for i, layer in enumerate(model.config.layers):
        q, k = seen[f"blocks.{i}.attn.q"], seen[f"blocks.{i}.attn.k"]
        visible = visible_keys(torch.arange(len(ids)), len(ids), None)
        pattern = scores(q, k, visible, scale=layer.attention.scores.scale).softmax(-1)[0]
        strongest = pattern[:, 1:].argmax(-1) == torch.arange(len(ids) - 1)
        weight = pattern.diagonal(-1, 1, 2)
        rows.append(torch.stack((weight.mean(-1), strongest.float().mean(-1)), -1))
    return torch.stack(rows)


def test_a_head_looks_at_the_token_before(tiny, passages):
    """Untrained, each of 512 keys gets about a hundredth."""
    both = torch.stack([previous_token(tiny, ids[:512]) for ids in passages.values()]).mean(0)
    weight, strongest = both.unbind(-1)
    assert weight.max() > 0.45
    assert strongest.flatten()[weight.argmax()] > 0.6
    stated = torch.tensor(REPORT["previous_token_by_layer_and_head"])
    assert weight.argmax() == stated.argmax()
    assert stated.max() == pytest.approx(weight.max().item(), abs=0.03)


def test_transformers_computes_the_same(passages):
    """1e-9 in float64; 1e-5 in float32, or five times what transformers itself moves."""
    ids = torch.tensor([passages["James 5"][:200]])
    apart, theirs = {}, {}
    for dtype in ("float32", "float64"):
        ours = load("tiny", device="cpu", dtype=dtype, offline=True)
        model = AutoModelForCausalLM.from_pretrained(TINY, dtype=getattr(torch, dtype)).eval()
        with torch.no_grad():
            theirs[dtype] = model(ids).logits.log_softmax(-1)
        found = ours.decoder(ids).log_softmax(-1)
        assert found.dtype == theirs[dtype].dtype
        apart[dtype] = float((found - theirs[dtype]).abs().max())
    moved = float((theirs["float32"] - theirs["float64"]).abs().max())
    assert apart["float64"] < 1e-9
    assert apart["float32"] < max(1e-5, 5 * moved)


def test_transformers_generates_from_the_directory_as_it_is(tiny):
    theirs = AutoModelForCausalLM.from_pretrained(TINY).eval()
    assert theirs.dtype == torch.float16
    assert theirs.generation_config.do_sample
    ids = tiny.tokenizer.encode("In the beginning")
    prompt = torch.tensor([ids])
    out = theirs.float().generate(prompt, do_sample=False, max_new_tokens=20)
    ours = written(tiny, "In the beginning", Sampling(temperature=0), 20)
    assert out[0, len(ids) :].tolist() == ours


@pytest.fixture(scope="module")
def their_tokenizer():
    return AutoTokenizer.from_pretrained(TINY)


@given(text=st.text(max_size=60) | st.sampled_from([*CHAPTERS.values(), "a<|endoftext|>b", "  \n"]))
def test_the_tokenizer_gives_back_what_it_was_given(tiny, their_tokenizer, text):
    ids = tiny.tokenizer.encode(text)
    assert ids == their_tokenizer(text)["input_ids"]
    assert tiny.tokenizer.decode(ids, skip_special=False) == text
    assert their_tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text


def test_every_byte_is_a_token_and_the_rest_are_longer(tiny):
    spelled = [tiny.tokenizer.token_bytes(i) for i in range(1, tiny.config.vocab)]
    assert {bytes([byte]) for byte in range(256)} <= set(spelled)
    assert len(set(spelled)) == len(spelled)
    assert tiny.eos_ids == {0}


def written(model, prompt, sampling, count):
    """The ids that the model writes after `prompt`."""
    ids = model.tokenizer.encode(prompt)
    return [token.id for token in stream(model, [ids], sampling, limit=count)]


def known_words(text):
    """The share of words in `text` that the training text has at least three times."""
    known = set(gzip.decompress((HERE / "words.txt.gz").read_bytes()).decode().split())
    words = re.findall("[a-z]+", text.lower())
    return sum(word in known for word in words) / len(words)


def test_it_writes_words(tiny):
    """The list holds most words of a real chapter and few of what untrained weights write."""
    assert known_words(CHAPTERS["James 5"]) > 0.95
    drawn = load("tiny", device="cpu", dtype="float32", offline=True, random_weights=1)
    for model, seeds in ((tiny, range(3)), (drawn, (0,))):
        texts = []
        for seed in seeds:
            sampling = Sampling(temperature=0.8, top_p=0.95, seed=seed)
            ids = written(model, "In the beginning", sampling, 80)
            texts.append(model.tokenizer.decode(ids).rpartition(" ")[0])  # the last may be cut
        assert (known_words(" ".join(texts)) > 0.9) == (model is tiny), texts


def test_greedy_text_is_words_and_not_one_word(tiny):
    ids = written(tiny, "In the beginning", Sampling(temperature=0), 60)
    text = tiny.tokenizer.decode(ids).rpartition(" ")[0]
    assert known_words("In the beginning" + text) > 0.95
    assert len(Counter(text.split())) >= 6


def test_no_digit_of_the_report_is_missing():
    curves = REPORT["curves"]
    assert curves["train"][-1]["step"] == curves["held_out"][-1]["step"] == REPORT["steps"]
    assert curves["held_out"][0]["loss"] > curves["held_out"][-1]["loss"]
    assert curves["held_out"][-1]["loss"] == pytest.approx(
        REPORT["held_out_nats_per_token"],
        abs=1e-3,  # rounding the weights to float16 cost nothing
    )
    assert {"seed", "steps", "tokens_seen", "versions", "minutes", "text"} <= set(REPORT)

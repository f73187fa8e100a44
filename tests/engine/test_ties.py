"""Near ties: greedy choices that another rounding would have made otherwise."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from continued import stream
from decoder_parameters import parameters_of
from fake_model import fake_model
from needs import needs_kernels
from small_models import random_model
from zoo import MODELS, VOCAB

from llmcli.checkpoints import open_checkpoint, open_model
from llmcli.config.embedding import EmbeddingConfig
from llmcli.engine import stream as engine
from llmcli.engine.sampling import Sampling, penalized
from llmcli.engine.ties import NearTies
from llmcli.graph.precision import Precision, matrices, stream_noise
from llmcli.loading.load import load_checkpoint

GREEDY = Sampling(temperature=0)
PENALIZED = Sampling(temperature=0, repetition_penalty=1.3, frequency_penalty=0.2)
PROMPT = [5, 6, 7, 8]
TEXT = (Path(__file__).parents[1] / "assets" / "held_out.txt").read_text()


def model_of(dtype: torch.dtype, stored: str = "F64", size: int | None = None) -> Any:
    """A small decoder with random weights that a file has in the format `stored`."""
    config = replace(MODELS["llama"], embedding=EmbeddingConfig(size=size))
    model = random_model(config, dtype)
    slots = parameters_of(model.decoder).values()
    entries = [SimpleNamespace(stored=stored, filled=slot.shape) for slot in slots]
    model.ledger = SimpleNamespace(entries=entries)  # type: ignore[assignment]
    return model


def test_margins_are_what_the_second_best_is_behind():
    tokens = list(stream(model_of(torch.float64), [PROMPT], GREEDY, limit=20, logprobs=2,
                         margins=True))  # fmt: skip
    assert len(tokens) > 5
    for token in tokens:
        (_, best), (_, second) = token.top
        assert token.margin == pytest.approx(best - second, abs=1e-12)
        assert token.tied is False  # in float64


@pytest.mark.parametrize("sampling", [GREEDY, PENALIZED, Sampling(seed=1)])
def test_margins_only_of_greedy_choices_on_request_which_they_do_not_change(sampling):
    runs = []
    for margins in (False, True):
        settings = {"limit": 20, "margins": margins}
        runs.append(list(stream(model_of(torch.bfloat16), [PROMPT, [9]], sampling, **settings)))
        for token in runs[-1]:
            assert (token.margin is not None) == (margins and sampling.temperature == 0)
            assert (token.tied is None) == (token.margin is None)
    assert [token.id for token in runs[0]] == [token.id for token in runs[1]]
    assert list(stream(fake_model(), [PROMPT], GREEDY, limit=3)), "nor a real model without them"


def test_equal_logits_are_a_tie_with_margin_0():
    model = model_of(torch.float64)
    head_VD = parameters_of(model.decoder)["head.W"]
    first = next(stream(model, [PROMPT], GREEDY, limit=1)).id
    head_VD[(first + 1) % VOCAB] = head_VD[first]
    token = next(stream(model, [PROMPT], GREEDY, limit=1, margins=True))
    assert (token.margin, token.tied) == (0.0, True)


@pytest.mark.parametrize(("sampling", "size"), [(GREEDY, None), (PENALIZED, None), (GREEDY, 24)])
def test_the_bound_is_what_noise_of_the_stream_moves(sampling, size):
    """Against a stream that really was moved, at random and by the estimated relative length."""
    model, seen = model_of(torch.float64, size=size), {}
    decoder, ties = model.decoder, NearTies(model)
    logits_1V = decoder(
        torch.tensor([PROMPT]), tap=lambda name, x: seen.__setitem__(name, x), logits="last"
    )[:, 0]
    counts = [torch.bincount(torch.tensor(ids), minlength=VOCAB)[None]
              for ids in (PROMPT, [20, 21])]  # fmt: skip
    scores_1V = penalized(logits_1V, sampling, *counts)
    noise = 1e-6
    ties.noise = noise  # large enough to be seen, small enough for the first order
    h_D = seen["blocks.1.resid_post"][0, -1]
    draws_ND = torch.randn(20_000, len(h_D), generator=torch.Generator().manual_seed(0)).double()
    moved_ND = h_D + draws_ND * (noise * h_D.norm() / math.sqrt(len(h_D)))
    moved_NV = decoder.logits(decoder.ln_final(moved_ND))
    moved_NV = penalized(moved_NV, sampling, *counts)
    for pair in ([5, 20], [20, 40], [41, 42], [6, 36]):
        ids_12 = torch.tensor([pair])
        logits_12 = logits_1V[:, pair]
        slopes_12 = torch.ones(1, 2, dtype=torch.float64)
        if sampling is PENALIZED:
            seen_12 = (counts[0] + counts[1])[:, pair] > 0
            slopes_12[seen_12] = torch.where(logits_12 > 0, 1 / 1.3, 1.3)[seen_12].double()
        bound = float(ties.bound(ids_12, logits_12, slopes_12))
        apart = scores_1V[0, pair[0]] - scores_1V[0, pair[1]]
        moved = moved_NV[:, pair[0]] - moved_NV[:, pair[1]] - apart
        # what points along the stream itself is taken out again by the norm
        assert float(moved.square().mean().sqrt()) == pytest.approx(bound, rel=0.15)


def test_a_final_norm_without_weights_has_the_bound_of_weights_1():
    model = model_of(torch.float64)
    weights_D = parameters_of(model.decoder)["ln_final.w"].fill_(1)
    given = torch.tensor([[5, 20]]), torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.float64)
    expected = NearTies(model).bound(*given)
    weights_D.fill_(math.nan)
    norm = replace(model.config.final_norm, weights=False)
    model.config = replace(model.config, final_norm=norm)
    assert torch.equal(NearTies(model).bound(*given), expected)


def test_penalties_count_in_margin_and_bound():
    """A repeated token's score grows with its logit by 1/1.3, or 1.3, and so does its noise."""
    model, bounds = model_of(torch.float64), []

    class Spy(NearTies):
        def bound(self, ids_B2, logits_B2, slopes_B2):
            bounds.append((ids_B2, logits_B2, slopes_B2))
            return super().bound(ids_B2, logits_B2, slopes_B2)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "NearTies", Spy)
        tokens = list(stream(model, [PROMPT], PENALIZED, limit=20, margins=True))
    before = list(PROMPT)
    repeated = 0
    for token, (ids_12, logits_12, slopes_12) in zip(tokens, bounds, strict=True):
        for id, logit, slope in zip(ids_12[0].tolist(), logits_12[0].tolist(),
                                    slopes_12[0].tolist(), strict=True):  # fmt: skip
            expected = 1.0 if id not in before else 1 / 1.3 if logit > 0 else 1.3
            assert slope == pytest.approx(expected, rel=1e-9)
            repeated += id in before
        before.append(token.id)
        assert token.margin >= 0
    assert repeated


def test_the_estimate_comes_from_the_arithmetic_in_use():
    noise = {
        (str(dtype), stored): NearTies(model_of(dtype, stored)).noise
        for dtype in (torch.float64, torch.float32, torch.bfloat16)
        for stored in ("BF16", "Q4_1")
    }
    config = model_of(torch.float32).config
    wide, narrow = (Precision.of(dtype) for dtype in ("float64", "bfloat16"))
    assert noise["torch.float64", "BF16"] == stream_noise(config, wide, ()) > 0
    for stored in ("BF16", "Q4_1"):
        assert noise["torch.float32", stored] == pytest.approx(
            2.0**29 * noise["torch.float64", stored]
        )
        ratio = noise["torch.bfloat16", stored] / noise["torch.float32", stored]
        assert 2**13 < ratio < 2**16  # 16 bits of 8, where sums of 24 add up as well
    # matrices that 16 bits do not hold are rounded, too, when they are loaded
    assert noise["torch.bfloat16", "Q4_1"] > 1.1 * noise["torch.bfloat16", "BF16"]
    deeper = config.__class__(**{**vars(config), "layers": config.layers * 8})
    grown = stream_noise(deeper, narrow, ()) / stream_noise(config, narrow, ())
    assert grown == pytest.approx(math.sqrt(8), rel=0.1)
    # products with blocks read integers; one more of what they read, or of what is cached, counts
    packed = {name: "Q8_0" for name in matrices(config)}
    all_but_q = {name: format for name, format in packed.items() if not name.endswith("q")}
    squares = {
        key: stream_noise(config, Precision(
            dtype="float32", cache=cache, formats=of, activations=bits
        ), ()) ** 2
        for key, cache, of, bits in (
            ("none", "float32", {}, 8), ("cache", "bfloat16", {}, 8), ("all", "float32", packed, 8),
            ("q dense", "float32", all_but_q, 8), ("16 bits", "float32", packed, 16),
        )
    }  # fmt: skip
    layers = len(config.layers)
    inputs = (4 * layers + 1) * 32 / 127**2 / 12
    assert squares["all"] - squares["none"] == pytest.approx(inputs)
    assert squares["16 bits"] - squares["none"] == pytest.approx(inputs / 256**2)
    assert squares["all"] == squares["q dense"]  # k and v read the same
    assert squares["cache"] - squares["none"] == pytest.approx(2 * layers * 2**-14 / 12, rel=1e-3)


def flips_and_marks(path: Path, texts: Sequence[Sequence[int]], first: Sequence[int]) -> Any:
    """Positions read in bfloat16: how many, where another token than float32's is best, which of
    these are marked as near ties, and how many are marked in all.
    """
    wide, narrow = (
        load_checkpoint(open_checkpoint(path), device="cpu", dtype=dtype)
        for dtype in ("float32", "bfloat16")
    )
    ties = NearTies(narrow)
    total = flips = marked_flips = marked = 0
    for ids, start in zip(texts, first, strict=True):
        exact_TV, own_TV = (
            model.decoder(torch.tensor([ids]))[0, start:].double() for model in (wide, narrow)
        )
        scores_T2, ids_T2 = own_TV.topk(2, -1)
        bound_T = ties.bound(ids_T2, scores_T2, torch.ones_like(scores_T2))
        marked_T = scores_T2[:, 0] - scores_T2[:, 1] <= bound_T
        flipped_T = own_TV.argmax(-1) != exact_TV.argmax(-1)
        total += len(marked_T)
        flips += int(flipped_T.sum())
        marked_flips += int((flipped_T & marked_T).sum())
        marked += int(marked_T.sum())
    print(f"{total} positions, {flips} flips, {marked_flips} of them marked, {marked} marked")
    return total, flips, marked_flips, marked


@pytest.mark.parametrize(("narrow", "wide"), [
    ("float32", "float64"), ("float16", "float32"), ("bfloat16", "float32"),
    pytest.param("int8", "float32", marks=needs_kernels),
    pytest.param("int4", "float32", marks=needs_kernels),
])  # fmt: skip
def test_the_estimate_is_not_far_from_what_rounding_does(narrow, wide):
    """On tiny, against the same weights with more digits."""
    packed = "int" in narrow
    how = {"quantize" if packed else "dtype": narrow}
    own = load_checkpoint(open_model("tiny"), device="cpu", **how)
    exact = load_checkpoint(open_model("tiny"), device="cpu", dtype=wide)
    for name, slot in parameters_of(exact.decoder).items() if packed else ():
        slot.copy_(own.decoder.weight(name).dense())
    ids = torch.tensor([own.tokenizer.encode(TEXT)[:250]])
    own_TV, exact_TV = (model.decoder(ids)[0].double() for model in (own, exact))
    scores_T2, ids_T2 = own_TV.topk(2, -1)
    bound_T = NearTies(own).bound(ids_T2, scores_T2, torch.ones_like(scores_T2))
    exact_T2 = exact_TV.gather(1, ids_T2)
    moved_T = (scores_T2 - exact_T2) @ torch.tensor([1.0, -1.0], dtype=torch.float64)
    share_T = moved_T.abs() / bound_T
    print(f"{narrow}: rms {share_T.square().mean().sqrt():.2f}, worst {share_T.max():.2f}")
    assert 0.1 < float(share_T.square().mean().sqrt()) < 1
    assert float(share_T.max()) < 3


def test_every_choice_that_bfloat16_changes_is_marked_and_few_others():
    model = load_checkpoint(open_model("tiny"), device="cpu", dtype="float32")
    ids = model.tokenizer.encode(TEXT)[:1500]
    parts = [ids[start : start + 250] for start in range(0, len(ids), 250)]
    path = open_model("tiny").path
    total, flips, marked_flips, marked = flips_and_marks(path, parts, [0] * len(parts))
    assert total == 1500
    assert marked_flips == flips > 0
    assert marked < 0.1 * total


@pytest.mark.real
def test_every_answer_that_bfloat16_changes_is_marked(smollm2_path):
    model = load_checkpoint(open_checkpoint(smollm2_path), device="cpu", dtype="float32")
    questions = "What is the capital of France?", "Why is the sky blue?", "Tell me a joke."
    prompts = [model.tokenizer.encode_chat([{"role": "user", "content": q}]) for q in questions]
    answers: list[list[int]] = [[] for _ in prompts]
    for token in stream(model, prompts, GREEDY, limit=24):
        answers[token.sequence].append(token.id)
    texts = [[*prompt, *answer[:-1]] for prompt, answer in zip(prompts, answers, strict=True)]
    first = [len(prompt) - 1 for prompt in prompts]
    total, flips, marked_flips, marked = flips_and_marks(smollm2_path, texts, first)
    assert marked_flips == flips
    assert marked < 0.25 * total

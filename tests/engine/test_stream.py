"""The loop that prefills and decodes, over a fake model that notices any mix-up of sequences.

And over real decoders with random weights: batched == alone == without any cache.
"""

import math
from collections import defaultdict
from dataclasses import replace
from itertools import groupby
from typing import Any

import pytest
import torch
from continued import plain_loop, stream
from covers import in_turn
from fake_model import EOS, EXTRA, VOCAB, fake_model, hashed, script
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import random_model
from zoo import MODELS

from llmcli import devices
from llmcli.engine.output import Token
from llmcli.engine.sampling import Sampling
from llmcli.engine.seeds import sample_seed
from llmcli.engine.stop import StopMatcher
from llmcli.errors import NotFinite, OutOfMemory, PromptTooLong, UsageError
from llmcli.graph.memory import PROMPT_CHUNK

GREEDY = Sampling(temperature=0)
HOT = Sampling(
    temperature=1.2, top_k=0, top_p=0.98, min_p=0.01, repetition_penalty=1.1,
    presence_penalty=0.2, frequency_penalty=0.1, seed=42,
)  # fmt: skip
THE = 256 + EXTRA.index("the")
TH = 256 + EXTRA.index("th")
GAP = 256 + EXTRA.index("\n\n")
OTHER = 257
STEPS = 270  # more than one table of random numbers has
PROMPTS = [[1, 2, 3], [4], list(range(100, 117)), [1, 2], [3] * 9]


def run(model: Any, prompts: list[list[int]], sampling: Sampling = GREEDY, **options: Any):
    """Tokens by sequence."""
    outputs: dict[int, list[Token]] = defaultdict(list)
    for token in stream(model, prompts, sampling, **{"limit": 30, **options}):
        outputs[token.sequence].append(token)
    return dict(sorted(outputs.items()))


def ids(tokens: list[Token]) -> list[int]:
    return [token.id for token in tokens]


def text(tokens: list[Token]) -> str:
    return "".join(token.text for token in tokens)


def by_hand(prompt: list[int], sampling: Sampling, limit: int, end: int | None = EOS) -> list[int]:
    return plain_loop(lambda ids: hashed(tuple(ids)), prompt, sampling, limit, end)


@pytest.mark.parametrize("sampling", [GREEDY, HOT, Sampling(seed=3), Sampling(top_k=2)])
def test_a_batch_is_every_prompt_alone_and_the_plain_loop(sampling):
    model = fake_model()
    together = run(model, PROMPTS, sampling)
    assert list(together) == list(range(len(PROMPTS)))
    for number, prompt in enumerate(PROMPTS):
        alone = run(fake_model(), [prompt], sampling)[0]
        batched = together[number]
        assert ids(batched) == ids(alone) == by_hand(prompt, sampling, 30)
        assert text(batched) == text(alone)
        assert [token.finish for token in batched] == [token.finish for token in alone]
        assert [token.index for token in batched] == list(range(len(batched)))
    lengths = {len(tokens) for tokens in together.values()}
    assert len(lengths) > 1  # they really end at different steps
    for step, call in enumerate(model.decoder.calls[1:], start=1):  # and leave the batch
        assert call == (sum(len(tokens) > step for tokens in together.values()), 1)


SAMPLINGS = (
    GREEDY, Sampling(temperature=0, repetition_penalty=1.3), Sampling(seed=9),
    Sampling(temperature=1.5, top_k=0, presence_penalty=0.5, seed=9),
)  # fmt: skip


@pytest.mark.parametrize(
    ("sampling", "name", "dtype"),
    in_turn(SAMPLINGS, ["llama", "window", "gpt2"], [torch.float64, torch.float32]),
)
def test_of_a_real_decoder_a_batch_is_every_prompt_alone_and_without_a_cache(sampling, name, dtype):
    model = replace(random_model(MODELS[name], dtype), eos_ids=frozenset({0}))
    prompts = [list(range(5, 14)), [20], [30, 31, 32], [5, 6, 7, 8]]
    together = [ids(tokens) for tokens in run(model, prompts, sampling).values()]
    for prompt, found in zip(prompts, together, strict=True):
        assert found == ids(run(model, [prompt], sampling)[0])
        assert found == plain_loop(
            lambda whole: model.decoder(torch.tensor([whole]))[0, -1], prompt, sampling, 30, 0
        )
    assert len({tuple(found) for found in together}) > 2  # two may end at once


@pytest.mark.parametrize("name", ["llama", "gpt2"])  # rotated, and of learned positions
def test_a_full_context_is_used_to_the_last_slot(name):
    model, sampling = random_model(MODELS[name]), Sampling(seed=9)
    prompts, options = [[7] * 60, [9] * 64, [3] * 50], {"limit": 1000, "ignore_eos": True}
    together = [ids(tokens) for tokens in run(model, prompts, sampling, **options).values()]
    assert [len(found) for found in together] == [5, 1, 15]
    for prompt, found in zip(prompts, together, strict=True):
        assert ids(run(model, [prompt], sampling, **options)[0]) == found


def test_samples_are_runs_with_their_own_seeds_that_share_a_prefill():
    model = fake_model()
    together = run(model, PROMPTS[:2], HOT, samples=3)
    assert model.decoder.calls[:2] == [(2, 3), (6, 1)]
    assert list(together) == list(range(6))
    for number, tokens in together.items():
        prompt, i = divmod(number, 3)
        options = {name: getattr(HOT, name) for name in HOT.__dataclass_fields__}
        own = Sampling(**{**options, "seed": sample_seed(42, i)})
        assert ids(tokens) == ids(run(fake_model(), [PROMPTS[prompt]], own)[0])
    texts = [tuple(ids(tokens)) for tokens in together.values()]
    assert len(set(texts)) == 6


def test_random_numbers_go_on_over_the_table_s_end():
    ids_of = ids(run(fake_model(), [[4]], HOT, limit=STEPS, ignore_eos=True)[0])
    assert ids_of == by_hand([4], HOT, STEPS, None)


def test_prefill_in_chunks():
    long = [[n % 97 for n in range(2 * PROMPT_CHUNK + 9)], [5] * (PROMPT_CHUNK + 1), [7]]
    seen: list[tuple[int, int]] = []
    model = fake_model()
    got = run(model, long, HOT, limit=3, on_prefill=lambda *said: seen.append(said))
    for prompt, tokens in zip(long, got.values(), strict=True):
        assert ids(tokens) == by_hand(prompt, HOT, 3)
    assert [shape for shape in model.decoder.calls if shape[1] > 1] == [
        (3, PROMPT_CHUNK), (3, PROMPT_CHUNK), (3, 9),
    ]  # fmt: skip
    total = sum(map(len, long))
    assert seen == [(2 * PROMPT_CHUNK + 1, total), (total - 9, total), (total, total)]


WORDS, MARKS = (THE, THE, THE, GAP, 97), (THE, 97, OTHER, GAP, EOS, THE)
EURO = "€".encode()
# what the model would write, options, the text, how many tokens it takes, and what ended it
ENDS: list[tuple[tuple[int, ...], dict[str, Any], str, int, str]] = [
    ((104, 105, EOS, 106), {}, "hi", 3, "eos"),  # an end token is one of the ids, and no text
    ((104, EOS, OTHER, 105), {"limit": 4, "ignore_eos": True}, "hi", 4, "length"),
    ((104,), {"limit": 3}, "hhh", 3, "length"),
    (WORDS, {"limit": 5, "stop": ["e"]}, "th", 1, "stop"),  # inside one token
    (WORDS, {"limit": 5, "stop": ["ethe"]}, "th", 2, "stop"),  # over two
    (WORDS, {"limit": 5, "stop": ["hethet"]}, "t", 3, "stop"),
    (WORDS, {"limit": 5, "stop": ["x", "\n"]}, "thethethe", 4, "stop"),
    (WORDS, {"limit": 5, "stop": ["hethethe\n"]}, "t", 4, "stop"),
    (WORDS, {"limit": 5, "stop": ["zzz"]}, "thethethe\n\na", 5, "length"),
    ((TH, 101), {"limit": 2, "stop": ["the"]}, "", 2, "stop"),  # outweighs the limit
    # the rest of a torn character can itself complete a stop string
    ((*EURO[:2], EOS), {}, "\ufffd", 3, "eos"),
    ((*EURO[:2], EOS), {"stop": ["\ufffd"]}, "", 3, "stop"),
]
for ignored in (True, False):
    for stop, shown, count in (
        ("<other>", "thea", 3),  # a special token, which is not shown
        ("a<oth", "the", 3), ("<other>\n", "thea", 4),
        ("a\n", "the", 4),  # as it is read
        ("<eos>", "thea\n\n", 5),  # an end token
        ("\n<eos>", "thea\n", 5),
    ):  # fmt: skip
        ENDS.append((MARKS, {"stop": [stop], "ignore_eos": ignored}, shown, count, "stop"))
ENDS += [  # what comes with each token
    ((TH, EOS), {"stop": ["the"]}, ["", "th"], 2, "eos"),  # held text comes at the end
    ((TH,), {"stop": ["ththx"], "limit": 2}, ["", "thth"], 2, "length"),
    ((*EURO, EOS), {}, ["", "", "€", ""], 4, "eos"),  # characters come whole
]


@pytest.mark.parametrize(("steps", "options", "shown", "count", "finish"), ENDS)
def test_how_a_text_ends(steps, options, shown, count, finish):
    tokens = run(fake_model(script(*steps)), [[0]], **options)[0]
    assert ids(tokens) == [*steps, *steps[-1:] * count][:count]
    assert shown in (text(tokens), [token.text for token in tokens])
    assert [token.finish for token in tokens] == [*[None] * (count - 1), finish]


def test_an_end_token_with_text_is_not_printed():
    model = fake_model(script(104, 105))
    model.eos_ids = frozenset({105})
    tokens = run(model, [[0]])[0]
    assert (ids(tokens), text(tokens), tokens[-1].finish) == ([104, 105], "h", "eos")


def test_without_a_tokenizer_there_are_ids_only():
    with_text, without = fake_model(), fake_model(text=False)
    assert ids(run(with_text, [[9]])[0]) == ids(run(without, [[9]])[0])
    assert text(run(without, [[9]])[0]) == ""


@pytest.mark.parametrize("sampling", [GREEDY, HOT])
def test_log_probabilities_are_the_model_s_own(sampling):
    plain = run(fake_model(), PROMPTS, sampling)
    with_logprobs = run(fake_model(), PROMPTS, sampling, logprobs=3)
    for number, tokens in with_logprobs.items():
        assert ids(tokens) == ids(plain[number])
        for at, token in enumerate(tokens):
            history = (*PROMPTS[number], *ids(tokens)[:at])
            expected = hashed(history).double().log_softmax(-1)
            assert token.logprob == pytest.approx(expected[token.id].item(), abs=1e-12)
            best = expected.topk(3)
            assert [id for id, _ in token.top] == best.indices.tolist()
            assert [value for _, value in token.top] == pytest.approx(best.values.tolist())


def test_log_probabilities_on_request_only():
    assert run(fake_model(), [[1]])[0][0].logprob is None
    token = run(fake_model(), [[1]], logprobs=0)[0][0]
    assert token.logprob is not None
    assert token.top == ()
    everything = run(fake_model(), [[1]], logprobs=10_000, limit=1)[0][0].top
    assert sum(math.exp(value) for _, value in everything) == pytest.approx(1)


@pytest.mark.parametrize("limit", [1, 2, 5, 100])
def test_a_full_context_ends_the_sequence_alone(limit):
    model = fake_model(context=12)
    got = run(model, [[1] * 12, [2] * 10, [3]], HOT, limit=limit, ignore_eos=True)
    assert [len(tokens) for tokens in got.values()] == [min(limit, room) for room in (1, 3, 12)]
    assert all(tokens[-1].finish == "length" for tokens in got.values())
    assert model.decoder.capacities == [(3, 12)]


def test_capacity_is_in_buckets_below_the_context_or_given_or_the_learned_positions():
    for prompt, limit, expected in ((10, 20, 64), (60, 5, 64), (60, 6, 128), (100, 10**6, 1000)):
        model = fake_model(script(EOS), context=1000)
        run(model, [[1] * prompt], limit=limit)
        assert model.decoder.capacities == [(1, expected)]
    wide = {"limit": 50, "ignore_eos": True}
    assert len(run(fake_model(context=9), [[1]], capacity=20, **wide)[0]) == 20
    assert len(run(fake_model(context=9), [[1]], capacity=5, **wide)[0]) == 5
    assert len(run(fake_model(context=9, positions=7), [[1]], capacity=20, **wide)[0]) == 7


def test_what_cannot_be_continued_is_refused_at_once():
    model = fake_model(context=10)
    with pytest.raises(PromptTooLong, match="12 tokens, 2 more than the context of 10"):
        stream(model, [[1] * 12], GREEDY, limit=1)
    with pytest.raises(PromptTooLong, match="prompt 1 has 11"):
        stream(model, [[1], [1] * 11], GREEDY, limit=1)
    for prompts in ([], [[]], [[1], []], [[VOCAB]], [[-1]]):
        with pytest.raises(UsageError):
            stream(model, prompts, GREEDY, limit=1)
    wrong = {"limit": 0, "samples": 0, "capacity": 0, "stop": ["a", ""], "logprobs": -1}
    for option, value in wrong.items():
        with pytest.raises(UsageError):
            stream(model, [[1]], GREEDY, **{"limit": 1, option: value})  # type: ignore[arg-type]
    assert model.decoder.calls == []


def test_caches_that_do_not_fit_are_refused_before_they_are_made(monkeypatch):
    model = fake_model()
    monkeypatch.setattr(devices, "available_bytes", lambda device: 100_000)
    with pytest.raises(OutOfMemory, match=r"caches of 64 × 128 tokens") as caught:
        list(stream(model, [[1]], GREEDY, limit=100, samples=64))
    assert caught.value.code == 5
    assert model.decoder.capacities == []


@pytest.mark.parametrize("bad", [math.nan, math.inf, None])
@pytest.mark.parametrize("sampling", [GREEDY, HOT])
def test_logits_that_are_not_finite(bad, sampling):
    def scores(ids: tuple[int, ...]) -> torch.Tensor:
        values = hashed(ids)
        values[EOS] = -math.inf
        if ids[0] == 7 and len(ids) == 4:
            return torch.full((VOCAB,), -math.inf) if bad is None else values.index_fill_(
                0, torch.tensor([3]), bad
            )
        return values

    tokens: list[Token] = []
    with pytest.raises(NotFinite, match="sequence 1 for its token 2") as caught:
        tokens.extend(stream(fake_model(scores), [[1], [7, 7]], sampling, limit=9))
    assert caught.value.code == 7
    assert [token.sequence for token in tokens] == [0, 1, 0, 1]


@pytest.mark.parametrize("at", ["prefill", "decode"])
def test_an_interruption_passes_through(at):
    def scores(ids: tuple[int, ...]) -> torch.Tensor:
        if len(ids) == (1 if at == "prefill" else 3):
            raise KeyboardInterrupt
        return script(104)(ids)

    tokens: list[Token] = []
    with pytest.raises(KeyboardInterrupt):
        tokens.extend(stream(fake_model(scores), [[0]], GREEDY, limit=9))
    assert text(tokens) == ("" if at == "prefill" else "hh")


def test_a_closed_stream_computes_nothing_more():
    model = fake_model()
    tokens = stream(model, [[0]], GREEDY, limit=9)
    next(tokens)
    tokens.close()  # type: ignore[attr-defined]
    assert len(model.decoder.calls) == 1
    assert torch.zeros(1, requires_grad=True).mul(2).requires_grad  # no mode leaks out


def test_tokens_come_before_the_next_step_is_computed():
    model = fake_model(script(104))
    for token in stream(model, [[0]], GREEDY, limit=5):
        assert len(model.decoder.calls) == token.index + 1
        assert not torch.is_inference_mode_enabled()


# stop strings across any cut of the text, against a reader of single characters

HIDDEN = "<>"  # characters of special tokens


def visible(text: str) -> str:
    return "".join(one for one in text if one not in HIDDEN)


def oracle(text: str, stops: list[str]) -> tuple[str, bool]:
    """Reads on until the text so far ends with a stop string; of several, the longest goes.

    With what is hidden or without it: the shortest text is left.
    """
    for end in range(1, len(text) + 1):
        left = [visible(text[: end - len(stop)]) for stop in stops if text[:end].endswith(stop)] + [
            seen[: -len(stop)]
            for seen in (visible(text[:end]),)
            for stop in stops
            if seen.endswith(stop)
        ]
        if left:
            return min(left, key=len), True
    return visible(text), False


def matched(pieces: list[str], stops: list[str]) -> tuple[str, bool]:
    matcher = StopMatcher(stops)
    text = "".join(
        matcher.push("".join(part), hidden=hidden)
        for piece in pieces
        for hidden, part in groupby(piece, HIDDEN.__contains__)
    )
    return text + matcher.finish(), matcher.stopped


@settings(max_examples=500, deadline=None)
@given(
    pieces=st.lists(st.text("ab<>", max_size=4), max_size=10),
    stops=st.lists(st.text("ab<>", min_size=1, max_size=4), max_size=3),
)
def test_any_cut_of_the_text_stops_at_the_same_place(pieces, stops):
    expected = oracle("".join(pieces), stops)
    assert matched(pieces, stops) == expected
    assert matched(list("".join(pieces)), stops) == expected
    # only what may begin a stop string is held back
    matcher = StopMatcher(stops)
    seen = shown = ""
    for piece in pieces:
        seen += piece
        shown += matcher.push(piece)
        if matcher.stopped:
            return
        held = seen[len(shown) :]
        assert seen == shown + held
        longer = [seen[-n:] for n in range(len(held) + 1, len(seen) + 1)]
        assert held == "" or any(stop.startswith(held) for stop in stops)
        assert not any(stop.startswith(end) for end in longer for stop in stops)


def test_a_stop_string_may_be_a_special_token_or_reach_into_it_or_across_it():
    for stop, shown in {"<|end|>": "one", "e<|end|>": "on", "|>\nt": "one", "e\n": "on"}.items():
        matcher = StopMatcher([stop])
        passed = matcher.push("one") + matcher.push("<|end|>", hidden=True) + matcher.push("\ntwo")
        assert (passed, matcher.stopped) == (shown, True)
    matcher = StopMatcher(["e<|end|>"])  # a false start is released without what is hidden
    passed = matcher.push("one") + matcher.push("<|else|>", hidden=True) + matcher.push("two")
    assert passed + matcher.finish() == "onetwo"

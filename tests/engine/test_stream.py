"""The loop that prefills and decodes, over a fake model that notices any mix-up of sequences."""

from __future__ import annotations

import math
from collections import defaultdict
from functools import partialmethod
from typing import Any

import pytest
import torch
from continued import stream
from fake_model import EOS, EXTRA, VOCAB, fake_model, hashed, script

from llmcli.engine import sampler as picker_module
from llmcli.engine.output import Token
from llmcli.engine.sampling import Sampling, filtered, sample
from llmcli.engine.seeds import sample_seed, uniforms
from llmcli.engine.session import Session
from llmcli.errors import NotFinite, PromptTooLong, UsageError

GREEDY = Sampling(temperature=0)
HOT = Sampling(
    temperature=1.2, top_k=0, top_p=0.98, min_p=0.01, repetition_penalty=1.1,
    presence_penalty=0.2, frequency_penalty=0.1, seed=42,
)  # fmt: skip
THE = 256 + EXTRA.index("the")
TH = 256 + EXTRA.index("th")
GAP = 256 + EXTRA.index("\n\n")
OTHER = 257
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


def plain_loop(prompt: list[int], sampling: Sampling, limit: int) -> list[int]:
    """Generation as one would write it first: everything anew for every token."""
    out: list[int] = []
    while len(out) < limit and (not out or out[-1] != EOS):
        counts = [torch.bincount(torch.tensor(x or [], dtype=torch.long), minlength=VOCAB)[None]
                  for x in (prompt, out)]  # fmt: skip
        probs = filtered(hashed((*prompt, *out))[None], sampling, *counts)
        u = torch.tensor(uniforms(sampling.seed, 0, len(out), 1), dtype=torch.float64)
        out.append(int(sample(probs, u)[0]))
    return out


@pytest.mark.parametrize("sampling", [GREEDY, HOT, Sampling(seed=3), Sampling(top_k=2)])
def test_a_batch_is_every_prompt_alone_and_the_plain_loop(sampling: Sampling) -> None:
    together = run(fake_model(), PROMPTS, sampling)
    assert list(together) == list(range(len(PROMPTS)))
    for number, prompt in enumerate(PROMPTS):
        alone = run(fake_model(), [prompt], sampling)[0]
        batched = together[number]
        assert ids(batched) == ids(alone) == plain_loop(prompt, sampling, 30)
        assert text(batched) == text(alone)
        assert [token.finish for token in batched] == [token.finish for token in alone]
        assert [token.index for token in batched] == list(range(len(batched)))
    lengths = {len(tokens) for tokens in together.values()}
    assert len(lengths) > 1  # they really end at different steps


def test_samples_are_runs_with_their_own_seeds() -> None:
    together = run(fake_model(), PROMPTS[:2], HOT, samples=3)
    assert list(together) == list(range(6))
    for number, tokens in together.items():
        prompt, i = divmod(number, 3)
        options = {name: getattr(HOT, name) for name in HOT.__dataclass_fields__}
        own = Sampling(**{**options, "seed": sample_seed(42, i)})
        assert ids(tokens) == ids(run(fake_model(), [PROMPTS[prompt]], own)[0])
    texts = [tuple(ids(tokens)) for tokens in together.values()]
    assert len(set(texts)) == 6


def test_samples_share_one_prefill() -> None:
    model = fake_model()
    run(model, [[5] * 100, [6] * 10], HOT, samples=4, limit=3)
    assert model.decoder.calls[0] == (2, 100)
    assert model.decoder.calls[1][0] == 8


def test_random_numbers_go_on_over_the_table_s_end(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run(fake_model(), PROMPTS, HOT, ignore_eos=True)
    monkeypatch.setattr(picker_module, "_STEPS", 7)
    assert run(fake_model(), PROMPTS, HOT, ignore_eos=True) == whole


def test_finished_sequences_leave_the_batch() -> None:
    model = fake_model()
    together = run(model, PROMPTS)
    for step, call in enumerate(model.decoder.calls[1:], start=1):
        assert call == (sum(len(tokens) > step for tokens in together.values()), 1)


@pytest.mark.parametrize("chunk", [1, 4, 16, 17, 512])
def test_prefill_in_chunks(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run(fake_model(), PROMPTS, HOT)
    monkeypatch.setattr(Session, "prefill", partialmethod(Session.prefill, chunk=chunk))
    seen: list[tuple[int, int]] = []
    model = fake_model()
    got = run(model, PROMPTS, HOT, on_prefill=lambda done, total: seen.append((done, total)))
    assert got == whole
    total = sum(map(len, PROMPTS))
    assert len(seen) == math.ceil(17 / chunk)
    assert seen[0][0] == sum(min(len(prompt), chunk) for prompt in PROMPTS)
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})


def test_finish_by_end_token() -> None:
    tokens = run(fake_model(script(104, 105, EOS, 106)), [[0]])[0]
    assert ids(tokens) == [104, 105, EOS]  # the end token is one of the ids …
    assert text(tokens) == "hi"  # … and no text
    assert [token.finish for token in tokens] == [None, None, "eos"]


def test_ignore_eos_prints_no_special_token() -> None:
    tokens = run(fake_model(script(104, EOS, OTHER, 105)), [[0]], limit=4, ignore_eos=True)[0]
    assert ids(tokens) == [104, EOS, OTHER, 105]
    assert text(tokens) == "hi"
    assert tokens[-1].finish == "length"


def test_an_end_token_with_text_is_not_printed() -> None:
    model = fake_model(script(104, 105))
    model.eos_ids = frozenset({105})
    tokens = run(model, [[0]])[0]
    assert (ids(tokens), text(tokens), tokens[-1].finish) == ([104, 105], "h", "eos")


def test_finish_by_limit() -> None:
    tokens = run(fake_model(script(104)), [[0]], limit=3)[0]
    assert text(tokens) == "hhh"
    assert [token.finish for token in tokens] == [None, None, "length"]


@pytest.mark.parametrize(
    ("stops", "expected", "count"),
    [
        (["e"], "th", 1),  # inside one token
        (["ethe"], "th", 2),  # over two
        (["hethet"], "t", 3),
        (["x", "\n"], "thethethe", 4),
        (["hethethe\n"], "t", 4),
        (["zzz"], "thethethe\n\na", 5),
    ],
)
def test_stop_strings_span_tokens(stops: list[str], expected: str, count: int) -> None:
    tokens = run(fake_model(script(THE, THE, THE, GAP, 97)), [[0]], stop=stops, limit=5)[0]
    assert text(tokens) == expected
    assert len(tokens) == count
    assert tokens[-1].finish == ("length" if stops == ["zzz"] else "stop")


@pytest.mark.parametrize(
    ("stop", "expected", "count"),
    [
        ("<other>", "thea", 3),  # a special token, which is not shown
        ("a<oth", "the", 3),
        ("<other>\n", "thea", 4),
        ("a\n", "the", 4),  # as it is read
        ("<eos>", "thea\n\n", 5),  # an end token
        ("\n<eos>", "thea\n", 5),
    ],
)
@pytest.mark.parametrize("ignore_eos", [True, False])
def test_stop_strings_see_special_tokens(
    stop: str, expected: str, count: int, ignore_eos: bool
) -> None:
    model = fake_model(script(THE, 97, OTHER, GAP, EOS, THE))
    tokens = run(model, [[0]], stop=[stop], ignore_eos=ignore_eos)[0]
    assert (text(tokens), len(tokens), tokens[-1].finish) == (expected, count, "stop")


def test_a_stop_string_outweighs_the_limit_and_held_text_comes_at_the_end() -> None:
    assert run(fake_model(script(TH, 101)), [[0]], stop=["the"], limit=2)[0][-1].finish == "stop"
    held = run(fake_model(script(TH, EOS)), [[0]], stop=["the"])[0]
    assert [token.text for token in held] == ["", "th"]
    assert held[-1].finish == "eos"
    cut = run(fake_model(script(TH)), [[0]], stop=["ththx"], limit=2)[0]
    assert [token.text for token in cut] == ["", "thth"]


def test_characters_come_whole() -> None:
    euro = "€".encode()
    tokens = run(fake_model(script(*euro, EOS)), [[0]])[0]
    assert [token.text for token in tokens] == ["", "", "€", ""]
    torn = run(fake_model(script(*euro[:2], EOS)), [[0]])[0]
    assert text(torn) == "\ufffd"
    assert torn[-1].finish == "eos"
    # the rest of a torn character can itself complete a stop string
    stopped = run(fake_model(script(*euro[:2], EOS)), [[0]], stop=["\ufffd"])[0]
    assert (text(stopped), stopped[-1].finish) == ("", "stop")


def test_without_a_tokenizer_there_are_ids_only() -> None:
    with_text, without = fake_model(), fake_model(text=False)
    assert ids(run(with_text, [[9]])[0]) == ids(run(without, [[9]])[0])
    assert text(run(without, [[9]])[0]) == ""


@pytest.mark.parametrize("sampling", [GREEDY, HOT])
def test_log_probabilities_are_the_model_s_own(sampling: Sampling) -> None:
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


def test_log_probabilities_on_request_only() -> None:
    assert run(fake_model(), [[1]])[0][0].logprob is None
    token = run(fake_model(), [[1]], logprobs=0)[0][0]
    assert token.logprob is not None
    assert token.top == ()
    everything = run(fake_model(), [[1]], logprobs=10_000, limit=1)[0][0].top
    assert sum(math.exp(value) for _, value in everything) == pytest.approx(1)


@pytest.mark.parametrize("limit", [1, 2, 5, 100])
def test_a_full_context_ends_the_sequence_alone(limit: int) -> None:
    model = fake_model(context=12)
    got = run(model, [[1] * 12, [2] * 10, [3]], HOT, limit=limit, ignore_eos=True)
    assert [len(tokens) for tokens in got.values()] == [min(limit, room) for room in (1, 3, 12)]
    assert all(tokens[-1].finish == "length" for tokens in got.values())
    assert model.decoder.capacities == [(3, 12)]


def test_capacity_is_given_in_buckets_below_the_context() -> None:
    for prompt, limit, expected in ((10, 20, 64), (60, 5, 64), (60, 6, 128), (100, 10**6, 1000)):
        model = fake_model(script(EOS), context=1000)
        run(model, [[1] * prompt], limit=limit)
        assert model.decoder.capacities == [(1, expected)]


def test_a_given_capacity_bounds_and_learned_positions_bound_it() -> None:
    wide = {"limit": 50, "ignore_eos": True}
    assert len(run(fake_model(context=9), [[1]], capacity=20, **wide)[0]) == 20
    assert len(run(fake_model(context=9), [[1]], capacity=5, **wide)[0]) == 5
    assert len(run(fake_model(context=9, positions=7), [[1]], capacity=20, **wide)[0]) == 7


def test_what_cannot_be_continued_is_refused_at_once() -> None:
    model = fake_model(context=10)
    with pytest.raises(PromptTooLong, match="12 tokens, 2 more than the context of 10"):
        stream(model, [[1] * 12], GREEDY, limit=1)
    with pytest.raises(PromptTooLong, match="prompt 1 has 11"):
        stream(model, [[1], [1] * 11], GREEDY, limit=1)
    for prompts in ([], [[]], [[1], []], [[VOCAB]], [[-1]]):
        with pytest.raises(UsageError):
            stream(model, prompts, GREEDY, limit=1)
    wrong = {"limit": 0, "samples": 0, "capacity": 0, "stop": [""], "logprobs": -1}
    for option, value in wrong.items():
        with pytest.raises(UsageError):
            stream(model, [[1]], GREEDY, **{"limit": 1, option: value})  # type: ignore[arg-type]
    assert model.decoder.calls == []


@pytest.mark.parametrize("bad", [math.nan, math.inf, None])
@pytest.mark.parametrize("sampling", [GREEDY, HOT])
def test_logits_that_are_not_finite(bad: float | None, sampling: Sampling) -> None:
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
def test_an_interruption_passes_through(at: str) -> None:
    def scores(ids: tuple[int, ...]) -> torch.Tensor:
        if len(ids) == (1 if at == "prefill" else 3):
            raise KeyboardInterrupt
        return script(104)(ids)

    tokens: list[Token] = []
    with pytest.raises(KeyboardInterrupt):
        tokens.extend(stream(fake_model(scores), [[0]], GREEDY, limit=9))
    assert text(tokens) == ("" if at == "prefill" else "hh")


def test_a_closed_stream_computes_nothing_more() -> None:
    model = fake_model()
    tokens = stream(model, [[0]], GREEDY, limit=9)
    next(tokens)
    tokens.close()  # type: ignore[attr-defined]
    assert len(model.decoder.calls) == 1
    assert torch.zeros(1, requires_grad=True).mul(2).requires_grad  # no mode leaks out


def test_tokens_come_before_the_next_step_is_computed() -> None:
    model = fake_model(script(104))
    for token in stream(model, [[0]], GREEDY, limit=5):
        assert len(model.decoder.calls) == token.index + 1
        assert not torch.is_inference_mode_enabled()

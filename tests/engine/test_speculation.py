"""Speculative decoding: a draft changes how many tokens are read at once, and no token."""

import dataclasses
from itertools import chain

import pytest
import torch
from continued import stream
from covers import in_turn
from decoder_parameters import packed_model
from needs import needs_kernels
from small_models import random_decoder, random_model
from tensors import drawn
from zoo import COMPUTED, IN_BLOCKS, MODELS

from llmcli.decoder.decoder import Decoder
from llmcli.engine.drafts import ModelDraft, NgramDraft
from llmcli.engine.sampler import Sampler
from llmcli.engine.sampling import Sampling
from llmcli.engine.seeds import uniforms
from llmcli.engine.session import Session
from llmcli.engine.speculation import ROWS, DraftLengthController, Speculation
from llmcli.kernels import native
from llmcli.ui.facts import draft_words

PROMPT = [3, 9, 1, 4, 3, 9, 1, 4, 3, 9]
NAMES = (
    "gpt2", "qk norm", "window", "short convolutions", "gated deltanet", "mamba-2",
    "longrope", "dynamic, within its length",
)  # fmt: skip


class Liar:
    """Proposes what it was told to, whatever the text is."""

    name, free = "liar", False

    def __init__(self, *ids):
        self.ids = list(ids)

    def begin(self, ids, sampler):
        self.begun = list(ids)

    def add(self, id):
        self.begun.append(id)

    def context_key(self):
        return 0

    def catch_up(self):
        pass

    def propose(self, count):
        return [self.ids[at % len(self.ids)] for at in range(count)]


@pytest.fixture
def eager(monkeypatch):
    """As many tokens as fit are drafted from the first one on, whatever they take."""
    monkeypatch.setattr(DraftLengthController, "rows", lambda self, key, most: min(most, 16))


@pytest.fixture(params=NAMES)
def model(request):
    return random_model(MODELS[request.param])


def another(model, seed):
    return dataclasses.replace(model, decoder=random_decoder(model.config, seed=seed))


DRAFTS = {
    "ngram": lambda model: NgramDraft(), "liar": lambda model: Liar(5, 1),
    "same": lambda model: ModelDraft(model, model),
    "another": lambda model: ModelDraft(another(model, 4), model),
}  # fmt: skip


SAMPLINGS = {
    "greedy": Sampling(temperature=0),
    "sampled": Sampling(temperature=0.7, top_k=0, top_p=1, min_p=0, seed=5),
    "penalties": Sampling(
        temperature=0.9, repetition_penalty=1.3, presence_penalty=0.2, frequency_penalty=0.1, seed=2
    ),
}  # fmt: skip


def written(model, sampling="greedy", draft=None, **settings):
    """The ids of a text, and its speculation, None without a draft."""
    speculation = None if draft is None else Speculation(draft)
    tokens = stream(model, [PROMPT], SAMPLINGS[sampling], **settings, speculation=speculation)
    return [token.id for token in tokens], speculation


@pytest.mark.usefixtures("eager")
def test_an_end_in_the_middle_of_a_proposal_ends_the_text(model):
    alone, _ = written(model, limit=12)
    ending = dataclasses.replace(model, eos_ids=frozenset({alone[5]}))
    wanted = alone[: alone.index(alone[5]) + 1]
    speculation = Speculation(ModelDraft(model, ending))
    found = list(stream(ending, [PROMPT], SAMPLINGS["greedy"], limit=12, speculation=speculation))
    assert [token.id for token in found] == wanted
    assert found[-1].finish == "eos"


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(
    ("model", "kind", "sampling"),
    in_turn(NAMES, list(DRAFTS), list(SAMPLINGS)),
    indirect=["model"],
)
def test_the_text_is_the_same(kind, sampling, model):
    sampling = SAMPLINGS[sampling]
    settings = {"limit": 40, "capacity": 33, "logprobs": 2}
    alone = list(stream(model, [PROMPT], sampling, **settings))
    speculation = Speculation(DRAFTS[kind](model))
    drafted = list(stream(model, [PROMPT], sampling, **settings, speculation=speculation))
    assert [token.id for token in drafted] == [token.id for token in alone]
    assert len(alone) == 24
    assert drafted[-1].finish == "length"
    for one, other in zip(drafted, alone, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-9)
        assert [id for id, _ in one.top] == [id for id, _ in other.top]
    ropes = [layer.attention.rope for layer in model.config.layers if layer.attention]
    if any(rope and type(rope.scaling).__name__ == "DynamicScaling" for rope in ropes):
        assert speculation.proposed == 0  # tokens that are read together rotate otherwise
    elif kind == "same":
        assert speculation.accepted > 12
    elif kind == "liar":
        assert speculation.accepted < speculation.proposed / 4


@pytest.mark.usefixtures("eager")
@needs_kernels
@pytest.mark.parametrize("name", IN_BLOCKS)
def test_packed_weights_have_the_same_bits(name, monkeypatch):
    model = packed_model(name)
    states = []
    monkeypatch.setattr(Decoder, "new_state", noted(Decoder.new_state, states))
    found = []
    for draft in (None, NgramDraft(), Liar(5, 1), ModelDraft(model, model)):
        speculation = None if draft is None else Speculation(draft)
        settings = {"limit": 40, "capacity": 50, "logprobs": 0, "speculation": speculation}
        tokens = list(stream(model, [PROMPT], SAMPLINGS["sampled"], **settings))
        found.append([(token.id, token.logprob) for token in tokens])
    rows = {count for state in states for count, _ in state.recorded}
    if name in COMPUTED or not rows:  # several rows are read as a prompt is
        assert name in COMPUTED or native.level() == "portable"
        assert rows == set()
        assert [[id for id, _ in one] for one in found[1:]] == [[id for id, _ in found[0]]] * 3
    else:
        assert rows == {1, *ROWS}
        assert found[1:] == found[:1] * 3


def noted(function, results):
    def call(*args, **kwargs):
        results.append(function(*args, **kwargs))
        return results[-1]

    return call


@pytest.mark.usefixtures("eager")
def test_what_nobody_asked_for_is_forgotten(model):
    """A text that is closed has read no more than one without a draft would have."""
    alone = Session(model.decoder, 1, 60)
    alone.prefill([PROMPT])
    ids = [int(best) for best in alone.decode(lambda x: (x.argmax(-1), x.argmax()), limit=20)]
    for count in (1, 2, 3, 7, 19):
        session = Session(model.decoder, 1, 60)
        session.prefill([PROMPT])
        steps = Speculation(ModelDraft(model, model)).decode(session, sampler(model))
        assert [next(steps)[0].id for _ in range(count)] == ids[:count]
        steps.close()
        assert session.ids == [[*PROMPT, *ids[: count - 1]]]
        logits_BV = session.extend([[ids[count - 1]]])
        torch.testing.assert_close(
            logits_BV[0], model.decoder(torch.tensor([PROMPT + ids[:count]]))[0, -1]
        )


def sampler(model, sampling=SAMPLINGS["greedy"], limit=99):
    vocab, device = model.config.vocab, model.device
    return Sampler(sampling, [PROMPT], vocab=vocab, device=device, limit=limit)


@pytest.mark.usefixtures("eager")
def test_reading_a_long_prompt_is_not_what_a_proposal_takes(monkeypatch):
    """Else a draft that has to read it never proposes again."""
    model = random_model(dataclasses.replace(MODELS["llama"], context=512))
    small, reads = another(model, 3), [[]]  # before a proposal, in it, before the next one …
    call, propose = Decoder.__call__, ModelDraft.propose

    def called(self, ids, *arguments, **settings):
        if self is small.decoder:
            reads[-1].append(ids.shape[1])
        return call(self, ids, *arguments, **settings)

    def proposed(self, count):
        reads.append([])
        found = propose(self, count)
        reads.append([])
        return found

    monkeypatch.setattr(Decoder, "__call__", called)
    monkeypatch.setattr(ModelDraft, "propose", proposed)
    session = Session(model.decoder, 1, 400)
    session.prefill([PROMPT * 30])
    steps = Speculation(ModelDraft(small, model)).decode(session, sampler(model))
    for _ in range(99):
        next(steps)
    assert [*chain(*reads[::2])] == [300]
    assert len(reads) > 10
    assert max(map(max, reads[1::2])) <= 2


@needs_kernels
@pytest.mark.usefixtures("eager")
def test_a_draft_near_its_end_proposes_what_was_recorded(monkeypatch):
    model = packed_model("llama")
    small = dataclasses.replace(model, config=dataclasses.replace(model.config, context=33))
    states = []
    monkeypatch.setattr(Decoder, "new_state", noted(Decoder.new_state, states))
    settings = {"limit": 40, "capacity": 50}
    ids, speculation = written(model, draft=ModelDraft(small, model), **settings)
    assert ids == written(model, **settings)[0]
    assert speculation.accepted > 5
    if native.level() != "portable":
        assert {1} < {rows for state in states for rows, _ in state.recorded} <= {1, *ROWS}


@pytest.mark.usefixtures("eager")
def test_tokens_are_counted_where_they_are_chosen():
    model = random_model(MODELS["llama"])
    alone, _ = written(model, limit=12)
    wanted = max(map(alone.index, alone)) + 1
    ending = dataclasses.replace(model, eos_ids=frozenset({alone[wanted - 1]}))
    _, speculation = written(ending, draft=ModelDraft(model, ending), limit=40)
    assert wanted > 3
    # all but the first one were proposed; nothing is known of those behind the end
    assert (speculation.accepted, speculation.proposed) == (wanted - 1, wanted - 1)
    _, lying = written(model, draft=Liar(5, 1), limit=4)
    assert lying.accepted == 0 < lying.proposed


@needs_kernels
def test_no_more_is_read_ahead_than_there_is_memory_for(monkeypatch):
    decoder = packed_model("llama").decoder
    session = Session(decoder, 1, 60)
    session.prefill([PROMPT])
    for _ in range(3):
        session.extend(torch.tensor([[7]]))
    if not session.state.recorded:
        pytest.skip("there are no kernels")
    nbytes = session.state.recorded[1, 60].nbytes
    assert nbytes > decoder.config.width * 4 * 5
    monkeypatch.setattr("llmcli.decoder.decoder.available_bytes", lambda device: 8 * nbytes)
    assert [session.can_verify(rows) for rows in ROWS] == [True, True, False]


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("speedup", [0.9, 1.1, None])
def test_a_draft_that_makes_it_slower_is_turned_off(speedup, monkeypatch):
    model = random_model(dataclasses.replace(MODELS["llama"], context=512))
    monkeypatch.setattr(Speculation, "speedup", property(lambda self: speedup))
    settings = {"limit": 200, "capacity": 220}
    ids, speculation = written(model, draft=Liar(5, 1), **settings)
    assert ids == written(model, **settings)[0]
    stopped = speculation.describe()["stopped"]
    assert stopped == (speedup == 0.9)
    assert (64 <= speculation.proposed < 64 + max(ROWS)) == stopped
    assert draft_words(speculation.describe()).endswith(": turned off") == stopped


def test_several_sequences_are_decoded_without_a_draft():
    model = random_model(MODELS["llama"])
    speculation = Speculation(NgramDraft())
    tokens = stream(model, [PROMPT, PROMPT], SAMPLINGS["greedy"], limit=4, speculation=speculation)
    assert len(list(tokens)) == 8
    assert speculation.proposed == 0


def test_a_guess_is_the_pick_it_stands_for():
    model = random_model(MODELS["llama"])
    choice = sampler(model, SAMPLINGS["sampled"])
    logits = drawn(6, model.config.vocab)
    guesses = [choice.guess(logits[at : at + 1], at) for at in range(6)]
    assert guesses == [choice.pick(logits[at : at + 1])[1][0].id for at in range(6)]
    assert len(set(uniforms(5, 0, 0, 6))) == 6


def test_ngrams_look_up_the_last_place_and_go_round():
    draft = NgramDraft()
    draft.begin([1, 2, 3, 4, 1, 2, 5, 6, 1, 2], None)
    assert draft.context_key() == 2
    assert draft.propose(3) == [5, 6, 1]
    draft.add(3)
    assert draft.context_key() == 3
    assert draft.propose(2) == [4, 1]
    draft.add(8)
    assert draft.context_key() is None
    draft.begin([7, 7, 7], None)
    assert draft.propose(5) == [7] * 5


# how many tokens are read at once: by what steps took and how often proposals were right


def made(prior=0.6, **seconds):
    pace = DraftLengthController(prior)
    for rows, each in seconds.items():
        for _ in range(5):
            pace.record_step(int(rows[1:]), each)
    return pace


def test_how_many_tokens_are_read_at_once():
    """None are drafted before a step was measured, nor where it promises little."""
    assert DraftLengthController(0.6).rows(0, 16) == 1
    assert made(prior=0.45, _1=1.0).rows(0, 4) == 1, "to be recorded first"
    assert made(prior=0.45, _1=1.0, _4=1.45).rows(0, 4) == 4
    pace = made(_1=1.0, _4=1.6, _8=2.4, _16=4.6)
    for _ in range(60):
        pace.record_acceptance(0, True)
    assert [pace.rows(0, most) for most in (16, 15, 1)] == [16, 8, 1], "right ones in large pieces"
    pace = made(_1=1.0, _4=1.5)
    for _ in range(20):
        pace.record_acceptance(2, False)
    assert (pace.rows(2, 4), pace.rows(4, 4)) == (1, 4), "each key by itself"


def test_proposals_that_are_wrong_end_soon_and_are_tried_now_and_then():
    pace, tried = made(_1=1.0, _4=1.5), 0
    for _ in range(400):
        if pace.rows(0, 4) > 1:
            tried += 1
            pace.record_acceptance(0, False)
    assert 2 <= tried <= 12


def test_a_draft_that_takes_as_long_as_the_model_is_not_asked():
    pace = made(_1=1.0, _4=1.2)
    assert pace.rows(0, 4) > 1
    pace.record_draft(1.0)
    assert pace.rows(0, 4) == 1
    asked = [pace.rows(0, 4) > 1 for _ in range(400)]
    assert asked[-1], "it may have been a neighbour that took the time"
    assert not any(asked[:20])

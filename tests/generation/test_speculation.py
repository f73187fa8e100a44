"""Speculative decoding: a draft changes how many tokens are read at once, and no token."""

import dataclasses
from collections import Counter

import pytest
import torch
from small_models import random_decoder, random_model
from zoo import IN_BLOCKS, MODELS

from llmcli.engine.session import Session
from llmcli.errors import UsageError
from llmcli.formats.dense import writable
from llmcli.generation.drafts import ModelDraft, NgramDraft
from llmcli.generation.engine import stream
from llmcli.generation.picker import Picker
from llmcli.generation.sampling import Sampling, filtered
from llmcli.generation.seeds import uniforms
from llmcli.generation.speculation import Pace, Speculation
from llmcli.kernels import native
from llmcli.model import Model

PROMPT = [3, 9, 1, 4, 3, 9, 1, 4, 3, 9]
NAMES = (
    "gpt2", "qk norm", "window", "short convolutions", "longrope", "dynamic, within its length",
)  # fmt: skip


class Liar:
    """Proposes what it was told to, whatever the text is."""

    name = "liar"

    def __init__(self, *ids):
        self.ids = list(ids)

    def begin(self, ids, picker):
        self.begun = list(ids)

    def add(self, id):
        self.begun.append(id)

    def ground(self):
        return 0

    def propose(self, count):
        return [self.ids[at % len(self.ids)] for at in range(count)]


@pytest.fixture
def eager(monkeypatch):
    """As many tokens as fit are drafted from the first one on, whatever they take."""
    monkeypatch.setattr(Pace, "rows", lambda self, ground, most: most)


@pytest.fixture(params=NAMES)
def model(request):
    return random_model(MODELS[request.param])


def draft_of(kind, model):
    if kind == "ngram":
        return NgramDraft()
    if kind == "liar":
        return Liar(5, 1)
    small = model
    if kind == "another":
        small = dataclasses.replace(model, decoder=random_decoder(model.config, seed=4))
    return ModelDraft(small, model)


SAMPLINGS = {
    "greedy": Sampling(temperature=0),
    "sampled": Sampling(temperature=0.7, top_k=0, top_p=1, min_p=0, seed=5),
    "penalties": Sampling(
        temperature=0.9, repetition_penalty=1.3, presence_penalty=0.2, frequency_penalty=0.1,
        seed=2,
    ),
}  # fmt: skip


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("kind", ["ngram", "liar", "same", "another"])
def test_the_text_is_the_same(kind, sampling, model):
    sampling = SAMPLINGS[sampling]
    settings = {"limit": 40, "capacity": 45, "logprobs": 2}
    alone = list(stream(model, [PROMPT], sampling, **settings))
    speculation = Speculation(draft_of(kind, model))
    drafted = list(stream(model, [PROMPT], sampling, **settings, speculation=speculation))
    assert [token.id for token in drafted] == [token.id for token in alone]
    assert len(alone) == 36
    assert drafted[-1].finish == "length"
    for one, other in zip(drafted, alone, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-9)
        assert [id for id, _ in one.top] == [id for id, _ in other.top]
    if any(type(rope.scaling).__name__ == "DynamicScaling" for rope in ropes(model)):
        assert speculation.proposed == 0  # tokens that are read together rotate otherwise
    elif kind == "same":
        assert speculation.accepted > 20
    elif kind == "liar":
        assert speculation.accepted < speculation.proposed / 4


def ropes(model):
    parts = [layer.attention for layer in model.config.layers if layer.attention is not None]
    return [part.rope for part in parts if part.rope is not None]


@pytest.mark.usefixtures("eager")
@pytest.mark.skipif(native.level() is None, reason="there are no kernels")
@pytest.mark.parametrize("name", IN_BLOCKS)
def test_packed_weights_have_the_same_bits(name):
    config, formats = IN_BLOCKS[name]
    model = random_model(config, formats=formats)
    session = Session(model.decoder, 1, 60)
    session.prefill([PROMPT])
    session.extend([[7]])
    session.extend(torch.tensor([[8]]))
    session.extend(torch.tensor([[9]]))
    replayed = bool(session.state.replays)
    found = []
    for draft in (None, NgramDraft(), Liar(5, 1), ModelDraft(model, model)):
        speculation = None if draft is None else Speculation(draft)
        settings = {"limit": 40, "capacity": 50, "logprobs": 0, "speculation": speculation}
        tokens = list(stream(model, [PROMPT], SAMPLINGS["sampled"], **settings))
        found.append([(token.id, token.logprob) for token in tokens])
    if replayed:
        assert found[0] == found[1] == found[2] == found[3]


def test_sampled_text_has_the_models_distribution(monkeypatch):
    """Three tokens of 3,000 seeds: Pearson's χ² of the 20 likeliest texts of two, then the rest."""
    model = random_model(MODELS["llama"])
    monkeypatch.setattr(Pace, "rows", lambda self, ground, most: 2)
    another = dataclasses.replace(model, decoder=random_decoder(model.config))
    head = writable(another.decoder.weight("head.W"))
    head += 0.3 * torch.randn(head.shape, generator=torch.Generator().manual_seed(1))
    sampling = Sampling(temperature=0.4, top_k=6, top_p=0.95, min_p=0.02)
    draft, runs = ModelDraft(another, model), 3000
    session = Session(model.decoder, 1, 24)
    session.prefill([PROMPT])
    logits_BV, length = session.logits_BV.clone(), len(PROMPT)
    seen, accepted = Counter(), 0
    for seed in range(runs):
        session.rewind(length, logits_BV=logits_BV)
        picker = Picker(
            dataclasses.replace(sampling, seed=seed), [PROMPT], samples=1,
            vocab=model.config.vocab, device=model.device, logprobs=None, limit=3,
        )  # fmt: skip
        speculation = Speculation(draft)
        steps = speculation.decode(session, picker)
        seen[tuple(next(steps)[0].id for _ in range(3))[1:]] += 1
        accepted += speculation.accepted
    assert 0.2 * runs < accepted < 0.8 * runs, "some are right and some are wrong"
    expected = distribution(model, sampling)
    best = sorted(expected, key=expected.get, reverse=True)[:20]
    pairs = [(seen[text], runs * expected[text]) for text in best]
    pairs.append((runs - sum(a for a, _ in pairs), runs - sum(b for _, b in pairs)))
    chi2 = sum((count - mean) ** 2 / mean for count, mean in pairs)
    assert chi2 < 45.3  # of 20 degrees of freedom in 999 of 1000 runs; the seeds are fixed


def distribution(model, sampling):
    """Probabilities of the second and third token together."""
    found = Counter()

    def next_probs(ids):
        logits = model.decoder(torch.tensor([ids]), logits="last")[:, 0]
        probs = filtered(logits, sampling)[0]
        return [(int(id), float(probs[id])) for id in probs.nonzero()[:, 0]]

    for a, p in next_probs(PROMPT):
        for b, q in next_probs([*PROMPT, a]):
            for c, r in next_probs([*PROMPT, a, b]):
                found[b, c] += p * q * r
    return found


@pytest.mark.usefixtures("eager")
def test_an_end_in_the_middle_of_a_proposal_ends_the_text(model):
    alone = [token.id for token in stream(model, [PROMPT], SAMPLINGS["greedy"], limit=12)]
    ending = dataclasses.replace(model, eos_ids=frozenset({alone[5]}))
    wanted = alone[: alone.index(alone[5]) + 1]
    speculation = Speculation(ModelDraft(model, ending))
    found = list(
        stream(ending, [PROMPT], SAMPLINGS["greedy"], limit=12, speculation=speculation)
    )
    assert [token.id for token in found] == wanted
    assert found[-1].finish == "eos"


def test_several_sequences_are_decoded_without_a_draft(model):
    speculation = Speculation(NgramDraft())
    tokens = stream(model, [PROMPT, PROMPT], SAMPLINGS["greedy"], limit=4, speculation=speculation)
    assert len(list(tokens)) == 8
    assert speculation.proposed == 0


def test_a_guess_is_the_pick_it_stands_for():
    sampling = SAMPLINGS["sampled"]
    picker = Picker(
        sampling, [PROMPT], samples=1, vocab=43, device=torch.device("cpu"), logprobs=None, limit=9
    )
    logits = torch.randn(6, 43, generator=torch.Generator().manual_seed(0))
    guesses = [picker.guess(logits[at : at + 1], at) for at in range(6)]
    picked = [picker.pick(logits[at : at + 1])[1][0].id for at in range(6)]
    assert guesses == picked
    assert len(set(uniforms(5, 0, 0, 6))) == 6


def test_ngrams_look_up_the_last_place_and_go_round():
    draft = NgramDraft()
    draft.begin([1, 2, 3, 4, 1, 2, 5, 6, 1, 2], None)
    assert draft.ground() == 2
    assert draft.propose(3) == [5, 6, 1]
    draft.add(3)
    assert draft.ground() == 3
    assert draft.propose(2) == [4, 1]
    draft.add(8)
    assert draft.ground() is None
    draft.begin([7, 7, 7], None)
    assert draft.propose(5) == [7] * 5


def test_a_draft_of_another_vocabulary_is_refused():
    model = random_model(MODELS["llama"])
    config = dataclasses.replace(MODELS["llama"], vocab=44)
    other = Model(
        name="other", config=config, decoder=random_decoder(config), tokenizer=None,
        checkpoint=None, eos_ids=frozenset(),
    )  # fmt: skip
    with pytest.raises(UsageError, match="`other` has another vocabulary than `small`"):
        ModelDraft(other, model)


class TestPace:
    def pace(self, **seconds):
        pace = Pace()
        for rows, each in seconds.items():
            for _ in range(5):
                pace.took(int(rows[1:]), each)
        return pace

    def test_nothing_is_drafted_before_a_step_was_measured(self):
        assert Pace().rows(0, 16) == 1

    def test_proposals_that_are_right_are_read_in_large_pieces(self):
        pace = self.pace(_1=1.0, _2=1.2, _4=1.6, _8=2.4, _16=4.6)
        for _ in range(60):
            pace.saw(0, True)
        assert pace.rows(0, 16) == 16
        assert pace.rows(0, 5) == 4
        assert pace.rows(0, 1) == 1

    def test_proposals_that_are_wrong_end_soon_and_are_tried_now_and_then(self):
        pace = self.pace(_1=1.0, _2=1.2, _4=1.6)
        tried = 0
        for _ in range(200):
            if pace.rows(0, 4) > 1:
                tried += 1
                pace.saw(0, False)
        assert 2 <= tried <= 12

    def test_what_is_known_of_one_ground_is_not_of_another(self):
        pace = self.pace(_1=1.0, _2=1.2)
        for _ in range(20):
            pace.saw(2, False)
        assert (pace.rows(2, 2), pace.rows(4, 2)) == (1, 2)

    def test_a_draft_that_takes_as_long_as_the_model_is_not_asked(self):
        pace = self.pace(_1=1.0, _2=1.1, _4=1.2)
        assert pace.rows(0, 4) > 1
        pace.drafted(1.0)
        assert pace.rows(0, 4) == 1

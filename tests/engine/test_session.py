"""A session: sequences that are read, continued, forked, undone and put back."""

import pytest
import torch
from covers import KINDS, covered
from small_models import as_model, ids, random_decoder
from zoo import MODELS, VOCAB, stretched

from llmcli.commands.score import measure as score
from llmcli.config.attention import DynamicScaling, LongRopeScaling
from llmcli.decoder.decoder import Decoder
from llmcli.engine.session import Session
from llmcli.graph.graph import graph
from llmcli.inspect.passes import remembered
from llmcli.inspect.windows import CHUNK

PROMPTS = [[5, 9, 2, 7, 11], [3], [8, 1, 4]]


@pytest.fixture(params=KINDS)
def decoder(request):
    return random_decoder(MODELS[request.param])


def likeliest(logits_BV):
    ids_B = logits_BV.argmax(-1)
    return ids_B, ids_B.tolist()


def whole(decoder, row):
    return decoder(torch.tensor([row]))[0]


def check(session, ids=None):
    """The last logits of every sequence are those of its whole text, which is `ids`."""
    assert ids in (None, session.ids)
    for row, logits_V in zip(session.ids, session.logits_BV, strict=True):
        torch.testing.assert_close(logits_V, whole(session.decoder, row)[-1])


@pytest.mark.parametrize("decoder", covered(MODELS), indirect=True)
def test_lists_of_unequal_length_are_read_in_one_call(decoder):
    session = Session(decoder, 3, 12)
    logits = session.extend(PROMPTS, logits="all")
    for row, prompt in enumerate(PROMPTS):
        torch.testing.assert_close(logits[row, : len(prompt)], whole(decoder, prompt))
    check(session, PROMPTS)
    assert session.extend([[6], [2, 2], [1]]) is session.logits_BV
    check(session, [[*PROMPTS[0], 6], [3, 2, 2], [*PROMPTS[2], 1]])
    assert session.lengths == [6, 3, 4]


def test_what_is_not_needed_is_not_computed(decoder):
    heard = []
    session = Session(decoder, 1, 12)
    stream = session.extend([[1, 2, 3]], logits="none", clock=heard.append)
    assert stream.shape == (1, 3, decoder.config.width)
    assert heard[-1] == f"blocks.{decoder.readers - 1}.resid_post"
    assert session.logits_BV is None
    with pytest.raises(ValueError, match="no logits are known"):
        next(session.decode(likeliest))
    session.extend([[4]])
    session.extend([[4]], logits="none")
    with pytest.raises(ValueError, match="no logits are known"):
        next(session.decode(likeliest))  # those of the token before are not its own
    heard.clear()
    session.extend([[4]], until=0, clock=heard.append)
    assert heard[-1] == "blocks.0.resid_post"


def test_the_last_logits_alone_are_those_of_all(decoder):
    """Without a state, too, and with embeddings for each layer: where layers keep nothing, of these
    tokens alone they are computed.
    """
    ids_BT = torch.tensor([[*row, *[0] * (5 - len(row))] for row in PROMPTS])
    lengths = [len(row) for row in PROMPTS]
    every = decoder(ids_BT, lengths=lengths)
    heard = []
    last = decoder(ids_BT, lengths=lengths, logits="last", clock=heard.append)
    torch.testing.assert_close(last[:, 0], every[torch.arange(3), torch.tensor(lengths) - 1])
    assert f"blocks.{len(decoder.blocks) - 1}.resid_post" in heard


def test_a_token_is_read_when_the_next_is_requested(decoder):
    session = Session(decoder, 1, 20)
    session.prefill([PROMPTS[0]])
    chosen = []
    for (id,) in session.decode(likeliest):
        chosen.append(id)
        assert session.lengths == [len(PROMPTS[0]) + len(chosen) - 1]
        if len(chosen) == 4:
            break
    assert session.ids == [[*PROMPTS[0], *chosen[:3]]]
    assert session.advance() is session.logits_BV
    check(session, [[*PROMPTS[0], *chosen]])
    with pytest.raises(ValueError, match="no token was chosen"):
        session.advance()
    for length in range(5, 9):  # each was the likeliest after those before it
        assert whole(decoder, session.ids[0][:length])[-1].argmax() == session.ids[0][length]


def test_of_a_limit_all_tokens_are_read(decoder):
    session = Session(decoder, 3, 20)
    session.prefill(PROMPTS)
    chosen = list(session.decode(likeliest, limit=3))
    assert len(chosen) == 3
    assert session.ids == [
        [*prompt, *new] for prompt, new in zip(PROMPTS, zip(*chosen, strict=True), strict=True)
    ]


def test_sequences_are_forked_and_dropped_between_choice_and_call(decoder):
    session = Session(decoder, 3, 20)
    session.prefill(PROMPTS)
    session.select([2, 0, 2, 1])
    steps = session.decode(likeliest)
    first = next(steps)
    assert first[0] == first[2]
    session.select([3, 0])
    second = next(steps)
    assert session.ids == [[*PROMPTS[1], first[3]], [*PROMPTS[2], first[0]]]
    for row, new in zip(session.ids, second, strict=True):
        assert whole(decoder, row)[-1].argmax() == new


def test_rewound_it_goes_on_as_if_nothing_had_been_read(decoder):
    session = Session(decoder, 2, 20)
    after = session.prefill([PROMPTS[0], PROMPTS[0][::-1]])
    session.keep()
    first = list(session.decode(likeliest, limit=4))
    session.rewind(5)
    assert session.logits_BV is after
    assert list(session.decode(likeliest, limit=4)) == first
    if not session.state.rewinds:
        with pytest.raises(ValueError, match="cannot forget its last tokens"):
            session.rewind(2)
        return
    session.rewind(2)
    assert session.ids == [PROMPTS[0][:2], PROMPTS[0][::-1][:2]]
    assert session.logits_BV is None
    with pytest.raises(ValueError, match="cannot rewind 2 tokens to 3"):
        session.rewind(3)


def test_a_snapshot_is_gone_back_to_any_number_of_times(decoder):
    session = Session(decoder, 2, 9)
    session.prefill([PROMPTS[0], PROMPTS[2]])
    saved = session.snapshot()
    first = list(session.decode(likeliest, limit=4))
    for _ in range(2):
        session.restore(saved)
        assert session.ids == [PROMPTS[0], PROMPTS[2]]
        assert list(session.decode(likeliest, limit=4)) == first
        if session.state.rewinds:
            session.rewind(1)  # and over the slots of the prompt, which the snapshot has too
            session.extend([[6] * 8, [6] * 8])
    session.grow(12)
    session.restore(saved)
    assert list(session.decode(likeliest, limit=6))[:4] == first
    session.select([0])
    with pytest.raises(ValueError, match="2 × 5 tokens does not fit a state of 1 × 12"):
        session.restore(saved)


@pytest.fixture
def session():
    """Of a model that can forget single tokens."""
    session = Session(random_decoder(MODELS["llama"]), 1, 12)
    session.extend([PROMPTS[0]])
    return session


def test_of_what_was_read_the_last_token_alone_is_read_again(session):
    assert session.reuse(PROMPTS[0]) == len(PROMPTS[0]) - 1
    session.extend([PROMPTS[0][-1:]])
    session.keep()
    assert session.reuse(PROMPTS[0]) == len(PROMPTS[0])


def test_a_queued_text_fills_its_slots_and_has_one_token_more(session):
    def draw(logits_BV):
        ids_B, chosen = likeliest(logits_BV)
        return ids_B, lambda: chosen

    tokens = session.decode(draw)
    assert len([next(tokens) for _ in range(12 - len(PROMPTS[0]) + 1)]) == 8
    with pytest.raises(ValueError, match="fit"):
        next(tokens)


def stopped(*arguments):
    raise KeyboardInterrupt


def test_a_call_or_a_return_that_is_cut_off_leaves_no_half_of_it(decoder, monkeypatch):
    """Some layers have read a token, or are back where it was kept, and others have not."""
    text = [*PROMPTS[0], 6, 2, 7]
    session = Session(decoder, 1, 12)
    session.prefill([PROMPTS[0]])
    session.keep()
    last = f"blocks.{len(decoder.blocks) - 1}.resid_post"
    for cut_off in ("call", "return"):
        session.extend([[6, 2]])
        if cut_off == "call":
            with pytest.raises(KeyboardInterrupt):
                session.extend([[3]], tap=lambda name, tensor: name == last and stopped())
        with monkeypatch.context() as patch:
            if cut_off == "return":
                for method in ("rewind", "restore"):
                    patch.setattr(session.state.layers[-1], method, stopped)
                with pytest.raises(KeyboardInterrupt):
                    session.reuse([*PROMPTS[0], 3])
        session.prefill([text[session.reuse(text) :]])
        check(session, [text])
        session.rewind(len(PROMPTS[0]))


def test_a_place_that_was_kept_goes_with_the_tokens_before_it(session):
    session.keep()
    session.rewind(2)
    session.extend([[4, 4, 4, 4]])
    session.rewind(len(PROMPTS[0]))
    assert session.logits_BV is None, "those that were kept are of another text"


def test_places_that_were_kept_belong_to_a_snapshot(decoder):
    session = Session(decoder, 1, 12)
    session.prefill([PROMPTS[0][:2]])
    session.keep()
    session.prefill([PROMPTS[0][2:]])
    saved = session.snapshot()
    session.extend([[7, 7]])
    session.rewind(0)
    session.extend([[8, 8, 8]])
    session.keep()
    session.restore(saved)
    session.rewind(2)
    session.extend([PROMPTS[0][2:]])
    check(session, [PROMPTS[0]])
    for _ in range(3):
        session.keep()
        session.extend([[5]])
    assert len(session.snapshot().kept) == 2


def test_a_snapshot_has_no_empty_slots_and_does_not_fit_a_smaller_state(decoder):
    session = Session(decoder, 1, 9)
    session.prefill([PROMPTS[0]])
    saved = session.state.snapshot()
    assert saved.nbytes == Session(decoder, 1, 5).state.nbytes
    slots = any("S" in state.axes for state in graph(decoder.config).states.values())
    assert (saved.nbytes < session.state.nbytes) is slots
    with pytest.raises(ValueError, match="1 × 5 tokens does not fit a state of 1 × 4"):
        Session(decoder, 1, 4).state.restore(saved)


def test_the_state_s_tensors_have_their_names(decoder):
    session, seen = Session(decoder, 1, 9), {}
    session.extend([PROMPTS[0]], tap=lambda name, tensor: seen.setdefault(name, tensor))
    states = graph(decoder.config).states
    tensors = session.state.tensors()
    assert list(tensors) == list(states)
    for name, tensor in tensors.items():
        held, axes = seen.get(states[name].holds), ("B", *states[name].axes)
        if "S" in axes:  # a slot for each position
            assert torch.equal(tensor.narrow(axes.index("S"), 0, 5), held)
            assert not tensor.narrow(axes.index("S"), 5, 4).any()
        elif "state" in name:
            emitted = {key: value for key, value in seen.items() if key.startswith("blocks.")}
            mixer = decoder.blocks[states[name].layer].mixers[0]
            after = mixer.derive(states[name].holds, emitted, 4, 5)[:, :, 0]
            torch.testing.assert_close(tensor, after)
        else:  # the last ones that a convolution reads
            rows = remembered(graph(decoder.config), states[name], held[0])
            assert torch.equal(tensor[0], rows)


def test_long_prompts_and_those_that_follow_them_come_in_chunks(decoder):
    tokens = ids(2, 17).tolist()
    heard = []
    session = Session(decoder, 2, 20)
    session.prefill([tokens[0][:3], tokens[1][:2]])
    more = [tokens[0][3:], tokens[1][2:9]]
    session.prefill(more, chunk=4, on_prefill=lambda *said: heard.append(said))
    check(session, [tokens[0], tokens[1][:9]])
    assert heard == [(8, 21), (15, 21), (19, 21), (21, 21)]
    assert max(map(max, session.ids)) < VOCAB


def test_a_sequence_that_outgrows_the_short_factors_of_longrope_is_read_again():
    decoder, heard = random_decoder(MODELS["longrope"]), []  # which end at 4 tokens
    session = Session(decoder, 3, 12, on_reprefill=heard.append)
    session.prefill([[5, 9, 2, 7, 11], [3], [8, 1, 4]])
    for new in ([6, 2, 1], [2, 2, 5], [0, 3, 3], [1, 1, 8]):
        session.extend([[id] for id in new])
        check(session)
    assert heard == [6, 8]  # when the third sequence gets its fifth token, and the second
    session.rewind(2)
    session.extend([[7], [7], [7]])
    check(session)
    assert heard == [6, 8, 2]


def test_what_longrope_was_read_for_is_kept_by_samples_and_snapshots():
    decoder, heard = random_decoder(MODELS["longrope"]), []
    session = Session(decoder, 2, 12, on_reprefill=heard.append)
    session.prefill([[5, 9, 2, 7], [3, 1, 2, 2]])
    saved = session.snapshot()
    for _ in range(2):
        session.select([1, 0])
        session.extend([[4], [8]])
        check(session)
        session.restore(saved)
    assert heard == [4, 4]


# reading a long prompt in chunks gives what one forward call gives

STRETCHED = {
    "none": None, "dynamic": DynamicScaling(factor=2.0, original=16),
    "longrope": LongRopeScaling(
        short=(1.0,) * 4, long=(1.0, 1.5, 2.0, 4.0), original=16, attention_factor=1.0
    ),
}  # fmt: skip


@pytest.fixture(params=STRETCHED)
def read(request):
    """A decoder that was trained for 16 tokens."""
    return random_decoder(stretched(STRETCHED[request.param]))


@pytest.mark.parametrize("lengths", [(30,), (7,), (14,), (3, 30, 8), (14, 9), (7, 7, 21)])
def test_logits_are_those_of_calls_that_all_have_some_bit_for_bit(read, lengths):
    prompts = [[(3 * row + 5 * i) % VOCAB for i in range(n)] for row, n in enumerate(lengths)]
    session, state = (make(read, len(prompts), 40) for make in (Session, Decoder.new_state))
    last = session.prefill(prompts, chunk=7)
    found = torch.empty_like(last)
    for start in range(0, max(lengths), 7):
        parts = [prompt[start : start + 7] for prompt in prompts]
        here = list(map(len, parts))
        some = torch.tensor(here) > 0
        ids = torch.tensor([part + [0] * (max(here) - len(part)) for part in parts])
        logits = read(ids, state, lengths=here, totals=lengths, logits="last")
        found[some] = logits[some, 0]  # in the end, those of the call in which a prompt ends
    assert torch.equal(last, found)
    kept = state.tensors()
    assert all(torch.equal(one, kept[name]) for name, one in session.state.tensors().items())
    assert session.lengths == state.lengths == list(lengths)
    assert session.ids == prompts


@pytest.mark.parametrize(
    ("lengths", "heads"), [((30,), [4]), ((7,), [0]), ((14,), [1]), ((3, 30, 8), [0, 1, 4])]
)
def test_norm_and_head_are_computed_where_a_prompt_ends_and_nowhere_else(read, lengths, heads):
    prompts = [[1] * n for n in lengths]
    heard = []
    Session(read, len(prompts), 40).prefill(prompts, chunk=7, clock=heard.append)
    calls = [call.split() for call in " ".join(heard).split("step ")[1:]]
    assert len(calls) == -(-max(lengths) // 7)
    for number, names in enumerate(calls):
        ends = ["ln_final.out", "logits_raw", "logits"] if number in heads else []
        assert [name for name in names if name.startswith(("ln_final", "logits"))] == ends


@pytest.mark.parametrize("count", [16, 17, 18, 2 * CHUNK + 9])  # the trained length is 16
def test_scores_are_those_of_one_pass(read, count):
    """About the trained length: the last token is not read, but it chooses LongRoPE's factors."""
    ids = [at % VOCAB for at in range(count)]
    given = ids, [""] * count, [(0, 0)] * count
    report = score.measure_score(as_model(read), *given, window=count, stride=1)
    logprobs = read(torch.tensor([ids]))[0].log_softmax(-1)
    expected = [logprobs[at, id].item() for at, id in enumerate(ids[1:])]
    assert [token.logprob for token in report.tokens[1:]] == pytest.approx(expected, abs=1e-9)

"""A conversation: what is read once stays read, what the model wrote keeps its ids."""

import dataclasses
import json

import pytest
import torch
from small_models import random_decoder
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Library
from zoo import MODELS

from llmcli.checkpoints import open_checkpoint
from llmcli.engine.conversation import Conversation
from llmcli.engine.drafts import ModelDraft
from llmcli.engine.messages import LEAD, Message
from llmcli.engine.sampling import Sampling
from llmcli.engine.speculation import Pace, Speculation
from llmcli.errors import CheckpointError, PromptTooLong, UsageError
from llmcli.model import Model
from llmcli.text import load_tokenizer

TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}\n"
    "{{ m.content.split('</think>')[-1] if m.role == 'assistant' else m.content }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{{ lead }}{% endif %}"
)
END = 0


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """Bytes, and merges that a random model does not make when it writes byte after byte."""
    folder = tmp_path_factory.mktemp("tokenizer")
    specials = ["<|end|>", "<|start|>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [(a, b) for a in letters[:60] for b in letters[:60]]
    words = specials + letters + sorted({a + b for a, b in merges})
    library = Library(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=merges))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken(text, special=True) for text in specials])
    library.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return load_tokenizer(open_checkpoint(folder, weights=False))


@pytest.fixture(
    params=["llama", "short convolutions", "gated deltanet", "mamba-2 alone", "longrope"]
)
def model(request, tokenizer):
    config = dataclasses.replace(
        MODELS.get(request.param, MODELS["gpt2"]), vocab=tokenizer.vocab_size
    )
    return Model(
        name="small", config=config, decoder=random_decoder(config), tokenizer=tokenizer,
        checkpoint=None, eos_ids=frozenset({END}),
    )  # fmt: skip


SAMPLING = Sampling(temperature=1.0, seed=11)


def answered(talk, limit=6, sampling=SAMPLING):
    """The answer's ids; afterwards the session's logits are those of the whole text."""
    ids = [token.id for token in talk.answer(sampling, limit=limit)]
    session = talk._session
    whole = talk.model.decoder(torch.tensor(session.ids))[0, -1]
    torch.testing.assert_close(session.logits_BV[0], whole)
    return ids


def talking(model, **more):
    talk = Conversation(model, room=400, **more)
    talk.set_system("be brief")
    talk.say("hello")
    return talk


def test_only_what_is_new_is_computed(model):
    talk = talking(model)
    first = answered(talk)
    assert talk.tokens.prompt == talk.tokens.computed
    for _ in range(3):
        before = talk.used
        talk.say("and now?")
        answered(talk)
        # the last token of an answer is read with what follows it
        assert talk.tokens.prompt - talk.tokens.computed == before
    assert [one.role for one in talk.messages] == ["system", *["user", "assistant"] * 4]
    assert tuple(first) == talk.messages[2].ids
    assert talk._session.ids[0][: talk.used].count(END) >= 5


def test_answers_keep_their_own_ids(model):
    talk = talking(model)
    answered(talk, limit=12)
    own = talk.messages[-1]
    again = model.tokenizer.encode(own.content, add_bos=False)
    assert list(own.ids) != again, "the vocabulary merges what the model wrote apart"
    talk.say("go on")
    answered(talk)
    text = model.tokenizer.decode(talk._session.ids[0], skip_special=False)
    assert text.startswith("<|start|>system\nbe brief<|end|>\n<|start|>user\nhello<|end|>\n")
    read = talk._session.ids[0]
    where = [i for i in range(len(read)) if tuple(read[i : i + len(own.ids)]) == own.ids]
    assert where


def test_an_end_token_is_written_once(model):
    talk = talking(model)
    answered(talk)
    mine = talk.messages.pop()
    ended = dataclasses.replace(mine, ids=(*mine.ids, END), end="eos")
    talk.messages.append(ended)
    talk.say("more")
    ids = talk._encoded(talk.messages)
    text = model.tokenizer.decode(ids, skip_special=False)
    assert text == talk._rendered(talk.messages)
    assert text.count("<|end|><|end|>") == 0


def test_undo_and_another_answer_go_back(model):
    talk = talking(model)
    first = answered(talk)
    talk.messages.pop()
    second = answered(talk)
    assert second != first, "another answer draws with another seed"
    assert talk.tokens.computed == 0
    talk.messages.pop()
    greedy = Sampling(temperature=0)
    likely = answered(talk, sampling=greedy)
    talk.messages.pop()
    assert answered(talk, sampling=greedy) == likely
    assert talk.undo() == "hello"
    assert [one.role for one in talk.messages] == ["system"]
    assert talk.undo() is None
    talk.say("other")
    answered(talk)


def test_the_same_seed_gives_the_same_conversation(model):
    both = []
    for _ in range(2):
        talk = talking(model)
        answered(talk)
        talk.say("go on")
        answered(talk)
        both.append(talk.messages)
    assert both[0] == both[1]


def test_what_was_saved_goes_on_as_it_would_have(model):
    talk = talking(model)
    answered(talk)
    saved, answers = list(talk.messages), talk.answers
    talk.say("go on")
    right = answered(talk)
    other = Conversation(model, room=400)
    assert other.load(saved, answers, {}) == 0
    assert other.messages == saved
    other.say("go on")
    assert answered(other) == right


NOT_THEIRS = {
    "another text": lambda one: {"content": "something else"},
    "a special token inside": lambda one: {"ids": (one.ids[0], END, *one.ids[1:])},
    "no end token behind an end": lambda one: {"end": "eos"},
    "cut by a stop string": lambda one: {"end": "stop"}, "no end": lambda one: {"end": None},
}  # fmt: skip


@pytest.mark.parametrize("wrong", NOT_THEIRS)
def test_ids_that_are_not_the_text_of_an_answer_are_dropped(model, wrong):
    talk = talking(model)
    answered(talk)
    own = talk.messages[-1]
    assert own.ids
    changed = dataclasses.replace(own, **NOT_THEIRS[wrong](own))
    other = Conversation(model, room=400)
    assert other.load([*talk.messages[:-1], changed], 1, {}) == 1
    assert other.messages[-1] == dataclasses.replace(changed, ids=())
    other.say("go on")
    answered(other)
    text = other._rendered(other.messages[:-1])
    assert other._session.ids[0][: other.tokens.prompt] == model.tokenizer.encode(text)


def test_what_cannot_be_loaded_changes_nothing(model, monkeypatch):
    talk = talking(model, variables={"lead": "a"})
    answered(talk)
    before = (list(talk.messages), talk.answers, talk.variables)
    new = [Message(role="user", content="x"), Message(role="assistant", content="y")]
    with monkeypatch.context() as patch:
        patch.setattr(talk._template, "source", "{{ raise_exception('never') }}")
        with pytest.raises(CheckpointError, match="never"):
            talk.load(new, 7, {"lead": "b"})
    assert (talk.messages, talk.answers, talk.variables) == before
    rendered = []
    render = talk._template.render
    monkeypatch.setattr(
        talk._template, "render", lambda *a, **k: rendered.append(k) or render(*a, **k)
    )
    talk.load(new * 50, 7, {"lead": "b"})
    assert [one["variables"] for one in rendered] == [{"lead": "b"}], "once, however many answers"


def test_an_answer_knows_little_of_what_precedes_it(model):
    talk = talking(model)
    for _ in range(4):
        answered(talk)
        talk.say("and now?" * 5)
    assert {len(one.lead) for one in talk.messages if one.ids} == {LEAD}


def test_an_answer_is_found_again_behind_other_words(model):
    talk = talking(model)
    answered(talk, limit=12)
    own = talk.messages[-1].ids
    talk.set_system("be longer than before")
    talk.say("go on")
    answered(talk)
    read = talk._session.ids[0]
    assert any(tuple(read[i : i + len(own)]) == own for i in range(len(read)))


def test_memory_grows_by_the_cache_alone(model):
    talk = talking(model)
    held = set()
    for _ in range(6):
        answered(talk)
        talk.say("and now?")
        kept = talk._session._kept
        assert len(kept) <= 2
        states = [one.state.nbytes for one in kept.values() if one.state is not None]
        logits = [one.logits_BV.untyped_storage().nbytes() for one in kept.values()]
        held.add(sum(states + logits))
    assert len(held) <= 2, "once there are two of them"


def test_undo_goes_back_to_where_the_last_turn_began(model):
    talk = talking(model)
    answered(talk)
    talk.say("one")
    answered(talk)
    talk.undo()
    talk.say("two")
    answered(talk)
    # the first answer is read once more where single tokens cannot be forgotten
    assert talk.tokens.computed < talk.tokens.prompt - 20


def test_long_prompts_tell_how_far_they_are_read(model):
    talk = talking(model)
    told = []
    next(talk.answer(SAMPLING, limit=1, on_prefill=lambda *said: told.append(said)))
    ((done, total),) = told
    assert done == total >= talk.tokens.prompt - 1


def test_a_tokenizer_of_another_model_is_one_line(model):
    small = dataclasses.replace(model, config=dataclasses.replace(model.config, vocab=50))
    talk = talking(small)
    with pytest.raises(CheckpointError, match="but the model has 50 embeddings"):
        next(talk.answer(SAMPLING, limit=1))


def test_what_the_template_leaves_out_is_not_kept(model):
    talk = talking(model)
    answered(talk)
    content = "why</think>because"
    ids = tuple(model.tokenizer.encode(content, add_bos=False))
    mine = dataclasses.replace(talk.messages.pop(), content=content, ids=(*ids, END), end="eos")
    talk.messages.append(mine)
    talk.say("more")
    answered(talk)
    text = model.tokenizer.decode(talk._session.ids[0], skip_special=False)
    assert "because" in text
    assert "why" not in text


def test_an_answer_that_is_cut_off_stays_as_far_as_it_came(model):
    talk = talking(model)
    stream = talk.answer(SAMPLING, limit=20)
    written = [next(stream).id for _ in range(3)]
    stream.close()
    last = talk.messages[-1]
    assert (last.role, last.end) == ("assistant", "interrupted")
    assert last.ids in ((), tuple(written))
    talk.say("go on")
    answered(talk)


def test_a_stop_string_ends_an_answer_whose_text_is_not_its_ids(model):
    talk = talking(model)
    ids = answered(talk, limit=12)
    cut = model.tokenizer.decode(ids)[2:4]
    other = talking(model)
    list(other.answer(SAMPLING, limit=12, stop=[cut]))
    assert other.messages[-1].end == "stop"
    assert other.messages[-1].ids == ()


def test_variables_reach_the_template(model):
    talk = talking(model, variables={"lead": "<think>"})
    assert talk._rendered(talk.messages).endswith("assistant\n<think>")


def test_a_conversation_that_does_not_fit_says_by_how_much(model):
    talk = Conversation(model, room=30)
    talk.say("x" * 200)
    with pytest.raises(PromptTooLong, match="more than the context of 30"):
        next(talk.answer(SAMPLING, limit=4))
    assert [one.role for one in talk.messages] == ["user"]
    talk.clear()
    talk.say("a")
    tokens = list(talk.answer(SAMPLING, limit=400))
    assert tokens[-1].finish in ("length", "eos")
    assert talk.used <= 30


def test_the_oldest_turns_are_dropped_until_an_answer_fits(model):
    talk = Conversation(model, room=160)
    talk.set_system("be brief")
    for text in ("one", "two", "three", "four"):
        talk.say(text + "." * 20)
        talk.messages.append(Message(role="assistant", content="yes " * 4))
    talk.say("five")
    whole = list(talk.messages)
    assert talk.missing(20) > 0

    def tokens(messages):
        return len(model.tokenizer.encode(talk._rendered(messages)))

    dropped = talk.drop_turns(20)
    assert talk.messages == [whole[0], *whole[1 + 2 * dropped :]]
    assert tokens(talk.messages) + 20 <= talk.room + 1
    assert tokens([whole[0], *whole[2 * dropped - 1 :]]) + 20 > talk.room + 1, "as few as possible"
    assert (talk.missing(20), talk.drop_turns(20)) == (0, 0)
    assert talk.missing(talk.room) == tokens(talk.messages) - 1
    answered(talk)
    talk.say("x" * 300)
    talk.drop_turns(20)
    assert [one.content for one in talk.messages] == ["be brief", "x" * 300], "these stay"
    assert talk.missing(1) > 0


def test_without_a_template_there_is_no_conversation(model):
    bare = dataclasses.replace(model, tokenizer=None)
    with pytest.raises(UsageError, match="cannot chat"):
        Conversation(bare, room=10)


def test_the_system_message_is_replaced_and_taken_away(model):
    talk = talking(model)
    talk.set_system("be long")
    assert talk.system == "be long"
    assert talk.messages[0] == Message(role="system", content="be long")
    talk.set_system(None)
    assert talk.system is None
    assert [one.role for one in talk.messages] == ["user"]
    talk.set_system("x")
    talk.clear()
    assert [one.role for one in talk.messages] == ["system"]


def test_an_answer_without_a_mark_behind_it_is_encoded_with_what_follows(model, monkeypatch):
    plain = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
    talk = talking(model)
    monkeypatch.setattr(talk._template, "source", plain)
    for _ in range(2):
        answered(talk)
        talk.say("go on")
        ids = talk._encoded(talk.messages)
        assert ids == model.tokenizer.encode(talk._rendered(talk.messages))
    answered(talk)


def test_an_answer_that_is_cut_off_inside_a_step_leaves_no_half_of_it(model, monkeypatch):
    talk = talking(model)
    block = type(model.decoder.blocks[-1])
    call, steps = block.__call__, []

    def stopped(self, x, state, step):
        if self is model.decoder.blocks[-1] and x.shape[1] == 1:
            steps.append(step)
            if len(steps) == 3:
                raise KeyboardInterrupt
        return call(self, x, state, step)

    with monkeypatch.context() as patch:
        patch.setattr(block, "__call__", stopped)
        with pytest.raises(KeyboardInterrupt):
            list(talk.answer(SAMPLING, limit=20))
    assert talk.messages[-1].end == "interrupted"
    talk.say("go on")
    answered(talk)


def test_a_return_that_is_cut_off_leaves_no_half_of_it(model, monkeypatch):
    """Some layers are back where the last turn began, and then nobody wants to go back."""
    talk = talking(model)
    answered(talk)
    before = list(talk.messages)
    last = talk._session.state.layers[-1]

    def stopped(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        for method in ("rewind", "restore"):
            patch.setattr(last, method, stopped)
        talk.undo()
        talk.say("another")
        with pytest.raises(KeyboardInterrupt):
            next(talk.answer(SAMPLING, limit=20))
    talk.messages = before
    talk.say("go on")
    answered(talk)


@pytest.mark.parametrize("room", range(20, 34))
def test_a_draft_reads_no_further_than_the_context(model, monkeypatch, room):
    monkeypatch.setattr(Pace, "rows", lambda self, ground, most: min(most, 8))
    texts = []
    for draft in (None, ModelDraft(model, model)):
        talk = Conversation(model, room=room)
        talk.say("a")
        talk.speculation = None if draft is None else Speculation(draft)
        texts.append([token.text for token in talk.answer(SAMPLING, limit=400)])
        assert talk.used <= talk._session.state.capacity <= room
    assert texts[0] == texts[1]


def test_what_comes_after_a_change_keeps_its_own_ids(model):
    talk = talking(model)
    answered(talk)
    talk.set_system("be long")
    for _ in range(3):
        talk.say("go on")
        answered(talk)
    assert talk.tokens.prompt - talk.tokens.computed > 20


def test_a_template_that_writes_nothing_is_one_line(model, monkeypatch):
    talk = talking(model)
    monkeypatch.setattr(talk._template, "source", "{{ '' }}")
    with pytest.raises(CheckpointError, match="makes no text"):
        next(talk.answer(SAMPLING, limit=4))

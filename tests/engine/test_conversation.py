"""A conversation: what is read once stays read, what the model wrote keeps its ids."""

import dataclasses
import json

import pytest
import torch
from byte_tokenizer import byte_tokenizer
from scripted import speak
from small_models import random_decoder
from zoo import MODELS

from llmcli.checkpoints import open_checkpoint
from llmcli.engine.conversation import Conversation
from llmcli.engine.drafts import ModelDraft
from llmcli.engine.sampling import Sampling
from llmcli.engine.speculation import DraftLengthController, Speculation
from llmcli.errors import CheckpointError, PromptTooLong, UsageError
from llmcli.model import Model
from llmcli.records.text import LEAD, Message
from llmcli.text import load_tokenizer
from llmcli.text.chat import ChatTemplate

TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}\n"
    "{{ m.content.split('</think>')[-1] if m.role == 'assistant' else m.content }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{{ lead }}{% endif %}"
    "{% if lead == 'never' %}{{ raise_exception('never') }}{% endif %}"
)
END = 0
SAMPLING = Sampling(temperature=1.0, seed=11)


def tokenizer_of(folder, specials, template, merged=0):
    """Bytes and special tokens, the first of which ends a text.

    The bytes of the first `merged` letters have merges, which a random model does not make when it
    writes byte after byte.
    """
    byte_tokenizer(specials, merged).save(str(folder / "tokenizer.json"))
    settings = {"eos_token": specials[0], "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return load_tokenizer(open_checkpoint(folder, weights=False))


def model_of(name, tokenizer):
    config = dataclasses.replace(MODELS[name], vocab=tokenizer.vocab_size)
    return Model(
        name="small", config=config, decoder=random_decoder(config), tokenizer=tokenizer,
        checkpoint=None, eos_ids=frozenset({END}),
    )  # fmt: skip


def with_template(model, source):
    """The model with another chat template."""
    tokenizer = dataclasses.replace(model.tokenizer, chat_template=ChatTemplate(source))
    return dataclasses.replace(model, tokenizer=tokenizer)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    return tokenizer_of(folder, ["<|end|>", "<|start|>"], TEMPLATE, merged=60)


KINDS = ["llama", "short convolutions", "gated deltanet", "mamba-2 alone", "longrope"]


@pytest.fixture(params=KINDS)
def model(request, tokenizer):
    return model_of(request.param, tokenizer)


def talking(model, **more):
    talk = Conversation(model, room=800, **more)
    talk.set_system("be brief")
    talk.say("hello")
    return talk


def read(talk):
    """The ids that the conversation has read, and their text."""
    (ids,) = talk._session.ids
    return ids, talk.model.tokenizer.decode(ids, skip_special=False)


def answered(talk, limit=6, sampling=SAMPLING, **more):
    """The answer's ids; afterwards the session's logits are those of the whole text."""
    ids = [token.id for token in talk.answer(sampling, limit=limit, **more)]
    whole = talk.model.decoder(torch.tensor(talk._session.ids))[0, -1]
    torch.testing.assert_close(talk._session.logits_BV[0], whole)
    return ids


def contents(messages):
    return [{"role": one.role, "content": one.content} for one in messages]


def is_among(part, ids):
    return any(tuple(ids[at : at + len(part)]) == part for at in range(len(ids)))


def test_only_what_is_new_is_computed_and_answers_keep_their_ids(model):
    talk, told = talking(model), []
    first = answered(talk, limit=12, on_prefill=lambda *said: told.append(said))
    assert talk.tokens.prompt == talk.tokens.computed
    assert told == [(talk.tokens.prompt, talk.tokens.prompt)]
    own = talk.messages[-1]
    assert tuple(first) == own.ids
    again = model.tokenizer.encode(own.content, add_bos=False)
    assert first != again, "the vocabulary merges what the model wrote apart"
    for _ in range(3):
        before = talk.used
        talk.say("and now?" * 5)
        answered(talk)
        # the last token of an answer is read with what follows it
        assert talk.tokens.prompt - talk.tokens.computed == before
    assert [one.role for one in talk.messages] == ["system", *["user", "assistant"] * 4]
    assert {len(one.lead) for one in talk.messages if one.ids} == {LEAD}
    ids, text = read(talk)
    assert ids[: talk.used].count(END) >= 5
    assert text.startswith("<|start|>system\nbe brief<|end|>\n<|start|>user\nhello<|end|>\n")
    assert is_among(own.ids, ids)
    talk.set_system("be longer than before")
    for _ in range(3):
        talk.say("go on")
        answered(talk)
        assert is_among(own.ids, read(talk)[0]), "behind other words, too"
    assert talk.tokens.prompt - talk.tokens.computed > 20


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
    talk.say("one")
    answered(talk)
    assert talk.undo() == "one"
    talk.say("two")
    answered(talk)
    # the first answer is read once more where single tokens cannot be forgotten
    assert talk.tokens.computed < talk.tokens.prompt - 20
    assert [talk.undo(), talk.undo()] == ["two", "hello"]
    assert [one.role for one in talk.messages] == ["system"]
    assert talk.undo() is None
    talk.say("other")
    answered(talk)


def test_what_was_saved_goes_on_as_it_would_have(model):
    talk = talking(model)
    answered(talk)
    saved, answers = list(talk.messages), talk.answers
    talk.say("go on")
    answered(talk)
    other = Conversation(model, room=400)
    assert other.load(saved, answers, {}) == 0
    assert other.messages == saved
    other.say("go on")
    answered(other)
    assert other.messages == talk.messages, "the same seed gives the same conversation"


def test_ids_that_are_not_the_text_of_an_answer_are_dropped(model):
    talk = talking(model)
    answered(talk)
    own = talk.messages[-1]
    assert own.ids
    for wrong in (
        {"content": "something else"},
        {"ids": (own.ids[0], END, *own.ids[1:])},  # a special token inside
        {"finish_reason": "eos"},  # with no end token behind it
        {"finish_reason": "stop"}, {"finish_reason": None},
    ):  # fmt: skip
        changed = dataclasses.replace(own, **wrong)
        other = Conversation(model, room=400)
        assert other.load([*talk.messages[:-1], changed], 1, {}) == 1, wrong
        assert other.messages[-1] == dataclasses.replace(changed, ids=(), lead="")
        other.say("go on")
        answered(other)
        expected = model.tokenizer.encode_chat(contents(other.messages[:-1]))
        assert read(other)[0][: other.tokens.prompt] == expected


def test_what_cannot_be_loaded_changes_nothing(model, monkeypatch):
    talk = talking(model, variables={"lead": "a"})
    answered(talk)
    before = (list(talk.messages), talk.answers, talk.variables)
    new = [Message(role="user", content="x"), Message(role="assistant", content="y")]
    with pytest.raises(CheckpointError, match="never"):
        talk.load(new, 7, {"lead": "never"})
    assert (talk.messages, talk.answers, talk.variables) == before
    rendered, render = [], ChatTemplate.render
    monkeypatch.setattr(
        ChatTemplate, "render", lambda *a, **k: rendered.append(k) or render(*a, **k)
    )
    talk.load(new * 20, 7, {"lead": "<think>"})
    assert [one["variables"] for one in rendered] == [{"lead": "<think>"}], "once for all answers"
    talk.say("go on")
    answered(talk)
    assert "assistant\n<think>" in read(talk)[1]


def test_memory_grows_by_the_cache_alone(model):
    talk = talking(model)
    held = set()
    for _ in range(6):
        answered(talk)
        talk.say("and now?")
        kept = talk._session.snapshot().kept
        assert len(kept) <= 2
        states = [one.state.nbytes for one in kept.values() if one.state is not None]
        logits = [one.logits_BV.untyped_storage().nbytes() for one in kept.values()]
        held.add(sum(states + logits))
    assert len(held) <= 2, "once there are two of them"


def test_what_the_template_writes_of_an_answer_is_what_is_read(model):
    """An end token once; not what it leaves out."""
    talk = talking(model)
    answered(talk)
    mine = talk.messages.pop()
    talk.messages.append(dataclasses.replace(mine, ids=(*mine.ids, END), finish_reason="eos"))
    talk.say("more")
    template = model.tokenizer.chat_template
    text = template.render(contents(talk.messages), add_generation_prompt=False)
    assert model.tokenizer.decode(talk.ids(), skip_special=False) == text
    assert text.count("<|end|><|end|>") == 0
    content = "why</think>because"
    ids = tuple(model.tokenizer.encode(content, add_bos=False))
    talk.messages[-2] = dataclasses.replace(
        mine, content=content, ids=(*ids, END), finish_reason="eos"
    )
    answered(talk)
    assert "because" in read(talk)[1]
    assert "why" not in read(talk)[1]


@pytest.mark.parametrize("how", ["closed", "interrupted"])
def test_an_answer_that_is_cut_off_stays_as_far_as_it_came(model, how):
    talk = talking(model)
    stream = talk.answer(SAMPLING, limit=20)
    written = [next(stream).id for _ in range(3)]
    if how == "closed":
        stream.close()
    else:
        with pytest.raises(KeyboardInterrupt):
            stream.throw(KeyboardInterrupt())
    last = talk.messages[-1]
    assert (last.role, last.finish_reason) == ("assistant", "interrupted")
    assert last.ids in ((), tuple(written))
    talk.say("go on")
    answered(talk)


def test_a_stop_string_ends_an_answer_whose_text_is_not_its_ids(model):
    talk = talking(model)
    ids = answered(talk, limit=12)
    cut = model.tokenizer.decode(ids)[2:4]
    other = talking(model)
    list(other.answer(SAMPLING, limit=12, stop=[cut]))
    assert other.messages[-1].finish_reason == "stop"
    assert other.messages[-1].ids == ()


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
        return len(model.tokenizer.encode_chat(contents(messages)))

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


def test_the_system_message_is_replaced_and_taken_away(model):
    talk = talking(model)
    for text, roles in (("be long", ["system", "user"]), (None, ["user"])):
        talk.set_system(text)
        assert talk.system == text
        assert [one.role for one in talk.messages] == roles
    talk.set_system("x")
    talk.clear()
    assert talk.messages == [Message(role="system", content="x")]


def test_an_answer_without_a_mark_behind_it_is_encoded_with_what_follows(model):
    plain = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
    talk = talking(with_template(model, plain))
    for _ in range(2):
        answered(talk)
        talk.say("go on")
        assert talk.ids() == talk.model.tokenizer.encode_chat(contents(talk.messages))
    answered(talk)


def test_what_cannot_be_a_conversation_is_refused(model):
    with pytest.raises(UsageError, match="cannot chat"):
        Conversation(dataclasses.replace(model, tokenizer=None), room=10)
    small = dataclasses.replace(model, config=dataclasses.replace(model.config, vocab=50))
    with pytest.raises(CheckpointError, match="but the model has 50 embeddings"):
        next(talking(small).answer(SAMPLING, limit=1))
    with pytest.raises(CheckpointError, match="gives no text"):
        next(talking(with_template(model, "{{ '' }}")).answer(SAMPLING, limit=4))


@pytest.mark.parametrize(
    ("room", "model"), [(room, KINDS[room % 5]) for room in range(20, 34)], indirect=["model"]
)
def test_a_draft_reads_no_further_than_the_context(model, monkeypatch, room):
    monkeypatch.setattr(DraftLengthController, "rows", lambda self, key, most: min(most, 8))
    texts = []
    for draft in (None, ModelDraft(model, model)):
        talk = Conversation(model, room=room)
        talk.say("a")
        talk.speculation = None if draft is None else Speculation(draft)
        texts.append([token.text for token in talk.answer(SAMPLING, limit=400)])
        assert talk.used <= talk._session.state.capacity <= room
    assert texts[0] == texts[1]


# with a model that reasons: what is kept of an answer, and what is read again

SPECIALS = ["<|return|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "[THINK]",
            "[/THINK]", "<|constrain|>", "<|call|>"]  # fmt: skip
# what the published templates do with an answer of the past, in few words
HARMONY = (
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% if '<|channel|>analysis<|message|>' in m.content %}"
    "{{ raise_exception('no channels in the content') }}{% endif %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
MAGISTRAL = (  # a text is written down again as it came
    "{% for m in messages %}{% if m.role == 'user' %}<|start|>{{ m.content }}<|end|>{% else %}"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for block in m.content %}"
    "{{- '[THINK]' + block['thinking'] + '[/THINK]' }}{% endfor %}{% endif %}<|return|>"
    "{% endif %}{% endfor %}"
)
OPENED = (  # as DeepSeek R1: the prompt begins the reasoning, and past reasoning is left out
    "{% for m in messages %}{% if m.role == 'user' %}<|start|>{{ m.content }}<|end|>{% else %}"
    "{{ m.content.split('</think>')[-1] }}<|return|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<think>\n{% endif %}"
)


@pytest.fixture
def reasoning(tmp_path):
    def make(template):
        talk = Conversation(model_of("llama", tokenizer_of(tmp_path, SPECIALS, template)), room=900)
        talk.say("hello")
        return talk

    return make


def writes(talk, monkeypatch, text):
    """The model writes `text`; returns the message and the text that its tokens had."""
    ids = talk.model.tokenizer.encode(text, add_bos=False)
    speak(monkeypatch.setattr, [ids])
    shown = "".join(token.text for token in talk.answer(Sampling(), limit=len(ids)))
    return talk.messages[-1], shown


HM = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes."


def test_channels_are_kept_apart(reasoning, monkeypatch):
    talk = reasoning(HARMONY)
    message, shown = writes(talk, monkeypatch, HM + "<|return|>")
    assert (message.content, message.reasoning, message.raw) == ("Yes.", "Hm.", HM)
    assert shown == HM, "markers that are special tokens are shown to who cuts the text"
    assert message.finish_reason == "eos"
    assert message.ids == tuple(talk.model.tokenizer.encode(HM + "<|return|>"))
    talk.say("more")
    writes(talk, monkeypatch, HM + "<|return|>")
    assert read(talk)[1] == (
        "<|start|>user<|message|>hello<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Yes.<|end|>"
        "<|start|>user<|message|>more<|end|><|start|>assistant" + HM
    )


def test_a_call_is_shown_as_it_was_written(reasoning, monkeypatch):
    call = "<|channel|>commentary to=functions.x <|constrain|>json<|message|>{}<|call|>"
    text = f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant{call}"
    message, shown = writes(reasoning(HARMONY), monkeypatch, text)
    assert shown == message.raw == text
    assert (message.content, message.reasoning) == (call, "Hm.")


def test_what_the_template_writes_down_again_keeps_its_ids(reasoning, monkeypatch):
    talk = reasoning(MAGISTRAL)
    message, _ = writes(talk, monkeypatch, "[THINK]Hm.[/THINK]Yes.<|return|>")
    assert (message.content, message.reasoning) == ("Yes.", "Hm.")
    before = talk.used
    talk.say("more")
    writes(talk, monkeypatch, "No.<|return|>")
    assert talk.tokens.prompt - talk.tokens.computed == before, "all of it is read already"
    assert talk.messages[-1].raw is None, "without markers the text is the content"


def test_reasoning_that_the_prompt_begins(reasoning, monkeypatch):
    talk = reasoning(OPENED)
    message, _ = writes(talk, monkeypatch, "Hm.\n</think>\n\nYes.<|return|>")
    assert (message.content, message.reasoning) == ("Yes.", "Hm.")
    talk.say("more")
    writes(talk, monkeypatch, "cut off")
    text = read(talk)[1]
    assert "Hm." not in text
    assert "<|end|>\n\nYes.<|return|>" in text
    assert talk.messages[-1].reasoning == "cut off"
    assert talk.messages[-1].content == ""


@pytest.mark.parametrize("template", [HARMONY, MAGISTRAL, OPENED])
def test_what_was_saved_with_reasoning_goes_on_as_it_would_have(template, reasoning, monkeypatch):
    both = []
    for loads in (False, True):
        talk = reasoning(template)
        text = {HARMONY: HM, MAGISTRAL: "[THINK]a[/THINK]b", OPENED: "a</think>b"}[template]
        writes(talk, monkeypatch, text + "<|return|>")
        if loads:
            saved, talk = talk, reasoning(template)
            talk.load(saved.messages, saved.answers, {})
        talk.say("more")
        both.append(talk.ids())
    assert both[0] == both[1]

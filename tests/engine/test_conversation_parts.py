"""A conversation with a model that reasons: what is kept of an answer, and what is read again."""

import dataclasses
import json

import pytest
from scripted import speak
from small_models import random_decoder
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Library
from zoo import MODELS

from llmcli.checkpoints import open_checkpoint
from llmcli.engine.conversation import Conversation
from llmcli.engine.sampling import Sampling
from llmcli.model import Model
from llmcli.text import load_tokenizer

SPECIALS = ["<|return|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "[THINK]",
            "[/THINK]", "<|constrain|>", "<|call|>"]  # fmt: skip
RETURN = 0
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
def talking(tmp_path):
    def make(template):
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        words = SPECIALS + letters
        library = Library(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=[]))
        library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        library.decoder = decoders.ByteLevel()
        library.add_special_tokens([AddedToken(text, special=True) for text in SPECIALS])
        library.save(str(tmp_path / "tokenizer.json"))
        settings = {"eos_token": "<|return|>", "chat_template": template}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
        tokenizer = load_tokenizer(open_checkpoint(tmp_path, weights=False))
        config = dataclasses.replace(MODELS["llama"], vocab=tokenizer.vocab_size)
        model = Model(
            name="small", config=config, decoder=random_decoder(config), tokenizer=tokenizer,
            checkpoint=None, eos_ids=frozenset({RETURN}),
        )  # fmt: skip
        talk = Conversation(model, room=900)
        talk.say("hello")
        return talk

    return make


def answered(talk, monkeypatch, text):
    """The model writes `text`; returns the message and the text that its tokens had."""
    ids = talk.model.tokenizer.encode(text, add_bos=False)
    speak(monkeypatch.setattr, [ids])
    shown = "".join(token.text for token in talk.answer(Sampling(), limit=len(ids)))
    return talk.messages[-1], shown


HM = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes."


def test_channels_are_kept_apart(talking, monkeypatch):
    talk = talking(HARMONY)
    message, shown = answered(talk, monkeypatch, HM + "<|return|>")
    assert (message.content, message.reasoning, message.raw) == ("Yes.", "Hm.", HM)
    assert shown == HM, "markers that are special tokens are shown to who cuts the text"
    assert message.end == "eos"
    assert message.ids == tuple(talk.model.tokenizer.encode(HM + "<|return|>"))
    talk.say("more")
    answered(talk, monkeypatch, HM + "<|return|>")
    read = talk.model.tokenizer.decode(talk._session.ids[0], skip_special=False)
    assert read == (
        "<|start|>user<|message|>hello<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Yes.<|end|>"
        "<|start|>user<|message|>more<|end|><|start|>assistant" + HM
    )


@pytest.mark.parametrize("call", [
    "<|channel|>commentary to=functions.x <|constrain|>json<|message|>{}<|call|>",
    "<|start|>assistant to=functions.x<|channel|>commentary <|constrain|>json<|message|>{}",
    "<|channel|>analysis to=python code<|message|>1+1<|call|>",
])  # fmt: skip
def test_a_call_is_shown_as_it_was_written(call, talking, monkeypatch):
    text = f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant{call}"
    text = text.replace("assistant<|start|>assistant", "assistant")
    message, shown = answered(talking(HARMONY), monkeypatch, text)
    assert shown == message.raw == text
    assert (message.content, message.reasoning) == (call, "Hm.")


def test_what_the_template_writes_down_again_keeps_its_ids(talking, monkeypatch):
    talk = talking(MAGISTRAL)
    message, _ = answered(talk, monkeypatch, "[THINK]Hm.[/THINK]Yes.<|return|>")
    assert (message.content, message.reasoning) == ("Yes.", "Hm.")
    before = talk.used
    talk.say("more")
    answered(talk, monkeypatch, "No.<|return|>")
    assert talk.tokens.prompt - talk.tokens.computed == before, "all of it is read already"
    assert talk.messages[-1].raw is None, "without markers the text is the content"


def test_reasoning_that_the_prompt_begins(talking, monkeypatch):
    talk = talking(OPENED)
    message, _ = answered(talk, monkeypatch, "Hm.\n</think>\n\nYes.<|return|>")
    assert (message.content, message.reasoning) == ("Yes.", "Hm.")
    talk.say("more")
    answered(talk, monkeypatch, "cut off")
    read = talk.model.tokenizer.decode(talk._session.ids[0], skip_special=False)
    assert "Hm." not in read
    assert "<|end|>\n\nYes.<|return|>" in read
    assert talk.messages[-1].reasoning == "cut off"
    assert talk.messages[-1].content == ""


@pytest.mark.parametrize("template", [HARMONY, MAGISTRAL, OPENED])
def test_what_was_saved_goes_on_as_it_would_have(template, talking, monkeypatch):
    both = []
    for loads in (False, True):
        talk = talking(template)
        text = {HARMONY: HM, MAGISTRAL: "[THINK]a[/THINK]b", OPENED: "a</think>b"}[template]
        answered(talk, monkeypatch, text + "<|return|>")
        if loads:
            saved, talk = talk, talking(template)
            talk.load(saved.messages, saved.answers, {})
        talk.say("more")
        both.append(talk._encoded(talk.messages))
    assert both[0] == both[1]

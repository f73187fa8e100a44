"""Chat templates give transformers' text, and a hostile one gives one clear error."""

from pathlib import Path

import pytest
from covers import few

from llmcli.errors import CheckpointError
from llmcli.text.chat import MAX_SOURCE, ChatTemplate
from llmcli.text.template_renderer import MAX_OUTPUT

# The features that real templates use, one template each; then public models' shapes, in few words.
# A line that ends with a backslash goes on in the next one.
DATA = Path(__file__).parent / "data"
TEXT = (DATA / "chat_templates.txt").read_text(encoding="utf-8")
SECTIONS = f"\n{TEXT}".replace("\\\n", "").removesuffix("\n").split("\n=== ")[1:]
TEMPLATES = dict(section.split("\n", 1) for section in SECTIONS)
SMOLLM2 = TEMPLATES["smollm2"]
CHATS = [
    [{"role": "user", "content": "Hi <b> & \"you\" é 🙂"}],
    [
        {"role": "system", "content": "Be\nbrief."}, {"role": "user", "content": " What is it? "},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nThat."},
        {"role": "user", "content": "Thanks"},
    ],
    [],
]  # fmt: skip
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


def transformers_text(source, chat, *, generation=True, **more):
    from transformers.utils.chat_template_utils import render_jinja_template

    (text,), _ = render_jinja_template(
        [chat], chat_template=source, add_generation_prompt=generation, **SPECIAL | more
    )
    return text


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("chat", CHATS, ids=["one", "four", "none"])
@pytest.mark.parametrize("generation", [True, False])
def test_text_equals_transformers(name, chat, generation):
    if name == "llama2" and not chat:  # it looks at the first message
        chat = CHATS[0]
    ours = ChatTemplate(TEMPLATES[name], special_tokens=SPECIAL)
    theirs = transformers_text(TEMPLATES[name], chat, generation=generation)
    assert ours.render(chat, add_generation_prompt=generation) == theirs


def test_reasoning_beside_the_text_has_the_names_that_templates_read():
    source = "{% for m in messages %}{{ m | tojson }}{% endfor %}"
    chat = [
        {"role": "assistant", "content": "a", name: "why"}
        for name in ("reasoning", "thinking", "reasoning_content")
    ]
    text = ChatTemplate(source).render(chat, add_generation_prompt=False)
    assert text == transformers_text(source, chat, generation=False)
    assert text.count('"reasoning_content": "why"') == text.count('"thinking": "why"') == 3


def test_variables_win_over_special_tokens_and_are_tools_too():
    source = "{{ bos_token }}{{ tools | tojson }}{{ messages | length }}{{ mood }}"
    more = {"bos_token": "!", "tools": [{"a": 1}], "mood": 2}
    text = ChatTemplate(source, special_tokens=SPECIAL).render(CHATS[0], variables=more)
    assert text == transformers_text(source, CHATS[0], **more) == '![{"a": 1}]12'
    hidden = ChatTemplate("{{ messages }}").render([], variables={"messages": 3})
    assert hidden == "[]", "the conversation is no variable"


@pytest.mark.parametrize("content", ["b", " b ", "", "<think>\nx", "CONTINUE_FINAL_MESSAGE_TAG b"])
@pytest.mark.parametrize("name", ["smollm2", "blocks", "macro", "qwen3", "glm4", "loops"])
def test_the_last_message_goes_on_as_in_transformers(name, content):
    chat = [*CHATS[1], {"role": "assistant", "content": content}]
    ours = ChatTemplate(TEMPLATES[name], special_tokens=SPECIAL)
    try:
        theirs = transformers_text(
            TEMPLATES[name], chat, generation=False, continue_final_message=True
        )
    except ValueError:
        with pytest.raises(CheckpointError, match="does not write the last message") as caught:
            ours.render(chat, continue_final_message=True)
        assert caught.value.hint
    else:
        assert ours.render(chat, continue_final_message=True) == theirs


@pytest.mark.parametrize("more", [{}, {"content": None}, {"content": [{"type": "text"}]}])
def test_a_last_message_without_text_cannot_go_on(more):
    chat = [*CHATS[0], {"role": "assistant", "tool_calls": [], **more}]
    before = str(chat)
    with pytest.raises(CheckpointError, match="last message has no text that the model") as caught:
        ChatTemplate(SMOLLM2).render(chat, continue_final_message=True)
    assert caught.value.hint
    assert str(chat) == before, "the caller's messages stay as they are"


@pytest.mark.parametrize("chat", CHATS[:2], ids=["one", "four"])
def test_a_template_for_images_does_not_leave_out_texts(chat):
    """Of a text its characters have no type, and transformers would write none of it."""
    source = (
        "{% for m in messages %}{{ m.role }}: {% for part in m.content %}"
        "{% if part['type'] == 'text' %}{{ part['text'] }}{% else %}{{ part['type'] }}{% endif %}"
        "{% endfor %}\n{% endfor %}"
    )
    in_parts = [m | {"content": [{"type": "text", "text": m["content"]}]} for m in chat]
    text = ChatTemplate(source, special_tokens=SPECIAL).render(chat)
    assert text == transformers_text(source, in_parts)
    assert all(message["content"] in text for message in chat)
    strict = source.replace("{% for part", "{{ raise_exception('x') if m.content is string }}"
                            "{% for part")  # fmt: skip
    assert ChatTemplate(strict, special_tokens=SPECIAL).render(chat) == text


SYSTEM = "{% if messages[0].role == 'system' %}"


@pytest.mark.parametrize(("source", "own"), [
    (SMOLLM2, "You are a helpful AI assistant named SmolLM, trained by Hugging Face"),
    ("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}", ""),
    ("<u>" + SYSTEM + "{{ messages[0].content }} {% endif %}{{ messages[-1].content }}", ""),
    (SYSTEM + "{{ raise_exception('none') }}{% endif %}x", ""),
    (SYSTEM + "<s>{{ messages[0].content }}{% else %}<s>{{ name | default('Own') }}{% endif %}<u>"
     "{{ messages[-1].content }}", "Ann"),
])  # fmt: skip
def test_the_system_message_that_a_template_writes_by_itself(source, own):
    assert ChatTemplate(source).own_system({"name": "Ann"}) == own


def test_messages_are_left_alone():
    message = {"role": "user", "content": "a"}
    source = "{% set _ = messages[0].update({'content': 'b'}) %}"
    with pytest.raises(CheckpointError):
        ChatTemplate(source).render([message])
    assert message == {"role": "user", "content": "a"}


def test_a_template_that_refuses():
    template = ChatTemplate("{{ raise_exception('no system\nmessage here') }}")
    with pytest.raises(CheckpointError, match="failed: no system message here") as caught:
        template.render([])
    assert "--raw" in caught.value.hint


# Templates that mean harm, one on each line; behind an empty line those that take no end.
ESCAPES, ENDLESS = (
    part.splitlines()
    for part in (DATA / "hostile_templates.txt").read_text(encoding="utf-8").split("\n\n")
)


@pytest.mark.parametrize("source", ESCAPES)
def test_the_sandbox_holds(source):
    try:
        text = ChatTemplate(source).render([{"role": "user", "content": "a"}])
    except CheckpointError:
        return
    assert "<class" not in text
    assert "function" not in text


GROW = (
    "{% set ns = namespace(l=[]) %}{% for i in range(60) %}{% set ns.l = [ns.l, ns.l] %}"
    "{% endfor %}"
)
HOSTILE = [
    # Doubling, by everything that joins.
    *(
        "{% set ns = namespace(s='xxxxxxxx') %}{% for i in range(40) %}{% set ns.s = " + twice
        + " %}{% endfor %}{{ ns.s | length }}"
        for twice in (
            "ns.s + ns.s", "ns.s ~ ns.s", "[ns.s, ns.s] | join", "''.join([ns.s, ns.s])",
            "'%s%s' % (ns.s, ns.s)", "'{0}{0}'.format(ns.s)", "ns.s | replace('x', 'xx')",
            "ns.s.replace('x', 'xx')", "[ns.s, ns.s] | string", "'%s%s' | format(ns.s, ns.s)",
            "[ns.s, ns.s] | tojson", "'-'.join([ns.s, ns.s] | map('string'))",
        )
    ),
    "{% set s = 'x' %}" + "{% set s %}{{ s }}{{ s }}{% endset %}" * 40 + "{{ s | length }}",
    "{% macro d(s) %}{{ s }}{{ s }}{% endmacro %}{{ " + "d(" * 40 + "'x'" + ")" * 40 + "}}",
    # Loops, widths and counts; one call each, in loops of C that nothing in the process interrupts.
    *ENDLESS,
    "{{ '\t'.expandtabs(10**9) }}",
    # Comparing, hashing, and what takes a lot of memory.
    *(
        GROW + "{% set a = ns.l %}" + GROW + end
        for end in (
            "{{ ns.l == a }}", "{{ ns.l in [a] }}", "{{ a < ns.l }}",
            "{{ [ns.l, a] | sort | length }}",
            "{{ [ns.l, a] | min }}", "{{ [a] | select('eq', ns.l) | list | length }}",
            "{{ a is eq(ns.l) }}", "{{ [[a]] | rejectattr('0', 'in', [ns.l]) | list | length }}",
            "{{ [ns.l] | unique | list | length }}", "{{ [a].index(ns.l) }}",
            "{{ [a].count(ns.l) }}", "{% for i in [a, ns.l] %}{{ loop.changed(i) }}{% endfor %}",
        )
    ),
    GROW.replace("[", "(").replace("]", ")") + "{{ {ns.l: 1} | length }}",
    GROW.replace("[ns.l, ns.l]", "dict(a=ns.l, b=ns.l)") + "{% set a = ns.l %}"
    + GROW.replace("[ns.l, ns.l]", "dict(a=ns.l, b=ns.l)") + "{{ ns.l == a }}",
    "{{ ([1] * 400000) | sort(attribute='" + "a," * 9999 + "a') | length }}",
    # Numbers whose hashes are all the same.
    *(
        "{% set n = range(0, 99999 * (2 ** 61 - 1), 2 ** 61 - 1) %}{{ " + held + " | length }}"
        for held in ("n | unique | list", "{}.fromkeys(n)", "dict(n | batch(2))")
    ),
    "{{ " + "a~" * 100_000 + "a }}", "{{ " + "a," * 100_000 + "a }}",
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
]  # fmt: skip
# They end at once, or are small after all.
HARMLESS = [
    "{{ 10 ** 10 ** 10 }}",
    "{{ strftime_now('%1000000000d' * 500) }}",
    GROW + "{% set a = ns.l %}" + GROW
    + "{{ [a] | rejectattr('0', 'in', [ns.l]) | list | length }}",
    GROW.replace("[ns.l, ns.l]", "dict(a=ns.l, b=ns.l)") + "{{ ns.l == dict(a=ns.l) }}",
]


@pytest.mark.parametrize("source", few(HOSTILE, 30), ids=range(len(HOSTILE)))
def test_a_hostile_template_is_one_clear_error(source, monkeypatch):
    monkeypatch.setattr("llmcli.text.template_renderer.MAX_SECONDS", 0.05)
    with pytest.raises(CheckpointError) as caught:
        ChatTemplate(source).render([])
    message = caught.value.message
    assert message.startswith("the chat template failed: ")
    assert "MemoryError" not in message
    assert "\n" not in message
    assert len(message) < 300


@pytest.mark.parametrize("source", HARMLESS)
def test_what_only_looks_hostile_is_transformers_text(source):
    assert ChatTemplate(source).render([]) == transformers_text(source, [])


def test_sizes_are_bounded():
    with pytest.raises(CheckpointError, match="more than"):
        ChatTemplate("x" * (MAX_SOURCE + 1)).render([])
    with pytest.raises(CheckpointError, match="it writes more than 16777216 characters"):
        ChatTemplate("{{ 'x' * 2 ** 24 }}y").render([])
    long = "a" * (MAX_OUTPUT // 2)
    chat = [{"role": "user", "content": long}]
    source = "{% for m in messages * 3 %}{{ m.content }}{% endfor %}"
    assert ChatTemplate(source).render(chat) == long * 3


def test_the_names_that_a_template_looks_up():
    def names(source):
        return ChatTemplate(source, special_tokens={"bos_token": "<s>"}).variables()

    assert names(SMOLLM2) == set()
    source = "{{ bos_token }}{% if thinking is defined %}x{% endif %}{{ tools }}"
    assert names(source) == {"thinking", "tools"}
    assert names(TEMPLATES["llama3"]) >= {"custom_tools", "date_string"}
    assert "messages" not in names(TEMPLATES["llama3"])
    assert names("{% generation %}{{ a }}{% endgeneration %}{% set b = 1 %}{{ b }}") == {"a"}
    with pytest.raises(CheckpointError, match="the chat template failed"):
        names("{% if %}")

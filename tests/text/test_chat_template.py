"""Chat templates give transformers' text, and a hostile one gives one clear error."""

import resource
import time

import pytest

from llmcli.errors import CheckpointError
from llmcli.text.chat import MAX_SOURCE, ChatTemplate
from llmcli.text.meter import MAX_OUTPUT

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# The features that real templates use, one template each.
TEMPLATES = {
    "smollm2": SMOLLM2,
    "llama2": "{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}"
    "{% set system = messages[0]['content'] %}{% else %}{% set rest = messages %}"
    "{% set system = false %}{% endif %}{% for m in rest %}{% if m['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + (('<<SYS>>\n' + system + '\n<</SYS>>\n\n') if loop.index0 == 0 "
    "and system != false else '') + m['content'].strip() + ' [/INST]' }}{% else %}"
    "{{ ' ' + m['content'].strip() + ' ' + eos_token }}{% endif %}{% endfor %}",
    "blocks": "{%- set ns = namespace(n=0) %}\n{%- for m in messages %}\n"
    "    {%- set ns.n = ns.n + 1 %}\n"
    "    {% if m.role == 'user' %}\n  U{{ ns.n }}: {{ m.content | trim }}\n    {% else %}\n"
    "  A: {{ m['content'] }}\n    {% endif %}\n{%- endfor %}\n",
    "tojson": "{% for m in messages %}{{ m | tojson }}{{ m | tojson(indent=2) }}{% endfor %}",
    "loopcontrols": "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}"
    "{% if m.role == 'system' %}{% continue %}{% endif %}{{ m.content }}{% endfor %}",
    "generation": "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}<eos>{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}",
    "undefined": "{{ pad_token }}|{{ tools }}|{{ documents }}|{% if tools %}x{% endif %}"
    "{{ nothing }}{% if custom is defined %}y{% endif %}",
    "date": "{{ strftime_now('%Y') | length }}",
    "macro": "{% macro say(m) -%}\n  <{{ m.role }}>{{ m.content }}</{{ m.role }}>\n{%- endmacro %}"
    "{% for m in messages %}{{ say(m) }}{% endfor %}",
    "methods": "{% for m in messages %}{{ m.content.split(' ')[-1].upper() * 2 }}"
    "{{ m.get('x', 'none') }}{{ m.items() | list | length }}{% endfor %}{{ 2 ** 5 }}{{ 3 * 4 }}",
    "loops": "{% for m in messages if m.role != 'system' %}{{ loop.index }}/{{ loop.length }}"
    "{{ loop.last }}{{ loop.previtem is defined }}{% else %}none{% endfor %}"
    "{% for m in messages recursive %}{% if m is string %}{{ m }}{% else %}"
    "{{ loop([m.role]) }}{% endif %}{% endfor %}{% for i in range(3) %}{{ i }}{% endfor %}",
    "filters": "{{ messages | map(attribute='role') | join(', ') }}"
    "{{ '-'.join(messages[0] or []) }}"
    "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}"
    "{{ ['b', 'a'] | sort | join }}{{ 'a\nb' | indent(2) }}{{ 'x' | center(5) }}"
    "{{ '%05.1f|%s' | format(2, 'a') }}{{ 'a-b' | replace('-', '+') }}"
    "{{ [[1], [2]] | sum(start=[]) }}"
    "{{ messages | groupby('role') | length }}{{ ' a ' | upper | trim | string }}"
    "{{ 2.5 | round(1) }}"
    "{{ messages | tojson(indent=1, separators=(',', ':')) }}{{ {'b': 1} | dictsort }}"
    "{{ 'a b c' | wordwrap(2) }}{{ messages | batch(2) | list | length }}",
    "strings": "{% set ns = namespace(s='') %}"
    "{% for m in messages %}{% set ns.s = ns.s ~ m.role ~ 1 %}"
    "{% endfor %}{{ ns.s[1:-1] }}{{ ns.s[::-1] }}{{ messages[1:] | length }}{{ 'a' ~ none }}"
    "{{ '%s is %d' % ('x', 3) }}{{ '{:>5}{}{{'.format('x', 3) }}{{ 7 % 4 }}{{ 'ab'.ljust(4) }}|"
    "{% set x %}<{{ ns.s }}>{% endset %}{{ x + x }}{{ [1] + [2] }}{{ 'a\tb'.expandtabs(4) }}"
    "{{ ns }}"
    "{% filter upper %}ab{% endfilter %}",
    "dict": "{% set d = dict(a=1) %}{{ d.a }}{{ {'b': 2}.b }}",
}
CHATS = [
    [{"role": "user", "content": "Hi <b> & \"you\" é 🙂"}],
    [
        {"role": "system", "content": "Be\nbrief."},
        {"role": "user", "content": " What is it? "},
        {"role": "assistant", "content": "That."},
        {"role": "user", "content": "Thanks"},
    ],
    [],
]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("chat", CHATS, ids=["one", "four", "none"])
@pytest.mark.parametrize("generation", [True, False])
def test_text_equals_transformers(name, chat, generation):
    from transformers.utils.chat_template_utils import render_jinja_template

    if name == "llama2" and not chat:  # it looks at the first message
        chat = CHATS[0]
    ours = ChatTemplate(TEMPLATES[name], special_tokens=SPECIAL)
    (theirs,), _ = render_jinja_template(
        [chat], chat_template=TEMPLATES[name], add_generation_prompt=generation, **SPECIAL
    )
    assert ours.render(chat, add_generation_prompt=generation) == theirs


def test_smollm2():
    text = ChatTemplate(SMOLLM2).render([{"role": "user", "content": "Hi"}])
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


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
    assert caught.value.code == 4
    assert "--raw" in caught.value.hint


ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__ }}{{ raise_exception.__globals__['x'] }}",
    "{{ strftime_now.__globals__ }}",
    "{{ self.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__.os.system('true') }}",
    "{% set x = namespace.__init__.__globals__ %}",
    "{{ '{0.__class__}'.format(messages) }}{{ ('{0.__class__.__init__.__globals__}').format(x) }}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_the_sandbox_holds(source):
    try:
        text = ChatTemplate(source).render([{"role": "user", "content": "a"}])
    except CheckpointError:
        return
    assert "<class" not in text
    assert "function" not in text


MEMORY = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # kB
HOSTILE = [
    "{% for i in range(10 ** 9) %}x{% endfor %}",
    "{{ 'x' * 10 ** 10 }}",
    "{{ [1] * 10 ** 10 }}",
    "{{ 10 ** 10 ** 10 }}",
    "{{ 9 ** 99999999 }}",
    "{% for i in range(100000) %}{{ 'x' * 1000 }}{% endfor %}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% if %}",
    "{{ messages[5].content.x }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{{ 1 / 0 }}",
    "{{ strftime_now(3) }}",
    "{% for m in messages %}{% endfor",
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
    "{% set ns = namespace(l=['x']) %}{% for i in range(40) %}{% set ns.l = [ns.l, ns.l] %}"
    "{% endfor %}{{ ns.l }}",
    "{% set ns = namespace(l=[], s='x' * 2 ** 23) %}{% for i in range(9999) %}"
    "{% set ns.l = ns.l + [ns.s[i:]] %}{% endfor %}",
    # Widths and counts.
    "{{ 'x'.ljust(10**9) }}", "{{ 'x'.rjust(10**9) }}", "{{ 'x'.center(10**9) }}",
    "{{ 'x'.zfill(10**9) }}", "{{ 'x' | center(10**9) }}", "{{ '\t'.expandtabs(10**9) }}",
    "{{ '%01000000000d' % 1 }}", "{{ '%.1000000000f' % 1 }}", "{{ '%*d' % (10**9, 1) }}",
    "{{ '%01000000000d' | format(1) }}", "{{ '{:1000000000}'.format(1) }}",
    "{{ '{:{w}}'.format(1, w=10**9) }}", "{{ '{a:1000000000}'.format_map({'a': 1}) }}",
    "{{ 'a' | indent(10**9, true) }}", "{{ [1] | batch(10**9, 0) | list }}",
    "{{ [1] | slice(10**9) | list }}", "{{ (1).to_bytes(10**9, 'big') | length }}",
    "{{ 1.5 | round(10**9, 'ceil') }}", "{{ [1] | tojson(indent=10**9) }}",
    "{{ ('x' * 10**6).replace('', 'x' * 10**6) }}", "{{ lipsum(n=10**9) }}",
    "{{ ('x' * 10**6) | list | join('x' * 10**6) }}", "{{ strftime_now('%1000000000d' * 500) }}",
    "{% set ns = namespace(n=3) %}{% for i in range(60) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
    # Time.
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% set l = [1] * 99999 %}{% for i in l %}{% for j in l %}{% endfor %}{% endfor %}",
    "{% set l = [1] * 99999 %}{% for i in l %}{% for j in l if false %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
]


@pytest.mark.parametrize("source", HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_template_is_one_clear_error(source):
    began = time.monotonic()
    with pytest.raises(CheckpointError, match="chat template failed") as caught:
        ChatTemplate(source).render([])
    assert time.monotonic() - began < 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < MEMORY + 3 * 2**20
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_sizes_are_bounded():
    with pytest.raises(CheckpointError, match="more than"):
        ChatTemplate("x" * (MAX_SOURCE + 1))
    assert MAX_OUTPUT < 1 << 26
    long = "a" * (MAX_OUTPUT // 2)
    chat = [{"role": "user", "content": long}]
    source = "{% for m in messages * 3 %}{{ m.content }}{% endfor %}"
    assert ChatTemplate(source).render(chat) == long * 3

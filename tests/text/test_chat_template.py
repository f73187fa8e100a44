"""Chat templates give transformers' text, and a hostile one gives one clear error."""

import pytest
from covers import few

from llmcli.errors import CheckpointError
from llmcli.text.chat import MAX_SOURCE, ChatTemplate
from llmcli.text.template_renderer import MAX_OUTPUT, RENDERER

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
    "generation is a scope": "{% set x = 1 %}{% for m in messages %}{% generation %}"
    "{% set x = loop.index + x %}{{ x }}{% endgeneration %}{{ x }}{% endfor %}",
    "namespace": "{% set ns = namespace({'a': 1}, b=2, self=3) %}{% set ns.c = ns.a + ns.self %}"
    "{{ ns.b }}{{ ns.c }}{{ ns.d is defined }}",
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
    # Public models' shapes, in few words.
    "llama3": "{{- bos_token }}{%- if custom_tools is defined %}{%- set tools = custom_tools %}"
    "{%- endif %}{%- if not date_string is defined %}{%- if strftime_now is defined %}"
    "{%- set date_string = strftime_now('%d %b %Y') %}{%- else %}{%- set date_string = 'x' %}"
    "{%- endif %}{%- endif %}{%- if messages and messages[0]['role'] == 'system' %}"
    "{%- set system = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}"
    "{%- else %}{%- set system = '' %}{%- endif %}"
    "{{- '<|start_header_id|>system<|end_header_id|>\n\n' }}Today: {{ date_string }}\n"
    "{{- system + '<|eot_id|>' }}{%- for m in messages %}"
    "{%- if not (m.role == 'ipython' or m.role == 'tool' or 'tool_calls' in m) %}"
    "{{- '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] | trim }}"
    "{%- elif 'tool_calls' in m %}{{ m.tool_calls | length }}{%- endif %}{%- endfor %}",
    "qwen3": "{%- set ns = namespace(multi_step_tool=true, last=messages|length - 1) %}"
    "{%- for message in messages[::-1] %}{%- set index = (messages|length - 1) - loop.index0 %}"
    "{%- if ns.multi_step_tool and message.role == 'user' and message.content is string and not("
    "message.content.startswith('<tool>') and message.content.endswith('</tool>')) %}"
    "{%- set ns.multi_step_tool = false %}{%- set ns.last = index %}{%- endif %}{%- endfor %}"
    "{%- for message in messages %}{%- set content = message.content %}"
    "{%- set reasoning = '' %}{%- if message.reasoning_content is string %}"
    "{%- set reasoning = message.reasoning_content %}{%- elif '</think>' in content %}"
    "{%- set reasoning = content.split('</think>')[0].rstrip('\n').split('<think>')[-1] %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}"
    "{%- if loop.last or (not loop.last and reasoning) %}{{ reasoning.strip('\n') }}|"
    "{%- endif %}{{ '<|im_start|>' ~ message.role ~ '\n' ~ content }}{% if ns.last > 0 %}+"
    "{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{- 'A\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- 'no' }}{%- endif %}"
    "{%- endif %}",
    "gemma": "{{ bos_token }}{%- set first = messages[0]['content'] if messages else '' -%}"
    "{%- for m in messages -%}{%- if (m['role'] == 'user') != (loop.index0 % 2 == 1) -%}"
    "{%- if m['role'] == 'assistant' -%}{%- set role = 'model' -%}{%- else -%}"
    "{%- set role = m['role'] -%}{%- endif -%}{{ '<start_of_turn>' + role + '\n' + (first if "
    "loop.first else '') }}{%- if m['content'] is string -%}{{ m['content'] | trim }}"
    "{%- elif m['content'] is iterable -%}{%- for item in m['content'] -%}"
    "{{ item['text'] | trim }}{%- endfor -%}{%- else -%}{{ raise_exception('type') }}{%- endif -%}"
    "{{ '<end_of_turn>\n' }}{%- endif -%}{%- endfor -%}",
    "mistral": "{%- set loop_messages = messages %}{%- set user = loop_messages | "
    "selectattr('role', 'equalto', 'user') | list %}{%- set ns = namespace(index=0) %}"
    "{%- for m in loop_messages %}{%- if m.role == 'tool' or m.tool_calls is defined and "
    "m.tool_calls is not none %}{%- continue %}{%- endif %}{%- set ns.index = ns.index + 1 %}"
    "{%- if m.role == 'user' and m == user[-1] %}{{- '[INST]' + m.content + '[/INST]' }}"
    "{%- elif m['role'] in ['assistant', 'system'] %}{{- ' ' + m.content|trim + eos_token }}"
    "{%- endif %}{%- endfor %}{%- for key, val in {'a': 1, 'b': '\"é'}.items() if key != 'a' %}"
    "{{- ', \"' + key + '\": ' + val|tojson }}{%- endfor %}{{ ns.index }}",
    "deepseek": "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = "
    "false %}{% endif %}{% set ns = namespace(is_first=false, system_prompt='', out=[]) %}"
    "{%- for message in messages %}{%- if message['role'] == 'system' %}"
    "{%- set ns.system_prompt = ns.system_prompt + message['content'] %}{%- endif %}{%- endfor %}"
    "{{ bos_token }}{{ ns.system_prompt }}{%- for message in messages %}"
    "{%- if message['role'] == 'assistant' and message['content'] is not none %}"
    "{% set content = message['content'] %}{% if '</think>' in content %}"
    "{% set content = content.split('</think>')[-1] %}{% endif %}"
    "{{'<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>'}}{%- endif %}"
    "{%- if message['role'] == 'user' %}{%- set ns.is_first = true -%}"
    "{{'<｜User｜>' + message['content']}}{%- endif %}{%- endfor -%}",
    "glm4": "[gMASK]<sop>{% macro visible(content) -%}{% if content is string -%}{{ content }}"
    "{%- elif content is iterable and content is not mapping -%}{% for item in content -%}"
    "{% if item is mapping and item.type == 'text' -%}{{ item.text }}{%- endif %}{%- endfor %}"
    "{%- else -%}{{ content }}{%- endif %}{%- endmacro -%}{% for item in messages %}"
    "{% if item['tools'] is defined %}{% for tool in item.tools %}{{ tool | tojson(indent=4, "
    "ensure_ascii=False) }}{% endfor %}{% endif %}{%- set meta = item.get('metadata', '') %}"
    "<|{{ item.role }}|>{{ meta }}\n{{ visible(item['content']) }}{{ '/nothink' if "
    "enable_thinking is defined and not enable_thinking and not visible(item.content)"
    ".endswith('/nothink') else '' }}{% endfor %}{% if add_generation_prompt %}<|assistant|>"
    "{% endif %}{{ [(1, 'a'), (2, messages)][0] }}{{ 'b' in ('a', messages) }}",
    "dict": "{% set d = dict(a=1) %}{{ d.a }}{{ {'b': 2}.b }}",
}
CHATS = [
    [{"role": "user", "content": "Hi <b> & \"you\" é 🙂"}],
    [
        {"role": "system", "content": "Be\nbrief."},
        {"role": "user", "content": " What is it? "},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nThat."},
        {"role": "user", "content": "Thanks"},
    ],
    [],
]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.fixture(autouse=True, scope="module")
def renderer():
    """One process for the templates of this file that do not fail."""
    with RENDERER:
        yield


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


def test_smollm2():
    text = ChatTemplate(SMOLLM2).render([{"role": "user", "content": "Hi"}])
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("source", "own"),
    [
        (SMOLLM2, "You are a helpful AI assistant named SmolLM, trained by Hugging Face"),
        ("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}", ""),
        (
            "<u>{% if messages[0].role == 'system' %}{{ messages[0].content }} {% endif %}"
            "{{ messages[-1].content }}", "",
        ),
        ("{% if messages[0].role == 'system' %}{{ raise_exception('none') }}{% endif %}x", ""),
        (
            "{% if messages[0].role == 'system' %}<s>{{ messages[0].content }}{% else %}<s>"
            "{{ name | default('Own') }}{% endif %}<u>{{ messages[-1].content }}", "Ann",
        ),
    ],
)  # fmt: skip
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
    "{% set ns = namespace(__html__='{0.__class__}'.format) %}{{ (ns | escape) ~ 'function' }}",
    "{% set ns = namespace() %}{% set ns.__html__ = ''.upper %}function",
    "{{ ('{0.__class__}' | attr('format'))(messages) }}",
]


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
    "{% for i in range(10 ** 9) %}x{% endfor %}",
    "{{ 'x' * 10 ** 10 }}",
    "{{ [1] * 10 ** 10 }}",
    "{{ 10 ** (10 ** 10) }}",
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
    "{{ ('x' * 10**6) | list | join('x' * 10**6) }}",
    "{% set ns = namespace(n=3) %}{% for i in range(60) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
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
    "{{ ([[1] * 400000] * 400000).count([1] * 400000) }}",
    "{{ ('ab' * 5000000) | unique | list }}", "{{ ('ab' * 5000000) | sort | length }}",
    "{{ ([1] * 400000) | sort(attribute='" + "a," * 9999 + "a') | length }}",
    "{{ ([(1,)] * 400000) | sum(start=()) | length }}",
    # Numbers whose hashes are all the same.
    *(
        "{% set n = range(0, 99999 * (2 ** 61 - 1), 2 ** 61 - 1) %}{{ " + held + " | length }}"
        for held in ("n | unique | list", "{}.fromkeys(n)", "dict(n | batch(2))")
    ),
    "{{ (['a' * 8000000] * 200000) | max | length }}",
    "{{ (['a' * 8000000] * 200000) | unique | list | length }}",
    "{{ ('(' * 8000000) | urlize | length }}", "{{ ('a ' * 4000000) | title | length }}",
    "{{ " + "a~" * 100_000 + "a }}", "{{ " + "a," * 100_000 + "a }}",
    # Time.
    "{{ ([1] * 400000) | select('in', [2] * 400000) | list | length }}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% set l = [1] * 99999 %}{% for i in l %}{% for j in l %}{% endfor %}{% endfor %}",
    "{% set l = [1] * 99999 %}{% for i in l %}{% for j in l if false %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    # One call each, in loops of C that nothing inside the process interrupts.
    "{{ ('a' * 8000000).rfind('ab' ~ 'a' * 4000000) }}",
    "{{ ('a' * 1000000).strip('b' * 1000000 ~ 'a') }}",
    "{{ ('a' * 8000000) | wordwrap }}",
    "{{ ('a' * 8000000).rindex('ab' ~ 'a' * 4000000) }}",
    "{{ ('a' * 8000000).rsplit('ab' ~ 'a' * 4000000) }}",
    "{{ ('a' * 8000000).rpartition('ab' ~ 'a' * 4000000) }}",
]
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
    monkeypatch.setattr("llmcli.text.template_renderer.MAX_SECONDS", 0.2)
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

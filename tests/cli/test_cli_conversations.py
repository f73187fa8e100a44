"""`{"messages": […]}` in files and batches, and the variables of the chat template."""

from __future__ import annotations

import json
import shutil

import pytest
from cli_tiny import write_tiny

from llmcli.cli.messages import read_conversation
from llmcli.cli.options import PromptOptions
from llmcli.cli.prompts import read_prompt
from llmcli.cli.template import TemplateOptions, template_variables
from llmcli.commands.attention.prompt import again
from llmcli.errors import UsageError

END, USER, ASSISTANT, SYSTEM = range(4)
VARIED = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{{ mood }}{{ more }}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def user(text):
    return {"role": "user", "content": text}


def answer(text, **more):
    return {"role": "assistant", "content": text, **more}


@pytest.fixture
def talk(tmp_path):
    """Writes a conversation, and gives the path of the file."""

    def write(*messages, name="talk.json", **more):
        path = tmp_path / name
        path.write_text(json.dumps({"messages": messages, **more}), "utf-8")
        return str(path)

    return write


@pytest.fixture
def prompt_of(run_tiny):
    """What `generate` gives to the model, as JSON says it."""

    def prompt(*argv):
        return run_tiny("generate", *argv, "-n", "1", "--json").json()["prompt"]

    return prompt


def letters(text):
    """Ids of the small model's letters."""
    return [letter + 5 - 33 for letter in text.encode()]


def test_a_file_of_messages_is_answered(talk, prompt_of):
    messages = [{"role": "system", "content": "s"}, user("hi"), answer("yo"), user("x")]
    prompt = prompt_of("-f", talk(*messages))
    assert prompt["ids"] == [
        SYSTEM, *letters("s"), END, USER, *letters("hi"), END, ASSISTANT, *letters("yo"), END,
        USER, *letters("x"), END, ASSISTANT,
    ]  # fmt: skip
    assert prompt == {"text": "x", "ids": prompt["ids"], "chat": True, "messages": messages}
    assert "messages" not in prompt_of("x")


def test_what_else_is_given_is_what_the_user_says_next(talk, prompt_of):
    file = talk(user("a"), answer("b", finish_reason="eos"))
    prompt = prompt_of("-f", file, "c")
    assert prompt["messages"] == [user("a"), answer("b"), user("c")]
    assert prompt["ids"][-4:] == [USER, *letters("c"), END, ASSISTANT]


def test_an_answer_at_the_end_goes_on(talk, prompt_of):
    ids = prompt_of("-f", talk(user("a"), answer("b")))["ids"]
    assert ids == [USER, *letters("a"), END, ASSISTANT, *letters("b")]
    cut = talk(user("a"), answer("b", finish_reason="length"))
    assert prompt_of("-f", cut)["ids"] == ids


def test_a_finished_answer_leaves_nothing_to_say_but_much_to_look_at(talk, run_tiny):
    for last in (answer("b", finish_reason="eos"), {"role": "assistant", "tool_calls": []}):
        result = run_tiny("generate", "-f", talk(user("a"), last))
        assert result.code == 2
        assert "ends with a finished answer: there is nothing to answer" in result.err
    file = talk(user("a"), answer("b", finish_reason="stop"))
    tokens = run_tiny("tokens", "-f", file, "--json").json()
    assert tokens["rendered"] == "<|user|>a<|end|><|assistant|>b<|end|>"
    assert tokens["text"] is None


def test_the_transcript_of_a_chat_goes_on(cli, tiny, tmp_path):
    """Of it the messages and the variables count."""
    folder = str(shutil.copytree(tiny, tmp_path / "m"))
    (tmp_path / "m" / "chat_template.jinja").write_text(VARIED)
    file = str(tmp_path / "t.json")
    base = ("-m", folder, "--random-weights", "--seed", "1", "--ignore-eos", "-n", "3")
    assert cli("chat", "--prompt", "a", "--set", "mood=5", "--save", file, *base[:5], "-n",
               "2").code == 0  # fmt: skip
    said = json.loads((tmp_path / "t.json").read_text())["messages"][1]["content"]
    prompt = cli("generate", "-f", file, "b", *base, "--json").json()["prompt"]
    assert prompt["messages"] == [user("a"), answer(said), user("b")]
    assert prompt["ids"][-2:] == [*letters("5"), ASSISTANT]


def test_a_batch_mixes_conversations_with_the_rest(run_tiny, talk, tmp_path):
    file = tmp_path / "b.jsonl"
    lines = ["hi", {"messages": [user("hi")]}, {"messages": [user("a"), answer("b")]}]
    file.write_text("\n".join(map(json.dumps, lines)))
    run = run_tiny("generate", "--batch", str(file), "-n", "2", "--json")
    first, second, third = (json.loads(line)["prompt"] for line in run.out.splitlines())
    assert first["ids"] == second["ids"]
    assert third["ids"][-2:] == [ASSISTANT, *letters("b")]
    plain = run_tiny("generate", "--batch", str(file), "-n", "2").out
    assert "--- 1 · hi\n" in plain
    assert "--- 2 · b\n" in plain


def test_the_system_message_of_the_command_line_wins(talk, prompt_of):
    file = talk({"role": "system", "content": "s"}, user("x"))
    assert prompt_of("-f", file, "--system", "t")["ids"][:3] == [SYSTEM, *letters("t"), END]
    file = talk(user("x"))
    assert prompt_of("-f", file, "--system", "t")["ids"][:4] == [SYSTEM, *letters("t"), END, USER]


def test_variables_come_from_the_file_and_the_command_line(cli, tiny, talk, tmp_path):
    folder = str(shutil.copytree(tiny, tmp_path / "m"))
    (tmp_path / "m" / "chat_template.jinja").write_text(VARIED)

    def rendered(*argv):
        return cli("tokens", "-m", folder, *argv, "--json").json()["rendered"]

    file = talk(user("x"), variables={"mood": "low", "more": 1})
    assert rendered("-f", file) == "<|user|>x<|end|>low1<|assistant|>"
    flags = ("--set", "mood=high", "--set", "more=[2]")
    assert rendered("-f", file, *flags) == "<|user|>x<|end|>high[2]<|assistant|>"
    assert rendered("x", "--set", "mood=z") == "<|user|>x<|end|>z<|assistant|>"  # implies --chat
    prompt = cli("generate", "-m", folder, "--random-weights", "-f", file, *flags, "--set",
                 "more=", "-n", "1", "--json").json()["prompt"]  # fmt: skip
    assert prompt["ids"] == [USER, *letters("x"), END, *letters("high"), ASSISTANT]


def test_values_of_variables_are_json_or_text():
    given = ["a=true", "b=1.5", 'c="x"', "d=x=y", "e=", 'f={"g": [1]}', "h=null"]
    assert template_variables(given) == {
        "a": True, "b": 1.5, "c": "x", "d": "x=y", "e": "", "f": {"g": [1]}, "h": None,
    }  # fmt: skip
    for wrong in ("a", "=1", "a-b=1", "messages=1", "add_generation_prompt=false"):
        with pytest.raises(UsageError, match="--set") as caught:
            template_variables([wrong])
        assert caught.value.hint
    line = again("x", TemplateOptions(variable=["a=1", "b=it's"]))
    assert line == "llmcli x --set a=1 --set 'b=it'\"'\"'s'"


def test_every_command_with_a_prompt_takes_it(talk, run_tiny):
    file = talk(user("hi"), answer("yo"), user("x"))
    written = "<|user|>hi<|end|><|assistant|>yo<|end|><|user|>x<|end|><|assistant|>"
    expected = run_tiny("tokens", written, "--json").json()["tokens"]
    ids = [token["id"] for token in expected]
    for command, *more in (("lens",), ("attention",), ("score",), ("explain", "embed[0,0]")):
        found = run_tiny(command, *more, "-f", file, "--json").json()["tokens"]
        assert [token["id"] for token in found] == ids, command
    assert run_tiny("ladder", "-f", file, "--json").json()["ids"] == ids
    assert run_tiny("shapes", "-f", file, "--json").json()["tokens"] == len(ids)
    timing = ("timing", "-f", file, "-n", "1", "--pairs", "2", "--json")
    assert run_tiny(*timing).json()["prompt_tokens"] == len(ids)


def test_text_that_happens_to_be_json_is_text(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", None)
    talk = '{"messages": [{"role": "user", "content": "x"}]}'
    for name, text in (
        ("talk.txt", talk), ("talk", talk), ("a.json", '{"messages": {"hello": "Hallo"}}'),
        ("b.json", '["messages"]'), ("c.json", '{"text": 1}'), ("d.json", "{"), ("e.json", "x"),
    ):  # fmt: skip
        (tmp_path / name).write_text(text)
        prompt = read_prompt(PromptOptions(file=str(tmp_path / name)))
        assert (prompt.text, prompt.conversation) == (text, None)
    assert capsys.readouterr().err == ""
    (tmp_path / "f.JSON").write_text(talk)
    assert read_prompt(PromptOptions(file=str(tmp_path / "f.JSON"))).conversation is not None
    (tmp_path / "g.json").write_text(talk[:-1])
    assert read_prompt(PromptOptions(file=str(tmp_path / "g.json"))).text == talk[:-1]
    assert "g.json` is not valid JSON (Expecting ',' delimiter" in capsys.readouterr().err


GOOD = {"role": "user", "content": "x"}
DEEP = json.loads("[" * 500 + "]" * 500)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"messages": []}, "`messages` of F is not a list of messages, or it is empty"),
        ({"messages": "x"}, "`messages` of F is not a list of messages, or it is empty"),
        ({"messages": [GOOD, "x"]}, "`messages[1]` of F is not an object"),
        ({"messages": [{"content": "x"}]}, "`messages[0]` of F has no `role`"),
        ({"messages": [{"role": "", "content": "x"}]}, "`messages[0]` of F has no `role`"),
        ({"messages": [{"role": 1, "content": "x"}]}, "`messages[0].role` of F is not a text"),
        ({"messages": [{"role": "user"}]}, "`messages[0]` of F has no `content`"),
        ({"messages": [{"role": "user", "content": None}]}, "`messages[0]` of F has no `content`"),
        ({"messages": [{**GOOD, "content": 3}]}, "`messages[0].content` of F is not a text"),
        ({"messages": [{**GOOD, "text": 3}]}, "`messages[0]` of F has the unknown key `text`"),
        ({"messages": [{**GOOD, "tool_calls": "x"}]},
         "`messages[0].tool_calls` of F is not a list"),
        ({"messages": [{**GOOD, "content": ["x"]}]},
         "`messages[0].content[0]` of F is not a part of type `text`"),
        ({"messages": [{**GOOD, "content": [{"type": "image", "url": "x"}]}]},
         "`messages[0].content[0]` of F is not a part of type `text`"),
        ({"messages": [{**GOOD, "content": "\ud83d"}]},
         "`messages[0].content` of F has half a surrogate pair, which is not a character"),
        ({"messages": [{"role": "assistant", "tool_calls": DEEP}]},
         "`messages[0].tool_calls` of F is nested more than 32 deep"),
        ({"messages": [GOOD], "variables": {"a": DEEP}},
         "`variables.a` of F is nested more than 32 deep"),
        ({"messages": [GOOD], "variables": {"a": {"b": ["\ud83d"]}}},
         "`variables.a` of F has half a surrogate pair, which is not a character"),
        ({"messages": [GOOD], "temperature": 1}, "F has the unknown key `temperature`"),
        ({"messages": [GOOD], "variables": [1]}, "`variables` of F is not an object"),
        ({"messages": [GOOD], "variables": {"a b": 1}},
         "`variables` of F cannot have a variable `a b`"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_conversation_is_said_with_its_place(value, words):
    with pytest.raises(UsageError) as caught:
        read_conversation(value, "F")
    assert caught.value.message == words
    assert caught.value.hint


def test_messages_as_other_programs_write_them():
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}], "name": None}
    found = read_conversation(
        {"messages": [{"role": "user", "content": parts}, call, {**GOOD, "role": "tool"}]}, "F"
    )
    assert list(found.messages) == [
        user("a b"), {"role": "assistant", "tool_calls": [{"id": "1"}]}, {**GOOD, "role": "tool"},
    ]  # fmt: skip


def test_what_contradicts_a_conversation_is_refused(talk, run_tiny, cli, tmp_path):
    file = talk(user("x"))
    batch = tmp_path / "b.jsonl"
    batch.write_text('"x"\n{"messages": [{"role": "user", "content": "x"}]}')
    (bad := tmp_path / "bad.jsonl").write_text('{"messages": [3]}')
    for argv, words in (
        (("-f", file, "--raw"), f"`{file}` is a conversation: it needs the chat template"),
        (("--batch", str(batch), "--raw"), f"line 2 of `{batch}` is a conversation: it needs"),
        (("--batch", str(bad)), f"`messages[0]` of line 1 of `{bad}` is not an object"),
        (("-f", file, "--ids", "1"), "`--ids` goes without PROMPT and `--file`"),
        (("x", "--raw", "--set", "a=1"), "`--set` needs the chat template, which"),
        (("--ids", "1", "--set", "a=1"), "`--ids` is always raw and goes without `--set`"),
    ):
        result = run_tiny("generate", *argv)
        assert result.code == 2
        assert words in result.err
        assert "hint: " in result.err
    result = run_tiny("score", "-f", file, "--versus", "tiny")
    assert result.code == 2
    assert "`--versus` compares on one" in result.err
    result = run_tiny("tokens", "-f", file, "--no-special")
    assert result.code == 2
    assert "leave `--no-special` out" in result.err
    bare = ("-m", str(write_tiny(tmp_path / "bare", template=False)), "--random-weights")
    for argv in (("generate", "-f", file), ("tokens", "-f", file), ("lens", "-f", file)):
        result = cli(*argv, *bare)
        assert result.code == 2
        assert "is a conversation, and" in result.err
        assert "has no chat template for it" in result.err


def test_a_template_that_refuses_the_messages_names_them(cli, tiny, talk, tmp_path):
    folder = str(shutil.copytree(tiny, tmp_path / "m"))
    (tmp_path / "m" / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}"
        "{% endif %}{{ m.content | upper }}{% endfor %}"
    )
    batch = tmp_path / "b.jsonl"
    for messages, words in (
        ([{"role": "tool", "content": "x"}], "the chat template failed: no tools"),
        ([answer("x")], "the chat template does not write the last message as it stands"),
    ):
        batch.write_text('"x"\n' + json.dumps({"messages": messages}))
        base = ("-m", folder, "--random-weights", "-n", "1")
        for argv, place in (
            (("--batch", str(batch)), f"line 2 of `{batch}`"), (("-f", talk(*messages)), "`"),
        ):  # fmt: skip
            result = cli("generate", *argv, *base)
            assert result.code == 4
            assert f"error: {place}" in result.err
            assert words in result.err
            assert "--raw" not in result.err

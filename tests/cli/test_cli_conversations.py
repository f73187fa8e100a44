"""`{"messages": […]}` as it is read, checked and timed, and the variables of the chat template."""

from __future__ import annotations

import json

import pytest

from llmcli.cli.messages import read_conversation
from llmcli.cli.options import PromptOptions
from llmcli.cli.prompts import read_prompt
from llmcli.cli.template import TemplateOptions, template_variables
from llmcli.commands.attention.prompt import again
from llmcli.errors import UsageError


def user(text):
    return {"role": "user", "content": text}


def test_values_of_variables_are_json_or_text():
    given = ["a=true", "b=1.5", 'c="x"', "d=x=y", "e=", 'f={"g": [1]}', "h=null"]
    assert template_variables(given) == {
        "a": True, "b": 1.5, "c": "x", "d": "x=y", "e": "", "f": {"g": [1]}, "h": None,
    }  # fmt: skip
    line = again("x", TemplateOptions(variable=["a=1", "b=it's"]))
    assert line == "llmcli x --set a=1 --set 'b=it'\"'\"'s'"


def test_a_conversation_is_timed_and_climbed(run_tiny, tmp_path):
    file = tmp_path / "talk.json"
    file.write_text(json.dumps({"messages": [user("hi")]}))
    found = run_tiny("timing", "-f", str(file), "-n", "1", "--pairs", "2", "--json").json()
    assert found["prompt_tokens"] == len("hi") + 3
    assert len(run_tiny("ladder", "-f", str(file), "--json").json()["ids"]) == len("hi") + 3


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

"""`chat`: one turn, a conversation on a terminal, and transcripts that go on."""

import io
import json
import os
import re
import shutil
import subprocess
import sys
import time

import children
import pytest
from chat_terminal import PROMPT, Terminal
from cli_tiny import write_mixture, write_tiny
from json_schemas import errors

from llmcli.cli.output import Output
from llmcli.commands.chat import command, slash, typed
from llmcli.commands.chat.chat import Chat
from llmcli.commands.chat.typed import with_files
from llmcli.commands.experts.command import ExpertsOptions
from llmcli.engine.sampler import Sampler
from llmcli.engine.session import Session
from llmcli.errors import CheckpointError, NotFinite, UsageError
from llmcli.text.chat import ChatTemplate
from llmcli.text.tokenizer import Tokenizer

GREEDY = ("--greedy", "-n", "8")


@pytest.fixture(scope="module")
def talker(tmp_path_factory):
    """A model with a chat template and room for a long conversation."""
    folder = tmp_path_factory.mktemp("talker") / "m"
    return str(write_tiny(folder, weights=True, max_position_embeddings=600))


@pytest.fixture
def chat(cli, talker, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    return lambda *argv: cli("chat", "-m", talker, "--seed", "1", *argv)


class Typed:
    """Lines for the prompt of a conversation, one after the other, and the drafts they replaced."""

    def __init__(self, *lines):
        self.lines, self.drafts, self.meters = list(lines), [], []

    def choose(self, question):
        return ""

    def ask(self, draft, meter):
        self.drafts.append(draft)
        self.meters.append(meter)
        line = self.lines.pop(0) if self.lines else None
        return line() if callable(line) else line


@pytest.fixture
def converse(cli, talker, monkeypatch):
    """A conversation of these lines, as a terminal would give them."""

    def run(*lines, argv=(), drafts=None, meters=None):
        typed = Typed(*lines)
        monkeypatch.setattr(command, "lines_of", lambda *how: typed)
        monkeypatch.setattr("sys.stdin", io.StringIO(""))
        monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
        result = cli("chat", "-m", talker, "--seed", "1", *argv)
        if drafts is not None:
            drafts += typed.drafts
        if meters is not None:
            meters += typed.meters
        return result

    return run


def test_one_turn(chat):
    said = chat("--prompt", "hello", *GREEDY)
    assert said.code == 0
    assert said.out.endswith("\n")
    line = chat("--prompt", "hello", *GREEDY, "--json").json()
    assert errors(line, "chat") == []
    assert line["messages"][0] == {"role": "user", "content": "hello"}
    content = line["messages"][1]["content"]
    assert said.out == content + "\n" * (not content.endswith("\n"))
    tokens = line["tokens"]
    assert tokens["prompt"] == tokens["computed"] == len("hello") + 3
    assert tokens["generated"] == len(line["messages"][1]["ids"])
    assert "read 8 new of 8" in chat("--prompt", "hello", *GREEDY, "--stats").err


def test_a_file_and_a_pipe_are_one_message(cli, talker, tmp_path, monkeypatch):
    file = tmp_path / "a.txt"
    file.write_text("from a file\n")
    monkeypatch.setattr("llmcli.cli.prompts.stdin_is_given", lambda stream: True)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"from a pipe\n")))
    said = cli("chat", "-m", talker, "-f", file, "--prompt", "and here", *GREEDY, "--json").json()
    assert said["messages"][0]["content"] == "from a pipe\nfrom a file\nand here"


def test_what_cannot_be_said(chat, tiny, cli, tmp_path):
    assert "there is no message" in chat().err
    assert chat().code == 2
    bare = write_tiny(tmp_path / "bare", template=False, weights=True)
    assert "cannot chat" in cli("chat", "-m", bare, "--prompt", "x").err
    assert "not NAME=VALUE" in chat("--prompt", "x", "--set", "thinking").err
    assert "not empty" in chat("--prompt", "x", "--stop", "").err
    long = chat("--prompt", "x" * 700)
    assert (long.code, "more than the context of 600" in long.err) == (2, True)
    assert chat("--prompt", "x", "--save", str(tmp_path / "no" / "a.json")).code != 0


def test_a_conversation_reads_only_what_is_new(converse):
    said = converse("hello", "/stats", "and then?", "/stats", "/tokens", argv=GREEDY)
    assert said.code == 0
    first, second = re.findall(r"read (\d+) new of (\d+)", said.out)[:2]
    assert first == ("8", "8")
    new, whole = map(int, second)
    # what is said, three special tokens around it, the last token of the answer before, which was
    # not read yet, and the end that it lacks where it was cut off
    assert new in (len("and then?") + 4, len("and then?") + 5)
    assert whole >= new + 8
    assert "assistant" in said.out


def test_commands_change_what_is_said(converse, tmp_path):
    drafts = []
    said = converse(
        "/system be brief", "hello", "/undo", "/undo", "/edit", "one", "/edit", "two",
        "/regen", "/clear", "/system none", "/set temperature 0.5", "/set lead true", "/set",
        "/set top_p 7", "/set top_p true", "/set seed 1.5", "/set nonsense", "/hepl",
        "/stats maybe", "/regen", "/load", "/save",
        argv=GREEDY, drafts=drafts,
    )  # fmt: skip
    assert "system: be brief" in said.out
    assert "undone: hello" in said.out
    assert "system: none" in said.out
    assert "one" in drafts, "the message to edit is the next draft"
    assert "temperature         0.5" in said.out
    assert "lead                True  (of the template)" in said.out
    for line in (
        "error: there is nothing to undo",
        "error: there is nothing to edit",
        "error: `top_p` must be greater than 0 and at most 1, not `7`",
        "error: `top_p` must be a number greater than 0 and at most 1, not `true`",
        "error: `seed` must be a whole number of at least 0, not `1.5`",
        "error: `/set` takes a name and a value",
        "error: there is no command `/hepl`",
        "hint: did you mean `/help`?",
        "error: `/stats` takes on or off",
        "error: there is nothing to answer",
        "error: `/load` takes the path of a file",
        "error: `/save` takes the path of a file",
    ):
        assert line in said.err, line


def test_what_begins_with_two_slashes_is_said(converse, tmp_path):
    file, drafts = tmp_path / "a.json", []
    said = converse("//etc/hosts", "/edit", "", "/etc/hosts", argv=(*GREEDY, "--save", file),
                    drafts=drafts)  # fmt: skip
    assert transcript(file)["messages"][0]["content"] == "/etc/hosts"
    assert drafts[2] == "//etc/hosts"
    assert "error: there is no command `/etc/hosts`" in said.err
    assert "`//…` says `/…` to the model" in said.err
    converse("/edit", argv=("--load", file), drafts=drafts)
    assert drafts[-1] == "//etc/hosts", "it was not typed here"


PLAIN = {
    "messages": [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "hello"}]},
        {"role": "assistant", "content": "Hi.", "reasoning_content": "Hm."},
    ],
    "variables": {"lead": "a"},
}


def test_messages_alone_are_a_conversation(converse, tmp_path):
    file, out = tmp_path / "plain.json", tmp_path / "out.json"
    file.write_text(json.dumps(PLAIN))
    said = converse(
        "and then?", "/set temperature 0.5", f"/load {file}", f"/save {out}",
        argv=("--load", file, *GREEDY),
    )  # fmt: skip
    assert said.code == 0
    assert "2 messages so far\nuser: hello\nassistant: Hi.\n" in said.err
    assert f"3 messages of {file}\n" in said.out
    found = transcript(out)
    assert errors(found, "chat") == []
    assert [one["content"] for one in found["messages"]] == ["be brief", "hello", "Hi."]
    assert found["messages"][2]["reasoning"] == "Hm."
    assert found["variables"] == {"lead": "a"}
    assert (found["sampling"]["temperature"], found["sampling"]["max_tokens"]) == (0.5, 8)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "tool", "content": "x"}, "is of the role `tool`"),
        ({"role": "system", "content": "x"}, "is of the role `system`"),
        ({"role": "assistant", "tool_calls": []}, "has `tool_calls`"),
    ],
)
def test_messages_that_are_no_part_of_a_chat(message, words, converse, tmp_path):
    file = tmp_path / "plain.json"
    file.write_text(json.dumps({"messages": [*PLAIN["messages"], message]}))
    said = converse(f"/load {file}", "/tokens")
    assert f"error: `messages[3]` of `{file}` {words}, which does not belong in a chat" in said.err
    assert "Traceback" not in said.err
    assert "hello" not in said.out


def test_a_message_without_an_answer_can_get_one(converse, tmp_path):
    file, out = tmp_path / "plain.json", tmp_path / "out.json"
    file.write_text(json.dumps({"messages": PLAIN["messages"][:2]}))
    said = converse("/regen", f"/save {out}", argv=("--load", file, *GREEDY))
    assert "note: the last message has no answer: `/regen` gives it one" in said.err
    assert len(transcript(out)["messages"]) == 3


def test_a_message_longer_than_the_context_is_refused_at_once(converse, chat, monkeypatch):
    asked = []
    monkeypatch.setattr(Typed, "choose", lambda self, question: asked.append(question) or "d")
    said = converse("hello", "x" * 700, "/tokens", argv=GREEDY)
    assert asked == []
    for err in (said.err, chat("--prompt", "x" * 700).err):
        assert "error: the message and the template around it take 703 tokens, " in err
        assert "103 more than the context of 600\nhint: shorten the message" in err
    assert "hello" in said.out


def test_a_context_without_room_for_the_template_is_refused(chat, converse):
    few = ("--context-length", "2")
    for said in (chat("--prompt", "x", *few), converse(argv=few)):
        assert said.code == 2
        assert "`--context-length 2` has no room for a message" in said.err
        assert "hint: such as `--context-length 259`" in said.err


def test_another_answer_reads_nothing_and_a_draft_may_propose_nothing(converse):
    said = converse("hello", "/regen", "/stats", argv=(*GREEDY, "-n", "1", "--draft", "ngram"))
    assert "read 0 new of 8" in said.out
    assert "draft proposed nothing so far" in said.out


def test_how_other_programs_end(converse):
    for name in ("/bye", "/quit"):
        assert converse(name, "/system never said").out == ""
    assert "/undo" in converse("/?").out
    said = converse("exit", " quit", "bye", "/tokens", argv=GREEDY)
    assert said.err.count("note: `/exit` ends") == 3
    assert "user" not in said.out


def test_undo_takes_back_one_turn_after_the_other(converse, tmp_path):
    file, drafts = tmp_path / "a.json", []
    lines = ("one", "two", "three", "/undo", "/undo", "two and more")
    converse(*lines, argv=(*GREEDY, "--save", file), drafts=drafts)
    assert not any(drafts), "the next line is not behind what was taken back"
    said = [one["content"] for one in transcript(file)["messages"]][::2]
    assert said == ["one", "two and more"]


def test_set_shows_what_was_set(converse):
    said = converse("/set top-k 7", "/set lead a", "/set seed 3", "/set")
    rows = [line.split() for line in said.out.splitlines()[:3]]
    assert rows == [["top_k", "7"], ["lead", "a", "(of", "the", "template)"], ["seed", "3"]]
    assert len(said.out.splitlines()) > 9


def test_set_says_what_it_takes(converse):
    said = converse(
        "/set num_ctx 100", "/set stop x", "/set system x", "/set max_tokens 0", "/set seed -1",
        "/set temperature abc", "/set top_p 7",
    )  # fmt: skip
    for line in (
        "hint: `/set` takes temperature, top_k, top_p, min_p, repetition_penalty, "
        "presence_penalty, frequency_penalty, max_tokens, seed, lead",
        "hint: `/system TEXT` sets that message",
        "error: `max_tokens` must be at least 1 or -1, not `0`",
        "error: `seed` must be at least 0, not `-1`",
        "error: `temperature` must be a number of at least 0, not `abc`",
        "error: `top_p` must be greater than 0 and at most 1, not `7`",
    ):
        assert line in said.err


@pytest.mark.parametrize(
    ("typed_text", "more", "said"),
    [
        ("one\\", True, "one\\"), ("one\\\\", False, "one\\\\"), ('"""one', True, '"""one'),
        ('"""one\ntwo"""', False, "one\ntwo"), (' """\n/one\n""" ', False, "//one"),
        ('""""""', False, ""), ('a """ b', False, 'a """ b'),
    ],
)  # fmt: skip
def test_lines_that_go_on(typed_text, more, said):
    assert typed.continues(typed_text) is more
    assert typed.without_quotes(typed_text) == said


def test_help_names_every_command(converse):
    said = converse("/help", "/exit", "never said")
    for name in slash.COMMANDS:
        assert f"/{name}" in said.out
    assert "never said" not in said.out


@pytest.mark.parametrize(("columns", "rows"), [("80", 22), ("40", 99), ("120", 22)])
def test_help_fits_the_screen(columns, rows, converse, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    lines = converse("/help", "/exit").out.splitlines()
    assert len(lines) <= rows
    assert max(map(len, lines)) <= int(columns)


def test_a_saved_conversation_goes_on_as_it_would_have(converse, tmp_path):
    file, other = tmp_path / "talk.json", tmp_path / "other.json"
    # float32: what is read at once and what is read step by step then agree, down to near ties
    sampling = ("-n", "8", "-t", "1", "--dtype", "float32")
    whole = converse("hello", "and then?", argv=(*sampling, "--save", file))
    right = json.loads(file.read_text())
    assert errors(right, "chat") == []
    assert [one["role"] for one in right["messages"]] == ["user", "assistant"] * 2
    converse("hello", argv=(*sampling, "--save", other))
    converse("and then?", argv=("--load", other, "--save", other, "--dtype", "float32"))
    found = json.loads(other.read_text())
    assert found["messages"] == right["messages"]
    assert found["sampling"] == right["sampling"]
    assert whole.code == 0


def test_generate_keeps_the_ids_of_a_saved_answer(converse, cli, talker, tmp_path, monkeypatch):
    file = tmp_path / "a.json"
    converse("hello", argv=(*GREEDY, "--save", file))
    said, encoded = transcript(file)["messages"][1], []
    encode = Tokenizer.encode

    def noted(self, text, **how):
        encoded.append(text)
        return encode(self, text, **how)

    monkeypatch.setattr(Tokenizer, "encode", noted)

    def ids(*argv):
        argv = ("-n", "1", "--json", *argv)
        return cli("generate", "-m", talker, "-f", file, "go on", *argv).json()["prompt"]["ids"]

    found = ids()
    assert not any(said["content"] in text for text in encoded)
    at = len(said["ids"])
    assert said["ids"] in [found[start : start + at] for start in range(len(found))]
    document = transcript(file)
    document["model"]["name"] = "another"
    file.write_text(json.dumps(document))
    assert ids() != found, "the text of these ids has others"
    assert any(said["content"] in text for text in encoded)


def test_a_draw_again_differs_and_is_kept(converse, tmp_path):
    file = tmp_path / "talk.json"
    converse("hello", "/regen", argv=("-n", "8", "-t", "1", "--save", file))
    found = json.loads(file.read_text())
    assert found["answers"] == 2
    assert len(found["messages"]) == 2
    converse("hello", argv=("-n", "8", "-t", "1", "--save", file))
    assert json.loads(file.read_text())["messages"][1] != found["messages"][1]


def transcript(file):
    return json.loads(file.read_text())


def test_edit_changes_nothing_until_something_else_is_said(converse, tmp_path):
    file, drafts = tmp_path / "talk.json", []
    converse("hello", "/edit", "", f"/save {file}", "/edit", "/stats", argv=GREEDY, drafts=drafts)
    assert drafts.count("hello") == 2
    (asked, answer) = transcript(file)["messages"]
    assert asked["content"] == "hello"
    converse("/edit", "hello you", "and now?", argv=("--load", file, "--save", file))
    said = [one["content"] for one in transcript(file)["messages"]][::2]
    assert said == ["hello you", "and now?"]
    assert answer["role"] == "assistant"


def test_what_cannot_be_answered_changes_nothing(converse, tmp_path):
    file = tmp_path / "talk.json"
    converse("hello", "x" * 700, "/edit", "y" * 700, f"/save {file}", argv=GREEDY)
    assert transcript(file)["messages"][0]["content"] == "hello"
    assert len(transcript(file)["messages"]) == 2


def test_what_is_chosen_wins_over_transcripts(converse, tmp_path):
    first, second, out = (tmp_path / name for name in ("a.json", "b.json", "c.json"))
    converse("hello", argv=(*GREEDY, "--stop", "never1", "--set", "lead=a", "--save", first))
    document = transcript(first)
    second.write_text(json.dumps(document | {"variables": {}}))
    converse(f"/load {first}", f"/load {second}", f"/save {out}")
    assert transcript(out)["variables"] == {}, "those of the first file are gone"
    assert transcript(out)["sampling"]["stop"] == ["never1"]
    flags = ("--stop", "other", "--set", "lead=b")
    converse(f"/load {first}", f"/save {out}", argv=flags)
    assert transcript(out)["variables"] == {"lead": "b"}
    assert transcript(out)["sampling"]["stop"] == ["other"]
    typed = ("/set lead c", "/set temperature 0.25", "/set seed 5", f"/load {first}")
    converse(*typed, f"/save {out}")
    assert transcript(out)["variables"] == {"lead": "c"}
    sampling = transcript(out)["sampling"]
    assert (sampling["temperature"], sampling["seed"]) == (0.25, 5)


def test_a_load_that_fails_or_is_interrupted_changes_nothing(converse, tmp_path, monkeypatch):
    file, bad, out = (tmp_path / name for name in ("a.json", "b.json", "c.json"))
    converse("hello", argv=(*GREEDY, "--save", file))
    changed = transcript(file)
    changed["messages"][0]["content"] = "another"
    changed["sampling"] |= {"temperature": 9, "stop": ["bad"], "seed": 77}
    bad.write_text(json.dumps(changed | {"variables": {"lead": "bad"}}))
    render = ChatTemplate.render
    for error in (KeyboardInterrupt(), CheckpointError("the chat template failed: x")):

        def broken(self, messages, error=error, **more):
            if messages[0]["content"] == "another":
                raise error
            return render(self, messages, **more)

        with monkeypatch.context() as patch:
            patch.setattr(ChatTemplate, "render", broken)
            said = converse(f"/load {file}", f"/load {bad}", f"/save {out}")
        assert said.code == 0
        assert transcript(out) == transcript(file) | {"environment": transcript(out)["environment"]}
    assert "error: the chat template failed: x" in said.err


def test_only_a_transcript_is_replaced(converse, chat, tmp_path):
    notes, empty, talk = (tmp_path / name for name in ("notes.txt", "empty", "talk.json"))
    empty.touch()
    for text in ("my notes", '{"messages": []}', "[" * 100_000):
        notes.write_text(text)
        said = converse("hello", f"/save {notes}", "two", f"/save {empty}", f"/save {talk}",
                        f"/save {talk}", argv=GREEDY)  # fmt: skip
        assert said.err.count("it exists and is not a transcript of `llmcli chat`") == 1
        refused = chat("--prompt", "hello", "--save", str(notes))
        assert (refused.code, refused.out) == (1, "")
        assert notes.read_text() == text
        assert len(transcript(talk)["messages"]) == 4


@pytest.mark.parametrize("option", ["--save", "--load", "/save"])
def test_what_another_chat_saved_meanwhile_is_not_replaced(
    converse, chat, tmp_path, monkeypatch, option
):
    file, link, third = (tmp_path / name for name in ("talk.json", "link.json", "third.json"))
    link.symlink_to(file)
    chat("--prompt", "before", *GREEDY, "--save", file)
    others = file.read_bytes() + b" "

    def another_chat_saves():
        (tmp_path / "new").write_bytes(others)
        (tmp_path / "new").replace(file)
        return "two"

    argv = {"--save": ("--save", file), "--load": ("--load", file, "--save", link), "/save": ()}
    first = f"/save {file}" if option == "/save" else "one"
    lines = (first, another_chat_saves, f"/save {link}", f"/save {third}", "four")
    said = converse(*lines, argv=(*GREEDY, *argv[option]))
    assert file.read_bytes() == others
    assert said.err.count("has changed since this chat read it") >= 2
    assert "hint: `/save FILE` saves under another name" in said.err
    assert [one["content"] for one in transcript(third)["messages"]][-4::2] == ["two", "four"]
    answered = chat("--prompt", "x", *GREEDY, "--save", file)  # it is read anew
    assert (answered.code, len(transcript(file)["messages"])) == (0, 2)
    made = command._chat

    def late(*given):
        another_chat_saves()
        return made(*given)

    monkeypatch.setattr(command, "_chat", late)
    refused = chat("--prompt", "x", *GREEDY, "--save", file)
    assert refused.code == 1
    assert "hint: `--save FILE` saves under another name" in refused.err
    assert refused.out, "the answer is told"
    assert file.read_bytes() == others


def test_ids_of_another_text_are_left(converse, tmp_path):
    file = tmp_path / "a.json"
    converse("hello", argv=(*GREEDY, "--save", file))
    document = transcript(file)
    document["messages"][1]["content"] += " and more"
    file.write_text(json.dumps(document))
    said = converse("and then?", argv=("--load", file, "--save", file))
    assert (said.code, "1 answer came with ids of another text" in said.err) == (0, True)
    assert "ids" not in transcript(file)["messages"][1]


@pytest.mark.parametrize("where", ["stats_line", "_tell"])
def test_a_second_ctrl_c_does_not_end_it(where, converse, tmp_path, monkeypatch):
    file = tmp_path / "a.json"

    def interrupted(*args):
        os.kill(os.getpid(), 2)
        time.sleep(1)

    if where == "stats_line":
        monkeypatch.setattr(Chat, where, interrupted)
    else:
        monkeypatch.setattr(command, where, interrupted)
    said = converse("hello", "/nothing", "two", argv=(*GREEDY, "--stats", "--save", file))
    assert said.code == 0
    assert len(transcript(file)["messages"]) == 4


def test_ctrl_c_while_a_line_is_written_cuts_nothing(converse, tmp_path, monkeypatch):
    file, write = tmp_path / "a.json", Output.write

    def interrupted(self, text, **more):
        write(self, text[:10], **more)
        os.kill(os.getpid(), 2)
        write(self, text[10:], **more)

    monkeypatch.setattr(Output, "write", interrupted)
    said = converse("hello", "two", argv=(*GREEDY, "--json", "--save", file))
    assert said.code == 0
    lines = [json.loads(line) for line in said.out.splitlines()]
    assert [one["messages"][0]["content"] for one in lines] == ["hello", "two"]
    assert len(transcript(file)["messages"]) == 4


def test_memory_that_is_not_there_is_one_line(converse, tmp_path, monkeypatch):
    file, prefill, failed = tmp_path / "a.json", Session.prefill, []

    def full(self, *args, **more):
        if not failed:
            failed.append(True)
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return prefill(self, *args, **more)

    monkeypatch.setattr(Session, "prefill", full)
    said = converse("hello", "two", argv=(*GREEDY, "--save", file))
    assert said.code == 0
    at, line = next(
        (at, line) for at, line in enumerate(said.err.splitlines()) if line.startswith("error: ")
    )
    assert line.startswith("error: out of memory: DefaultCPUAllocator")
    assert said.err.splitlines()[at + 1].startswith("hint: remove a turn with")
    assert transcript(file)["messages"][0]["content"] == "two"


@pytest.mark.parametrize("error", [NotFinite("a NaN"), RuntimeError("broken")])
def test_an_answer_that_an_error_cuts_short_is_told_and_saved(error, chat, tmp_path, monkeypatch):
    file, choose, steps = tmp_path / "a.json", Sampler.pick, []

    def failing(self, *args):
        steps.append(True)
        if len(steps) == 4:
            raise error
        return choose(self, *args)

    monkeypatch.setattr(Sampler, "pick", failing)
    said = chat("--prompt", "hello", "-n", "8", "--json", "--save", file)
    line, failed = map(json.loads, said.out.splitlines())
    assert str(error) in failed["error"]["message"]
    assert line["tokens"]["generated"] == 3
    assert line["messages"][1]["finish_reason"] == "interrupted"
    assert transcript(file)["messages"] == line["messages"]


def test_variables_that_no_template_takes(chat, converse, tmp_path):
    deep = "[" * 40 + "]" * 40
    for value in (deep, "[" * 5000 + "]" * 5000):
        assert "nested more than 32 deep" in chat("--prompt", "x", "--set", f"lead={value}").err
        assert "nested more than 32 deep" in converse(f"/set lead {value}").err
    said = chat("--prompt", "x", "--set", "laed=1")
    assert (said.code, "hint: did you mean `lead`?" in said.err) == (2, True)
    said = converse("/set laed 1", "/set temprature 1", "/set messages 1", "/set top_k 1.5", "/set")
    assert said.err.count("has no such variable") == 3
    assert "did you mean `lead`?" in said.err
    assert "did you mean `temperature`?" in said.err
    assert "error: `top_k` must be a whole number of at least 0, not `1.5`" in said.err
    assert "of the template" not in said.out
    file = tmp_path / "a.json"
    converse("hello", argv=(*GREEDY, "--save", file))
    for change in ({"variables": {"lead": json.loads(deep)}},
                   {"sampling": transcript(file)["sampling"] | {"top_k": 1.5}}):  # fmt: skip
        bad = tmp_path / "bad.json"
        bad.write_text(json.dumps(transcript(file) | change))
        assert converse(argv=("--load", bad)).code == 2


def test_with_json_stdout_has_answers_alone(converse):
    argv = (*GREEDY, "--json")
    said = converse("/help", "hello", "/stats", "/tokens", "and then?", argv=argv)
    first, second = (json.loads(line) for line in said.out.splitlines())
    assert [one["messages"][0]["content"] for one in (first, second)] == ["hello", "and then?"]
    assert errors(first, "chat") == errors(second, "chat") == []
    assert set(first) - set(second) == {"model", "environment"}  # once per stream
    del second["timings"]
    assert errors(second, "chat"), "a transcript names its model"
    assert "/undo" in said.err
    assert " new of " in said.err


def test_answers_have_no_limit_where_none_is_set(converse, tmp_path):
    file = tmp_path / "a.json"
    argv = ("--greedy", "--presence-penalty", "1", "--stop", "never", "--save", file)
    said = converse("hello", "/set", argv=(*argv, "-n", "-1"))
    assert "max_tokens          -1" in said.out
    saved = transcript(file)
    assert (errors(saved, "chat"), saved["sampling"]["max_tokens"]) == ([], -1)
    again = converse("/set", "/set max_tokens 3", "/set max_tokens -1", argv=("--load", file))
    shown = [line.split()[-1] for line in again.out.splitlines() if line.startswith("max_tokens")]
    assert shown == ["-1", "3", "-1"]


def test_what_an_answer_has_at_sigterm_is_saved(talker, tmp_path):
    file = tmp_path / "talk.json"
    process = children.start(
        [sys.executable, "-m", "llmcli", "chat", "-m", talker, "--prompt", "hello", "--greedy",
         "-n", "100000", "--save", str(file), "--context-length", "100000", "-q",
         "--presence-penalty", "1", "--stop", "never"],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    process.stdout.read(1)
    process.send_signal(15)
    process.communicate(timeout=60)
    assert process.returncode == 143
    document = transcript(file)
    assert errors(document, "chat") == []
    assert document["messages"][1]["finish_reason"] == "interrupted"


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_a_conversation_with_a_mark_in_front_is_loaded(converse, tmp_path, encoding):
    path = tmp_path / "c.json"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "é"}]}), encoding)
    said = converse(f"/save {tmp_path / 'd.json'}", argv=("--load", str(path), *GREEDY))
    assert said.code == 0, said.err
    assert transcript(tmp_path / "d.json")["messages"][0]["content"] == "é"


def test_a_file_may_be_stdin(cli, talker, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"from stdin\n")))
    said = cli("chat", "-m", talker, "-f", "-", *GREEDY, "--json").json()
    assert said["messages"][0]["content"] == "from stdin"
    assert "exclude each other" in cli("chat", "-m", talker, "-f", "-", "--no-stdin").err


def test_what_the_command_line_cannot_mean(chat, tmp_path):
    assert "`--stop` is not UTF-8 text" in chat("--prompt", "x", "--stop", "\udcff").err
    said = chat("--prompt", "x", "--save", str(tmp_path / "no" / "a.json"))
    assert "there is no such directory" in said.err
    assert said.out == "", "before the model has said anything"


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("plum\n")
    (tmp_path / "two words.md").write_text("```\ncode\n```\n")
    (tmp_path / "latin.txt").write_bytes(b"\xe9")
    return tmp_path


PLUM = "\n\n`notes.txt`:\n```\nplum\n```"


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("what says @notes.txt?", "what says `notes.txt`?" + PLUM),
        ("@notes.txt, @notes.txt", "`notes.txt`, `notes.txt`" + PLUM),
        ('@"two words.md"', "`two words.md`\n\n`two words.md`:\n````\n```\ncode\n```\n````"),
        ("@'notes.txt' and a@notes.txt", "`notes.txt` and a@notes.txt" + PLUM),
        (r"\@notes.txt @someone @", "@notes.txt @someone @"),
        ("see\n```\n@notes.txt\n```", "see\n```\n@notes.txt\n```"),
    ],
)
def test_files_in_a_message(typed, said, files):
    notes = []
    assert with_files(typed, notes.append) == said
    assert notes == []


def test_what_looks_like_a_file_and_is_none(files):
    notes = []
    assert with_files("@not.there and @a/b @.", notes.append) == "@not.there and @a/b @."
    assert notes == [f"`@{name}` is not a file: it stays as text" for name in ("not.there", "a/b")]
    (files / "folder").mkdir()
    notes.clear()
    assert with_files("@folder, @folder/", notes.append) == "@folder, @folder/"
    stays = "is a directory: it stays as text"
    assert notes == [f"`@{name}` {stays}" for name in ("folder", "folder/")]
    with pytest.raises(UsageError, match="is not UTF-8 text"):
        with_files("@latin.txt", notes.append)


def test_files_in_a_prompt_and_none_in_a_pipe(cli, talker, files, monkeypatch):
    monkeypatch.setattr("llmcli.cli.prompts.stdin_is_given", lambda stream: True)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"@notes.txt\n")))
    said = cli("chat", "-m", talker, "--prompt", "and @notes.txt @no.txt", *GREEDY, "--json")
    (asked, _) = said.json()["messages"]
    assert asked["content"] == "@notes.txt\nand `notes.txt` @no.txt" + PLUM
    assert "note: `@no.txt` is not a file" in said.err
    assert "is not UTF-8 text" in cli("chat", "-m", talker, "--prompt", "@latin.txt").err


def test_a_transcript_has_the_text_that_the_model_saw(converse, files):
    drafts = []
    said = converse(
        "read @notes.txt", "/save a.json", "/edit", "read @latin.txt", argv=GREEDY, drafts=drafts
    )
    assert transcript(files / "a.json")["messages"][0]["content"] == "read `notes.txt`" + PLUM
    assert "read @notes.txt" in drafts, "it is edited as it was typed"
    assert "`latin.txt` is not UTF-8 text" in said.err
    said = converse("read @notes.txt", "/undo", argv=GREEDY)
    assert "undone: read @notes.txt" in said.out


@pytest.mark.parametrize("letter", ["d", "c", "", "x"])
def test_what_to_do_when_the_context_fills_is_asked(letter, converse, tmp_path, monkeypatch):
    file = tmp_path / "talk.json"
    asked = []
    monkeypatch.setattr(Typed, "choose", lambda self, question: asked.append(question) or letter)
    long = "x" * 150
    lines = [f"{n}{long}" for n in range(4)]
    said = converse("/system brief", *lines, argv=(*GREEDY, "--save", file))
    assert said.code == 0
    assert asked == ["[d]rop the oldest turns, [c]lear, or Enter to cancel? "]
    assert "the context of 600 tokens has no room for another answer" in said.err
    contents = [one["content"] for one in transcript(file)["messages"]]
    kept = {"d": "123", "c": "3"}.get(letter, "012")
    assert [text[0] for text in contents[1::2]] == list(kept)
    assert contents[0] == "brief"
    told = {"d": "note: dropped 1 oldest turn, 1", "c": "note: dropped all earlier messages, "}
    assert told.get(letter, "note: cancelled: the message was not sent") in said.err


def test_a_pipe_is_not_asked(chat):
    assert "more than the context of 600" in chat("--prompt", "x" * 700).err


def test_an_answer_that_fills_the_context_says_so(converse):
    said = converse("x" * 590, argv=("-n", "50", "--greedy", "--presence-penalty", "2"))
    assert "note: the context is full" in said.err


def test_an_answer_that_the_limit_cuts_says_so(converse, chat, tmp_path):
    said = converse("hello", "/set max_tokens 1", "more", argv=GREEDY)
    assert "note: the answer ends at the limit of 8 tokens: `/set max_tokens N` allows" in said.err
    assert "limit of 1 token: " in said.err
    assert "limit of 8 tokens: `-n N` allows more" in chat("--prompt", "hello", *GREEDY).err


def test_the_file_follows_the_conversation(converse, tmp_path, monkeypatch):
    file, seen = tmp_path / "talk.json", []

    def ask(self, draft, meter):
        seen.append(transcript(file) if file.exists() else None)
        line = self.lines.pop(0) if self.lines else None
        return line() if callable(line) else line

    monkeypatch.setattr(Typed, "ask", ask)
    converse("/system x", "hello", "two", "/undo", "/set seed 7", "/system brief", "/clear",
             argv=(*GREEDY, "--save", file))  # fmt: skip
    assert seen[:2] == [None, None], "nothing is kept of what was never answered"
    assert [len(one["messages"]) for one in seen[2:]] == [3, 5, 3, 3, 3, 1]
    assert seen[6]["sampling"]["seed"] == 7
    assert seen[7]["messages"] == [{"role": "system", "content": "brief"}]
    seen.clear()
    before = file.stat().st_ino
    converse("/stats", argv=("--load", file, "--save", file))
    assert file.stat().st_ino == before, "nothing was changed"
    converse("/system other", argv=("--load", file, "--save", file))
    assert transcript(file)["messages"][0]["content"] == "other"


def test_tokens_add_up_to_the_context(converse):
    meters = []
    said = converse(
        "/tokens", "/system be brief", "hello", "and then?", "/tokens", argv=GREEDY, meters=meters
    )
    rows = re.findall(r"^(\w+) +(\d+)  (.*)$", said.out, re.MULTILINE)
    assert rows[0] == ("context", "0", "of 600")
    *parts, whole = rows[1:]
    assert [name for name, *_ in parts] == ["system", *("user", "assistant") * 2, "template"]
    assert parts[-1][2] == "what it puts around these"
    assert whole[0] == "context"
    assert sum(int(count) for _, count, _ in parts) == int(whole[1])
    assert meters[-1] == f"{whole[1]} / 600"


def test_every_count_of_the_context_is_the_same(converse, tmp_path):
    file, meters = tmp_path / "a.json", []
    lines = ("hello", "/stats", "/tokens")
    said = converse(*lines, argv=(*GREEDY, "--save", file), meters=meters)
    loaded = converse("/stats", argv=("--load", file), meters=meters)
    found = re.findall(r"context +(\d+) +of 600", said.out + loaded.out)
    assert found == [meters[-1].split()[0]] * 3


def test_the_templates_own_system_message_is_shown(converse, monkeypatch):
    assert "system: none\n" in converse("/system").out
    own = (
        "{% if messages[0].role != 'system' %}<|system|>Be kind.<|end|>{% endif %}"
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    )
    init = ChatTemplate.__init__
    monkeypatch.setattr(ChatTemplate, "__init__", lambda self, _, **more: init(self, own, **more))
    said = converse("/system", "hello", "/tokens", "/system x", "/system none", argv=GREEDY)
    assert said.out.startswith("system: none, so the template's own: Be kind.\n")
    assert said.out.endswith("system: x\nsystem: none, so the template's own: Be kind.\n")
    assert "its own system message and what it puts around these" in said.out


def test_look_shows_the_conversation_and_leaves_it(converse):
    plain = converse("hello", "and then?", "/stats", argv=GREEDY)
    said = converse(
        "/look lens", "hello", "/look attention", "/look attention --layer 1 --head 2",
        "/look lens --position -1", "/look timing", "and then?", "/stats", argv=GREEDY,
    )  # fmt: skip
    assert said.code == 0
    assert "error: there is nothing to look at" in said.err
    assert re.search(r"^head \d+\.\d+", said.out, re.MULTILINE)
    assert "/look attention --layer" in said.out
    assert "resid_post" in said.out or "layer" in said.out
    assert "prefill" in said.out
    assert "ceilings: " in said.out
    assert said.out.count("✓") >= 4
    took = r"read (\d+) new of (\d+)"
    assert re.findall(took, said.out)[-1] == re.findall(took, plain.out)[-1]


def test_look_experts_shows_those_of_the_last_answer(converse, tmp_path, monkeypatch):
    folder = write_mixture(tmp_path / "mixture")
    talk = {"messages": [
        {"role": "user", "content": "hello"}, {"role": "assistant", "content": "a first"},
        {"role": "user", "content": "and?"}, {"role": "assistant", "content": "bye"},
    ]}  # fmt: skip
    (tmp_path / "talk.json").write_text(json.dumps(talk))
    seen, plain = [], ExpertsOptions.layers

    def noted(self, config):
        seen.append((self.position, self.layer))
        return plain(self, config)

    monkeypatch.setattr(ExpertsOptions, "layers", noted)
    argv = ("-m", str(folder), "--random-weights", "--load", str(tmp_path / "talk.json"))
    said = converse(
        "/look experts", "/look experts --layer 2 --position 0", "/look experts --layer 0",
        argv=argv,
    )  # fmt: skip
    assert "error: layer 0 has no experts" in said.err
    assert list(dict.fromkeys(seen)) == [("-4:", None), ("0", "2"), ("-4:", "0")]
    shown = said.out.split("weight of the chosen experts")[0]
    assert re.search(r"^token +b +y +e", shown, re.MULTILINE)
    assert said.out.count("\n✓ 5 checks\n") == 2


def test_look_experts_needs_a_mixture(converse):
    said = converse("hello", "/look experts", argv=GREEDY)
    assert "error: no layer of this model has experts to choose from" in said.err
    assert said.code == 0


def test_what_look_cannot_show_is_one_line(converse, monkeypatch):
    said = converse(
        "hello", "/look", "/look weights", "/look lens --colour red", "/look lens --layer",
        "/look attention --layer 9", '/look "', argv=GREEDY,
    )  # fmt: skip
    assert said.err.count("error: `/look` takes attention, experts, lens, timing") == 3
    assert said.err.count("error: `/look lens` takes `--layer …`, `--position …`") == 2
    assert "error: `--layer`: there is no 9, for there are 2 layers" in said.err
    monkeypatch.setattr(slash, "_LOOKED_AT", 5)
    said = converse("hello", "/look lens", argv=(*GREEDY, "--json"))
    assert "note: the last 5 of" in said.err
    assert "settled: from this layer on" in said.err
    assert len(said.out.splitlines()) == 1


def damaged(**changes):
    return lambda document: document | changes


DAMAGE = {
    "no object": lambda document: [document],
    "another schema": damaged(schema="llmcli.generate/1"),
    "no model": damaged(model=None),
    "no messages": damaged(messages={}),
    "another role": damaged(messages=[{"role": "tool", "content": ""}]),
    "no content": damaged(messages=[{"role": "user"}]),
    "reasoning that is no text": damaged(
        messages=[{"role": "assistant", "content": "a", "reasoning": 1}]
    ),
    "a raw answer that is no text": damaged(
        messages=[{"role": "assistant", "content": "a", "raw": ["a"]}]
    ),
    "a system message that comes late": damaged(
        messages=[{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]
    ),
    "ids of the user": damaged(messages=[{"role": "user", "content": "a", "ids": [1]}]),
    "ids beyond the vocabulary": damaged(
        messages=[{"role": "assistant", "content": "a", "ids": [10**6]}]
    ),
    "ids that are no numbers": damaged(
        messages=[{"role": "assistant", "content": "a", "ids": [True]}]
    ),
    "an unknown end": damaged(
        messages=[{"role": "assistant", "content": "a", "finish_reason": "tired"}]
    ),
    "a seed below 0": lambda d: d | {"sampling": d["sampling"] | {"seed": -1}},
    "a temperature that is no number": lambda d: (
        d | {"sampling": d["sampling"] | {"temperature": "hot"}}
    ),
    "no stop strings": lambda d: d | {"sampling": d["sampling"] | {"stop": [""]}},
    "answers that are no number": damaged(answers=True),
}
# What other conversations must not have either, and the beginning of the message.
UNFIT = {
    "no variables": (damaged(variables=[]), "`variables` of F is not an object"),
    "a variable of no template": (
        damaged(variables={"messages": 1}), "`variables` of F cannot have a variable `messages`"
    ),
    "a deep variable": (
        damaged(variables={"lead": json.loads("[" * 40 + "]" * 40)}),
        "`variables.lead` of F is nested more than 32 deep",
    ),
    "half a character": (
        damaged(messages=[{"role": "user", "content": "\ud83d"}]),
        "`messages[0]` of F has half a surrogate pair",
    ),
    "half a character to stop at": (
        lambda d: d | {"sampling": d["sampling"] | {"stop": ["\ud83d"]}},
        "`sampling.stop` of F has half a surrogate pair",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return tmp_path_factory.mktemp("saved") / "talk.json"


@pytest.fixture
def refused(converse, cli, talker, saved):
    """What `--load` says of a saved conversation that was changed, and `generate -f` too."""

    def refused(change):
        if not saved.exists():
            converse("hello", argv=(*GREEDY, "--save", saved))
        bad = saved.with_name("bad.json")
        bad.write_text(json.dumps(change(json.loads(saved.read_text()))))
        said = converse(argv=("--load", bad))
        assert said.code == 2
        assert len(said.err.splitlines()) == 2
        if "its `schema`" not in said.err:
            assert cli("generate", "-m", talker, "-f", bad, "x").err == said.err
        return said.err.replace(f"`{bad}`", "F")

    return refused


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_transcript_is_one_line(damage, refused):
    assert refused(DAMAGE[damage]).startswith("error: F is not a transcript of `llmcli chat`: ")


@pytest.mark.parametrize("damage", UNFIT)
def test_a_transcript_is_checked_as_every_conversation_is(damage, refused):
    change, words = UNFIT[damage]
    assert refused(change).startswith(f"error: {words}")


def test_another_models_answers_are_read_as_text(converse, saved, tmp_path):
    converse("hello", argv=(*GREEDY, "--save", saved))
    document = json.loads(saved.read_text())
    document["model"]["name"] = "another"
    file = tmp_path / "other.json"
    file.write_text(json.dumps(document))
    said = converse("and then?", argv=("--load", file, *GREEDY))
    assert (said.code, "`another` wrote the answers" in said.err) == (0, True)


def test_a_conversation_on_a_terminal(talker, tmp_path):
    talk = Terminal(talker, *GREEDY, "--seed", "1", home=tmp_path)
    talk.wait("/help lists the commands")
    talk.wait(PROMPT)
    talk.wait("0 / 60")  # its last column is written apart
    talk.type("hello\r")
    talk.wait(PROMPT)
    talk.type("/sta\t")
    talk.wait("ts")
    talk.type("\r")
    assert "read 8 new of 8" in talk.wait(" of 600")
    talk.wait(PROMPT)
    talk.type("/nothing\r")
    talk.wait("there is no command `/nothing`")
    talk.wait(PROMPT)
    (tmp_path / "notes.txt").write_text("plum")
    talk.type(f"see @{tmp_path}/not\t")
    talk.wait("es.txt")
    talk.type("\r")
    talk.wait(PROMPT)
    talk.type("\x03")  # nothing runs: the line is cleared
    talk.type("/exit\r")
    assert talk.end() == 0
    kept = (tmp_path / "llmcli" / "chat_history").read_text()
    assert "+hello" in kept
    assert "+/stats" in kept
    assert f"+see @{tmp_path}/notes.txt" in kept


def test_ctrl_c_stops_the_answer_and_keeps_the_conversation(talker, tmp_path):
    file = tmp_path / "talk.json"
    talk = Terminal(
        talker, "-t", "1", "-n", "500", "--stop", "never that", "--seed", "3",
        "--save", str(file), home=tmp_path,
    )  # fmt: skip
    talk.wait(PROMPT)
    talk.type("hello\r")
    time.sleep(0.5)
    talk.process.send_signal(2)
    talk.wait(PROMPT)
    talk.type("/exit\r")
    assert talk.end() == 0
    if file.exists():
        assert errors(json.loads(file.read_text()), "chat") == []


def test_the_end_of_input_ends_it(talker, tmp_path):
    talk = Terminal(talker, *GREEDY, home=tmp_path)
    talk.wait(PROMPT)
    talk.type("\x04")
    assert talk.end() == 0


def test_killed_at_any_moment_no_transcript_is_half(converse, talker, tmp_path):
    """Of a file that takes a while to write: it is the old one or the new one, never a part."""
    file = tmp_path / "talk.json"
    converse("hello", argv=(*GREEDY, "--save", file))
    old = transcript(file) | {"variables": {"long": list(range(200_000))}}
    file.write_text(json.dumps(old))
    inside = 0
    for wait in (0.0, 0.05, 0.1, 0.15, 0.2, 0.3):
        count = len(transcript(file)["messages"])
        process = children.start(
            [sys.executable, "-m", "llmcli", "chat", "-m", talker, "--prompt", "hello",
             *GREEDY, "--load", str(file), "--save", str(file)],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert process.stdout.read(1), "it answers"
        time.sleep(wait)
        process.kill()
        process.wait()
        inside += any(path.suffix == ".part" for path in tmp_path.iterdir())
        found = transcript(file)
        assert errors(found, "chat") == []
        assert len(found["messages"]) in (count, count + 2)
        assert found["variables"] == old["variables"]
    assert inside, "at least one of them while the file was being written"
    converse("/clear", f"/save {file}")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["talk.json"]


def test_a_template_that_fails_is_one_line(converse, tmp_path, monkeypatch):
    file, refused = tmp_path / "talk.json", "{{ raise_exception('roles must alternate') }}"
    render = ChatTemplate.render

    def picky(self, messages, **more):
        if messages[-1]["content"] == "refused":
            return render(ChatTemplate(refused), messages, **more)
        return render(self, messages, **more)

    monkeypatch.setattr(ChatTemplate, "render", picky)
    said = converse("hello", "refused", "and now?", argv=(*GREEDY, "--save", file))
    assert said.code == 0
    assert said.err.count("error: the chat template failed: roles must alternate") == 1
    assert "Traceback" not in said.err
    asked = [one["content"] for one in transcript(file)["messages"]][::2]
    assert asked == ["hello", "and now?"]


def test_a_refused_system_message_is_named_with_what_there_is_to_do(cli, tiny, tmp_path):
    picky = shutil.copytree(tiny, tmp_path / "picky")
    (picky / "chat_template.jinja").write_text(
        "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}"
        "{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    words = "error: the chat template takes no system message: System role not supported\n"
    base = ("-m", str(picky), "--random-weights", "-n", "1", "--system", "be brief")
    for argv in (("chat", "--prompt", "x"), ("generate", "x"), ("tokens", "x", "--chat")):
        options = base if argv[0] != "tokens" else ("-m", str(picky), "--system", "be brief")
        result = cli(*argv, *options)
        assert result.code == 4
        assert words in result.err
        hint = result.err.partition("hint: ")[2]
        assert "`--system`" in hint
        assert "`/system none`" in hint
        assert "--raw" not in hint
        assert "--chat" not in hint
    talk = tmp_path / "talk.json"
    said = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    talk.write_text(json.dumps({"messages": said}))
    told = cli("generate", "-f", talk, *base[:-2])
    assert "takes no system message" in told.err
    assert "hint: change its messages" in told.err


def test_where_no_history_can_be_kept_it_is_not(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    path = typed.history_path()
    assert path == tmp_path / "llmcli" / "chat_history"
    assert path.stat().st_mode & 0o077 == 0
    monkeypatch.setenv("XDG_STATE_HOME", str(path))  # a file, no folder
    assert typed.history_path() is None
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # no home directory
    assert typed.history_path() is None

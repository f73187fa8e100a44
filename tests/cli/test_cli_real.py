"""The real model through the command line; everything else is tested on a small one."""

import json
import re

import pytest
from chat_terminal import PROMPT, Terminal
from needs import needs_kernels

from llmcli.kernels import native

pytestmark = pytest.mark.real

TOOK = r"read ([\d,]+) new of ([\d,]+), .* context ([\d,]+) of"
OVERHEAD = 12  # tokens of the template around a message, and the last one of the answer before
UNREAD = 3  # tokens of a conversation that an answer leaves unread: its last one, and its end


@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16"])
def test_the_first_command_of_the_readme(dtype, cli, smollm2_path):
    """Whatever `auto` is on a processor: the answer is far from a tie (0.97 nats)."""
    result = cli("generate", "What is the capital of Japan?", "--greedy", "--dtype", dtype,
                 "-m", str(smollm2_path))  # fmt: skip
    assert (result.code, result.out) == (0, "The capital of Japan is Tokyo.")


def test_a_text_as_it_stands(cli, smollm2_path):
    result = cli("generate", "The capital of France is", "--greedy", "-n", "8", "--raw",
                 "-m", str(smollm2_path))  # fmt: skip
    assert result.code == 0
    assert result.out.startswith(" Paris")
    assert result.err == ""


def test_an_answer_through_the_chat_template(cli, smollm2_path):
    result = cli("generate", "What is the capital of France?", "--greedy", "-n", "16", "--json",
                 "--dtype", "float32", "-m", str(smollm2_path))  # fmt: skip
    document = result.json()
    assert document["prompt"]["chat"] is True
    assert document["outputs"][0]["text"] == "The capital of France is Paris."
    assert document["outputs"][0]["finish_reason"] == "eos"
    assert document["model"]["family"] == "llama"
    assert document["timings"]["generated_tokens"] == 8


@needs_kernels
def test_every_command_names_the_same_formats_and_bytes(cli, smollm2_path):
    path = ("-m", str(smollm2_path), "--device", "cpu", "--json")
    documents = {
        "info": cli("info", *path).json(), "shapes": cli("shapes", *path).json(),
        "load": cli("load", *path).json(), "score": cli("score", "Hello there", *path).json(),
        "generate": cli("generate", "Hello", "-n", "2", *path).json(),
    }
    for name, document in documents.items():
        model = document["model"]
        assert model["weight_format"] == "Q4_1 + Q8_0", name
        assert (model["activation_format"], model["cache_format"]) == ("float32", "float16")
        assert (model["product_format"], model["weight_bytes"]) == ("int16", 96576768)
        assert all(check["ok"] for check in document.get("checks", {}).values()), name
    assert documents["generate"]["path"]["product_format"] == "int16"
    for name in ("load", "score", "generate"):
        assert documents[name]["environment"]["kernels"][0] == f"llmcli {native.level()}", name
    shapes = {tensor["name"]: tensor for tensor in documents["shapes"]["tensors"]}
    embed, down = shapes["embed.W"], shapes["blocks.0.mlp.W_down"]
    assert (embed["dtype"], embed["bytes"]) == ("Q8_0", embed["stored_bytes"])
    assert (down["dtype"], down["bytes"]) == ("Q4_1", down["stored_bytes"])


class Conversation(Terminal):
    """Turns whose statistics are read off the screen."""

    def __init__(self, model, *argv, home):
        # float32: what is read at once and what is read step by step then agree
        flags = ("--greedy", "-n", "24", "--dtype", "float32", "--stats")
        super().__init__(str(model), *flags, *argv, home=home)
        self.context = 0  # tokens of the conversation after the last turn
        self.wait(PROMPT)

    def command(self, line):
        self.type(line + "\r")
        return self.wait(PROMPT)

    def say(self, line):
        """The screen, and (new tokens, tokens of the prompt); the context before that turn."""
        shown = self.command(line)
        found = re.findall(TOOK, shown)
        assert found, shown
        new, prompt, context = (int(text.replace(",", "")) for text in found[-1])
        before, self.context = self.context, context
        return shown, new, prompt, before


def test_ten_turns_with_smollm2(smollm2_path, tmp_path):
    first, second, third = (tmp_path / name for name in ("a.json", "b.json", "c.json"))
    talk = Conversation(smollm2_path, home=tmp_path)
    for line, answer in (
        ("What is the capital of Japan?", "Tokyo"),
        ("What language do they speak there?", "Japanese"),
        ("What is the capital of France?", "Paris"),
        ("And of Spain?", "Madrid"),
        ("And of Germany?", "Berlin"),
    ):
        shown, new, prompt, before = talk.say(line)
        assert answer in shown.partition(line)[2], shown
        assert before - UNREAD <= prompt - new <= before, "only what is new was computed"
        assert new <= (len(line.split()) + 2 * OVERHEAD if before else prompt)
    _, _, _, fifth = talk.say("And of Italy?")
    assert "undone: And of Italy?" in talk.command("/undo")
    shown, new, prompt, _ = talk.say("And of Portugal?")
    assert "Lisbon" in shown
    assert prompt - new >= fifth - UNREAD, "the turns before were not read again"
    talk.command("/set temperature 2")
    drawn = []
    for seed in (5, 6):
        talk.command(f"/set seed {seed}")
        shown, new, _, _ = talk.say("/regen")
        assert new == 0
        drawn.append(shown)
    assert len({text.partition("\n")[2].partition("read ")[0] for text in drawn}) == 2
    talk.command("/set temperature 0")
    _, _, _, sixth = talk.say("Tell me")
    talk.type("/edit\r")
    talk.wait("Tell me")
    talk.wait("Tell me")
    _, new, prompt, _ = talk.say(" more about Japan.")
    assert prompt - new >= sixth - UNREAD
    talk.command(f"/save {first}")
    saved = json.loads(first.read_text())["messages"]
    assert saved[-2]["content"] == "Tell me more about Japan."
    assert len(saved) == 14
    talk.command(f"/save {second}")
    last = ("And of Spain?", "What language do they speak there?", "Thank you!")
    for line in last:
        _, new, prompt, before = talk.say(line)
        assert before - UNREAD <= prompt - new <= before
    talk.type("/exit\r")
    assert talk.end() == 0
    assert len(json.loads(second.read_text())["messages"]) == 20
    again = Conversation(smollm2_path, "--load", str(first), "--save", str(third), home=tmp_path)
    for number, line in enumerate(last):
        _, new, prompt, before = again.say(line)
        assert before - UNREAD <= prompt - new <= before
        assert (new == prompt) is (number == 0)
    again.type("/exit\r")
    assert again.end() == 0
    assert json.loads(third.read_text())["messages"] == json.loads(second.read_text())["messages"]

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


@pytest.mark.parametrize(("argv", "answer"), [
    # whatever the arithmetic is: far from a tie (0.97 nats)
    (["What is the capital of Japan?", "--dtype", "float32"], "The capital of Japan is Tokyo."),
    (["What is the capital of Japan?", "--dtype", "bfloat16"], "The capital of Japan is Tokyo."),
    (["The capital of France is", "--raw", "-n", "8"], " Paris"),
])
def test_known_answers(cli, smollm2_path, argv, answer):
    said = cli("generate", *argv, "--greedy", "--json", "-m", str(smollm2_path)).json()
    (output,) = said["outputs"]
    assert said["model"]["family"] == "llama"
    assert said["prompt"]["chat"] is ("--raw" not in argv)
    if said["prompt"]["chat"]:
        assert (output["text"], output["finish_reason"]) == (answer, "eos")
        assert said["timings"]["generated_tokens"] == 8
    else:
        assert output["text"].startswith(answer)


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


def test_a_conversation_with_smollm2(smollm2_path, tmp_path):
    """Answers that need the turns before, of which only what is new is read."""
    file = tmp_path / "talk.json"
    talk = Conversation(smollm2_path, home=tmp_path)
    for line, answer in (
        ("What is the capital of Japan?", "Tokyo"),
        ("What language do they speak there?", "Japanese"),
        ("What is the capital of France?", "Paris"),
        ("And of Spain?", "Madrid"),
    ):
        shown, new, prompt, before = talk.say(line)
        assert answer in shown.partition(line)[2], shown
        assert before - UNREAD <= prompt - new <= before
        assert new <= (len(line.split()) + 2 * OVERHEAD if before else prompt)
    assert "undone: And of Spain?" in talk.command("/undo")
    talk.command(f"/save {file}")
    talk.type("/exit\r")
    assert talk.end() == 0
    assert len(json.loads(file.read_text())["messages"]) == 6
    talk = Conversation(smollm2_path, "--load", str(file), home=tmp_path)
    shown, new, prompt, _ = talk.say("And of Portugal?")
    assert "Lisbon" in shown
    assert new == prompt
    talk.type("/exit\r")
    assert talk.end() == 0

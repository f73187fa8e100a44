"""Chat templates as published: the ids are those of transformers' `apply_chat_template`.

The texts are read from a pinned wheel of TRL, which keeps models' templates as they were published
to tell the models apart. They are no part of this repository.
"""

import hashlib
import json
import re
import tomllib
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import pytest
from byte_tokenizer import byte_tokenizer

from llmcli.checkpoints import open_checkpoint
from llmcli.checkpoints.wheel import download
from llmcli.errors import CheckpointError
from llmcli.shell.conversations import read_conversation
from llmcli.shell.encoding import ChatOptions, pieces
from llmcli.shell.prompts import Prompt
from llmcli.text import load_tokenizer

WHEEL = "trl==1.16.0"
DIGEST = "97bf33c13ab71202d4d948e5e089dedc788a43109cb623c9e6a98875f2348124"

pytestmark = pytest.mark.real


@dataclass(frozen=True)
class Published:
    """A template's model, its special tokens, and `--set` that reasoning hangs on.

    `parts`: it reads contents that are lists of parts, and nothing of a text.
    """

    model: str
    bos: str = "<bos>"
    eos: str = "<eos>"
    reasoning: Sequence[str] = ()
    parts: bool = False


DATA = Path(__file__).parent / "data"
TEMPLATES = {
    name: Published(**about)
    for name, about in tomllib.loads((DATA / "published_templates.toml").read_text("utf-8")).items()
}
# `reasoned`: which reasoning is written down again, and which is left out
SAID = json.loads((DATA / "published_conversations.json").read_text("utf-8"))
TOOL, REASONED = SAID["tool"], SAID["reasoned"]
CONVERSATIONS = SAID["plain"] | REASONED


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Name → text, as published; of all that the wheel has, without its own variants."""
    folder = download(WHEEL, tmp_path_factory.mktemp("wheel"), lambda done: None)
    found = {}
    for path in folder.rglob("*"):  # pip leaves the wheel, uv what was in it
        if path.suffix == ".jinja":
            found[path.stem] = path.read_bytes()
        elif path.suffix == ".whl":
            with zipfile.ZipFile(path) as wheel:
                for name in wheel.namelist():
                    if name.endswith(".jinja"):
                        found[name.split("/")[-1].removesuffix(".jinja")] = wheel.read(name)
    kept = {name: found[name] for name in sorted(found) if not name.endswith("_training")}
    assert hashlib.sha256(b"\0".join(kept.values())).hexdigest() == DIGEST
    assert set(kept) == set(TEMPLATES)
    return {name: text.decode() for name, text in kept.items()}


@pytest.fixture(scope="module")
def vocabulary(sources, tmp_path_factory):
    """The tokenizer.json of bytes and of all that the templates write as special tokens."""
    marks = r"<\|[^|<>]+\|?>|<[^|<>]+\|>|<｜[^｜<>]+｜>|\[/?[A-Z_]+\]|</?[a-z_]+>|<[A-Z_]+>"
    ours = (text for one in TEMPLATES.values() for text in (one.bos, one.eos))
    specials = sorted({*ours, *re.findall(marks, "\n".join(sources.values()))})
    path = tmp_path_factory.mktemp("vocabulary") / "tokenizer.json"
    byte_tokenizer(specials).save(str(path))
    return path


@pytest.mark.parametrize("name", TEMPLATES)
def test_ids_are_those_of_apply_chat_template(name, sources, vocabulary, tmp_path):
    from transformers import PreTrainedTokenizerFast

    one = TEMPLATES[name]
    (tmp_path / "tokenizer.json").symlink_to(vocabulary)
    settings = {"bos_token": one.bos, "eos_token": one.eos}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "chat_template.jinja").write_bytes(sources[name].encode())
    ours = load_tokenizer(open_checkpoint(tmp_path, weights=False))
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)

    def both(messages, given, variables):
        while True:  # some write the date
            day = date.today()
            found = (
                our_ids(ours, messages, given, variables),
                their_ids(theirs, messages, one.parts, given, variables),
            )
            if day == date.today():
                return found

    plain, reasoned = {}, {given: {} for given in one.reasoning}
    for title, messages in CONVERSATIONS.items():
        variables = {"tools": [TOOL]} if title.startswith("tools") else {}
        plain[title], their = both(messages, "", variables)
        assert plain[title] == their, title
        for given in one.reasoning if title in REASONED else ():
            reasoned[given][title], their = both(messages, given, variables)
            assert reasoned[given][title] == their, (title, given)
    for name in {given.partition("=")[0] for given in one.reasoning}:
        values = [found for given, found in reasoned.items() if given.startswith(name)]
        assert any(found[title] != plain[title] for found in values for title in found), name


def our_ids(tokenizer, messages, given, variables):
    """The ids that `generate` gives to the model, or why there are none."""
    document = {"messages": messages, "variables": variables}
    prompt = Prompt(None, where="x", conversation=read_conversation(document, "x"))
    options = ChatOptions(variable=[given] if given else None)
    try:
        _, found = pieces(prompt, options, tokenizer, "m", parse_special=True)
    except CheckpointError as error:
        return error.message.removeprefix("x: the chat template ")
    return [piece.id for piece in found]


def their_ids(tokenizer, messages, parts, given, variables):
    """The same of transformers, told how the conversation ends."""
    name, _, value = given.partition("=")
    last = messages[-1]
    ends = last["role"] == "assistant"
    kept = [{k: v for k, v in one.items() if k != "finish_reason"} for one in messages]
    for one in kept if parts else ():
        if "content" in one:
            one["content"] = [{"type": "text", "text": one["content"]}]
    try:
        return tokenizer.apply_chat_template(
            kept, return_dict=False, add_generation_prompt=not ends,
            continue_final_message=ends and "finish_reason" not in last, **variables,
            **({name: {"true": True, "false": False}.get(value, value)} if given else {}),
        )  # fmt: skip
    except Exception as error:  # a template raises anything
        if "continue_final_message" in str(error):
            return "does not write the last message as it stands: the model cannot continue it"
        what = "takes no system message" if "System role" in str(error) else "failed"
        return f"{what}: {error}"

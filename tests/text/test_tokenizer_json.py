"""tokenizer.json against transformers: ids, text, BOS rules; files that are broken; loading."""

import json
import sys
import time
from pathlib import Path

import children
import numpy as np
import piece_models
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llama_cpp_strings import LOOKALIKES, strings
from safetensors.numpy import save_file
from text_fixtures import clear_error, metadata, same_as_transformers
from tokenizer_files import KINDS, write
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, processors

from llmcli.checkpoints.checkpoint import open_checkpoint
from llmcli.engine.output import Choice, Output
from llmcli.errors import CheckpointError, UnsupportedModel
from llmcli.text import StreamDecoder, load_tokenizer
from llmcli.text.added import add_to_library, listed_tokens
from llmcli.text.hf import from_directory


def altered(directory, kind, **parts):
    """A directory with other parts of its tokenizer."""
    write(directory, kind)
    library = Library.from_file(str(directory / "tokenizer.json"))
    for name, part in parts.items():
        setattr(library, name, part)
    library.save(str(directory / "tokenizer.json"))
    return directory


TEXTS = [*strings(500, seed=4), *LOOKALIKES, "<s> a </s>b", "  lead", " \n", "<|eot_id|> <s>"]
TURNS = "{% for m in messages %}{{ bos_token }}{{ m.content }}{{ eos_token }}{% endfor %}"
ENDED = "{% for m in messages %}{{ bos_token }}{{ m.content }}{{ eot_token }}{% endfor %}"
NEW = {"content": "<|new|>", "special": True}
TOOL = {"content": "<tool>", "special": False, "normalized": False}
EOT = {"eot_token": "<|end_of_text|>"}
NAMED = {"tool_use": "T", "default": TURNS}


def settings_of_a_directory():
    """(kind, tokenizer_config.json, further files)."""
    for kind in ("llama3", "gpt2"):
        for asked in (True, False, None):  # whether BOS is added is what the file says
            yield kind, {"add_bos_token": asked, "add_eos_token": asked}, {}
    names = {"bos_token": {"content": "<s>", "lstrip": False, "rstrip": False, "normalized": False},
             "eos_token": {"content": "</s>", "normalized": False}}  # fmt: skip
    yield "llama2", dict.fromkeys(names), {"special_tokens_map.json": names}
    yield "gpt2", {"additional_special_tokens": ["the", "not there"]}, {}
    for kind in ("gpt2", "llama2", "qwen2"):
        for listed in (
            {"901": TOOL, "900": NEW}, {"940": NEW, "3": TOOL}, {"900": NEW | {"lstrip": True}},
        ):  # fmt: skip
            yield kind, {"added_tokens_decoder": listed}, {}
        yield kind, {}, {"added_tokens.json": {"<|new|>": 900, "<tool>": 901}}
        named = {"pad_token": "<|new|>", "additional_special_tokens": ["<tool>"]}
        yield kind, {}, {"special_tokens_map.json": named}
        more = {"additional_special_tokens": ["<tool>", "the"]}
        yield kind, {"extra_special_tokens": {"own": "<|new|>"}} | more, {}
    for kind in ("llama3", "metaspace"):
        for split in (True, False):
            yield kind, {"split_special_tokens": split, "chat_template": TURNS}, {}
    for kind in ("llama3", "metaspace", "gpt2"):  # BOS once where the template writes it
        for front in ("", "{{ bos_token }}", "\n{{ bos_token }}", "[x] {{ bos_token }}"):
            yield kind, {"chat_template": front + TURNS.replace("{{ bos_token }}", "")}, {}
    yield "llama3", {"chat_template": ENDED, "extra_special_tokens": EOT}, {}
    yield "llama3", {"chat_template": ENDED, **EOT}, {}
    yield "llama3", {"chat_template": ENDED}, {"special_tokens_map.json": EOT}
    unread = {"special_tokens_map.json": {"bos_token": "<|eot_id|>"}}
    yield "llama3", {"chat_template": ENDED, **EOT, "added_tokens_decoder": {}}, unread
    listed = [{"name": name, "template": text} for name, text in NAMED.items()]
    files = {"additional_chat_templates/tool_use.jinja": "T", "chat_template.jinja": TURNS}
    for template, more in ((NAMED, {}), (listed, {}), (None, files), ({"default": "S"}, files)):
        yield "llama3", {"chat_template": template}, more


@pytest.mark.parametrize(("kind", "settings", "files"), [*settings_of_a_directory()])
def test_what_settings_change_is_transformers(tmp_path, kind, settings, files):
    from transformers import AutoTokenizer

    directory = write(tmp_path, kind, **settings)
    for name, content in files.items():
        (directory / name).parent.mkdir(exist_ok=True)
        text = content if name.endswith(".jinja") else json.dumps(content)
        (directory / name).write_text(text)
    ours = from_directory(directory, config={"vocab_size": 908})
    theirs = AutoTokenizer.from_pretrained(directory)
    more = ["a<|new|>b", "a <|new|> <tool>the b", "<|new|><|new|> <too", "not there, other the",
            "a<|eot_id|>b</s> <s> c"]  # fmt: skip
    same_as_transformers(ours, theirs, [*TEXTS[:50], *more])
    assert ours.add_bos is (kind in ("llama3", "llama2", "metaspace"))
    assert ours.eos_ids == {theirs.eos_token_id} - {None}
    assert (ours.chat_template is None) == (theirs.chat_template is None)
    if theirs.chat_template:
        chat = [{"role": "user", "content": "a quick one"}]
        assert ours.encode_chat(chat) == theirs.apply_chat_template(chat).input_ids


def test_eos_of_the_post_processor_is_left_out(tmp_path):
    processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    ids = from_directory(altered(tmp_path, "llama2", post_processor=processor)).encode("a b")
    assert ids[0] == 1
    assert 2 not in ids


def test_no_id_is_added_that_has_no_embedding(tmp_path):
    directory = write(tmp_path, "gpt2", additional_special_tokens=["the", "not there"])
    for rows in (900, 901):
        assert from_directory(directory, config={"vocab_size": rows}).vocab_size == rows


JUNK = ["1", None, [None, "1", 1.0], -1, True, [False], {"a": 1}, 10**9]  # what is no id
ENDS = [(1, [1, 5], {1, 2, 5}), *((junk, [5, junk], {2, 5}) for junk in JUNK)]


@pytest.mark.parametrize(("config", "generation", "ends"), ENDS)
def test_eos_from_all_configurations(tmp_path, config, generation, ends):
    found = from_directory(
        write(tmp_path, "llama3"),
        config={"eos_token_id": config},
        generation={"eos_token_id": generation},
    ).eos_ids
    assert found == ends
    assert all(type(index) is int for index in found)


def test_thousands_of_listed_tokens_load_at_once(tmp_path):
    vocab = {f"<t{index}>": index for index in range(8000)} | {"a": 8000, "<unk>": 8001}
    library = Library(models.WordLevel(vocab, unk_token="<unk>"))
    library.save(str(tmp_path / "tokenizer.json"))
    listed = {
        str(index): {"content": text, "special": index % 2 == 0, "lstrip": index % 3 == 0}
        for text, index in vocab.items()
        if index < 8000
    }
    settings = {"added_tokens_decoder": listed, "eos_token": "<t1>", "pad_token": "<t3>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    began = time.process_time()
    ours = from_directory(tmp_path)
    assert time.process_time() - began < 5, "one call per token took 26 s"
    assert ours.special_ids == {*range(0, 8000, 2), 1, 3}
    assert ours.eos_ids == {1}
    assert ours.encode("<t7>a<t8>a <t9>") == [7, 8000, 8, 8000, 9]


def test_of_two_entries_for_one_token_the_last_counts(tmp_path):
    token = {"content": "the", "special": True}
    listed = {"1": {**token, "lstrip": True}, "2": token}
    directory = write(tmp_path, "gpt2", added_tokens_decoder=listed)
    ours = from_directory(directory)
    assert ours.encode("the")[0] in ours.special_ids
    assert ours.decode(ours.encode("a the"), skip_special=False) == "a the", "not `lstrip`"


def test_without_a_decoder_tokens_are_joined_with_spaces(tmp_path):
    from transformers import PreTrainedTokenizerFast

    library = Library(models.WordLevel({"a": 0, "b": 1, "<unk>": 2}, unk_token="<unk>"))
    library.save(str(tmp_path / "tokenizer.json"))
    ours = from_directory(tmp_path)
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    assert ours.decode([0, 1, 0]) == theirs.decode([0, 1, 0]) == "a b a"
    stream = StreamDecoder(ours)
    assert [stream.push(index) for index in (0, 99, 1)] == ["a", "", " b"]


@pytest.mark.parametrize(
    "decoder", [decoders.BPEDecoder(), decoders.CTC(), decoders.Strip(" ", 1, 0)]
)
def test_an_unknown_decoder_is_unsupported(tmp_path, decoder):
    with pytest.raises(UnsupportedModel, match=type(decoder).__name__):
        from_directory(altered(tmp_path, "gpt2", decoder=decoder))


def test_no_tokenizer_and_other_tokenizers(tmp_path):
    assert from_directory(tmp_path) is None
    (tmp_path / "tekken.json").write_bytes(b"{}")
    with pytest.raises(UnsupportedModel, match=r"tekken\.json"):
        from_directory(tmp_path)


def test_an_id_far_out_is_an_error_not_a_huge_list(tmp_path):
    directory = write(tmp_path, "gpt2")
    content = json.loads((directory / "tokenizer.json").read_text())
    content["model"]["vocab"]["zz"] = 4_000_000_000
    (directory / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="has the id 4000000000"):
        from_directory(directory)


@given(st.data())
def test_any_change_to_the_file_gives_a_tokenizer_or_an_error(tmp_path_factory, data):
    directory = write(tmp_path_factory.mktemp("changed"), data.draw(st.sampled_from(list(KINDS))))
    content = json.loads((directory / "tokenizer.json").read_text())
    steps = map(content.get, ("decoder", "post_processor", "pre_tokenizer", "normalizer"))
    part = data.draw(st.sampled_from([content, content["model"], *filter(None, steps)]))
    key = data.draw(st.sampled_from(sorted(part)))
    junk = st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=3)
    part[key] = data.draw(junk | st.lists(junk, max_size=2) | st.dictionaries(st.text(), junk))
    (directory / "tokenizer.json").write_text(json.dumps(content))
    with clear_error(most=400, always=False):
        tokenizer = from_directory(directory)
        tokenizer.decode(tokenizer.encode("some text"))


@pytest.mark.parametrize(("name", "content"), [
    ("tokenizer.json", b""), ("tokenizer.json", b"{}"), ("tokenizer.json", b"\xff\xfe\x00"),
    ("tokenizer.json", b'{"version": "1.0", "model": {"type": "BPE"}}'),
    ("tokenizer.json", b"[" * 100_000), ("tokenizer_config.json", b"{"),
    ("tokenizer_config.json", b"[1]"), ("tokenizer_config.json", b"\xff"),
    ("tokenizer_config.json", b"[" * 100_000), ("special_tokens_map.json", b"nope"),
    ("chat_template.jinja", b"\xff\xff"), ("tokenizer_config.json", b'{"chat_template": 3}'),
])  # fmt: skip
def test_broken_files_are_one_clear_error(tmp_path, name, content):
    directory = write(tmp_path, "gpt2")
    (directory / name).write_bytes(content)
    with clear_error(most=400):
        from_directory(directory)


@pytest.mark.parametrize("kind", KINDS)
def test_a_continuation_keeps_the_space_that_a_beginning_drops(tmp_path, kind):
    ours = from_directory(write(tmp_path, kind))
    ids = ours.encode("the quick brown fox", add_bos=False)
    for cut in range(1, len(ids)):
        stream = StreamDecoder(ours, first=False)
        rest = "".join(map(stream.push, ids[cut:])) + stream.finish()
        assert ours.decode(ids[:cut]) + rest == ours.decode(ids) == "the quick brown fox"


def test_chat_templates_without_a_default_and_of_processors(tmp_path):
    def source():
        return from_directory(tmp_path).chat_template.source

    listed = [{"name": "rag", "template": "R"}, {"name": "tool_use", "template": "T"}]
    write(tmp_path, "llama3", chat_template=listed)
    assert source() == "R"
    named, own = tmp_path / "additional_chat_templates/chat.jinja", tmp_path / "chat_template.json"
    named.parent.mkdir()
    named.write_text("C")
    assert source() == "R", "that of the settings, where no file is the default"
    write(tmp_path, "llama3")
    own.write_text('{"chat_template": "J"}')
    assert source() == "C"
    named.unlink()
    assert source() == "J"
    own.write_text('{"chat_template": {"default": "D"}}')
    assert source() == "D"
    own.write_text('{"chat_template": 3}')
    with pytest.raises(CheckpointError, match="neither a text nor named texts"):
        source()


def test_a_token_without_an_embedding_stays_text_behind_those_that_the_file_adds():
    backend = Library(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    backend.add_tokens(["<x>", "<y>"])
    listed = {"5": {"content": "<new>"}, "6": {"content": "<more>"}}
    tokens = listed_tokens(Path(), {"added_tokens_decoder": listed}, ())
    add_to_library(backend, tokens, [], marks=False, rows=6)
    assert [backend.token_to_id(text) for text in ("<y>", "<new>", "<more>")] == [4, 5, None]


def test_a_text_begins_where_its_prompt_ends_with_a_special_token(tmp_path):
    """There a vocabulary of pieces drops the space before a word; behind a word it is its own."""
    tokenizer = from_directory(write(tmp_path / "m", "llama2"))
    word = tokenizer.encode("the", add_bos=False)
    for prompt, text in (([min(tokenizer.special_ids)], "the"), (word, " the")):
        output = Output(0, prompt, room=9, tokenizer=tokenizer, stop=(), eos_ids=frozenset())
        assert "".join(output.add(Choice(id, None, ())).text for id in word) == text


# from a checkpoint to its tokenizer, and what importing that costs


@pytest.mark.parametrize(("values", "bos"), [
    (metadata(["hello"], types={"<s>": 3}, bos_token_id=260), 260),
    (piece_models.metadata("llama"), 1),
])  # fmt: skip
def test_gguf_file(tmp_path, values, bos):
    path = tmp_path / "m.gguf"
    path.write_bytes(piece_models.gguf(values))
    tokenizer = load_tokenizer(open_checkpoint(path))
    assert tokenizer.decode(tokenizer.encode("hello hello")) == "hello hello"
    assert tokenizer.bos_id == bos


@pytest.mark.parametrize("as_file", [True, False])
def test_directory(tmp_path, as_file):
    write(tmp_path, "llama3")
    weights = tmp_path / "model.safetensors"
    save_file({"w": np.zeros(1, np.float32)}, weights)
    (tmp_path / "config.json").write_text('{"model_type": "llama", "eos_token_id": 1}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2]}')
    checkpoint = open_checkpoint(weights if as_file else tmp_path)
    tokenizer = load_tokenizer(checkpoint)
    assert tokenizer.eos_ids == {1, 2}
    assert tokenizer.add_bos
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError):
        load_tokenizer(checkpoint)
    (tmp_path / "tokenizer.json").unlink()
    assert load_tokenizer(checkpoint) is None


def test_importing_and_rendering_loads_nothing_heavy():
    code = (
        "import sys, json, llmcli.text; from llmcli.text import ChatTemplate;"
        "heavy = {'torch', 'transformers', 'tokenizers', 'jinja2', 'numpy'};"
        "first = sorted(heavy & set(sys.modules)); ChatTemplate('x').render([]);"
        "print(json.dumps([first, sorted(heavy & set(sys.modules))]))"
    )
    run = children.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(run.stdout) == [[], []]

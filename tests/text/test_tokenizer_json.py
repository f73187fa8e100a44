"""tokenizer.json against transformers: ids, text, BOS rules; and files that are broken."""

import json
import os
import time

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llama_cpp_strings import LOOKALIKES, strings
from text_fixtures import clear_error
from tokenizer_files import KINDS, write
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, normalizers, processors

from llmcli.engine.output import Choice, Output
from llmcli.errors import CheckpointError, UnsupportedModel
from llmcli.text import StreamDecoder
from llmcli.text.hfspecial import add_tokens
from llmcli.text.hfvocab import from_directory


def both(directory, **settings):
    """Ours and transformers' of a directory."""
    from transformers import AutoTokenizer

    return from_directory(directory, **settings), AutoTokenizer.from_pretrained(str(directory))


TEXTS = [*strings(500, seed=4), *LOOKALIKES, "<s> a </s>b", "  lead", " \n", "<|eot_id|> <s>"]


@pytest.mark.parametrize("kind", ["llama3", "gpt2"])
@pytest.mark.parametrize("asked", [True, False, None])
def test_bos_is_what_the_file_says_not_the_settings(tmp_path, kind, asked):
    directory = write(tmp_path, kind, add_bos_token=asked, add_eos_token=asked)
    ours, theirs = both(directory)
    assert ours.encode("some text") == theirs("some text").input_ids
    assert ours.add_bos is (kind == "llama3")


def test_eos_of_the_post_processor_is_left_out(tmp_path):
    directory = write(tmp_path, "llama2")
    library = Library.from_file(str(directory / "tokenizer.json"))
    library.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    library.save(str(directory / "tokenizer.json"))
    ids = from_directory(directory).encode("a b")
    assert ids[0] == 1
    assert 2 not in ids


def test_special_tokens_as_objects_and_in_their_own_file(tmp_path):
    token = {"content": "<s>", "lstrip": False, "rstrip": False, "normalized": False}
    directory = write(tmp_path, "llama2", bos_token=None, eos_token=None)
    names = {"bos_token": token, "eos_token": {**token, "content": "</s>"}}
    (directory / "special_tokens_map.json").write_text(json.dumps(names))
    ours, theirs = both(directory)
    assert (ours.bos_id, ours.eos_ids) == (1, {2}) == (theirs.bos_token_id, {theirs.eos_token_id})


def test_extra_special_tokens_are_special(tmp_path):
    directory = write(tmp_path, "gpt2", additional_special_tokens=["the", "not there"])
    library = Library.from_file(str(directory / "tokenizer.json"))
    assert library.token_to_id("the") is not None
    ours, theirs = both(directory)
    assert ours.encode("other the") == theirs("other the").input_ids
    assert library.token_to_id("the") in ours.special_ids
    assert ours.encode("not there") == [library.get_vocab_size()] == theirs("not there").input_ids
    full = from_directory(directory, config={"vocab_size": library.get_vocab_size()})
    assert full.vocab_size == library.get_vocab_size(), "no id without an embedding"


def test_eos_from_all_configurations(tmp_path):
    directory = write(tmp_path, "llama3")
    more = {"eos_token_id": [1, 5]}
    ours = from_directory(directory, config={"eos_token_id": 1}, generation=more)
    assert ours.eos_ids == {1, 2, 5}


@pytest.mark.parametrize("junk", ["1", None, [None, "1", 1.0], -1, True, [False], {"a": 1}, 10**9])
def test_what_is_no_id_ends_nothing(tmp_path, junk):
    directory = write(tmp_path, "llama3")
    ours = from_directory(directory, config={"eos_token_id": junk}, generation=None)
    assert ours.eos_ids == {2}
    ours = from_directory(directory, config=None, generation={"eos_token_id": [5, junk]})
    assert ours.eos_ids == {2, 5}
    assert all(type(index) is int for index in ours.eos_ids)


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
    added = from_directory(directory)._backend.get_added_tokens_decoder().values()
    (the,) = [token for token in added if token.content == "the"]
    assert (the.special, the.lstrip) == (True, False)


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
    directory = write(tmp_path, "gpt2")
    library = Library.from_file(str(directory / "tokenizer.json"))
    library.decoder = decoder
    library.save(str(directory / "tokenizer.json"))
    with pytest.raises(UnsupportedModel, match=type(decoder).__name__):
        from_directory(directory)


def test_no_tokenizer_and_other_tokenizers(tmp_path):
    assert from_directory(tmp_path) is None
    (tmp_path / "tekken.json").write_bytes(b"{}")
    with pytest.raises(UnsupportedModel, match=r"tekken\.json") as caught:
        from_directory(tmp_path)
    assert caught.value.code == 4


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
    part = data.draw(st.sampled_from([content, content["model"], *_dicts(content)]))
    key = data.draw(st.sampled_from(sorted(part)))
    junk = st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=3)
    part[key] = data.draw(junk | st.lists(junk, max_size=2) | st.dictionaries(st.text(), junk))
    (directory / "tokenizer.json").write_text(json.dumps(content))
    try:
        tokenizer = from_directory(directory)
        tokenizer.decode(tokenizer.encode("some text"))
    except CheckpointError:
        pass  # the only kind of error that may come out


def _dicts(content):
    nodes = [content[key] for key in ("decoder", "post_processor", "pre_tokenizer", "normalizer")]
    return [node for node in nodes if node]


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


def test_chat_template_files(tmp_path):
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    directory = write(tmp_path, "llama3", chat_template=named)
    assert from_directory(directory).chat_template.source == "D"
    (directory / "chat_template.jinja").write_text("{{ bos_token }}J", encoding="utf-8")
    ours = from_directory(directory)
    assert ours.chat_template.render([]) == "<|begin_of_text|>J"
    assert ours.encode_chat([]) == ours.encode("J"), "one BOS"
    directory = write(tmp_path / "plain", "llama3", chat_template="S{{ eos_token }}")
    assert from_directory(directory).chat_template.render([]) == "S<|eot_id|>"
    assert from_directory(write(tmp_path / "none", "gpt2")).chat_template is None


@pytest.mark.parametrize("kind", KINDS)
def test_a_continuation_keeps_the_space_that_a_beginning_drops(tmp_path, kind):
    ours = from_directory(write(tmp_path, kind))
    ids = ours.encode("the quick brown fox", add_bos=False)
    for cut in range(1, len(ids)):
        stream = StreamDecoder(ours, first=False)
        rest = "".join(map(stream.push, ids[cut:])) + stream.finish()
        assert ours.decode(ids[:cut]) + rest == ours.decode(ids) == "the quick brown fox"


def test_a_normalizer_that_the_class_has_not_stays(tmp_path):
    """transformers 5 takes vocabulary and merges of `LlamaTokenizer`, and not how text is cut."""
    from transformers import AutoTokenizer

    vocab = {text: index for index, text in enumerate(["<unk>", "<s>", "</s>", *"▁abAB", "▁a"])}
    library = Library(models.BPE(vocab=vocab, merges=[("▁", "a")], unk_token="<unk>"))
    library.normalizer = normalizers.Sequence(
        [normalizers.Lowercase(), normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    library.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    ours = {}
    for name in ("LlamaTokenizer", "PreTrainedTokenizerFast"):
        settings = {"tokenizer_class": name, "unk_token": "<unk>"}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        theirs = AutoTokenizer.from_pretrained(tmp_path)
        for text in (" ab", "AB"):
            ours[text] = from_directory(tmp_path).encode(text, add_bos=False)
            assert ours[text] == library.encode(text).ids
            same = theirs.encode(text, add_special_tokens=False) == ours[text]
            assert same is (name != "LlamaTokenizer")
    assert ours == {" ab": [3, 8, 5], "AB": [8, 5]}


@pytest.mark.parametrize("kind", ["llama3", "metaspace", "gpt2"])
@pytest.mark.parametrize("front", ["", "@", "\n@", "[x] @"])
def test_the_template_alone_writes_bos(tmp_path, kind, front):
    rest = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    template = front.replace("@", "{{ bos_token }}") + rest
    ours, theirs = _chat_ids(write(tmp_path, kind, chat_template=template))
    assert ours == theirs


def _chat_ids(directory):
    """Ours and transformers' of one chat."""
    chat = [{"role": "user", "content": "a quick one"}]
    ours, theirs = both(directory)
    return ours.encode_chat(chat), theirs.apply_chat_template(chat).input_ids


@pytest.mark.parametrize("where", ["named", "own", "map", "kept"])
def test_templates_see_the_tokens_that_a_model_names(tmp_path, where):
    source = "{% for m in messages %}{{ bos_token }}{{ m.content }}{{ eot_token }}{% endfor %}"
    named = {"eot_token": "<|end_of_text|>"}
    given = {
        "named": {"extra_special_tokens": named}, "own": named, "map": {},
        "kept": named | {"added_tokens_decoder": {}},
    }[where]  # fmt: skip
    directory = write(tmp_path, "llama3", chat_template=source, **given)
    if where in ("map", "kept"):  # in the second case it is not read
        more = named if where == "map" else {"bos_token": "<|eot_id|>"}
        (directory / "special_tokens_map.json").write_text(json.dumps(more))
    ours, theirs = _chat_ids(directory)
    assert ours == theirs
    assert ours[-1] == from_directory(directory).encode("<|end_of_text|>", add_bos=False)[0]


@pytest.mark.parametrize("form", ["object", "list", "files", "files over settings"])
def test_named_chat_templates(tmp_path, form):
    source = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    named = {"tool_use": "T", "default": source}
    given = {
        "object": named, "list": [{"name": name, "template": text} for name, text in named.items()],
        "files": None, "files over settings": {"default": "S"},
    }[form]  # fmt: skip
    directory = write(tmp_path, "llama3", chat_template=given)
    if form.startswith("files"):
        (directory / "additional_chat_templates").mkdir()
        (directory / "additional_chat_templates/tool_use.jinja").write_text("T")
        (directory / "chat_template.jinja").write_text(source)
    ours, theirs = _chat_ids(directory)
    assert ours == theirs


def test_chat_templates_without_a_default_and_of_processors(tmp_path):
    def source(directory):
        return from_directory(directory).chat_template.source

    listed = [{"name": "rag", "template": "R"}, {"name": "tool_use", "template": "T"}]
    directory = write(tmp_path / "list", "llama3", chat_template=listed)
    assert source(directory) == "R"
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates/chat.jinja").write_text("C")
    assert source(directory) == "R", "that of the settings, where no file is the default"
    (write(directory, "llama3") / "chat_template.json").write_text('{"chat_template": "J"}')
    assert source(directory) == "C"
    (directory / "additional_chat_templates/chat.jinja").unlink()
    assert source(directory) == "J"
    (directory / "chat_template.json").write_text('{"chat_template": {"default": "D"}}')
    assert source(directory) == "D"
    (directory / "chat_template.json").write_text('{"chat_template": 3}')
    with pytest.raises(CheckpointError, match="neither a text nor named texts"):
        source(directory)


@pytest.mark.parametrize("kind", ["gpt2", "llama2", "qwen2"])
@pytest.mark.parametrize("where", ["decoder", "file", "map", "extra", "odd id", "flags"])
def test_tokens_that_only_the_settings_know(tmp_path, kind, where):
    size = Library.from_file(str(write(tmp_path, kind) / "tokenizer.json")).get_vocab_size()
    new = {"content": "<|new|>", "special": True}
    more = {"content": "<tool>", "special": False, "normalized": False}
    given, files = {
        "decoder": ({"added_tokens_decoder": {str(size + 1): more, str(size): new}}, {}),
        "odd id": ({"added_tokens_decoder": {str(size + 40): new, "3": more}}, {}),
        "flags": ({"added_tokens_decoder": {str(size): new | {"lstrip": True}}}, {}),
        "file": ({}, {"added_tokens.json": {"<|new|>": size, "<tool>": size + 1}}),
        "map": ({}, {"special_tokens_map.json": {
            "pad_token": "<|new|>", "additional_special_tokens": ["<tool>"]}}),
        "extra": ({"extra_special_tokens": {"own": "<|new|>"},
                   "additional_special_tokens": ["<tool>", "the"]}, {}),
    }[where]  # fmt: skip
    directory = write(tmp_path, kind, **given)
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content))
    ours, theirs = both(directory, config={"vocab_size": size + 8})
    for text in [*TEXTS[:50], "a<|new|>b", "a <|new|> <tool>the b", "<|new|><|new|> <too"]:
        assert ours.encode(text) == theirs(text).input_ids, text
        plain = theirs(text, add_special_tokens=False, split_special_tokens=True).input_ids
        assert ours.encode(text, add_bos=False, parse_special=False) == plain, text
    assert ours.vocab_size == len(theirs) > size
    assert ours.special_ids == set(theirs.all_special_ids) | {
        index for index, token in theirs.added_tokens_decoder.items() if token.special
    }


@pytest.mark.parametrize("kind", ["llama3", "metaspace"])
@pytest.mark.parametrize("split", [True, False])
def test_split_special_tokens(tmp_path, kind, split):
    source = "{% for m in messages %}{{ bos_token }}{{ m.content }}{{ eos_token }}{% endfor %}"
    directory = write(tmp_path, kind, split_special_tokens=split, chat_template=source)
    ours, theirs = both(directory)
    for text in ["a<|eot_id|>b</s> <s> c", *TEXTS[:50]]:
        assert ours.encode(text) == theirs(text).input_ids, text
    ours, theirs = _chat_ids(directory)
    assert ours == theirs


def test_a_token_without_an_embedding_stays_text_behind_those_that_the_file_adds():
    backend = Library(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    backend.add_tokens(["<x>", "<y>"])
    listed = {5: {"content": "<new>"}, 6: {"content": "<more>"}}
    add_tokens(backend, listed, [], marks=False, rows=6)
    assert [backend.token_to_id(text) for text in ("<y>", "<new>", "<more>")] == [4, 5, None]


def test_a_text_begins_where_its_prompt_ends_with_a_special_token(tmp_path):
    """There a vocabulary of pieces drops the space before a word; behind a word it is its own."""
    tokenizer = from_directory(write(tmp_path / "m", "llama2"))
    word = tokenizer.encode("the", add_bos=False)
    for prompt, text in (([min(tokenizer.special_ids)], "the"), (word, " the")):
        output = Output(0, prompt, room=9, tokenizer=tokenizer, stop=(), eos_ids=frozenset())
        assert "".join(output.add(Choice(id, None, ())).text for id in word) == text

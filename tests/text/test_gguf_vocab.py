"""GGUF vocabularies made by hand: special tokens, types, BOS, and metadata that lies."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from piece_models import metadata as pieces_of
from text_fixtures import check_pieces, clear_error, metadata, table

from llmcli.checkpoints import open_model
from llmcli.errors import CheckpointError, UnsupportedModel, UsageError
from llmcli.text import load_tokenizer
from llmcli.text.added import AddedToken, AddedTokens
from llmcli.text.gguf import from_gguf
from llmcli.text.pretokenizers import PRE_TOKENIZERS
from llmcli.text.stream import StreamDecoder

CONTROL, USER = 3, 4


def words(tokenizer, ids):
    return [tokenizer.token_text(index) for index in ids]


CUTS = table("pairs.jsonl")


@pytest.mark.parametrize("name", CUTS)
def test_the_tokens_of_a_text(name):
    words, more, text, expected = CUTS[name]
    check_pieces(from_gguf(metadata(words, **more)), text, expected)


def test_control_tokens_only_where_special_is_parsed_user_defined_always():
    tokenizer = from_gguf(metadata(types={"<|im_end|>": CONTROL, "<think>": USER}))
    text = "a<|im_end|><think>b"
    plain = tokenizer.encode(text, parse_special=False)
    assert 256 not in plain
    assert 257 in plain
    assert tokenizer.decode(plain) == text
    assert tokenizer.decode(tokenizer.encode(text)) == "a<think>b"
    assert tokenizer.decode(tokenizer.encode(text), skip_special=False) == text


@pytest.mark.parametrize(("text", "longest", "leftmost"), [
    ("abcdef", [(None, 0, 2), (0, 2, 6)], [(1, 0, 3), (None, 3, 6)]),
    *((text, cut, cut) for text, cut in (
        ("abcabcd", [(1, 0, 3), (1, 3, 6), (None, 6, 7)]), ("", []), ("cde", [(None, 0, 3)]),
    )),
])  # fmt: skip
def test_of_overlapping_tokens_llama_cpp_takes_the_longest_transformers_the_leftmost(
    text, longest, leftmost
):
    tokens = {i: AddedToken(content=t, special=True) for i, t in enumerate(["cdef", "abc"])}
    for rule, expected in ((False, longest), (True, leftmost)):
        found = AddedTokens(tokens, leftmost=rule).cut(text, True)
        assert list(found) == expected
    whole = [(None, 0, len(text))] if text else []
    assert list(AddedTokens(tokens, leftmost=False).cut(text, False)) == whole


def test_bos_follows_the_file_then_the_pre_tokenizer():
    special = {"<s>": CONTROL}
    at = 256
    for pre, asked, expected in (
        ("gpt-2", None, False), ("gpt-2", True, True), ("llama-bpe", None, True),
        ("llama-bpe", False, False), ("tekken", None, True),
    ):  # fmt: skip
        values = metadata(types=special, pre=pre, bos_token_id=at, add_bos_token=asked)
        tokenizer = from_gguf(values)
        assert tokenizer.add_bos is expected
        assert tokenizer.encode("a") == [*([at] if expected else ()), ord("a")]
        assert tokenizer.encode("a", add_bos=True)[0] == at
        assert tokenizer.encode("a", add_bos=False) == [ord("a")]
        front = tokenizer.pieces("a", add_bos=True)[0]
        assert (front.id, front.start, front.end, front.special) == (at, 0, 0, True)


def test_what_a_vocabulary_has_not_is_a_usage_error():
    with pytest.raises(UsageError, match="no BOS"):
        from_gguf(metadata()).encode("a", add_bos=True)
    with pytest.raises(UsageError, match="no chat template"):
        from_gguf(metadata()).encode_chat([])


def test_tokens_end_a_text_by_id_and_by_text_and_are_never_added():
    names = ["<|eot_id|>", "<|im_end|>", "<|fim_pad|>", "<|file_sep|>", "<mine>", "<other>"]
    types = dict.fromkeys(names, CONTROL)
    tokenizer = from_gguf(metadata(types=types, eos_token_id=260, add_eos_token=True))
    assert tokenizer.eos_ids == {256, 257, 258, 259, 260}
    assert tokenizer.encode("a") == [ord("a")]
    tokenizer = from_gguf(metadata(types={"<|im_end|>": 1, "<fim_prefix>": 1}))
    assert (tokenizer.eos_ids, tokenizer.special_ids) == ({256}, {256, 257})


def test_harmony_keeps_its_end_inside_the_text():
    names = ["<|end|>", "<|return|>", "<|call|>", "<|channel|>"]
    tokenizer = from_gguf(metadata(types=dict.fromkeys(names, CONTROL)))
    assert tokenizer.eos_ids == {257, 258}
    assert tokenizer.special_ids == {257, 258}
    assert tokenizer.decode([256, 259]) == "<|end|><|channel|>"


def test_the_bytes_of_a_token():
    """Unused ones stand for nothing; what is not UTF-8 keeps its bytes."""
    tokenizer = from_gguf(metadata(types={"[PAD1]": 5, "[UNK]": 2, "\udcff\udcfe": USER}))
    found = [tokenizer.token_bytes(id) for id in (256, 257, 258, 10**9, -1)]
    assert found == [b"", b"[UNK]", b"\xff\xfe", b"", b""]
    assert tokenizer.token_text(258) == "\\xff\\xfe"
    assert tokenizer.decode([10**9, -1, 65]) == tokenizer.decode([65])


def test_bytes_without_a_token_are_dropped_and_keep_their_neighbours_apart():
    values = metadata(["ab"])
    tokens = values["tokenizer.ggml.tokens"]
    tokens[0x88] = "instead of 0x88"
    tokenizer = from_gguf(values)
    assert words(tokenizer, tokenizer.encode("ab")) == ["ab"]
    text = "a\u0088b"  # bytes 61 c2 88 62
    assert tokenizer.encode(text) == [ord("a"), 0xC2, ord("b")]
    assert [(p.start, p.end) for p in tokenizer.pieces(text)] == [(0, 1), (1, 3), (3, 4)]
    values["tokenizer.ggml.tokens"][0xC2] = "instead of 0xc2"
    tokenizer = from_gguf(values)
    assert tokenizer.encode(text) == [ord("a"), ord("b")], "not merged across the gap"


@given(st.text())
def test_round_trip_and_stream(text):
    tokenizer, data = WITH_WORDS, text.encode()
    pieces = tokenizer.pieces(text)
    spelled = [data[piece.start : piece.end] for piece in pieces]
    assert spelled == [tokenizer.token_bytes(piece.id) for piece in pieces]
    assert b"".join(spelled) == data
    stream = StreamDecoder(tokenizer)
    streamed = [stream.push(piece.id) for piece in pieces]
    assert "\ufffd" not in "".join(streamed) or "\ufffd" in text, "half a character was shown"
    assert "".join(streamed) + stream.finish() == text
    assert tokenizer.decode(piece.id for piece in pieces) == text


WITH_WORDS = from_gguf(metadata(["hello", "Ġworld", "ðŁĺ", "ĠðŁ", "Ã©"]))


@given(st.binary(max_size=30))
def test_stream_of_any_bytes_equals_decode(data):
    tokens = list(data)  # the first 256 tokens are the bytes in order
    stream = StreamDecoder(WITH_WORDS)
    text = "".join([*map(stream.push, tokens), stream.finish()])
    assert text == WITH_WORDS.decode(tokens) == data.decode("utf-8", "replace")


@pytest.mark.parametrize("kind", ["bert", "rwkv", "plamo2", 7])
def test_other_kinds_are_unsupported(kind):
    with pytest.raises(UnsupportedModel, match="not supported") as caught:
        from_gguf(metadata(model=kind))
    assert "gpt2" in caught.value.hint


@pytest.mark.parametrize("kind", [None, "none", "no_vocab"])
def test_no_tokenizer_is_none(kind):
    assert from_gguf(metadata(model=kind)) is None


@pytest.mark.parametrize("pre", ["smolllm", "zzz", "gpt2\x1b[31m" * 50, None, "", 3, ["gpt-2"]])
def test_an_unknown_or_missing_pre_tokenizer_is_llama_cpps_default_and_a_note(pre):
    tokenizer = from_gguf(metadata(["ab"], pre=pre))
    usual = from_gguf(metadata(["ab"], pre="default"))
    assert (len(tokenizer.notes), usual.notes) == (1, ())
    assert "`tokenizer.ggml.pre`" in tokenizer.notes[0]
    assert tokenizer.notes[0].isprintable()
    assert len(tokenizer.notes[0]) < 300
    assert tokenizer.name == "gguf byte-level BPE, default"
    for text in ("1234 ab, it's", " a  b"):
        assert tokenizer.encode(text) == usual.encode(text)


def test_ids_out_of_range_are_ignored_with_a_note():
    tokenizer = from_gguf(metadata(fim_pad_token_id=256, eos_token_id=-1, padding_token_id=1 << 40))
    assert sorted(note[:26] for note in tokenizer.notes) == [
        "`tokenizer.ggml.eos_token_", "`tokenizer.ggml.fim_pad_to", "`tokenizer.ggml.padding_to",
    ]  # fmt: skip
    assert tokenizer.eos_ids == frozenset()
    assert from_gguf(metadata()).notes == ()


def test_gpt_4o_is_the_published_expression():
    """o200k_base of openai/tiktoken, tiktoken_ext/openai_public.py."""
    contraction = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    published = "|".join(
        [
            rf"[^\r\n\p{{L}}\p{{N}}]?{upper}*{lower}+{contraction}",
            rf"[^\r\n\p{{L}}\p{{N}}]?{upper}+{lower}*{contraction}", r"\p{N}{1,3}",
            r" ?[^\s\p{L}\p{N}]+[\r\n/]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+",
        ]
    )  # fmt: skip
    assert PRE_TOKENIZERS["gpt-4o"].patterns == (published,)


@pytest.mark.parametrize(("key", "value"), [
    ("tokens", None), ("tokens", "abc"), ("tokens", 3), ("tokens", []), ("tokens", [1, 2]),
    ("tokens", ["a", "b", "a"]), ("tokens", ["a", None]), ("merges", None), ("merges", 5),
    ("merges", ["ab"]), ("merges", [" b"]), ("merges", ["a zzz"]), ("merges", ["a b", 3]),
    ("merges", ["q z"]), ("merges", [""]), ("token_type", [1]), ("token_type", "x" * 300),
    ("token_type", 1), ("bos_token_id", "0"), ("eot_token_id", [0]), ("eos_token_id", True),
    ("add_bos_token", True),
])  # fmt: skip
def test_lying_metadata_is_one_clear_error(key, value):
    with clear_error():
        from_gguf(metadata(**{key: value}))


_JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=5), max_leaves=8,
)  # fmt: skip
_KEYS = ["tokens", "merges", "token_type", "bos_token_id", "eos_token_id", "pre", "model"]


@given(st.dictionaries(st.sampled_from([*_KEYS, "add_bos_token", "fim_pad_token_id"]), _JUNK))
def test_any_metadata_gives_a_tokenizer_or_an_error(values):
    given = {f"tokenizer.ggml.{key}": value for key, value in values.items()}
    with clear_error(always=False):
        tokenizer = from_gguf(metadata(types={"<s>": CONTROL}) | given)
        if tokenizer is not None:
            ids = tokenizer.encode("a b")
            assert [piece.id for piece in tokenizer.pieces("a b")] == ids
            assert isinstance(tokenizer.decode(ids, skip_special=False), str)


def test_chat_template_comes_with_its_special_tokens():
    values = metadata(types={"<s>": CONTROL, "</s>": CONTROL}, bos_token_id=256, eos_token_id=257,
                      add_bos_token=True)  # fmt: skip
    turns = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    for front, begins in (
        ("{{ bos_token }}", []), ("", []),
        ("b{{ bos_token }}", [256, ord("b")]),  # llama.cpp drops only a BOS that begins the text
    ):  # fmt: skip
        values["tokenizer.chat_template"] = front + turns
        ids = from_gguf(values).encode_chat([{"role": "user", "content": "a"}])
        assert ids == [*begins, 256, ord("a"), 257]
    del values["tokenizer.chat_template"]
    assert from_gguf(values).chat_template is None
    values |= {"tokenizer.chat_template.rag": "R", "tokenizer.chat_template.tool_use": "T"}
    assert from_gguf(values).chat_template.source == "R"
    values["tokenizer.chat_template"] = ["x"]
    with pytest.raises(CheckpointError, match="not a string"):
        from_gguf(values)


def test_what_it_takes_goes_with_its_entries_and_with_who_looks_them_up():
    """By so much the need that `info` shows was off where one number stood for all kinds."""
    pairs, pieces = from_gguf(metadata()), from_gguf(pieces_of("llama"))
    library = load_tokenizer(open_model("tiny"))
    each = [(one.nbytes - (4 << 20)) / one.vocab_size for one in (pieces, pairs, library)]
    assert each == [235, 570, 890]

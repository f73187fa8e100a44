"""Vocabularies made by hand, of byte pairs and of SentencePiece: metadata and files that lie."""

import json
import struct
import time

import piece_models
import pytest
from hypothesis import given
from hypothesis import strategies as st
from text_fixtures import check_pieces, clear_error, metadata, table

from llmcli.checkpoints import open_model
from llmcli.errors import CheckpointError, UnsupportedModel, UsageError
from llmcli.records.text import covered_bytes
from llmcli.text import load_tokenizer
from llmcli.text.added import AddedToken, AddedTokens
from llmcli.text.gguf import from_gguf
from llmcli.text.hf import from_directory
from llmcli.text.pretokenizers import PRE_TOKENIZERS
from llmcli.text.sentencepiece import check_charsmap, fields, message, number, parse_pieces
from llmcli.text.stream import StreamDecoder

CONTROL, USER, UNUSED, BYTE = 3, 4, 5, 6


BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def of_pieces(words, *, types=None, byte_tokens=True, **more):
    """`<unk>`, `<s>`, `</s>`, all bytes, then `words` with falling scores; `types` by word."""
    tokens = ["<unk>", "<s>", "</s>", *(BYTES if byte_tokens else []), *words]
    kinds = [2, 3, 3, *[BYTE] * (256 if byte_tokens else 0)]
    kinds += [(types or {}).get(word, 1) for word in words]
    values = {
        "model": "llama", "tokens": tokens,
        "scores": [0.0] * (len(tokens) - len(words)) + [-1.0 * i for i in range(len(words))],
        "token_type": kinds,
    } | more  # fmt: skip
    return {
        key if "." in key else f"tokenizer.ggml.{key}": value
        for key, value in values.items() if value is not None
    }  # fmt: skip


def shown(tokenizer, ids):
    return [tokenizer.token_text(index).replace(" ", "▁") for index in ids]


MADE = {"pairs.jsonl": metadata, "pieces.jsonl": of_pieces}
CUTS = {title: (made, *row) for name, made in MADE.items() for title, row in table(name).items()}


@pytest.mark.parametrize("name", CUTS)
def test_the_tokens_of_a_text(name):
    made, words, more, text, expected = CUTS[name]
    if more.get("scores") == "equal":
        more = more | {"scores": [0.0] * 260 + [-1.0, -1.0, -1.0]}
    check_pieces(from_gguf(made(words, **more)), text, expected)


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
    assert shown(tokenizer, tokenizer.encode("ab")) == ["ab"]
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
    pairs, pieces = from_gguf(metadata()), from_gguf(piece_models.metadata("llama"))
    library = load_tokenizer(open_model("tiny"))
    each = [(one.nbytes - (4 << 20)) / one.vocab_size for one in (pieces, pairs, library)]
    assert each == [235, 570, 890]


# vocabularies of pieces


SPACED = of_pieces(["▁", "a", "▁a", "<x>"], types={"<x>": CONTROL})
LONGER = of_pieces(["▁", "a", "  ", "▁▁"], types={"  ": USER})


def test_the_space_in_front_is_not_in_the_text():
    tokenizer = from_gguf(SPACED)
    ids = tokenizer.encode("a a")
    assert tokenizer.decode(ids) == "a a"
    assert tokenizer.decode(ids, skip_special=False) == "<s> a a"
    stream = StreamDecoder(tokenizer)
    assert "".join(map(stream.push, ids)) + stream.finish() == "a a"
    plain = from_gguf(SPACED | {"tokenizer.ggml.add_space_prefix": False})
    assert plain.decode(plain.encode(" a")) == " a"


def test_every_byte_of_a_text_and_of_given_ids_has_its_place_once():
    tokenizer = from_gguf(of_pieces(["▁", "a", "▁a"]))
    text = "🙂▁a 日本▁ é"  # with the mark written out
    spans = [(p.start, p.end) for p in tokenizer.pieces(text)]
    assert covered_bytes(spans) == len(text.encode())
    assert spans[2:6] == [(0, 1), (1, 2), (2, 3), (3, 4)]
    ids = tokenizer.encode(" é a")
    spelled, pieces = tokenizer.decode(ids, skip_special=False).encode(), tokenizer.spelled(ids)
    assert [piece.id for piece in pieces] == ids
    found = [spelled[p.start : p.end] for p in pieces[1:]]
    assert found == [tokenizer.token_bytes(id) for id in ids[1:]]
    assert pieces[-1].end == len(spelled)


def test_plain_text_makes_no_hidden_token_and_user_defined_ones():
    tokenizer = from_gguf(of_pieces(["▁", "<", "s", ">", "s>", "</", "/", "▁<"]))
    for text in ("<s>", "</s>", "<unk>", "<0x0A>"):
        ids = tokenizer.encode(text, add_bos=False, parse_special=False)
        assert not tokenizer.special_ids.intersection(ids)
        assert tokenizer.decode(ids) == text
    assert tokenizer.encode("<s>", add_bos=False) == [1]
    tokenizer = from_gguf(LONGER)
    user = tokenizer.vocab_size - 2
    assert tokenizer.token_bytes(user) == b"  "
    assert tokenizer.encode("a   a", add_bos=False, parse_special=False)[2:4] == [user, user + 1]


def test_the_bytes_of_odd_tokens():
    odd = ["<0x-1>", "<0xZZ>", "<0x+1>", "<0x 1>", "<0x１１>"]
    tokenizer = from_gguf(of_pieces(["▁", *odd], types=dict.fromkeys(odd, BYTE)))
    first = tokenizer.vocab_size - len(odd)
    assert [tokenizer.token_bytes(first + i).decode() for i in range(len(odd))] == odd
    assert tokenizer.token_bytes(3 + 0x0A) == b"\n"
    tokenizer = from_gguf(of_pieces(["▁", "a", "b", "\udcff"], types={"a": UNUSED, "b": 99}))
    assert [tokenizer.token_bytes(i) for i in range(260, 263)] == [b"", b"", b"\xff"]


def test_ids_that_the_file_leaves_out_are_llama_cpps():
    tokenizer = from_gguf(of_pieces(["▁"]))
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.add_bos) == (1, {2}, True)
    astray = from_gguf(of_pieces(["▁"], bos_token_id=1 << 40))
    assert (astray.bos_id, len(astray.notes)) == (1, 1), "the kind's own, as in llama.cpp"
    quiet = from_gguf(of_pieces(["▁"], add_bos_token=False))
    assert not quiet.add_bos
    assert quiet.encode("x", add_bos=True)[0] == 1
    t5 = from_gguf(of_pieces(["▁"], model="t5"))
    assert (t5.bos_id, t5.add_bos) == (None, False)
    with pytest.raises(UsageError, match="no BOS"):
        t5.encode("x", add_bos=True)
    assert from_gguf(of_pieces([], byte_tokens=False, tokens=["a"])).bos_id is None


@pytest.mark.parametrize(("key", "value"), [
    ("scores", [0.0]), ("scores", "x" * 900), ("scores", 3), ("scores", [None] * 900),
    ("scores", [float("nan")] * 900), ("scores", [float("-inf")] * 900), ("scores", [1e300] * 900),
    ("scores", [10**400] * 900), ("token_type", [1]), ("tokens", ["a", "a"]), ("tokens", []),
    ("bos_token_id", "1"), ("precompiled_charsmap", "abc"), ("precompiled_charsmap", [1, 2, 3]),
    ("precompiled_charsmap", [255] * 4096), ("precompiled_charsmap", {"a": 1}),
    ("precompiled_charsmap", 7),
])  # fmt: skip
@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_lying_metadata_of_pieces_is_one_clear_error(kind, key, value):
    if kind == "llama" and key == "precompiled_charsmap":
        return  # llama.cpp does not read it either
    with clear_error():
        from_gguf(of_pieces(["▁", "a"], **{"model": kind, key: value}))


# Files


KEEP_SPACES = number(4, 0)


def model(pieces, trainer=b"", rules=KEEP_SPACES):
    """A model of merges that keeps all spaces, as a `tokenizer.model` is written."""
    body = b"".join(
        message(1, message(1, text.encode()) + b"\x15" + struct.pack("<f", score) + number(3, kind))
        for text, score, kind in pieces
    )
    return body + message(2, number(3, 2) + trainer) + message(3, rules)


@pytest.fixture
def opened(tmp_path):
    """`opened(settings)`: a `tokenizer.model` with these settings beside it."""

    def make(settings=None, pieces=(), config=None):
        (tmp_path / "tokenizer.model").write_bytes(model([*GOOD, *pieces]))
        if settings is not None:
            (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        return from_directory(tmp_path, config=config)

    return make


GOOD = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3), ("▁", -1.0, 1), ("a", -2.0, 1)]


@pytest.mark.parametrize(("data", "what"), [
    (b"\x12\0", "is empty"), (b"\xff" * 40, "no end"), (b"\n\xff\xff\x03a", "longer"),
    (b"\x0b", "wire type 3"), (b"\n\x02\n\x05", "longer"), (b"IQ== 0\nIg== 1\n", "is empty"),
    (model([("a", 0.0, 1)]), "unknown"), (model([*GOOD, ("u", 0.0, 2)]), "unknown"),
    (model([*GOOD, ("a", 0.0, 1)]), "twice"), (model([*GOOD, ("", 0.0, 1)]), "empty"),
    (model([*GOOD, ("b", float("nan"), 1)]), "is nan"), (model([*GOOD, ("b", 0.0, 7)]), "kind"),
    (model([*GOOD, ("b", 0.0, 0)]), "kind"), (model([*GOOD, ("<0x41>", 0.0, 6)]), "256"),
    (model(GOOD, rules=number(5, 0)), "without"),
    (model(GOOD, number(24, 1)), "without"), (model(GOOD, rules=message(2, b"\x01\x02")), "table"),
])  # fmt: skip
def test_a_broken_model_file_is_one_clear_error(data, what, tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(data)
    with clear_error(what):
        from_directory(tmp_path)


@pytest.mark.parametrize("kind", [3, 4])
def test_models_of_words_or_characters_are_not_supported(kind):
    with pytest.raises(UnsupportedModel, match="words or characters"):
        parse_pieces(model(GOOD, number(3, kind)))


def test_a_model_file_beside_its_settings(opened, tmp_path):
    pieces = [("▁a", 0.0, 1), ("<free>", 0.0, 3)]
    settings = {
        "add_bos_token": True,
        "bos_token": {"content": "<s>"},
        "eos_token": "<|end|>",
        "chat_template": "{{ bos_token }}{{ messages[0].content }}",
        "added_tokens_decoder": {
            "6": {"content": "<|user|>", "special": True, "rstrip": True},
            "9": {"content": "<|end|>", "special": True, "lstrip": True},
        },
    }
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<think>": 8}))
    tokenizer = opened(settings, pieces, {"eos_token_id": [2, 500]})
    assert tokenizer.vocab_size == 10
    assert not tokenizer.has(7)
    assert tokenizer.eos_ids == {2, 9}
    text = "a<|user|>  a<think> a \n<|end|>"
    assert shown(tokenizer, tokenizer.encode(text)) == [
        "<s>", "▁a", "<|user|>", "a", "<think>", "▁a", "<|end|>",
    ]  # fmt: skip
    plain = tokenizer.encode(text, parse_special=False)
    assert 8 in plain
    assert not {6, 9}.intersection(plain)
    spans = [(p.id, p.start, p.end) for p in tokenizer.pieces("a<|user|>  a", add_bos=False)]
    assert spans == [(5, 0, 1), (6, 1, 9), (4, 11, 12)]
    assert tokenizer.encode_chat([{"role": "user", "content": "a"}]) == [1, 4]
    settings |= {"extra_special_tokens": {"eot": "<|new|>"}, "pad_token": "<pad>"}
    more = opened(settings, pieces, {"vocab_size": 12})
    assert more.encode("<pad><|new|>", add_bos=False) == [10, 11]
    assert more.special_ids >= {10, 11}
    assert opened(settings, pieces, {"vocab_size": 11}).vocab_size == 11
    settings["chat_template"] = "{{ messages[0].content }}"
    bare = opened(settings, pieces)
    assert bare.encode_chat([{"role": "user", "content": "a"}]) == bare.encode("a")[1:]


def test_thousands_of_added_tokens_do_not_slow_a_text_down(opened):
    """An expression of them all took ten seconds for this text."""
    tokens = {str(9 + i): {"content": f"<unused{i}>", "special": True} for i in range(3000)}
    tokenizer = opened({"added_tokens_decoder": tokens})
    start = time.process_time()
    ids = tokenizer.encode("a <unused " * 10_000 + "<unused17>", add_bos=False)
    assert time.process_time() - start < 3
    assert ids[-1] == 9 + 17


def test_whitespace_behind_many_tokens_is_looked_at_once(opened):
    token = {"content": "<x>", "special": True, "rstrip": True}
    tokenizer = opened({"added_tokens_decoder": {"9": token}})
    start = time.process_time()
    assert tokenizer.encode("<x> \u2003\x1f\n" * 300_000, add_bos=False) == [9] * 300_000
    assert time.process_time() - start < 5  # a copy of what follows, each time, takes minutes


def test_a_special_token_may_end_a_text_that_a_longer_one_would_not_fit(opened):
    """`<unk>` begins with the same letter and is longer than what is left."""
    text = "é a<s>"
    last = opened().pieces(text, add_bos=False)[-1]
    assert (last.text, last.end - last.start, last.end) == ("<s>", 3, len(text.encode()))


@pytest.mark.parametrize(("settings", "pieces"), [
    ({}, "▁a </s> a"), ({"legacy": False}, "▁a </s> a"),
    ({"legacy": True}, "▁a </s> ▁a"),  # a space in front of every stretch
    ({"add_prefix_space": False}, "a </s> a"),
])  # fmt: skip
def test_where_a_space_is_put_in_front(settings, pieces, opened):
    tokenizer = opened(settings, [("▁a", 0.0, 1)])
    assert shown(tokenizer, tokenizer.encode("a</s>a", add_bos=False)) == pieces.split()


@pytest.mark.parametrize(("listed", "words"), [
    ({"x": {"content": "a"}}, "no id or no text"), ({"9": {}}, "no id or no text"),
    ({"9": "a"}, "no id or no text"), ({"9" * 5000: {"content": "a"}}, "no id or no text"),
    ({"-1": {"content": "a"}}, "no id or no text"),
    ({"9": {"content": "\ud800"}}, "is not Unicode text"),
    ({str(1 << 30): {"content": "far"}}, "no id or no text"),
    ({"9" * 20: {"content": "far"}}, "no id or no text"),
    ({str(1 << 24): {"content": "far"}}, "the id `16777216`"),
    ({str(1 << 22): {"content": "far"}}, "has the id 4194304"),  # gaps would fill the memory
])  # fmt: skip
def test_added_tokens_that_cannot_be(listed, words, opened):
    with clear_error(words):
        opened({"added_tokens_decoder": listed})


def test_the_table_of_replacements_is_what_the_library_reads():
    table = piece_models.trained("small")
    charsmap = parse_pieces(table).charsmap
    check_charsmap(charsmap)
    size = int.from_bytes(charsmap[:4], "little")
    for at in range(4, 4 + size, 4):  # no unit may lead outside
        broken = bytearray(charsmap)
        unit = int.from_bytes(charsmap[at : at + 4], "little")
        broken[at : at + 4] = (unit & 0x800001FF | 0x7FFFF << 10).to_bytes(4, "little")
        if unit >> 31:
            broken[at : at + 4] = b"\xff\xff\xff\xff"
        with pytest.raises(CheckpointError, match="outside"):
            check_charsmap(bytes(broken))
    with pytest.raises(CheckpointError):
        check_charsmap(charsmap[:-1])


def test_wire_fields_are_what_was_written():
    data = number(3, 300) + message(70, b"abc") + b"\x15abcd" + b"\x11abcdefgh"
    assert list(fields(data)) == [(3, 300), (70, b"abc"), (2, b"abcd"), (2, b"abcdefgh")]


def test_tokenizer_json_comes_first(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(model(GOOD))
    assert from_directory(tmp_path).name == "tokenizer.model, BPE"
    (tmp_path / "tokenizer.json").write_text("{}")
    with clear_error("`tokenizer.json`"):
        from_directory(tmp_path)

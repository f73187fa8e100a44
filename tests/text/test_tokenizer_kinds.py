"""Every kind of tokenizer that a directory may hold, against transformers, on thousands of texts.

The vocabularies are trained here and written by transformers' own `save_pretrained`, or as the
files that checkpoints of a class had before there was tokenizer.json. At the end: a text in parts
has the tokens of the whole, for every known way of cutting words.
"""

import ast
import json
import os
import random
from functools import cache, partial
from pathlib import Path

import pytest
import tokenizer_files
from hypothesis import given
from hypothesis import strategies as st
from llama_cpp_strings import CODE, LOOKALIKES, MARKS, SPACES, WORDS, strings
from text_fixtures import clear_error, decoded, metadata, same_as_transformers
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing

from llmcli.errors import CheckpointError, UnsupportedModel
from llmcli.text import StreamDecoder
from llmcli.text import tokenizer as tokenizers_
from llmcli.text.gguf import from_gguf
from llmcli.text.hf import from_directory
from llmcli.text.portions import divisible, portions
from llmcli.text.pretokenizers import PRE_TOKENIZERS, build_pre_tokenizer

EMOJI = ["👨‍👩‍👧‍👦", "🏳️‍🌈", "👍🏽", "🇩🇪🇫🇷", "1️⃣", "☃\ufe0f", "\u200d", "\ufe0f"]
NAMED = ["<|endoftext|>", "<|im_start|>", "<|eot_id|>", "<s>", "</s>", "<unk>", "[CLS]", "[UNK]",
         "<|begin_of_text|>", "<tool>", "<extra_id_0>", "[MASK]"]  # fmt: skip
COMBINING = [chr(c) for c in (*range(0x300, 0x370, 5), 0x94D, 0xE31, 0x5B0, 0x64B, 0x20DD, 0x1160)]
UNASSIGNED = [chr(c) for c in (0x378, 0x530, 0x2FE0, 0xFFFF, 0x1FFFE, 0xE0080, 0xF0000, 0x10FFFF)]


def texts() -> tuple[list[str], list[str]]:
    """3,000 drawn texts, those of `strings` among them; 300 with what a splitter gets wrong."""
    draw = random.Random(11)
    pools = [EMOJI, NAMED, COMBINING, UNASSIGNED, WORDS, SPACES, MARKS, LOOKALIKES]
    pools.append([chr(c) for c in (*range(0x21), *range(0x7F, 0xA1))])
    found = [*NAMED, *EMOJI, *CODE]
    for name in NAMED:
        found += [
            f"a{name}b", f"a {name} b", f" {name}", f"{name} ", f"{name}\n{name}{name}", name[:-1]
        ]
    found += [" " * n + "x" * (n % 7) + "\n" * (n % 5) for n in range(1, 60)]
    found += ["a" * 5000, "ab" * 3000, "é" * 999, "́" * 500, "🙂" * 300, "中" * 999, "1" * 999]
    found += ["\x00", "a\x00b", "\r", "a\rb", "\r\r\n", "\x1b[31m", "\u2028\u2029", "\u202eabc"]
    drawn = strings(2000, seed=12)
    while len(drawn) < 3000:
        drawn.append("".join(draw.choice(draw.choice(pools)) for _ in range(draw.randint(1, 12))))
    return drawn, found


DRAWN, ODD = texts()
TEXTS = DRAWN + ODD


def trained(model, trainer, *, pre, normalizer=None, decoder=None):
    tokenizer = Tokenizer(model)
    tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.decoder = normalizer, pre, decoder
    tokenizer.train_from_iterator(tokenizer_files.CORPUS, trainer)
    return tokenizer


def wordpiece():
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    made = trained(
        models.WordPiece(unk_token="[UNK]"),
        trainers.WordPieceTrainer(vocab_size=900, special_tokens=special, show_progress=False),
        normalizer=normalizers.BertNormalizer(), pre=pre_tokenizers.BertPreTokenizer(),
        decoder=decoders.WordPiece(),
    )  # fmt: skip
    made.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = {"unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return made, names | {"pad_token": "[PAD]", "mask_token": "[MASK]"}


def wordlevel():
    made = trained(
        models.WordLevel(unk_token="<unk>"),
        trainers.WordLevelTrainer(special_tokens=["<unk>", "<s>"], show_progress=False),
        pre=pre_tokenizers.Whitespace(),
    )
    return made, {"unk_token": "<unk>", "bos_token": "<s>"}


def unigram():
    """As T5's: replacements, runs of spaces merged, `▁` in front of every word."""
    import piece_models

    from llmcli.text.sentencepiece import parse_pieces

    model = parse_pieces(piece_models.trained("t5"))
    made = Tokenizer(models.Unigram(list(zip(model.strings, model.scores, strict=True)), unk_id=2))
    made.normalizer = normalizers.Sequence(
        [
            normalizers.Precompiled(model.charsmap),
            normalizers.Replace(Regex(" {2,}"), "▁"),
        ]
    )
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    made.decoder = decoders.Metaspace(prepend_scheme="always")
    made.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    names = {"unk_token": "<unk>", "eos_token": "</s>", "pad_token": "<pad>"}
    return made, names | {"extra_special_tokens": ["the"]}


def trained_by_bytes(kind):
    return Tokenizer.from_str(tokenizer_files.trained(kind)), tokenizer_files.KINDS[kind][1]


FILES = {kind: partial(trained_by_bytes, kind) for kind in tokenizer_files.KINDS}
FILES |= {"wordpiece": wordpiece, "wordlevel": wordlevel, "unigram": unigram}
LISTED = {
    "900": {"content": "<|im_start|>", "special": True, "normalized": False},
    "901": {"content": "<|eot_id|>", "special": True, "lstrip": True, "rstrip": True},
    "902": {"content": "<tool>", "special": False, "normalized": True},
}
PLAIN = {"cls_token": "the", "sep_token": "a", "bos_token": "the", "eos_token": "a"}
PLAIN |= {"unk_token": "<|endoftext|>", "pad_token": None, "mask_token": None}
# (tokenizer_config.json, config.json's model_type, further files) of vocab.json and merges.txt.
PAIRS = {
    "pair gpt2": ({}, "gpt2", {}),
    "pair gpt2 spaced": (
        {"tokenizer_class": "GPT2TokenizerFast", "add_prefix_space": True, "add_bos_token": True},
        "llama",
        {"added_tokens.json": {"<s>": 900, "<tool>": 901}, "special_tokens_map.json": {
            "bos_token": {"content": "<s>", "normalized": True}, "image_token": "<tool>",
        }},
    ),
    "pair qwen2": ({"added_tokens_decoder": LISTED, "eos_token": "<|im_start|>"}, "qwen3", {}),
    "pair qwen2 always": ({"tokenizer_class": "GPT2Tokenizer", "bos_token": None}, "qwen2", {}),
    "pair neox": ({"tokenizer_class": "GPTNeoXTokenizer", "add_bos_token": True}, None, {}),
    "pair roberta": ({"tokenizer_class": "RobertaTokenizer", **PLAIN}, None, {}),
}  # fmt: skip


def write_pair(directory, settings, model_type, more, *, kind="gpt2"):
    model = json.loads(tokenizer_files.trained(kind))["model"]
    contents = {"vocab.json": model["vocab"], "tokenizer_config.json": settings, **more}
    if model_type:
        contents["config.json"] = {"model_type": model_type}
    for name, content in contents.items():
        if content is not None:
            (directory / name).write_text(json.dumps(content), encoding="utf-8")
    lines = ["#version: 0.2", *map(" ".join, model["merges"])]
    (directory / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return {"model_type": model_type}


@pytest.fixture(scope="module", params=[*FILES, *PAIRS])
def pair(request, tmp_path_factory):
    """(ours, transformers', the kind's name)."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    kind, directory = request.param, tmp_path_factory.mktemp("kind")
    config = None
    if kind in FILES:
        made, names = FILES[kind]()
        saved = PreTrainedTokenizerFast(tokenizer_object=made, **names)
        saved.save_pretrained(directory)
    else:
        config = write_pair(directory, *PAIRS[kind])
    theirs = AutoTokenizer.from_pretrained(str(directory))
    return from_directory(directory, config=config), theirs, kind


def test_ids_text_and_facts_are_transformers(pair):
    """Every kind with all odd texts and every fourth drawn one."""
    ours, theirs, kind = pair
    given = DRAWN[[*FILES, *PAIRS].index(kind) % 4 :: 4] + ODD
    same_as_transformers(ours, theirs, given)
    for text in given[::3]:
        ids = theirs(text).input_ids
        assert ours.decode(ids) == decoded(theirs, ids, skip_special_tokens=True), text
    front = theirs("a", add_special_tokens=False).input_ids
    full = theirs("a").input_ids
    at = next(i for i in range(len(full)) if full[i : i + len(front)] == front)
    assert ours.encode("a")[:at] == full[:at]
    assert ours.add_bos is (at > 0)
    assert ours.eos_ids == {theirs.eos_token_id} - {None}


def test_stream_equals_decode_for_any_ids(pair):
    ours, theirs, _ = pair

    @given(st.lists(st.integers(0, ours.vocab_size + 3), max_size=30), st.booleans())
    def check(ids, skip):
        stream = StreamDecoder(ours, skip_special=skip)
        text = "".join([*map(stream.push, ids), stream.finish()])
        assert text == ours.decode(ids, skip_special=skip)
        expected = decoded(theirs, ids, skip_special_tokens=skip)
        if "\ufffd" not in expected:  # the library marks a whole run of byte tokens as broken
            assert text == expected

    check()


def test_pieces_are_the_ids_and_lie_in_the_text(pair):
    ours, _, kind = pair
    for text in TEXTS[::5]:
        pieces, data = ours.pieces(text), text.encode()
        assert [piece.id for piece in pieces] == ours.encode(text)
        ends = [piece.end for piece in pieces]
        assert all(0 <= p.start <= p.end <= len(data) for p in pieces)
        assert ends == sorted(ends)
        if kind in ("gpt2", "llama3"):  # bytes, and nothing is normalized or put in front
            assert b"".join(data[p.start : p.end] for p in pieces) == data, text


SPACE = [{}, {"add_prefix_space": True}, {"add_prefix_space": False}]
LEGACY = [{"legacy": True}, {"legacy": False, "add_prefix_space": None}]
LETTERS = [{}, {"do_lower_case": False}, {"strip_accents": True, "do_lower_case": False},
           {"tokenize_chinese_chars": False, "strip_accents": False}]  # fmt: skip
# (kind of file, class that is named, config.json's model_type, settings)
CLASSES = [
    ("gpt2", "GPT2TokenizerFast", "llama", SPACE),
    ("gpt2", "CodeGenTokenizer", "gpt2", SPACE),
    ("gpt2", "GPTNeoXTokenizerFast", "gpt_neox", SPACE),
    ("gpt2", None, "gpt_neox", SPACE),
    ("gpt2", "GPT2TokenizerFast", "granite", SPACE[1:2]),  # the file as it stands
    ("gpt2", "PreTrainedTokenizerFast", "gpt2", SPACE[1:2]),
    ("qwen2", "Qwen2Tokenizer", "llama", SPACE),
    ("qwen2", "GPT2Tokenizer", "qwen2", SPACE),  # the model's own class
    ("qwen2", None, "qwen3", [{"eos_token": None}]),
    ("llama2", "LlamaTokenizer", "llama", [*SPACE, *LEGACY]),
    ("llama2", "LlamaTokenizer", "mistral", [*SPACE[1:], *LEGACY]),
    ("llama2", "CodeLlamaTokenizerFast", "llama", [*SPACE, *LEGACY]),
    ("llama2", None, "llama", SPACE[1:2]),
    ("metaspace", "LlamaTokenizerFast", "llama", [*SPACE, *LEGACY]),
    ("llama3", "LlamaTokenizerFast", "llama", SPACE[1:]),
    ("wordpiece", "BertTokenizer", "gpt2", LETTERS),
]
CASES = [(*case[:3], given) for case in CLASSES for given in case[3]]


@pytest.mark.parametrize(("kind", "named", "model_type", "given"), CASES)
def test_the_class_that_is_named_sets_what_it_does_in_transformers(
    tmp_path, kind, named, model_type, given
):
    from transformers import AutoTokenizer

    made, names = FILES[kind]()
    made.save(str(tmp_path / "tokenizer.json"))
    settings = {**names, **given} | ({"tokenizer_class": named} if named else {})
    config = {"model_type": model_type, "vocab_size": 1000}
    for name, content in (("tokenizer_config.json", settings), ("config.json", config)):
        (tmp_path / name).write_text(json.dumps(content))
    ours, theirs = from_directory(tmp_path, config=config), AutoTokenizer.from_pretrained(tmp_path)
    texts = [" ab", "ab", "É 中文", "a</s> b<s>c<|im_end|> d", *TEXTS[::40]]
    same_as_transformers(ours, theirs, texts)


def digits_alone():
    library = tokenizer_files.gpt2()
    steps = [pre_tokenizers.Digits(individual_digits=True), library.pre_tokenizer]
    library.pre_tokenizer = pre_tokenizers.Sequence(steps)
    return library


def small_letters():
    vocab = {text: index for index, text in enumerate(["<unk>", "<s>", "</s>", *"▁abAB", "▁a"])}
    library = Tokenizer(models.BPE(vocab=vocab, merges=[("▁", "a")], unk_token="<unk>"))
    library.normalizer = normalizers.Sequence(
        [normalizers.Lowercase(), normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    return library


@pytest.mark.parametrize(("named", "model_type", "made", "texts"), [
    ("GPT2Tokenizer", "gpt2", digits_alone, ["in  2024"]),
    ("LlamaTokenizer", "llama", small_letters, [" ab", "AB"]),
])  # fmt: skip
def test_a_step_of_the_file_that_its_class_has_not_stays(tmp_path, named, model_type, made, texts):
    """The model was trained with it; transformers 5 takes vocabulary and merges, and drops it."""
    from transformers import AutoTokenizer

    library = made()
    library.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    settings = {"tokenizer_class": named, "unk_token": "<unk>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    ours, theirs = from_directory(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for text in texts:
        ids = library.encode(text).ids
        assert ours.encode(text, add_bos=False) == ids
        assert theirs.encode(text, add_special_tokens=False) != ids


def test_line_ends_blank_lines_and_a_mark_in_front_change_nothing(tmp_path):
    config = write_pair(tmp_path, {}, "gpt2", {})

    def ids():
        return list(map(from_directory(tmp_path, config=config).encode, TEXTS[:300]))

    path, before = tmp_path / "merges.txt", ids()
    lines = path.read_text(encoding="utf-8").splitlines()
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join([*lines, "", ""]).encode())
    assert ids() == before
    path.write_text("\n".join(lines[1:]), encoding="utf-8")  # no header, no end of the last line
    assert ids() == before


def test_added_tokens_have_the_ids_that_the_files_give(tmp_path):
    listed = {"950": {"content": "<tool>", "special": True}, "2000": {"content": "<end>"}}
    config = write_pair(tmp_path, {"added_tokens_decoder": listed}, "gpt2", {})
    ours = from_directory(tmp_path, config=config)
    assert ours.encode("<tool><end>", add_bos=False) == [950, 2000]
    assert ours.vocab_size == 2001
    assert not ours.has(1999)
    assert ours.special_ids >= {950}


UNKNOWN = [
    ({}, None, "no `tokenizer_class` is named"), ({}, "llama", "no `tokenizer_class` is named"),
    ({"tokenizer_class": "CLIPTokenizer"}, "gpt2", "`CLIPTokenizer`"),
    ({"tokenizer_class": "PreTrainedTokenizerFast"}, "llama", "`PreTrainedTokenizerFast`"),
    ({"tokenizer_class": "\x1b[31m"}, "llama", r"`\\x1b\[31m`"),
    ({"tokenizer_class": ["GPT2Tokenizer"]}, "gpt2", "unsupported tokenizer class"),
    ({}, ["gpt2"], "no `tokenizer_class` is named"),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "model_type", "words"), UNKNOWN)
def test_an_unknown_cut_is_an_error_not_a_guess(tmp_path, settings, model_type, words):
    config = write_pair(tmp_path, settings, model_type, {})
    with pytest.raises(UnsupportedModel, match=words) as caught:
        from_directory(tmp_path, config=config)
    assert caught.value.hint


HOSTILE = [
    (name, ast.literal_eval(content))
    for name, content in (
        row.split(" ", 1)
        for row in (Path(__file__).parent / "data" / "hostile_pairs.txt").read_text().splitlines()
    )
]
HOSTILE += [("vocab.json", b'{"a":' * 100_000), ("merges.txt", b"\n" * (1 << 21))]


@pytest.mark.parametrize(("name", "content"), HOSTILE)
def test_a_broken_pair_is_one_clear_error(tmp_path, name, content):
    config = write_pair(tmp_path, {}, "gpt2", {})
    (tmp_path / name).write_bytes(content)
    with clear_error(most=400):
        from_directory(tmp_path, config=config)


def test_files_that_are_too_large_or_alone_and_an_added_token_without_text(tmp_path):
    config = write_pair(tmp_path, {}, "gpt2", {})
    for name in ("vocab.json", "merges.txt"):
        kept = (tmp_path / name).read_bytes()
        os.truncate(tmp_path / name, (1 << 25) + 1)
        with pytest.raises(CheckpointError, match=f"`{name}` has more than"):
            from_directory(tmp_path, config=config)
        (tmp_path / name).unlink()
        if name == "merges.txt":
            with pytest.raises(UnsupportedModel, match=r"only tokenizer is `vocab\.json`"):
                from_directory(tmp_path, config=config)
        (tmp_path / name).write_bytes(kept)
    (tmp_path / "added_tokens.json").write_text('{"": 900}')
    with clear_error("the added token `900` has no text"):
        from_directory(tmp_path, config=config)


# texts in parts


# Their words are whole runs of words.
WHOLE = {"exaone-moe", "superbpe", "gemma4", "granite-embed-multi-311m", "sarvam-moe"}
GAPS = ["  ", "\n", "\r\n", "\t", "'s", "é", "e\u0301", "日本", "12", "3.5", "()", "🙂", "\u00a0"]


@cache
def long_texts(count=60):
    draw = random.Random(5)
    words = [*strings(200, seed=9), *GAPS, *["ab cd", "The cat", " it's a", "x y z"] * 40]
    return ["".join(draw.choices(words, k=40)) for _ in range(count)]


def bare(pre_tokenizer, **options):
    tokenizer = Tokenizer(models.BPE(**options))
    tokenizer.pre_tokenizer = pre_tokenizer
    return tokenizer


def test_portions_are_the_text():
    for text in long_texts():
        cuts = list(portions(text, 20))
        assert "".join(text[a:b] for a, b in cuts) == text
        assert all(text[a] == " " and text[a - 1].isalpha() for a, _ in cuts[1:])
    assert any(len(list(portions(text, 20))) > 3 for text in long_texts())
    assert list(portions("日" * 100, 10)) == [(0, 100)]


# one name of each rule: some 90 names have some 30 rules
RULES = {repr(rule): name for name, rule in sorted(PRE_TOKENIZERS.items())}.values()


@pytest.mark.parametrize("name", RULES)
def test_every_rule_cuts_there(name):
    """The words of all parts are those of the whole, which is all that merging sees."""
    cutter = build_pre_tokenizer(PRE_TOKENIZERS[name])
    assert divisible(bare(cutter)) == (name not in WHOLE)
    if name in WHOLE:
        return
    for text in long_texts():
        parts = [cutter.pre_tokenize_str(text[a:b]) for a, b in portions(text, 15)]
        words = [word for part in parts for word, _ in part]
        assert words == [word for word, _ in cutter.pre_tokenize_str(text)]


@pytest.mark.parametrize("kind", tokenizer_files.KINDS)
def test_ids_and_offsets_do_not_depend_on_the_parts(kind, tmp_path, monkeypatch):
    tokenizer = from_directory(tokenizer_files.write(tmp_path, kind))
    assert tokenizer._divisible == (kind in ("gpt2", "llama3", "qwen2"))
    specials = "ab cd<|endoftext|> ef gh<|eot_id|>ij kl</s> mn op"
    for text in [*long_texts(30), specials]:
        whole, pieces = tokenizer.encode(text), tokenizer.pieces(text)
        with monkeypatch.context() as small:
            small.setattr(tokenizers_, "PORTION", 10)
            small.setattr(tokenizers_, "portions", lambda text: portions(text, 10))
            assert tokenizer.encode(text) == whole
            found = tokenizer.pieces(text)
        assert [piece.id for piece in found] == whole
        # parts that no normalizer changed have exact offsets where the whole has not
        for one, other in zip(found, pieces, strict=True):
            assert other.start <= one.start <= one.end <= other.end


def test_a_gguf_vocabulary_is_cut_between_its_special_tokens(monkeypatch):
    tokenizer = from_gguf(metadata(["the", "Ġcat", "Ġsat"], types={"<x>": 3}))
    text = "the cat sat<x> the cat " * 9
    whole = tokenizer.encode(text), tokenizer.pieces(text)
    ran = []
    run = tokenizer._run
    monkeypatch.setattr(tokenizer, "_run", lambda text, at: ran.append(text) or run(text, at))
    monkeypatch.setattr(tokenizers_, "PORTION", 5)
    monkeypatch.setattr(tokenizers_, "portions", lambda text: portions(text, 5))
    assert (tokenizer.encode(text), tokenizer.pieces(text)) == whole
    assert max(map(len, ran)) < 12


def test_what_is_not_known_is_not_cut():
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert divisible(bare(byte_level))
    assert not divisible(bare(pre_tokenizers.ByteLevel(add_prefix_space=True)))
    assert not divisible(bare(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)))
    looks_back = pre_tokenizers.Split(Regex(r"(?<=a) \w+"), "isolated")
    assert not divisible(bare(pre_tokenizers.Sequence([looks_back, byte_level])))
    assert not divisible(bare(None))
    odd = bare(byte_level)
    odd.normalizer = normalizers.Strip()
    assert not divisible(odd)
    for content in ("ab cd", "word", " word", "cd "):
        added = bare(byte_level)
        added.add_tokens([content])
        assert not divisible(added), content
    marked = bare(byte_level)
    marked.add_special_tokens(["<|im_start|>", "  "])
    assert divisible(marked)

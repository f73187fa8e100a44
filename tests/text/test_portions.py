"""A text in parts has the tokens of the whole, for every known way of cutting words."""

import random
from functools import cache

import pytest
from llama_cpp_strings import strings
from text_fixtures import metadata
from tokenizer_files import KINDS, write
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from llmcli.text import tokenizer as tokenizers_
from llmcli.text.gguf import from_gguf
from llmcli.text.hf import from_directory
from llmcli.text.portions import divisible, portions
from llmcli.text.pretokenizers import PRE_TOKENIZERS, build_pre_tokenizer

# Their words are whole runs of words.
WHOLE = {"exaone-moe", "superbpe", "gemma4", "granite-embed-multi-311m", "sarvam-moe"}
ODD = ["  ", "\n", "\r\n", "\t", "'s", "é", "e\u0301", "日本", "12", "3.5", "()", "🙂", "\u00a0"]


@cache
def texts(count=60):
    draw = random.Random(5)
    words = [*strings(200, seed=9), *ODD, *["ab cd", "The cat", " it's a", "x y z"] * 40]
    return ["".join(draw.choices(words, k=40)) for _ in range(count)]


def bare(pre_tokenizer, **options):
    tokenizer = Tokenizer(models.BPE(**options))
    tokenizer.pre_tokenizer = pre_tokenizer
    return tokenizer


def test_portions_are_the_text():
    for text in texts():
        cuts = list(portions(text, 20))
        assert "".join(text[a:b] for a, b in cuts) == text
        assert all(text[a] == " " and text[a - 1].isalpha() for a, _ in cuts[1:])
    assert any(len(list(portions(text, 20))) > 3 for text in texts())
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
    for text in texts():
        parts = [cutter.pre_tokenize_str(text[a:b]) for a, b in portions(text, 15)]
        words = [word for part in parts for word, _ in part]
        assert words == [word for word, _ in cutter.pre_tokenize_str(text)]


@pytest.mark.parametrize("kind", KINDS)
def test_ids_and_offsets_do_not_depend_on_the_parts(kind, tmp_path, monkeypatch):
    tokenizer = from_directory(write(tmp_path, kind))
    assert tokenizer._divisible == (kind in ("gpt2", "llama3", "qwen2"))
    specials = "ab cd<|endoftext|> ef gh<|eot_id|>ij kl</s> mn op"
    for text in [*texts(30), specials]:
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
        added.add_tokens([AddedToken(content)])
        assert not divisible(added), content
    marked = bare(byte_level)
    marked.add_special_tokens(["<|im_start|>", "  "])
    assert divisible(marked)

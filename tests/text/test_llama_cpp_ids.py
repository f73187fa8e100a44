"""Ids equal to llama.cpp's, frozen by make_llama_cpp_ids.py, and to the sentencepiece library's."""

from functools import cache

import piece_models
import pytest
from llama_cpp_strings import pair_vocabulary, strings
from text_fixtures import frozen
from transformers import GemmaTokenizer, LlamaTokenizer, T5Tokenizer
from transformers.tokenization_utils_base import generate_merges
from transformers.tokenization_utils_sentencepiece import SentencePieceBackend

from llmcli.checkpoints.gguf import read_gguf
from llmcli.text.gguf import from_gguf
from llmcli.text.hf import from_directory
from llmcli.text.pretokenizers import PRE_TOKENIZERS, build_pre_tokenizer
from llmcli.text.sentencepiece import parse_pieces


@pytest.fixture(scope="session")
def smollm2(smollm2_path):
    return from_gguf(read_gguf(smollm2_path)[0])


@pytest.fixture(scope="module")
def pair_tokenizer():
    names = {"model": "gpt2", "pre": "gpt-2"} | pair_vocabulary()
    return from_gguf({f"tokenizer.ggml.{key}": value for key, value in names.items()})


@pytest.mark.real
def test_smollm2_ids_equal_llama_cpp(smollm2):
    fixture = frozen("smollm2_ids.json.gz")
    assert len(fixture["rows"]) >= 5000
    assert sum(len(row) == 3 for row in fixture["rows"]) > 300, "few look-alikes in the fixture"
    for text, parsed, *plain in fixture["rows"]:
        assert smollm2.encode(text) == parsed, text
        assert smollm2.encode(text, parse_special=False) == (plain[0] if plain else parsed), text


@pytest.mark.real
def test_smollm2_facts(smollm2):
    assert sorted(smollm2.eos_ids) == frozen("smollm2_ids.json.gz")["ends"] == [0, 2, 4]
    assert (smollm2.bos_id, smollm2.add_bos, smollm2.vocab_size) == (1, False, 49152)
    assert smollm2.special_ids == frozenset(range(17))
    assert smollm2.encode("12") == smollm2.encode("1") + smollm2.encode("2")  # the digit rule
    text = smollm2.chat_template.render([{"role": "user", "content": "Hi"}])
    ids = smollm2.encode_chat([{"role": "user", "content": "Hi"}])
    assert ids[0] == 1
    assert ids.count(1) == 3, "BOS is written by the template and not added again"
    assert smollm2.decode(ids, skip_special=False) == text


@pytest.mark.parametrize("pre", frozen("pretokenizer_ids.json.gz")["rows"])
def test_pre_tokenizer_splits_equal_llama_cpp(pair_tokenizer, pre):
    fixture = frozen("pretokenizer_ids.json.gz")
    backend = pair_tokenizer.backend
    backend.pre_tokenizer = build_pre_tokenizer(PRE_TOKENIZERS[pre])
    compared = 0
    for text, ids in zip(fixture["texts"], fixture["rows"][pre], strict=True):
        if ids is not None:
            compared += 1
            assert pair_tokenizer.encode(text) == ids, text
    assert compared > 130


# `\s*[\r\n]` and `\s*[\r\n]+` match the same: the first two split everything alike. The third is
# `gpt-4o` on all but the letters that are left out for that one.
ALIKE = [("qwen2", "bailingmoe"), ("bailingmoe", "qwen2"), ("granite-embed-multi-97m", "gpt-4o")]


def test_a_wrong_rule_is_noticed(pair_tokenizer):
    """The fixture has every rule and can tell them apart: none passes for another one."""
    fixture = frozen("pretokenizer_ids.json.gz")
    rules = {rule.patterns for rule in PRE_TOKENIZERS.values() if not rule.raw}
    assert rules == {PRE_TOKENIZERS[pre].patterns for pre in fixture["rows"]}  # characters: below
    for pre in fixture["rows"]:
        pair_tokenizer.backend.pre_tokenizer = build_pre_tokenizer(PRE_TOKENIZERS[pre])
        ours = [pair_tokenizer.encode(text) for text in fixture["texts"]]
        for other, rows in fixture["rows"].items():
            same = all(a == b for a, b in zip(ours, rows, strict=True) if b is not None)
            equal = PRE_TOKENIZERS[pre].patterns == PRE_TOKENIZERS[other].patterns
            assert same == (equal or (pre, other) in ALIKE), (pre, other)


# vocabularies with `▁` for spaces

SPACED = ["gemma4", "sarvam-moe"]
KINDS = ["llama", "gemma", "small", "phi3", *SPACED]


@pytest.fixture(scope="module", params=KINDS)
def case(request):
    found = frozen(f"{'spaced' if request.param in SPACED else 'sentencepiece'}_ids.json.gz")
    model = found["models"][request.param]
    return from_gguf(model["metadata"]), model, found["texts"]


def test_ids_are_llama_cpps(case):
    """But for a `▁` at the end of a text, which the library merges as the space that it means."""
    tokenizer, model, texts = case
    assert [tokenizer.token_bytes(i).hex() for i in range(tokenizer.vocab_size)] == model["pieces"]
    assert sorted(tokenizer.eos_ids) == model["ends"]
    assert len(texts) > 500
    unigram = model["metadata"]["tokenizer.ggml.model"] == "t5"
    for text, (parsed, plain) in zip(texts, model["ids"], strict=True):
        if unigram and "▁" in text:
            continue
        assert tokenizer.encode(text, add_bos=False) == parsed, text
        assert tokenizer.encode(text, add_bos=False, parse_special=False) == plain, text


def test_pieces_tile_the_text(case):
    """Each begins where the one before ended, but for what the model drops or rewrites."""
    tokenizer, model, texts = case
    exact = model["metadata"]["tokenizer.ggml.model"] == "llama"
    stripping = "general.name" in model["metadata"]
    for text in texts[:400] + texts[-40:]:
        pieces = tokenizer.pieces(text, add_bos=False)
        assert [p.id for p in pieces] == tokenizer.encode(text, add_bos=False)
        at = 0
        for piece in pieces:
            assert at <= piece.start <= piece.end or piece.start <= piece.end == at, (text, piece)
            assert not exact or stripping or "▁" in text or piece.start == at, (text, piece)
            at = piece.end
        assert not exact or stripping or at == len(text.encode())


def test_gemma_4_takes_line_ends_whole_and_begins_with_bos():
    models = frozen("spaced_ids.json.gz")["models"]
    gemma, other = (from_gguf(models[name]["metadata"]) for name in SPACED)
    at = models["gemma4"]["metadata"]["tokenizer.ggml.tokens"].index("\n")
    assert gemma.encode("a\n\n\n\nb", add_bos=False)[1:-1] == [at + 2]
    assert other.encode("a\n\n\n\nb", add_bos=False)[1:-1] == [at + 1, at + 1]
    assert (gemma.encode("a")[0], other.add_bos) == (gemma.bos_id, False)
    said = {**models["gemma4"]["metadata"], "tokenizer.ggml.add_bos_token": False}
    assert from_gguf(said).encode("a")[0] == gemma.bos_id, "whatever the file says"


# Models trained here. `SentencePieceBackend` is transformers' class around the library itself; the
# others rebuild the model for the `tokenizers` library, which is not exact for a text that begins
# with a space (it drops the one that the model would put in front).

TEXTS = strings(4000, seed=21)
MODELS = ["llama", "gemma", "t5"]
NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    @cache
    def directory(kind):
        path = tmp_path_factory.mktemp(kind)
        (path / "tokenizer.model").write_bytes(piece_models.trained(kind))
        return path

    return directory


@pytest.fixture(scope="module", params=MODELS)
def slow(request, directories):
    names = dict(NAMES, bos_token=None) if request.param == "t5" else NAMES
    path = directories(request.param) / "tokenizer.model"
    return request.param, SentencePieceBackend(vocab_file=str(path), **names)


def rebuilt(kind):
    """transformers' own class for the model, as it makes one from a `tokenizer.model`."""
    model = parse_pieces(piece_models.trained(kind))
    vocab = {string: index for index, string in enumerate(model.strings)}
    if kind == "t5":
        return T5Tokenizer(
            vocab=list(zip(model.strings, model.scores, strict=True)), extra_ids=0,
            _spm_precompiled_charsmap=model.charsmap,
        )  # fmt: skip
    merges = generate_merges(vocab)
    if kind == "llama":
        return LlamaTokenizer(vocab=vocab, merges=merges, legacy=False)
    return GemmaTokenizer(
        vocab=vocab, merges=merges, pad_token="<unk>", mask_token="<unk>", **NAMES
    )


def test_vocabularies_are_those_of_the_sentencepiece_library_behind_transformers(slow, directories):
    """Of a GGUF file and of a `tokenizer.model`."""
    kind, theirs = slow
    ours, file = from_gguf(piece_models.metadata(kind)), from_directory(directories(kind))
    for text in TEXTS:
        ids = theirs.encode(text, add_special_tokens=False)
        # a user-defined token, which llama.cpp cuts out first
        assert (kind == "gemma" and "  " in text) or ours.encode(text, add_bos=False) == ids
        # the newer rule: no second space behind a special token; see below
        named = any(name in text for name in NAMES.values())
        assert named or file.encode(text, add_bos=False) == ids


@pytest.mark.parametrize("kind", MODELS)
def test_a_model_file_is_transformers_class_for_it(kind, directories):
    ours, theirs = from_directory(directories(kind)), rebuilt(kind)
    checked = 0
    for text in TEXTS:
        if kind == "llama" and text.startswith((" ", "▁")):
            continue
        if kind == "t5" and ("▁" in text or "\x85" in text):  # spaces to one of them only
            continue
        checked += 1
        ids = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text, add_bos=False) == ids, text
        if kind != "t5":
            assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), text
    assert checked > 3000


@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_text_comes_back_as_it_was(kind, directories):
    for ours in (from_gguf(piece_models.metadata(kind)), from_directory(directories(kind))):
        for text in TEXTS:
            if "▁" not in text and not any(name in text for name in NAMES.values()):
                assert ours.decode(ours.encode(text)) == text

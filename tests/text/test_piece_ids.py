"""GGUF tokenizers with `▁` for spaces give llama.cpp's ids, frozen by make_llama_cpp_ids.py."""

import pytest
from text_fixtures import frozen

from llmcli.text.ggufvocab import from_gguf

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
    assert len(texts) > 500
    unigram = model["metadata"]["tokenizer.ggml.model"] == "t5"
    for text, (parsed, plain) in zip(texts, model["ids"], strict=True):
        if unigram and "▁" in text:
            continue
        assert tokenizer.encode(text, add_bos=False) == parsed, text
        assert tokenizer.encode(text, add_bos=False, parse_special=False) == plain, text


def test_bytes_and_ends_are_llama_cpps(case):
    tokenizer, model, _ = case
    assert [tokenizer.token_bytes(i).hex() for i in range(tokenizer.vocab_size)] == model["pieces"]
    assert sorted(tokenizer.eos_ids) == model["ends"]


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
    at = gemma._vocabulary.strings.index("\n")
    assert gemma.encode("a\n\n\n\nb", add_bos=False)[1:-1] == [at + 2]
    assert other.encode("a\n\n\n\nb", add_bos=False)[1:-1] == [at + 1, at + 1]
    assert (gemma.encode("a")[0], other.add_bos) == (gemma.bos_id, False)
    said = {**models["gemma4"]["metadata"], "tokenizer.ggml.add_bos_token": False}
    assert from_gguf(said).encode("a")[0] == gemma.bos_id, "whatever the file says"

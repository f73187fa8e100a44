"""A byte-level BPE tokenizer of the `tokenizers` library."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers


def byte_tokenizer(specials, merged=0):
    """Special tokens and the 256 bytes, of which the first `merged` merge in pairs."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [(a, b) for a in letters[:merged] for b in letters[:merged]]
    words = [*specials, *letters, *sorted({a + b for a, b in merges})]
    vocab = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in specials])
    return tokenizer

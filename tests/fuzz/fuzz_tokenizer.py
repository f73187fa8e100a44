"""Fuzzing the tokenizers: whatever a file says about one, it works or there is one clear error.

    python tests/fuzz/fuzz_tokenizer.py -max_total_time=3600 NEW_INPUTS tests/fuzz/corpus/tokenizer

needs atheris (a coverage-guided fuzzer, `pip install atheris`). The first byte says what the rest
is: a GGUF file, a SentencePiece model, a table of replacements, choices by which a GGUF file's
metadata is made, or the settings beside a SentencePiece model. A crash of the C++ library below
counts as a finding. The fixed corpus is replayed by test_corpus.py without atheris.
"""

import random
import struct
import sys
import tempfile
from pathlib import Path

if __name__ == "__main__":
    # before the tokenizers are imported: their branches are counted
    import atheris

    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]
    with atheris.instrument_imports(include=["llmcli.text", "llmcli.checkpoints"]):
        import llmcli.text  # noqa: F401

from fuzzing import fuzz, sound

from llmcli.checkpoints.gguf import parse_gguf
from llmcli.text.gguf import from_gguf
from llmcli.text.hf import from_directory
from llmcli.text.sentencepiece import PieceEncoder, check_charsmap, message, number, parse_pieces
from llmcli.text.stream import StreamDecoder
from llmcli.text.tokenizer import Tokenizer

HERE = Path("model.gguf")
GGUF, PIECES, CHARSMAP, CHOICES, SETTINGS = range(5)
TEXTS = [
    "", " ", "a", "ab  ab", " hello world", "▁▁x", "é\n\t", "<s>ab</s>", "<0x0A><0x-1>", "\0a\0",
    "👍\ufffd", "ﬁ½ Ａ", "aaaaaaaaaaaaaaaaaaaaaaaa", "<|x|> b", "x" * 300,
]  # fmt: skip
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
KEY = "tokenizer.ggml."
PARTS = [
    "", "a", "b", "▁", " ", "<s>", "</s>", "<unk>", "aa", "ab", "é", "\n", "<0x0A>",
    "<0x-1>", "<|x|>",
    "<|im_end|>", "\0", "\udcff", "\ufdd0", "👍", "<fim_prefix>", "unused", "aaaaaaaa", "▁▁", "Ġ",
]  # fmt: skip
ALONE = ["a", "b", "▁", "aa"]
SCORES = [0.0, -1.0, -2.5, 1.0, -1e10, 3e38, -3e38, 1e-45]
FAULTS = [1e300, float("nan"), "x", None, 10**400]


def check(data: bytes) -> bool:
    """Build and use what `data` describes; whether it was accepted. A fault raises."""
    return bool(sound(lambda: _use(data), most=1000))


def _use(data: bytes) -> bool:
    kind, body = data[0] if data else 0, data[1:]
    if kind == PIECES:
        _encode_all(PieceEncoder(parse_pieces(body)))
        return True
    if kind == CHARSMAP:
        check_charsmap(body)
        _encode_all(PieceEncoder(parse_pieces(_model(1, charsmap=body))))
        return True
    tokenizer = _tokenizer(kind, body)
    if tokenizer is None:
        return False
    for text in TEXTS:
        for special in (True, False)[len(data) % 2 :: 2]:
            ids = tokenizer.encode(text, parse_special=special)
            assert all(0 <= i < tokenizer.vocab_size for i in ids)
            pieces = tokenizer.pieces(text, parse_special=special)
            assert [piece.id for piece in pieces] == ids
            size = len(text.encode())
            assert all(0 <= piece.start <= piece.end <= size for piece in pieces)
            stream = StreamDecoder(tokenizer)
            shown = "".join(map(stream.push, ids)) + stream.finish()
            assert shown == tokenizer.decode(ids)
    for i in (-1, 0, tokenizer.vocab_size - 1, tokenizer.vocab_size, 1 << 40):
        tokenizer.token_bytes(i, first=True), tokenizer.token_text(i)
    return True


def _tokenizer(kind: int, body: bytes) -> Tokenizer | None:
    if kind != SETTINGS:
        return from_gguf(_chosen(body) if kind == CHOICES else parse_gguf(HERE, body)[0])
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "tokenizer_config.json").write_bytes(body)
        (Path(name) / "tokenizer.model").write_bytes(_model(2))
        return from_directory(Path(name))


def _chosen(body: bytes) -> dict[str, object]:
    """Metadata from choices: a kind, flags and ids, then four bytes for every token."""
    head, rows = body[:8].ljust(8, b"\0"), body[8:]
    tokens, types, scores = [], [], []
    for at in range(0, len(rows) - 3, 4):
        first, second, kind, score = rows[at : at + 4]
        token = PARTS[first % len(PARTS)] + PARTS[second % len(PARTS)]
        if token not in tokens or first > 250:
            tokens.append(token)
            types.append(
                kind % 8 if kind < 250 else [-1, 1 << 31, 2.5, None, "1", True][kind - 250]
            )
            scores.append(SCORES[score % 8] if score < 251 else FAULTS[score - 251])
    values = {
        "model": ["llama", "t5", "gpt2", "llama"][head[0] % 4],
        "pre": "gpt-2",
        "tokens": tokens + (BYTES if head[1] & 1 else []),
        "token_type": None if head[1] & 2 else types + [6] * 256,
        "scores": None if head[1] & 4 else scores + [0.0] * 256,
        "merges": [
            f"{a} {b}" for a in ALONE for b in ALONE if head[1] & 8 or {a, b, a + b} <= {*tokens}
        ],
        "add_space_prefix": [None, True, False, "no"][head[2] % 4],
        "add_bos_token": [None, True, False, []][head[3] % 4],
        "bos_token_id": None if head[4] > 240 else head[4] % 64,
        "unknown_token_id": None if head[5] > 128 else head[5] - 1,
        "remove_extra_whitespaces": bool(head[6] & 1),
        "precompiled_charsmap": list(_charsmap(offset=head[7])) if head[6] & 2 else None,
    }
    found = {KEY + key: value for key, value in values.items() if value is not None}
    return found | {"general.name": "Phi-3" if head[6] & 4 else "x"}


def _encode_all(encoder: PieceEncoder) -> None:
    for text in TEXTS:
        found = encoder.encode(text)
        assert len(found.offsets) == len(found.ids)
        assert all(0 <= a <= b <= len(text) for a, b in found.offsets)


def _model(kind: int, *, charsmap: bytes = b"") -> bytes:
    """A `tokenizer.model`: kind 1 Unigram, 2 merges, 3 words."""
    names = ["<unk>", "<s>", "</s>", *BYTES, "▁", "a", "b", "ab", "▁ab", "\t\t"]
    kinds = [2, 3, 3, *[6] * 256, 1, 1, 1, 1, 1, 4]
    pieces = [
        message(1, message(1, n.encode()) + b"\x15" + struct.pack("<f", -i) + number(3, k))
        for i, (n, k) in enumerate(zip(names, kinds, strict=True))
    ]
    trainer = message(2, number(3, kind) + number(35, 1) + message(46, b"<s>"))
    return b"".join(pieces) + trainer + message(3, message(2, charsmap) + number(3, 1))


def _charsmap(*, offset: int = 1) -> bytes:
    """A table that writes `A` as `a`: one block of a double array, and the text."""
    units = [0] * 256
    units[0] = offset << 10  # the root leads to its offset, exclusive-or a byte
    leaf = (offset ^ ord("A")) % 256
    units[leaf] = 3 << 10 | 1 << 8 | ord("A")
    units[leaf ^ 3] = 1 << 31  # the value: the text at 0
    return struct.pack("<I256I", 1024, *units) + b"a\0"


def mutate(data: bytes, most: int, seed: int) -> bytes:
    """What the fuzzer's own changes hardly reach: the same file with other strings and numbers."""
    dice = random.Random(seed)
    content = bytearray(data[:most])
    strings = [
        b"<s>", b"</s>", b"\xe2\x96\x81", b"<0x0A>", b"<0x-1>", b"<|im_end|>", b"\0", b"\xff"
    ]
    for _ in range(dice.randint(1, 4)):
        if len(content) < 16:
            break
        at, how = dice.randrange(1, len(content)), dice.random()
        if how < 0.3:
            word = dice.choice(strings)
            content[at : at + len(word)] = word
        elif how < 0.6:
            value = dice.choice([0, 1, 2, 3, 4, 5, 6, 7, 255, 2**31 - 1, 2**31, 2**32 - 1])
            struct.pack_into("<I", content, min(at, len(content) - 4), value)
        elif how < 0.8:
            score = dice.choice([0.0, -1.0, 1e38, -1e38, 1e-45, float("inf"), float("nan")])
            struct.pack_into("<f", content, min(at, len(content) - 4), score)
        else:
            content[at] ^= 1 << dice.randrange(8)
    return bytes(content[:most])


if __name__ == "__main__":
    fuzz(check, mutate)

"""Writes the named part of the fixed corpus: `PYTHONPATH=tests python tests/fuzz/make_corpus.py`.

What each file is stands in its name; `ok-` files are accepted by the header's parser, `bad-`
files refused. The `found-` files came out of long runs of the fuzzers: each reached a branch
that no other file did. Shapes of public reports on GGUF parsers are among them: CVE-2024-21802,
CVE-2024-21825, CVE-2024-21836, CVE-2024-23496, CVE-2024-23605 (counts and lengths that wrap, too
many layers), CVE-2025-53630 (sizes of tensors that wrap when added).
"""

import json
import struct
from pathlib import Path

from gguf_bytes import (
    ARRAY,
    BOOL,
    F32,
    F64,
    I32,
    STRING,
    U8,
    U16,
    U32,
    U64,
    gguf,
    pair,
    tensor,
    text,
)

CORPUS = Path(__file__).parent / "corpus"
HUGE = (2**30, 2**31, 2**32 - 1, 2**61, 2**63 - 1, 2**63, 2**64 - 8, 2**64 - 1)


def head(tensors: int, keys: int, rest: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, keys) + rest


def array(kind: int, count: int, body: bytes) -> bytes:
    return text("k") + struct.pack("<IIQ", ARRAY, kind, count) + body


def llama(**keys: int) -> bytes:
    """A header that a model's configuration could be read from, with `keys` of its own."""
    sizes = {"embedding_length": 32, "block_count": 1, "context_length": 64} | {
        "feed_forward_length": 64, "attention.head_count": 4, "vocab_size": 8,
    }  # fmt: skip
    pairs = [pair("general.architecture", STRING, "llama")]
    pairs += [pair(f"llama.{k}", U32, v) for k, v in (sizes | keys).items()]
    pairs += [pair("llama.attention.layer_norm_rms_epsilon", F32, 1e-5)]
    return gguf(pairs, [tensor("token_embd.weight", [32, 8], 0, 0)], bytes(1024))


def vocabulary(tokens: list[str | bytes], types: list[int]) -> bytes:
    return gguf(
        [
            pair("general.architecture", STRING, "llama"),
            pair("tokenizer.ggml.model", STRING, "llama"),
            pair("tokenizer.ggml.tokens", ARRAY, (STRING, tokens)),
            pair("tokenizer.ggml.scores", ARRAY, (F32, [0.0] * len(tokens))),
            pair("tokenizer.ggml.token_type", ARRAY, (I32, types)),
        ]
    )


def gguf_files() -> dict[str, bytes]:
    """Name → bytes."""
    one = [tensor("t", [32], 8, 0)]
    found = {
        "ok-empty": gguf(),
        "ok-version-2": gguf(version=2),
        "ok-every-type": gguf(
            [pair(f"s{kind}", kind, 1) for kind in (0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12)]
            + [pair(f"a{kind}", ARRAY, (kind, [1, 0])) for kind in (0, 1, 2, 3, 4, 5, 6, 7, 10, 11)]
            + [pair("a12", ARRAY, (F64, [0.1])), pair("s", STRING, b"\xff\0\n")],
            [tensor("a", [4, 2], 0, 0), tensor("b", [64, 3], 8, 64), tensor("c", [256], 14, 320)],
            bytes(640),
            alignment=32,
        ),
        "ok-alignment-1": gguf([pair("general.alignment", U32, 1)], one, bytes(34), alignment=1),
        "ok-strings-of-zeros": gguf([array(STRING, 40, bytes(320))]),
        "ok-part-of-three": gguf([pair("split.count", U16, 3), pair("split.no", U16, 0)]),
        "ok-split-count-is-text": gguf([pair("split.count", STRING, "3")]),
        "ok-layers-513": llama(block_count=513),
        "ok-layers-max": llama(block_count=2**32 - 1),
        "ok-heads-0": llama(**{"attention.head_count": 0}),
        "ok-head-arrays": gguf(
            [
                pair("general.architecture", STRING, "llama"), pair("llama.block_count", U32, 600),
                pair("llama.attention.head_count", ARRAY, (U32, [4] * 600)),
            ]
        ),
        "ok-byte-tokens": vocabulary(["<unk>", "<0x-1>", "<0xZZ>", "<0x>"], [2, 6, 6, 6]),
        "ok-types-out-of-range": vocabulary(["a", "b"], [-(2**31), 2**31 - 1]),
        "ok-tokens-not-utf8": vocabulary([b"\xff", b"\xc3", ""], [1, 1, 1]),
        "bad-big-endian": b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
        "bad-version-1": gguf(version=1),
        "bad-git-lfs": b"version https://git-lfs.github.com/spec/v1\n",
        "bad-html": b"<!DOCTYPE html><html></html>",
        "bad-array-of-arrays": gguf([array(ARRAY, 1, struct.pack("<IQ", U8, 1) + b"\0")]),
        "bad-array-of-unknown": gguf([array(13, 1, bytes(8))]),
        "bad-value-of-unknown-type": gguf([text("k") + struct.pack("<I", 13) + bytes(8)]),
        "bad-boolean-2": gguf([text("k") + struct.pack("<IB", BOOL, 2)]),
        "bad-key-twice": gguf([pair("k", U8, 1), pair("k", U8, 1)]),
        "bad-tensor-twice": gguf([], one * 2, bytes(34)),
        "bad-alignment-0": gguf([pair("general.alignment", U32, 0)], one, bytes(34)),
        "bad-alignment-3": gguf([pair("general.alignment", U32, 3)], one, bytes(34)),
        "bad-alignment-is-text": gguf([pair("general.alignment", STRING, "32")], one, bytes(34)),
        "bad-alignment-is-true": gguf([pair("general.alignment", BOOL, 1)], one, bytes(34)),
        "bad-alignment-u64": gguf([pair("general.alignment", U64, 2**63)], one, bytes(34)),
        "bad-dims-product-wraps": gguf([], [tensor("t", [2**32, 2**32], 0, 0)], bytes(64)),
        "bad-dims-product-wraps-to-32": gguf([], [tensor("t", [2**59 + 1, 32], 24, 0)], bytes(64)),
        "bad-dims-negative": gguf([], [tensor("t", [2**64 - 32], 24, 0)], bytes(64)),
        "bad-dims-zero": gguf([], [tensor("t", [0, 4], 0, 0)], bytes(64)),
        "bad-bytes-wrap": gguf([], [tensor("t", [2**62], 0, 0)], bytes(64)),
        "bad-rank-0": gguf([], [tensor("t", [], 0, 0)], bytes(64)),
        "bad-rank-5": gguf([], [tensor("t", [1] * 5, 0, 0)], bytes(64)),
        "bad-rank-max": gguf([], [tensor("t", [1], 0, 0, rank=2**32 - 1)], bytes(64)),
        "bad-type-withdrawn": gguf([], [tensor("t", [32], 4, 0)], bytes(64)),
        "bad-type-max": gguf([], [tensor("t", [32], 2**32 - 1, 0)], bytes(64)),
        "bad-rows-no-block": gguf([], [tensor("t", [16, 2], 8, 0)], bytes(64)),
        "bad-offset-odd": gguf([], [tensor("t", [8], 24, 1)], bytes(64)),
        "bad-offset-wraps": gguf([], [tensor("t", [32], 24, 2**64 - 32)], bytes(64)),
        "bad-offset-near-63": gguf([], [tensor("t", [32], 24, 2**63 - 32)], bytes(64)),
        "bad-overlap": gguf([], [tensor("a", [64], 24, 0), tensor("b", [8], 24, 32)], bytes(96)),
        "bad-truncated": gguf([], one, bytes(33)),
        "bad-name-not-utf8": gguf([pair(b"\xff", U8, 1)]),
        "bad-name-too-long": gguf([pair("k" * 65536, U8, 1)]),
    }  # fmt: skip
    for number in HUGE:
        found |= {
            f"bad-alignment-{number:x}": gguf([pair("general.alignment", U64, number)]),
            f"bad-keys-{number:x}": head(0, number, bytes(64)),
            f"bad-tensors-{number:x}": head(number, 0, bytes(64)),
            f"bad-key-length-{number:x}": head(0, 1, struct.pack("<Q", number) + bytes(64)),
            f"bad-string-{number:x}": gguf([text("k") + struct.pack("<IQ", STRING, number)]),
            f"bad-second-string-{number:x}": gguf(
                [array(STRING, 2, text("a") + struct.pack("<Q", number) + bytes(64))]
            ),
            f"bad-array-{number:x}": gguf([array(U64, number, bytes(64))]),
            f"bad-strings-{number:x}": gguf([array(STRING, number, bytes(64))]),
            f"bad-dim-{number:x}": gguf([], [tensor("t", [number], 0, 0)], bytes(64)),
        }
    return found


def safetensors_files() -> dict[str, bytes]:
    """Name → input of the fuzzer (see `whole` there)."""

    def entry(dtype: str = "F32", shape: object = (2,), span: object = (0, 8)) -> str:
        return json.dumps({"dtype": dtype, "shape": shape, "data_offsets": span})

    a = f'"a":{entry()}'
    deep = '{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0],"x":%s}}'
    texts = {
        "ok-plain": f"{{{a}}}", "ok-metadata": f'{{"__metadata__":{{"x":"1","x":"2"}},{a}}}',
        "ok-name-twice": f"{{{a},{a}}}", "ok-array-as-entry": '{"a":["F32",[2],[0,8]]}',
        "ok-dtype-object": '{"a":{"dtype":{"F32":null},"shape":[2],"data_offsets":[0,8]}}',
        "ok-pair-of-surrogates": f'{{"\\ud83d\\ude00":{entry()}}}',
        "ok-half-bytes": f'{{"a":{entry("F4", [16])}}}',
        "bad-half-byte": f'{{"a":{entry("F4", [15])}}}',
        "bad-lone-surrogate": f'{{"\\ud83d":{entry()}}}',
        "bad-backslash-between": f'{{"x\\ud83d\\\\\\ude00":{entry()}}}',
        "bad-metadata-twice": f'{{"__metadata__":null,"__metadata__":{{}},{a}}}',
        "bad-shape-twice": a.replace("{", '{"shape":[2],').join("{}"),
        "bad-shadowed-number": f'{{"a":1,{a}}}',
        "bad-minus-zero": f'{{"a":{entry()}}}'.replace("[0,", "[-0,").replace("[0, ", "[-0, "),
        "bad-exponent": f'{{"a":{entry()}}}'.replace("[2]", "[2e0]"),
        "bad-nan": a.replace("{", '{"x":NaN,').join("{}"),
        "bad-out-of-range": a.replace("{", '{"x":1e999,').join("{}"),
        "bad-hole": f'{{"a":{entry(shape=[1], span=[4, 8])}}}',
        "bad-overlap": f'{{{a},"b":{entry("U8", [4], [4, 8])}}}',
        "bad-reversed": f'{{"a":{entry(span=[8, 0])}}}', "bad-list": "[]",
    }  # fmt: skip
    for number in (*HUGE, 2**64):
        texts |= {
            f"bad-dim-{number:x}": f'{{"a":{entry(shape=[number])}}}',
            f"bad-dims-{number:x}": f'{{"a":{entry(shape=[number, 4], span=[0, 0])}}}',
            f"bad-offsets-{number:x}": f'{{"a":{entry(span=[0, number])}}}',
        }
    found = {name: text.encode() + bytes(8) for name, text in texts.items()}
    found |= {
        "ok-nothing": b"{}", "ok-deep": (deep % ("[" * 125 + "]" * 125)).encode(),
        "bad-too-deep": (deep % ("[" * 126 + "]" * 126)).encode(),
        "bad-deep-without-end": b"[" * 4000, "bad-bom": b"\xef\xbb\xbf{}",
        "bad-short": b"\xff" + bytes(7),
        "bad-git-lfs": b"\xffversion https://git-lfs.github.com/spec/v1\n",
        "bad-pickle": b"\xff\x80\x02}q\x00." + bytes(30),
    }  # fmt: skip
    for number in HUGE:
        found[f"bad-length-{number:x}"] = b"\xff" + struct.pack("<Q", number) + b"{}"
    return found


if __name__ == "__main__":
    for folder, files in (("gguf", gguf_files()), ("safetensors", safetensors_files())):
        (CORPUS / folder).mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (CORPUS / folder / name).write_bytes(content)

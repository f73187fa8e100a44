"""Fuzzing the safetensors header parser: what it accepts has the library's tensors.

    python tests/fuzz/fuzz_safetensors.py -max_total_time=3600 NEW_INPUTS \
        tests/fuzz/corpus/safetensors

needs atheris (see fuzz_gguf.py). An input is a file without its first eight bytes, the length of
the header, which are put before it: the header ends with the last brace. Behind a byte 255 it is
a whole file.
"""

import json
import math
import random
import struct
import sys
import tempfile
from pathlib import Path

if __name__ == "__main__":  # before the parser is imported: its branches are counted
    import atheris

    sys.path[:0] = [str(Path(__file__).parents[2])]
    with atheris.instrument_imports(include=["llmcli.checkpoints", "json"]):
        import llmcli.checkpoints.safetensors  # noqa: F401

import safetensors
from fuzzing import fuzz, sound

from llmcli.checkpoints.safetensors import read_safetensors
from llmcli.checkpoints.tensors import SAFETENSORS_BITS

Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]


def library(content: bytes) -> Tensors | None:
    """What the library finds: name → (dtype, shape, bytes); None where it refuses the file."""
    try:
        return {
            name: (info["dtype"], tuple(info["shape"]), bytes(info["data"]))
            for name, info in safetensors.deserialize(content)
        }
    except safetensors.SafetensorError:
        return None


def ours(path: Path, content: bytes) -> Tensors | None:
    """What our reader finds in the same bytes, written to `path`."""
    path.write_bytes(content)
    if (found := sound(lambda: read_safetensors(path), path)) is None:
        return None
    _, tensors, size = found
    assert size == len(content)
    return {
        name: (info.format, info.shape, content[info.offset : info.offset + info.nbytes])
        for name, info in tensors.items()
    }


def check(path: Path, content: bytes) -> bool:
    """Whether our reader accepts a file with these bytes; then the library finds the same in it."""
    found = ours(path, content)
    assert found is None or found == library(content)
    return found is not None


WORDS = [
    b'{"dtype":"F32","shape":[2],"data_offsets":[0,8]}', b'"a":', b'"__metadata__":{"a":"b"},',
    b'"dtype":"BF16",', b'"shape":[]', b'"data_offsets":[8,8]', b'"F4"', b'{"F32":null}', b"null",
    b"[", b"{", b"]", b"}", b",", b":", b"-0", b"1e400", b"18446744073709551615", b"0.0", b"1E0",
    b"18446744073709551616", b"9223372036854775808", b'"\\ud800"', b"\\ud83d\\ude00",
    b"\xef\xbb\xbf", b"\xed\xa0\x80", b" \t\r\n", b"\x0b", b"NaN", b"Infinity", b"true", b"[" * 130,
    b'["U8",[0],[0,0]]', b'"x":[[]],', b'"":', b"\\", b"/", b"\x7f", b"\x1f", b"\\u0000",
]  # fmt: skip


def honest(dice: random.Random) -> bytes:
    """A header with its data, mostly right."""
    entries: dict[str, object] = {}
    end = 0
    for name in dice.sample(["a", "b", "é", "", "dtype", "a.b", "\\", "\ud800"], dice.randrange(5)):
        kind = dice.choice(sorted(SAFETENSORS_BITS))
        shape = [dice.choice([0, 1, 2, 3, 4, 8, 2**32]) for _ in range(dice.randrange(4))]
        bits = SAFETENSORS_BITS[kind] * math.prod(shape)
        start = max(0, end + dice.choice([0] * 20 + [-1, 1]))
        end = start + min(bits // 8, 200)
        fields = [("dtype", kind), ("shape", shape), ("data_offsets", [start, end])]
        dice.shuffle(fields)
        entries[name] = dict(fields)
    if dice.random() < 0.3:
        entries["__metadata__"] = dice.choice([{}, {"a": "b"}, None, {"a": 1}, [], {"a": None}])
    items = list(entries.items())
    dice.shuffle(items)
    text = json.dumps(dict(items), separators=dice.choice([(",", ":"), (", ", ": ")]))
    return text.encode() + bytes(max(0, end + dice.choice([0] * 20 + [-1, 1])))


def mutate(data: bytes, most: int, seed: int) -> bytes:
    """Words of the format put in, doubled and taken out; data that fit the header's end."""
    dice = random.Random(seed)
    content = bytearray(data if dice.random() < 0.5 else honest(dice))
    for _ in range(dice.choice([0, 1, 1, 2, 3])):
        at = dice.randrange(len(content) + 1)
        how = dice.random()
        if how < 0.6:
            content[at:at] = dice.choice(WORDS)
        elif how < 0.75:
            del content[at : at + dice.choice([1, 1, 2, 8, 40])]
        elif how < 0.9:
            piece = content[at : at + dice.choice([8, 20, 50, 100])]
            content[at:at] = piece
        else:
            content += bytes(dice.choice([1, 4, 8, 16]))
    return bytes(content[:most])


def whole(data: bytes) -> bytes:
    """The file that an input stands for: header up to the last brace, then the tensors' bytes."""
    if data[:1] == b"\xff":
        return data[1:]
    length = data.rfind(b"}") + 1
    return struct.pack("<Q", length) + data


if __name__ == "__main__":
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        file = Path(folder) / "a.safetensors"
        fuzz(lambda data: check(file, whole(data) or b"\0"), mutate)

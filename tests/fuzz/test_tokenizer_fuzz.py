"""The fixed corpus of the tokenizer fuzzer, replayed: verdicts, bounds and offsets."""

from pathlib import Path

import fuzz_tokenizer
import pytest

FILES = sorted((Path(__file__).parent / "corpus" / "tokenizer").iterdir())


def test_the_named_files_are_what_their_maker_writes():
    named = {path.name: path.read_bytes() for path in FILES if path.name[:6] != "found-"}
    assert named == fuzz_tokenizer.seeds()
    assert len(FILES) > len(named)
    assert sum(path.stat().st_size for path in FILES) < 100_000


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_tokenizer_or_one_clear_error(path):
    data = path.read_bytes()
    kind = path.name.partition("-")[0]
    assert fuzz_tokenizer.check(data) == (kind == "ok") or kind == "found"
    if kind != "found":
        return
    for seed in range(20):  # and what lies beside what was found
        fuzz_tokenizer.check(fuzz_tokenizer.mutate(data, 1 << 14, seed))

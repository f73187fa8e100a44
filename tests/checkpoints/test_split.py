"""Names of the parts of a split model."""

from __future__ import annotations

import pytest

from llmcli.checkpoints.split import MAX_PARTS, part_names


def test_any_part_gives_the_whole_group_in_order() -> None:
    expected = tuple(f"a/b-{number:05d}-of-00003.gguf" for number in (1, 2, 3))
    for name in expected:
        assert part_names(name) == expected
    assert part_names("x-00001-of-00001.gguf") == ("x-00001-of-00001.gguf",)
    assert part_names("X-00002-of-00002.GGUF") == ("X-00001-of-00002.GGUF", "X-00002-of-00002.GGUF")
    twice = "x-00001-of-00002-00001-of-00002.gguf"
    assert part_names(twice) == (twice, "x-00001-of-00002-00002-of-00002.gguf")


@pytest.mark.parametrize(
    "name",
    [
        "", "model.gguf", "x-1-of-3.gguf", "x-00000-of-00000.gguf", "x-00000-of-00003.gguf",
        "x-00004-of-00003.gguf", "x-00001-of-99999.gguf", f"x-00001-of-{MAX_PARTS + 1:05d}.gguf",
        "x-00001-of-00003.safetensors", "x-00001-of-00003.gguf.part", "-00001-of-00003.gguf",
        "x-٠٠٠٠١-of-٠٠٠٠٣.gguf", "x_00001_of_00003.gguf",
    ],
)  # fmt: skip
def test_other_names_are_no_parts(name: str) -> None:
    assert part_names(name) is None


def test_a_group_as_large_as_allowed_is_named_whole() -> None:
    names = part_names(f"x-{MAX_PARTS:05d}-of-{MAX_PARTS:05d}.gguf")
    assert names is not None and len(set(names)) == MAX_PARTS

"""GGUF models in several files: names of the parts, and the whole that is read from them."""

from pathlib import Path

import gguf as reference
import numpy as np
import pytest
from gguf_bytes import STRING, U16, U32, gguf, pair, tensor

from llmcli.checkpoints import open_checkpoint
from llmcli.checkpoints.split import MAX_PARTS, part_names
from llmcli.errors import CheckpointError, ModelNotFound


def test_any_part_gives_the_whole_group_in_order():
    expected = tuple(f"a/b-{number:05d}-of-00003.gguf" for number in (1, 2, 3))
    for name in expected:
        assert part_names(name) == expected
    assert part_names("x-00001-of-00001.gguf") == ("x-00001-of-00001.gguf",)
    shouted = ("X-00001-OF-00002.GGUF", "X-00002-OF-00002.GGUF")
    assert part_names(shouted[0]) == part_names(shouted[1]) == shouted
    assert part_names("X-00002-of-00002.GGUF") == ("X-00001-of-00002.GGUF", "X-00002-of-00002.GGUF")
    shards = ("x-00001-of-00002.safetensors", "x-00002-of-00002.safetensors")
    assert part_names(shards[0]) == part_names(shards[1]) == shards
    twice = "x-00001-of-00002-00001-of-00002.gguf"
    assert part_names(twice) == (twice, "x-00001-of-00002-00002-of-00002.gguf")
    most = part_names(f"x-{MAX_PARTS:05d}-of-{MAX_PARTS:05d}.gguf")
    assert len(set(most)) == MAX_PARTS


@pytest.mark.parametrize("name", [
    "", "model.gguf", "x-1-of-3.gguf", "x-00000-of-00000.gguf", "x-00000-of-00003.gguf",
    "x-00004-of-00003.gguf", "x-00001-of-99999.gguf", f"x-00001-of-{MAX_PARTS + 1:05d}.gguf",
    "x-00001-of-00003.bin", "x-00001-of-00003.gguf.part", "-00001-of-00003.gguf",
    "x-٠٠٠٠١-of-٠٠٠٠٣.gguf", "x_00001_of_00003.gguf",
])  # fmt: skip
def test_other_names_are_no_parts(name):
    assert part_names(name) is None


def part(number: int, count: int, tensors: list[str], *, total: int = 3, **general: str) -> bytes:
    """Part `number` (from 1) with tensors of 8 bytes that hold the part's number."""
    pairs = [pair(f"general.{key}", STRING, value) for key, value in general.items()]
    if count:
        pairs += [
            pair("split.no", U16, number - 1), pair("split.count", U16, count),
            pair("split.tensors.count", U32, total),
        ]  # fmt: skip
    table = [tensor(name, [8], 24, 32 * at) for at, name in enumerate(tensors)]
    return gguf(pairs, table, bytes([number]) * 32 * len(tensors))


def write_parts(folder: Path, **replaced: bytes | None) -> list[Path]:
    """A model of three parts; `p1=…` puts other bytes into part 1, None leaves it out."""
    contents: dict[str, bytes | None] = {
        "p1": part(1, 3, ["a"], architecture="llama", name="first"), "p2": part(2, 3, ["b"]),
        "p3": part(3, 3, ["c"]),
    }  # fmt: skip
    paths = [folder / f"m-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    for path, content in zip(paths, (contents | replaced).values(), strict=True):
        if content is not None:
            path.write_bytes(content)
    return paths


def refused(path: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    assert caught.value.message.isprintable()
    assert caught.value.hint
    return caught.value


def test_any_part_and_the_directory_open_the_whole_model(tmp_path):
    paths = write_parts(tmp_path)
    for given in (*paths, tmp_path):
        found = open_checkpoint(given)
        assert found.path == paths[0]
        assert found.files == tuple(paths)
        assert list(found.tensors) == ["a", "b", "c"]
        assert found.model_type == "llama"
        assert found.metadata["general.name"] == "first"
        assert found.nbytes == sum(path.stat().st_size for path in paths)
        assert bytes(found.raw("b")) == bytes([2]) * 8
        assert found.read("c", 2, 5) == bytes([3]) * 3


def test_what_the_reference_splits_is_read_as_it_was_before(tmp_path):
    rng = np.random.default_rng(0)
    tensors = {f"t{i}": rng.normal(size=(3, 32)).astype(np.float32) for i in range(5)}
    for name, limit in (("whole", 0), ("split", 2)):
        writer = reference.GGUFWriter(tmp_path / f"{name}.gguf", "llama", split_max_tensors=limit)
        writer.add_string("general.name", "x")
        for key, values in tensors.items():
            writer.add_tensor(key, values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    split = open_checkpoint(tmp_path / "split-00002-of-00003.gguf")
    whole = open_checkpoint(tmp_path / "whole.gguf")
    assert len(split.files) == 3
    assert list(split.tensors) == list(whole.tensors) == list(tensors)
    for name, values in tensors.items():
        assert split.raw(name) == whole.raw(name) == values.tobytes()
    assert {k: v for k, v in split.metadata.items() if not k.startswith("split.")} == dict(
        whole.metadata
    )


def test_a_first_part_without_tensors_and_parts_with_the_metadata_again(tmp_path):
    write_parts(
        tmp_path, p1=part(1, 3, [], architecture="llama"),
        p2=part(2, 3, ["a", "b"], architecture="llama"),
    )  # fmt: skip
    assert list(open_checkpoint(tmp_path).tensors) == ["a", "b", "c"]


def test_links_to_the_parts_are_followed_and_their_names_are_what_counts(tmp_path):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    for number, path in enumerate(write_parts(blobs)):
        (snapshot / path.name).symlink_to(path.rename(blobs / f"{number:x}"))
    assert list(open_checkpoint(snapshot).tensors) == ["a", "b", "c"]
    assert "its name does not say which" in refused(blobs / "1").message


ODD = gguf([pair("split.count", STRING, "3"), pair("split.no", STRING, "0")])  # no numbers
BAD = {
    "numbers of absurd types": ({"p1": ODD}, "part 0 of 3"),
    "first gone": ({"p1": None}, "no `m-00001-of-00003.gguf`"),
    "last gone": ({"p3": None}, "no `m-00003-of-00003.gguf`"),
    "two gone": ({"p1": None, "p3": None}, "no `m-00001-of-00003.gguf`, `m-00003-of-00003.gguf`"),
    "another order": ({"p2": part(3, 3, ["b"])}, "`{1}` says that it is part 3 of 3"),
    "another count": ({"p2": part(2, 4, ["b"])}, "`{1}` says that it is part 2 of 4"),
    "a whole model": ({"p2": part(2, 0, ["b"])}, "`{1}` is named as one of 3 parts"),
    "no count at all": ({"p1": part(1, 0, ["a"])}, "`{0}` is named as one of 3 parts"),
    "another total": ({"p2": part(2, 3, ["b"], total=4)}, "`{1}` has `split.tensors.count` 4"),
    "too few tensors": ({"p3": part(3, 3, [])}, "the 3 parts have 2 tensors"),
    "a tensor twice": ({"p3": part(3, 3, ["a"])}, "`a` is in `m-00001-of-00003.gguf` and again"),
    "another model": ({"p2": part(2, 3, ["b"], architecture="gpt2")}, "architecture` gpt2"),
    "another name": ({"p2": part(2, 3, ["b"], name="\x1b[2J")}, "general.name` \\x1b[2J"),
    "broken": ({"p2": part(2, 3, ["b"])[:-30]}, "`{1}` is not a usable GGUF file"),
    "empty": ({"p2": b""}, "`{1}` is empty"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_parts_that_do_not_fit_are_named(tmp_path, name):
    replaced, cause = BAD[name]
    paths = write_parts(tmp_path, **replaced)
    assert cause.format(*paths) in refused(tmp_path).message
    if replaced.get("p2", b"") is not None:
        assert cause.format(*paths) in refused(paths[1]).message


def test_a_part_under_a_name_of_its_own_is_not_taken_for_a_model(tmp_path):
    alone = tmp_path / "m.gguf"
    alone.write_bytes(part(2, 3, ["b"]))
    assert "one of 3 parts" in refused(alone).message
    (tmp_path / "x-00001-of-00001.gguf").write_bytes(part(1, 1, ["a"], total=1))
    assert list(open_checkpoint(tmp_path / "x-00001-of-00001.gguf").tensors) == ["a"]


def test_where_no_part_is_there_nothing_is(tmp_path):
    with pytest.raises(ModelNotFound, match="m-00001"):
        open_checkpoint(tmp_path / "m-00001-of-00003.gguf")


def test_two_groups_in_one_directory_are_listed_by_their_first_parts(tmp_path):
    write_parts(tmp_path)
    (tmp_path / "other-00002-of-00002.gguf").write_bytes(part(2, 2, ["b"]))
    message = refused(tmp_path).message
    assert "several .gguf files: `m-00001-of-00003.gguf`, `other-00001-of-00002.gguf`" in message

